"""First in, first out: the oldest stored leaf goes first, however often it was used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from looseleaf.core.eviction.lru import LRUPolicy
from looseleaf.core.eviction.policy import Use


class FIFOPolicy(LRUPolicy):
    """LRU to which only storing is a use."""

    name: ClassVar[str] = "fifo"

    def hit(self, node_ids: Sequence[int], use: Use) -> None:
        """Changes nothing."""

    def release(self, node_ids: Sequence[int], use: Use, num_output_tokens: int) -> None:
        """Changes nothing."""
