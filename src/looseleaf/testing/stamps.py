"""A KV memory that holds, instead of K and V, the proof of whose they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from looseleaf.core.lease import Lease
from looseleaf.testing.mirror import owners_of


class WrongStamp(AssertionError):
    """A slot does not hold what its reader must find there: cross-talk, a stale block, or an overwritten one."""


class StampMemory:
    """One stamp per slot, made of lane, namespaces, prefix and position. Shares no code with the cache.

    Write what a lease is about to commit with `write`, check what it would read with `verify`. Every position's stamp
    depends on all tokens before it, so a wrong block anywhere shows.
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._stamps: list[int | None] = [None] * (num_blocks * block_tokens)

    def resize(self, num_blocks: int) -> None:
        """Have another number of blocks; new ones hold nothing."""
        num_slots = num_blocks * self._block_tokens
        self._stamps = self._stamps[:num_slots] + [None] * (num_slots - len(self._stamps))

    def write(self, lease: Lease, start: int, stop: int) -> None:
        """Stamp the positions from `start` to `stop` (exclusive) of a lease, as a forward pass would write K and V."""
        stamps = self._expected(lease, stop)
        for position in range(start, stop):
            for lane, slot in self._slots(lease, position):
                self._stamps[slot] = hash((lane, stamps[position]))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Do the copies (from_block, to_block) that a fork, a resize or a compaction asks for: all reads first."""
        size = self._block_tokens
        read = [self._stamps[source * size : (source + 1) * size] for source, _ in pairs]
        for (_, target), stamps in zip(pairs, read, strict=True):
            self._stamps[target * size : (target + 1) * size] = stamps

    def verify(self, lease: Lease) -> None:
        """Check all committed positions of a live lease, in each group those that it holds.

        Raises:
            WrongStamp: with the first position that does not hold.
        """
        stop = lease.num_committed_tokens
        for position, stamp in enumerate(self._expected(lease, stop)):
            for lane, slot in self._slots(lease, position):
                if self._stamps[slot] != hash((lane, stamp)):
                    place = f"request {lease.request_id!r}, position {position}, lane {lane}"
                    raise WrongStamp(f"{place}: slot {slot} holds something else")

    def _expected(self, lease: Lease, stop: int) -> list[int]:
        stamps = []
        stamp = hash("stamp")
        num_blocks = -(-stop // self._block_tokens)
        owners = owners_of(num_blocks, self._block_tokens, lease.namespace, lease.layers)
        for position, token in enumerate(lease.token_ids[:stop].tolist()):
            stamp = hash((stamp, owners[position // self._block_tokens], position, token))
            stamps.append(stamp)
        return stamps

    def _slots(self, lease: Lease, position: int) -> Iterator[tuple[str, int]]:
        """The lanes that hold a position, each with its slot."""
        index, offset = divmod(position, self._block_tokens)
        for name, table in lease.block_tables.items():
            row = index - lease.first_blocks[name]
            if row >= 0:
                for lane, block in enumerate(np.atleast_1d(table[row]).tolist()):
                    yield f"{name}/{lane}", block * self._block_tokens + offset
