"""First in, first out: the oldest stored leaf goes first, however often it was used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from looseleaf.core.eviction.lru import LRUPolicy


class FIFOPolicy(LRUPolicy):
    """LRU that takes no note of uses: the order is that of storing."""

    name: ClassVar[str] = "fifo"

    def hit(self, node_ids: Sequence[int], now: int) -> None:
        """See `EvictionPolicy.hit`: changes nothing."""

    def release(self, node_ids: Sequence[int], now: int) -> None:
        """See `EvictionPolicy.release`: changes nothing."""
