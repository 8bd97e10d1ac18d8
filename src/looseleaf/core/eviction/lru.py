"""Least recently used: the default of most caches, and a hard one to beat on live conversations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from looseleaf.core.eviction.heap import OfferedHeap


class LRUPolicy:
    """Evicts the leaf whose last use (begin or end of a request) is longest ago; deepest first on ties."""

    name: ClassVar[str] = "lru"

    def __init__(self) -> None:
        self._last_used: dict[int, int] = {}
        self._heap = OfferedHeap()

    def insert(self, node_id: int, now: int) -> None:
        """See `EvictionPolicy.insert`."""
        self._last_used[node_id] = now

    def hit(self, node_ids: Sequence[int], now: int) -> None:
        """See `EvictionPolicy.hit`."""
        for node_id in node_ids:
            self._last_used[node_id] = now

    def release(self, node_ids: Sequence[int], now: int) -> None:
        """See `EvictionPolicy.release`: the end of a request is a use too."""
        self.hit(node_ids, now)

    def split(self, node_id: int, upper_id: int) -> None:
        """See `EvictionPolicy.split`."""
        self._last_used[upper_id] = self._last_used[node_id]

    def offer(self, node_id: int, depth_blocks: int) -> None:
        """See `EvictionPolicy.offer`."""
        self._heap.offer(node_id, (self._last_used[node_id], -depth_blocks))

    def withdraw(self, node_id: int) -> None:
        """See `EvictionPolicy.withdraw`."""
        self._heap.withdraw(node_id)

    def victim(self) -> int | None:
        """See `EvictionPolicy.victim`."""
        return self._heap.first()

    def forget(self, node_id: int) -> None:
        """See `EvictionPolicy.forget`."""
        self._heap.withdraw(node_id)
        del self._last_used[node_id]

    def offered(self) -> Iterable[int]:
        """See `EvictionPolicy.offered`."""
        return self._heap.offered()
