"""How hard memory is pressed for: how long blocks live without use, and what one more block would be worth."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

import numpy as np

from looseleaf.ids import Int64Array

MEMORY_AGES = 8.0
"""Uses are forgotten over so many times the time that blocks live without one."""

WINDOW_SHARE = 1 / 16
"""Share of the pool over which the worth of the next victims is averaged."""


class Pressure:
    """Learns from evictions and from uses shortly before they would have come. Seconds are those of the cache's clock.

    A block that returns when d others were evicted since its own eviction would have been there with d + 1 blocks more:
    the ghost list of ARC (Megiddo and Modha, FAST 2003), by count instead of by list. Blocks are those of the pool, in
    all lanes.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_evicted_blocks = 0
        self.num_blocks = num_blocks
        self._counts: deque[int] = deque()  # of blocks evicted up to each eviction, as far back as the pool is large
        self._last_uses: deque[float] = deque()
        self._tail_hits = 0.0  # per block of the window, with decay
        self._updated_at = 0.0

    def on_evicted(self, num_blocks: int, last_used_at: float) -> None:
        """Blocks last used at `last_used_at` were evicted. O(1)."""
        self.num_evicted_blocks += num_blocks
        self._counts.append(self.num_evicted_blocks)
        self._last_uses.append(last_used_at)
        while self._counts[0] < self.num_evicted_blocks - self.num_blocks:
            self._counts.popleft()
            self._last_uses.popleft()

    def frontier(self, num_blocks: int = 0) -> float:
        """With `num_blocks` blocks more, what was used after this time would still be there. O(log evictions)."""
        if self.num_evicted_blocks <= num_blocks:
            return -math.inf
        at = bisect_left(self._counts, self.num_evicted_blocks - num_blocks)
        return self._last_uses[min(at, len(self._counts) - 1)]

    def tail(self, num_blocks: int) -> float:
        """With `num_blocks` blocks fewer, what was used before this time would be gone. Last uses are taken to lie as
        close together behind the last eviction as before it; a policy by other things than recency mixes them."""
        frontier = self.frontier()
        if not self._counts or num_blocks == 0:
            return -math.inf
        num_known = self.num_evicted_blocks - self._counts[0]
        if num_known >= num_blocks:
            return frontier + abs(frontier - self.frontier(num_blocks))
        return frontier + abs(frontier - self._last_uses[0]) * num_blocks / max(1, num_known)

    def num_kept(self, evicted_counts: Int64Array, extra_blocks: int) -> int:
        """Blocks are asked for again that were evicted when `evicted_counts` [n] had been. How many of them would be
        there with `extra_blocks` blocks more."""
        return int(np.count_nonzero(self.num_evicted_blocks - evicted_counts < extra_blocks))

    def on_hit(self, used_at: Sequence[float], num_blocks: Sequence[int], now_seconds: float) -> None:
        """Runs of `num_blocks` blocks are found that were last used at `used_at`."""
        window = max(1, int(self.num_blocks * WINDOW_SHARE))
        self._fade(now_seconds)
        self._tail_hits += self.num_near_tail(used_at, num_blocks, window) / window

    def num_near_tail(self, used_at: Sequence[float], num_blocks: Sequence[int], fewer_blocks: int) -> int:
        """How many blocks of these runs would be gone with `fewer_blocks` blocks fewer, though they are not kept by
        pins now."""
        frontier, tail = self.frontier(), self.tail(fewer_blocks)
        return sum(num for at, num in zip(used_at, num_blocks, strict=True) if frontier <= at < tail)

    def price(self, now_seconds: float) -> float:
        """Uses per second that a block finds which is about to be evicted: what the next victims are worth."""
        self._fade(now_seconds)
        return self._tail_hits / self._memory_seconds(now_seconds)

    def _fade(self, now_seconds: float) -> None:
        if now_seconds > self._updated_at:
            self._tail_hits *= math.exp((self._updated_at - now_seconds) / self._memory_seconds(now_seconds))
            self._updated_at = now_seconds

    def _memory_seconds(self, now_seconds: float) -> float:
        return MEMORY_AGES * max(now_seconds - self.frontier(), 1e-3)
