"""What was cached once and is not any more: the memory behind the answers "evicted" and "cleared".

A fixed table of chain keys, direct-mapped: a new entry overwrites whatever had its place. It costs no Python object per
block and can't grow; an overwritten entry makes an explanation say "never seen" at worst.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from looseleaf.core.chain_keys import ChainKeys, join_keys, root_key
from looseleaf.core.namespaces import Border
from looseleaf.core.tree import Node
from looseleaf.ids import Int64Array

MIN_ENTRIES = 2**16
EVICTED = 1
CLEARED = 2
EXPENDED = 3
"""Evicted before the policy's choice: its session had ended or replaced it."""
OVER_QUOTA = 5
"""Evicted since its namespace stored more than its quota."""
_MIX = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads the low bits over the table
_MIX_WORD = np.uint64(_MIX)
_MASK = 2**64 - 1
_CAUSE_BITS = 3
_CAUSES = (1 << _CAUSE_BITS) - 1


class ForgottenBlock(NamedTuple):
    """When (seconds of the cache's clock, and blocks evicted by then) a block was forgotten, and why: `EVICTED`,
    `EXPENDED`, `OVER_QUOTA` or `CLEARED`."""

    at_seconds: float
    num_evicted_blocks: int
    cause: int


class EvictedRun(NamedTuple):
    """Blocks of a prompt that were cached once, int64 [n] each: their chain keys, and how many blocks had been evicted
    when they were."""

    keys: Int64Array
    evicted_counts: Int64Array


class ForgottenTable:
    """Chain keys of forgotten blocks, four for each block of the pool, rounded up, and never few."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        size = max(MIN_ENTRIES, 1 << (4 * num_blocks - 1).bit_length())
        self._shift = 64 - (size.bit_length() - 1)
        self._shift_word = np.uint64(self._shift)
        self._chain = ChainKeys(block_bytes)
        self._block_bytes = block_bytes
        self._keys = np.zeros(size, dtype=np.int64)
        self._times = np.zeros(size, dtype=np.float64)
        self._counts = np.zeros(size, dtype=np.int64)  # blocks evicted by then, and below them the cause
        self.is_empty = True

    def record(self, keys: Int64Array, cause: int, now_seconds: float, num_evicted: int) -> None:
        """Note that blocks with these chain keys [n] are about to be forgotten, and that with them `num_evicted` blocks
        were evicted since the start."""
        places = self._places(keys)
        self._keys[places] = keys
        self._times[places] = now_seconds
        self._counts[places] = num_evicted << _CAUSE_BITS | cause
        self.is_empty = False

    def look_up(self, key: int) -> ForgottenBlock | None:
        """What is remembered of the block with this chain key."""
        place = (key * _MIX & _MASK) >> self._shift
        count = int(self._counts[place])
        if self._keys[place] != key or not count & _CAUSES:
            return None
        return ForgottenBlock(float(self._times[place]), count >> _CAUSE_BITS, count & _CAUSES)

    def keys_behind(self, node: Node, data: bytes, borders: Sequence[Border] = ()) -> Int64Array:
        """Chain keys of the whole blocks of a prompt, packed tokens `data`, behind the end of `node`'s run: int64 [n].
        `borders`: those of its `Tenancy`."""
        key, size, at = self._end_key(node), self._block_bytes, node.end
        parts: list[Int64Array] = []
        for border in borders:
            if node.end <= border.first_block < len(data) // size:
                parts.append(self._chain.behind(key, data[at * size : border.first_block * size]))
                key, at = join_keys(int(parts[-1][-1]) if len(parts[-1]) else key, border.namespace), border.first_block
        rest = self._chain.behind(key, data[at * size :])
        return np.concatenate((*parts, rest)) if parts else rest

    def evicted_run(self, keys: Int64Array) -> EvictedRun:
        """Those of a prompt's blocks, by their chain keys [n], that are remembered as evicted, up to the last that is:
        one between them that is not was overwritten in the table."""
        places = self._places(keys)
        known = np.flatnonzero((self._keys[places] == keys) & (self._counts[places] & 1 == 1))  # all but cleared
        count = int(known[-1]) + 1 if len(known) else 0
        nearest = known[np.searchsorted(known, np.arange(count))]  # itself, or the next that is known
        return EvictedRun(keys[:count], self._counts[places[nearest]] >> _CAUSE_BITS)

    def num_cleared(self, keys: Int64Array) -> int:
        """How many of a prompt's blocks, by their chain keys [n], are remembered as cleared, up to the last that is."""
        places = self._places(keys)
        known = np.flatnonzero((self._keys[places] == keys) & (self._counts[places] & _CAUSES == CLEARED))
        return int(known[-1]) + 1 if len(known) else 0

    def keys_of(self, node: Node) -> Int64Array:
        """Chain keys of a node's blocks, int64 [num_blocks]; worked out once and kept in the nodes of its path."""
        keys = node.chain_keys
        for step in node.path() if keys is None else ():
            keys = step.chain_keys
            if keys is None:
                keys = step.chain_keys = self._chain.behind(self._base_key(step), step.tokens)
        assert keys is not None  # those of the last step, the node
        return keys

    def end_keys(self, node: Node) -> list[int]:
        """Chain keys at the ends of the nodes of a path. O(path) once its keys are worked out."""
        if not node.is_root:
            self.keys_of(node)  # of all above too
        return [self._end_key(step) for step in node.path()]

    def key_before(self, node: Node, row: int) -> int | None:
        """Chain key in front of a node's block number `row`; None in front of a namespace's first block."""
        if row:
            return int(self.keys_of(node)[row - 1])
        assert node.parent is not None  # a root has no blocks
        return None if node.parent.is_root else self._end_key(node.parent)

    def _base_key(self, node: Node) -> int:
        """Chain key in front of a node's run."""
        assert node.parent is not None  # a root has no run
        key = self._end_key(node.parent)
        return join_keys(key, node.namespace) if node.begins_layer else key

    def _end_key(self, node: Node) -> int:
        if node.chain_keys is None:
            if not node.is_root:
                return int(self.keys_of(node)[-1])
            node.chain_keys = np.array([root_key(node.namespace)], dtype=np.int64)
        return int(node.chain_keys[-1])

    def _places(self, keys: Int64Array) -> Int64Array:
        mixed = keys.view(np.uint64) * _MIX_WORD
        mixed >>= self._shift_word
        places: Int64Array = mixed.view(np.int64)
        return places
