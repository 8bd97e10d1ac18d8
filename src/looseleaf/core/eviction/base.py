"""What most policies do the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from looseleaf.core.eviction.policy import Use


class PlainPolicy:
    """Methods of `EvictionPolicy` that a policy without a memory of sizes, keys and outputs has no use for."""

    uses_keys: ClassVar[bool] = False

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def resize(self, num_blocks: int) -> None:
        """The order does not depend on it."""
        self.num_blocks = num_blocks

    def extend(self, node_id: int, num_blocks: int) -> None:
        """Changes nothing."""

    def missed(self, keys: Sequence[int], use: Use) -> Sequence[int]:
        """All of it has one history."""
        return ()

    def shorten(self, node_id: int, num_blocks: int, key: int) -> None:
        """Changes nothing."""

    def describe(self, node_id: int, seconds: float) -> Mapping[str, float | str]:
        """Nothing to tell."""
        return {}
