"""Least frequently used since it was stored; ties least recently used, then deepest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from looseleaf.core.eviction.heap import Key
from looseleaf.core.eviction.lru import LRUPolicy


class LFUPolicy(LRUPolicy):
    """Evicts the leaf with the fewest uses. Counts start anew when a run is stored again after its eviction."""

    name: ClassVar[str] = "lfu"

    def __init__(self) -> None:
        super().__init__()
        self._num_uses: dict[int, int] = {}

    def key(self, node_id: int, depth_blocks: int) -> Key:
        """Uses first, then recency."""
        return (self._num_uses[node_id], self._last_used[node_id], -depth_blocks)

    def insert(self, node_id: int, now: int) -> None:
        """The first use."""
        super().insert(node_id, now)
        self._num_uses[node_id] = 1

    def hit(self, node_ids: Sequence[int], now: int) -> None:
        """One more use of each."""
        super().hit(node_ids, now)
        for node_id in node_ids:
            self._num_uses[node_id] += 1

    def split(self, node_id: int, upper_id: int) -> None:
        """Both parts were used as often as the whole."""
        super().split(node_id, upper_id)
        self._num_uses[upper_id] = self._num_uses[node_id]

    def forget(self, node_id: int) -> None:
        """O(1)."""
        super().forget(node_id)
        del self._num_uses[node_id]
