"""Least recently used: the default of most caches, and a hard one to beat on live conversations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from looseleaf.core.eviction.heap import Key, OfferedHeap


class LRUPolicy:
    """Evicts the leaf whose last use (begin or end of a request) is longest ago; deepest first on ties.

    Methods as in `EvictionPolicy`. Policies with another order inherit the book-keeping and say what counts.
    """

    name: ClassVar[str] = "lru"

    def __init__(self) -> None:
        self._last_used: dict[int, int] = {}
        self._heap = OfferedHeap()

    def key(self, node_id: int, depth_blocks: int) -> Key:
        """What orders the victims: the smallest goes first."""
        return (self._last_used[node_id], -depth_blocks)

    def insert(self, node_id: int, now: int) -> None:
        """Storing is a use."""
        self._last_used[node_id] = now

    def hit(self, node_ids: Sequence[int], now: int) -> None:
        """Reusing is a use."""
        for node_id in node_ids:
            self._last_used[node_id] = now

    def release(self, node_ids: Sequence[int], now: int) -> None:
        """The end of a request is a use too."""
        for node_id in node_ids:
            self._last_used[node_id] = now

    def split(self, node_id: int, upper_id: int) -> None:
        """Both parts were used when the whole was."""
        self._last_used[upper_id] = self._last_used[node_id]

    def offer(self, node_id: int, depth_blocks: int) -> None:
        """O(log offered)."""
        self._heap.offer(node_id, self.key(node_id, depth_blocks))

    def withdraw(self, node_id: int) -> None:
        """O(1)."""
        self._heap.withdraw(node_id)

    def victim(self) -> int | None:
        """O(log offered), amortised."""
        return self._heap.first()

    def forget(self, node_id: int) -> None:
        """O(1)."""
        self._heap.withdraw(node_id)
        del self._last_used[node_id]

    def offered(self) -> Iterable[int]:
        """All offered ids."""
        return self._heap.offered()
