"""A heap of offered ids with lazy removal, shared by the policies that order by a fixed key."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import TypeAlias

Key: TypeAlias = tuple[float, ...]


class OfferedHeap:
    """Offered ids by key, smallest first. Withdrawn entries stay in the heap until they surface or outnumber the live
    ones.

    `offer` and `first` cost O(log n) amortised, `withdraw` O(1). Why not a sorted list: a withdrawal (a hit on a cached
    leaf) is far more frequent than a look at the smallest.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Key, int]] = []
        self._live: dict[int, Key] = {}

    def offer(self, node_id: int, key: Key) -> None:
        """Add an id under `key`, or move it there."""
        self._live[node_id] = key
        heapq.heappush(self._entries, (key, node_id))
        if len(self._entries) > 2 * len(self._live) + 64:
            self._entries = [(key, node) for node, key in self._live.items()]
            heapq.heapify(self._entries)

    def withdraw(self, node_id: int) -> None:
        """Remove an id; nothing happens if it is not offered."""
        self._live.pop(node_id, None)

    def key(self, node_id: int) -> Key:
        """The key of an offered id."""
        return self._live[node_id]

    def first(self) -> int | None:
        """The id of the smallest key; it stays offered."""
        while self._entries:
            key, node_id = self._entries[0]
            if self._live.get(node_id) == key:
                return node_id
            heapq.heappop(self._entries)
        return None

    def offered(self) -> Iterable[int]:
        """All offered ids."""
        return self._live.keys()
