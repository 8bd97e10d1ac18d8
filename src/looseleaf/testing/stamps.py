"""A KV memory that holds, instead of K and V, the proof of whose they are."""

from __future__ import annotations

import numpy as np

from looseleaf.core.lease import Lease


class WrongStamp(AssertionError):
    """A slot does not hold what its reader must find there: cross-talk, a stale block, or an overwritten one."""


class StampMemory:
    """One stamp per slot, made of namespace, prefix and position. Shares no code with the cache.

    Write what a lease is about to commit with `write`, check what it would read with `verify`. Every position's stamp
    depends on all tokens before it, so a wrong block anywhere shows.
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._stamps: list[int | None] = [None] * (num_blocks * block_tokens)

    def write(self, lease: Lease, start: int, stop: int) -> None:
        """Stamp the positions from `start` to `stop` (exclusive) of a lease, as a forward pass would write K and V."""
        stamps = self._expected(lease, stop)
        for position in range(start, stop):
            self._stamps[self._slot(lease, position)] = stamps[position]

    def copy_block(self, from_block: int, to_block: int) -> None:
        """Do one of the copies that a fork asks for."""
        size = self._block_tokens
        self._stamps[to_block * size : (to_block + 1) * size] = self._stamps[
            from_block * size : (from_block + 1) * size
        ]

    def verify(self, lease: Lease) -> None:
        """Check all committed positions of a live lease.

        Raises:
            WrongStamp: with the first position that does not hold.
        """
        stop = lease.num_committed_tokens
        for position, stamp in enumerate(self._expected(lease, stop)):
            slot = self._slot(lease, position)
            if self._stamps[slot] != stamp:
                raise WrongStamp(f"request {lease.request_id!r}, position {position}: slot {slot} holds something else")

    def _expected(self, lease: Lease, stop: int) -> list[int]:
        stamps = []
        stamp = hash(("stamp", lease.namespace))
        for position, token in enumerate(lease.token_ids[:stop].tolist()):
            stamp = hash((stamp, position, token))
            stamps.append(stamp)
        return stamps

    def _slot(self, lease: Lease, position: int) -> int:
        index, offset = divmod(position, self._block_tokens)
        return int(np.int64(lease.block_table[index]) * self._block_tokens + offset)
