"""Least recently used: the default of most caches, and a hard one to beat on live conversations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from looseleaf.core.eviction.base import PlainPolicy
from looseleaf.core.eviction.heap import Key, OfferedHeap
from looseleaf.core.eviction.policy import StoredRun, Use


class LRUPolicy(PlainPolicy):
    """Evicts the leaf whose last use (begin or end of a request) is longest ago; deepest first on ties.

    Methods as in `EvictionPolicy`. Policies with another fixed order inherit the book-keeping and say what counts.
    """

    name: ClassVar[str] = "lru"

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._last_used: dict[int, int] = {}
        self._heap = OfferedHeap()

    def key(self, node_id: int, depth_blocks: int) -> Key:
        """What orders the victims: the smallest goes first."""
        return (self._last_used[node_id], -depth_blocks)

    def insert(self, node_id: int, run: StoredRun, use: Use) -> None:
        """Storing is a use."""
        self._last_used[node_id] = use.tick

    def hit(self, node_ids: Sequence[int], use: Use) -> None:
        """Reusing is a use."""
        for node_id in node_ids:
            self._last_used[node_id] = use.tick

    def release(self, node_ids: Sequence[int], use: Use, num_output_tokens: int) -> None:
        """The end of a request is a use too."""
        for node_id in node_ids:
            self._last_used[node_id] = use.tick

    def split(self, node_id: int, upper_id: int, num_upper_blocks: int) -> None:
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

    def forget(self, node_id: int, key: int | None) -> None:
        """O(1)."""
        self._heap.withdraw(node_id)
        del self._last_used[node_id]

    def offered(self) -> Iterable[int]:
        """All offered ids."""
        return self._heap.offered()

    def describe(self, node_id: int, seconds: float) -> Mapping[str, float | str]:
        """The logical time of its last use."""
        return {"last_used_tick": self._last_used[node_id]}
