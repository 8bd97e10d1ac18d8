"""Least frequently used since it was stored; ties least recently used, then deepest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from looseleaf.core.eviction.heap import Key
from looseleaf.core.eviction.lru import LRUPolicy
from looseleaf.core.eviction.policy import StoredRun, Use


class LFUPolicy(LRUPolicy):
    """Evicts the leaf with the fewest uses. Counts start anew when a run is stored again after its eviction."""

    name: ClassVar[str] = "lfu"

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._num_uses: dict[int, int] = {}

    def key(self, node_id: int, depth_blocks: int) -> Key:
        """Uses first, then recency."""
        return (self._num_uses[node_id], self._last_used[node_id], -depth_blocks)

    def insert(self, node_id: int, run: StoredRun, use: Use) -> None:
        """The first use."""
        super().insert(node_id, run, use)
        self._num_uses[node_id] = 1

    def hit(self, node_ids: Sequence[int], use: Use) -> None:
        """One more use of each."""
        super().hit(node_ids, use)
        for node_id in node_ids:
            self._num_uses[node_id] += 1

    def split(self, node_id: int, upper_id: int, num_upper_blocks: int) -> None:
        """Both parts were used as often as the whole."""
        super().split(node_id, upper_id, num_upper_blocks)
        self._num_uses[upper_id] = self._num_uses[node_id]

    def forget(self, node_id: int, key: int | None) -> None:
        """O(1)."""
        super().forget(node_id, key)
        del self._num_uses[node_id]
