"""Segmented LRU: what was used twice is not thrown out by what was used once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from looseleaf.core.eviction.policy import StoredRun, Use
from looseleaf.core.eviction.queues import QueuePolicy

PROBATION, PROTECTED = 0, 1

PROTECTED_SHARE = 0.8
"""Most of the pool that the protected segment may take."""


class SLRUPolicy(QueuePolicy):
    """Two LRU queues (Karedla, Love, Wherry, "Caching strategies to improve disk system performance", Computer 1994).

    New runs are on probation; a hit protects them. When the protected runs take more than 80% of the pool, those used
    longest ago go back on probation. Evicts from probation first. As in LRU, the end of a request is a use, but one
    that protects nothing.
    """

    name: ClassVar[str] = "slru"
    queue_names: ClassVar[tuple[str, ...]] = ("probation", "protected")

    def insert(self, node_id: int, run: StoredRun, use: Use) -> None:
        """Begins on probation."""
        self.add(node_id, run, PROBATION)

    def hit(self, node_ids: Sequence[int], use: Use) -> None:
        """Protects."""
        place = self.back()
        for node_id in node_ids:
            self.move(node_id, PROTECTED, place)
        self._demote()

    def release(self, node_ids: Sequence[int], use: Use, num_output_tokens: int) -> None:
        """Makes all of them young again where they are."""
        place = self.back()
        for node_id in node_ids:
            self.move(node_id, self.runs[node_id].queue, place)

    def victim(self) -> int | None:
        """O(log offered), amortised."""
        node_id = self.front_offered(PROBATION)
        return self.front_offered(PROTECTED) if node_id is None else node_id

    def _demote(self) -> None:
        while self.queue_blocks[PROTECTED] > PROTECTED_SHARE * self.num_blocks:
            node_id = self.front(PROTECTED)
            assert node_id is not None  # it has blocks
            self.move(node_id, PROBATION, self.back())
