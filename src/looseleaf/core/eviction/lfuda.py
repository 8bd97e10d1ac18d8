"""LFU with dynamic ageing: counts of what nobody asks for any more are overtaken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from looseleaf.core.eviction.heap import Key
from looseleaf.core.eviction.lru import LRUPolicy
from looseleaf.core.eviction.policy import StoredRun, Use


class LFUDAPolicy(LRUPolicy):
    """Evicts the least uses plus age (Arlitt et al., "Evaluating content management techniques for Web proxy caches",
    Performance Evaluation Review 2000); ties least recently used, then deepest.

    A run's value is what it is worth, its number of uses since it was stored, plus the cache's age at the last of them.
    The age is the largest value ever evicted. It steps forward when a request ends: what a request stores is worth no
    more for what had to go to make room for it.
    """

    name: ClassVar[str] = "lfuda"

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._num_uses: dict[int, int] = {}
        self._values: dict[int, float] = {}
        self._age = self._next_age = 0.0

    def worth(self, node_id: int) -> float:
        """What a run is worth apart from the cache's age."""
        return self._num_uses[node_id]

    def key(self, node_id: int, depth_blocks: int) -> Key:
        """Value first, then recency."""
        return (self._values[node_id], self._last_used[node_id], -depth_blocks)

    def insert(self, node_id: int, run: StoredRun, use: Use) -> None:
        """The first use."""
        super().insert(node_id, run, use)
        self._num_uses[node_id] = 1
        self._values[node_id] = self._age + self.worth(node_id)

    def hit(self, node_ids: Sequence[int], use: Use) -> None:
        """One more use of each."""
        super().hit(node_ids, use)
        for node_id in node_ids:
            self._num_uses[node_id] += 1
            self._values[node_id] = self._age + self.worth(node_id)

    def release(self, node_ids: Sequence[int], use: Use, num_output_tokens: int) -> None:
        """The age steps forward."""
        super().release(node_ids, use, num_output_tokens)
        self._age = self._next_age

    def split(self, node_id: int, upper_id: int, num_upper_blocks: int) -> None:
        """Both parts were used as often as the whole."""
        super().split(node_id, upper_id, num_upper_blocks)
        self._num_uses[upper_id] = self._num_uses[node_id]
        self._values[upper_id] = self._values[node_id]

    def shorten(self, node_id: int, num_blocks: int, key: int) -> None:
        """The cache ages."""
        self._next_age = max(self._next_age, self._values[node_id])

    def forget(self, node_id: int, key: int | None) -> None:
        """The cache ages, if this is an eviction. O(1)."""
        super().forget(node_id, key)
        del self._num_uses[node_id]
        value = self._values.pop(node_id)
        if key is not None:
            self._next_age = max(self._next_age, value)

    def describe(self, node_id: int, seconds: float) -> Mapping[str, float | str]:
        """Value, age of the cache, uses."""
        value, uses = self._values[node_id], self._num_uses[node_id]
        return {"value": value, "cache_age_value": self._age, "num_uses": uses}
