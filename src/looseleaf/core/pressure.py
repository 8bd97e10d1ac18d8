"""How hard memory is pressed for: how long blocks live without use, and what one more block would be worth."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque

import numpy as np

from looseleaf.ids import Int64Array

MEMORY_AGES = 8.0
"""Returns are forgotten over so many times the time that blocks live without use."""

MIN_SHARE = 1 / 16
"""Share of the pool, at least, over which the worth of one more block is averaged."""

PRIOR_RETURNS = 2.0
"""Returns of each block within `MEMORY_AGES` lives, assumed until the pool has been turned over about once: a quarter
of the victims would be used again within another such life."""


class Pressure:
    """Learns from evictions and from returns of what was evicted. Seconds are those of the cache's clock.

    A block that returns when d others were evicted since its own eviction would have been there with d + 1 blocks more:
    the ghost list of ARC (Megiddo and Modha, FAST 2003), by count instead of by list.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_evicted_blocks = 0
        self._num_blocks = num_blocks
        self._counts: deque[int] = deque()  # of blocks evicted up to each eviction, as far back as the pool is large
        self._last_uses: deque[float] = deque()
        self._soon_returns = 0.0  # per block of the window, with decay
        self._updated_at = 0.0

    def on_evicted(self, num_blocks: int, last_used_at: float) -> None:
        """Blocks last used at `last_used_at` were evicted. O(1)."""
        self.num_evicted_blocks += num_blocks
        self._counts.append(self.num_evicted_blocks)
        self._last_uses.append(last_used_at)
        while self._counts[0] < self.num_evicted_blocks - self._num_blocks:
            self._counts.popleft()
            self._last_uses.popleft()

    def frontier(self, num_blocks: int = 0) -> float:
        """With `num_blocks` blocks more, what was used after this time would still be there. O(log evictions)."""
        if self.num_evicted_blocks <= num_blocks:
            return -math.inf
        at = bisect_left(self._counts, self.num_evicted_blocks - num_blocks)
        return self._last_uses[min(at, len(self._counts) - 1)]

    def on_returned(self, evicted_counts: Int64Array, extra_blocks: int, now_seconds: float) -> int:
        """Blocks are asked for again that were evicted when `evicted_counts` [n] had been. How many of them would be
        there with `extra_blocks` blocks more."""
        distances = self.num_evicted_blocks - evicted_counts
        window = max(extra_blocks, int(self._num_blocks * MIN_SHARE), 1)
        self._fade(now_seconds)
        self._soon_returns += int(np.count_nonzero(distances < window)) / window
        return int(np.count_nonzero(distances < extra_blocks))

    def price(self, now_seconds: float) -> float:
        """Uses per second that one more block would find: what the next victims are worth."""
        self._fade(now_seconds)
        unknown = PRIOR_RETURNS * math.exp(-self.num_evicted_blocks / self._num_blocks)
        return (self._soon_returns + unknown) / self._memory_seconds(now_seconds)

    def _fade(self, now_seconds: float) -> None:
        if now_seconds > self._updated_at:
            self._soon_returns *= math.exp((self._updated_at - now_seconds) / self._memory_seconds(now_seconds))
            self._updated_at = now_seconds

    def _memory_seconds(self, now_seconds: float) -> float:
        return MEMORY_AGES * max(now_seconds - self.frontier(), 1e-3)
