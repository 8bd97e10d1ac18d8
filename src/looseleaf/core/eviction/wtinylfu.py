"""W-TinyLFU: a new run must have been asked for more often than what it would throw out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from looseleaf.core.eviction.policy import StoredRun, Use
from looseleaf.core.eviction.queues import QueuePolicy

WINDOW, PROBATION, PROTECTED = 0, 1, 2

WINDOW_SHARE = 0.01
"""Share of the pool for newcomers, which need not compete yet."""

PROTECTED_SHARE = 0.8
"""Most of the rest that the protected segment may take."""

MAX_COUNT = 15

_MASK = 2**64 - 1

SAMPLE = 10
"""Counts halve after so many touched blocks per block of the pool."""


class CountMinSketch:
    """How often keys were counted, never too little, in 4 bytes per cell: four rows of counters up to 15 (Cormode,
    Muthukrishnan, "An improved data stream summary: the count-min sketch", 2005)."""

    def __init__(self, num_cells: int) -> None:
        num_bits = max(6, (num_cells - 1).bit_length())
        self._shift = 64 - num_bits
        self._rows = [bytearray(1 << num_bits) for _ in range(4)]
        self._factors = [int(number) | 1 for number in np.random.PCG64(0x5CE7C4).random_raw(4)]

    def add(self, keys: Sequence[int]) -> None:
        """Count each of the keys once more; those that share a cell here count once there. Some array operations."""
        hashes = np.array(keys, dtype=np.int64).view(np.uint64)
        for row, factor in zip(self._rows, self._factors, strict=True):
            cells = (hashes * np.uint64(factor)) >> np.uint64(self._shift)
            counts = np.frombuffer(row, dtype=np.uint8)
            counts[cells] = np.minimum(counts[cells] + 1, MAX_COUNT)

    def raise_to(self, key: int, count: int) -> None:
        """Count a key no less than `count`."""
        for row, cell in zip(self._rows, self._cells(key), strict=True):
            row[cell] = max(row[cell], min(count, MAX_COUNT))

    def count(self, key: int) -> int:
        """How often a key was counted, or more."""
        return min(row[cell] for row, cell in zip(self._rows, self._cells(key), strict=True))

    def halve(self) -> None:
        """Halve all counts."""
        for row in self._rows:
            counts = np.frombuffer(row, dtype=np.uint8)
            counts >>= 1

    def _cells(self, key: int) -> list[int]:
        return [(key * factor & _MASK) >> self._shift for factor in self._factors]


class WTinyLFUPolicy(QueuePolicy):
    """A window, a segmented LRU, and counts that decide between them (Einziger, Friedman, Manes, "TinyLFU: a highly
    efficient cache admission policy", ACM ToS 2017).

    New runs enter the window, an LRU queue of 1% of the pool. When memory is needed and the window has more than that,
    its oldest run goes on into the main part (80% protected, as in `slru`) if it was asked for more often than the main
    part's next victim, and is evicted if not. What can't be evicted, because runs lie behind it, goes on without.

    Stored runs carry their count; what is not stored has its count in a sketch, by chain key. Counts halve after 10
    touched blocks per block of the pool.
    """

    name: ClassVar[str] = "wtinylfu"
    uses_keys: ClassVar[bool] = True
    queue_names: ClassVar[tuple[str, ...]] = ("window", "probation", "protected")

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._sketch = CountMinSketch(num_blocks)
        self._era = 0
        self._eras: dict[int, int] = {}
        self._num_touched_blocks = 0

    def resize(self, num_blocks: int) -> None:
        """The shares follow; a new sketch, which knows nothing of what is not stored."""
        super().resize(num_blocks)
        self._sketch = CountMinSketch(num_blocks)

    def insert(self, node_id: int, run: StoredRun, use: Use) -> None:
        """Enters the window with the count of its key."""
        self.add(node_id, run, WINDOW)
        self._eras[node_id] = self._era
        self.runs[node_id].uses = max(1, self._sketch.count(run.key))
        self._admit_to_room()

    def hit(self, node_ids: Sequence[int], use: Use) -> None:
        """One more use of each; what was on probation is protected."""
        place = self.back()
        for node_id in node_ids:
            run = self.runs[node_id]
            run.uses = min(self._count(node_id) + 1, MAX_COUNT)
            self.move(node_id, WINDOW if run.queue == WINDOW else PROTECTED, place)
            self._touch(run.num_blocks)
        while self.queue_blocks[PROTECTED] > PROTECTED_SHARE * (1 - WINDOW_SHARE) * self.num_blocks:
            oldest = self.front(PROTECTED)
            assert oldest is not None  # it has blocks
            self.move(oldest, PROBATION, self.back())

    def missed(self, keys: Sequence[int], use: Use) -> Sequence[int]:
        """Counts them."""
        self._touch(len(keys))
        self._sketch.add(keys)
        return ()

    def release(self, node_ids: Sequence[int], use: Use, num_output_tokens: int) -> None:
        """Makes all of them young again where they are."""
        place = self.back()
        for node_id in node_ids:
            self.move(node_id, self.runs[node_id].queue, place)

    def split(self, node_id: int, upper_id: int, num_upper_blocks: int) -> None:
        """Both parts were used as often as the whole."""
        super().split(node_id, upper_id, num_upper_blocks)
        self._eras[upper_id] = self._eras[node_id]

    def victim(self) -> int | None:
        """The window's oldest run or the main part's victim. O(log offered) amortised: a run leaves the window once."""
        while self.queue_blocks[WINDOW] > WINDOW_SHARE * self.num_blocks:
            oldest = self.front(WINDOW)
            assert oldest is not None  # it has blocks
            main = self._main_victim()
            is_offered = self.runs[oldest].depth_blocks is not None
            if is_offered and (main is None or self._count(oldest) <= self._count(main)):
                return oldest
            self.move(oldest, PROBATION, self.back())
        main = self._main_victim()
        return self.front_offered(WINDOW) if main is None else main

    def shorten(self, node_id: int, num_blocks: int, key: int) -> None:
        """The sketch keeps the count of what went."""
        super().shorten(node_id, num_blocks, key)
        self._sketch.raise_to(key, self._count(node_id))

    def forget(self, node_id: int, key: int | None) -> None:
        """The sketch keeps the count of what was evicted."""
        if key is not None:
            self._sketch.raise_to(key, self._count(node_id))
        super().forget(node_id, key)
        del self._eras[node_id]

    def describe(self, node_id: int, seconds: float) -> Mapping[str, float | str]:
        """Its queue and its count."""
        return {**super().describe(node_id, seconds), "num_counted_uses": self._count(node_id)}

    def _count(self, node_id: int) -> int:
        run, era = self.runs[node_id], self._eras[node_id]
        if era != self._era:
            run.uses >>= min(self._era - era, 4)
            self._eras[node_id] = self._era
        return run.uses

    def _main_victim(self) -> int | None:
        node_id = self.front_offered(PROBATION)
        return self.front_offered(PROTECTED) if node_id is None else node_id

    def _admit_to_room(self) -> None:
        """What is too much for the window goes on while the main part has room."""
        while self.queue_blocks[WINDOW] > WINDOW_SHARE * self.num_blocks:
            oldest = self.front(WINDOW)
            assert oldest is not None  # it has blocks
            num_main = self.queue_blocks[PROBATION] + self.queue_blocks[PROTECTED]
            if num_main + self.runs[oldest].num_blocks > (1 - WINDOW_SHARE) * self.num_blocks:
                return
            self.move(oldest, PROBATION, self.back())

    def _touch(self, num_blocks: int) -> None:
        self._num_touched_blocks += num_blocks
        if self._num_touched_blocks >= SAMPLE * self.num_blocks:
            self._num_touched_blocks = 0
            self._era += 1
            self._sketch.halve()
