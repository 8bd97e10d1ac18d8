"""First in, first out: the oldest stored leaf goes first, however often it was used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from looseleaf.core.eviction.lru import LRUPolicy


class FIFOPolicy(LRUPolicy):
    """LRU to which only storing is a use."""

    name: ClassVar[str] = "fifo"

    def hit(self, node_ids: Sequence[int], now: int) -> None:
        """Changes nothing."""

    def release(self, node_ids: Sequence[int], now: int) -> None:
        """Changes nothing."""
