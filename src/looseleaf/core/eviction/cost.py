"""Cost-aware: keeps what would take most work to compute again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from looseleaf.core.eviction.lfuda import LFUDAPolicy
from looseleaf.core.eviction.policy import StoredRun, Use

EVEN_BLOCKS = 1536
"""Position in blocks at which attention over what lies before costs as much as all linear layers."""


@dataclass(slots=True)
class _Extent:
    start_block: int
    num_blocks: int


class CostPolicy(LFUDAPolicy):
    """GreedyDual-Size-Frequency with the work of computing a run again as its cost (Cherkasova, "Improving WWW proxies
    performance with Greedy-Dual-Size-Frequency caching policy", HP Labs 1998).

    Evicts the least value = age + uses * cost / size. A block at position p costs 1 for the linear layers, the same for
    all, and p / EVEN_BLOCKS for attention to the blocks before it: 2 * N operations per token for N weights against
    4 * L * d * p for L layers of width d, equal at p = N / (2 * L * d) tokens, 6 * d for a plain transformer, 24,576
    for d = 4,096. So a run of n blocks from s on costs 1 + (s + n / 2) / EVEN_BLOCKS per block: its length counts only
    as far as it makes its end lie deeper, since evicting it gives as many blocks as it takes to bring back.
    """

    name: ClassVar[str] = "cost"

    def __init__(self, num_blocks: int, even_blocks: float = EVEN_BLOCKS) -> None:
        super().__init__(num_blocks)
        self._even_blocks = even_blocks
        self._extents: dict[int, _Extent] = {}

    def worth(self, node_id: int) -> float:
        """Uses times cost per block, in costs of a first block."""
        extent = self._extents[node_id]
        return self._num_uses[node_id] * (1 + (extent.start_block + extent.num_blocks / 2) / self._even_blocks)

    def insert(self, node_id: int, run: StoredRun, use: Use) -> None:
        """The first use."""
        self._extents[node_id] = _Extent(run.start_block, run.num_blocks)
        super().insert(node_id, run, use)

    def extend(self, node_id: int, num_blocks: int) -> None:
        """Counts from the next use on."""
        self._extents[node_id].num_blocks += num_blocks

    def split(self, node_id: int, upper_id: int, num_upper_blocks: int) -> None:
        """Both parts keep the value of the whole until their next use."""
        super().split(node_id, upper_id, num_upper_blocks)
        lower = self._extents[node_id]
        self._extents[upper_id] = _Extent(lower.start_block, num_upper_blocks)
        lower.start_block += num_upper_blocks
        lower.num_blocks -= num_upper_blocks

    def shorten(self, node_id: int, num_blocks: int, key: int) -> None:
        """The cache ages."""
        super().shorten(node_id, num_blocks, key)
        self._extents[node_id].num_blocks -= num_blocks

    def forget(self, node_id: int, key: int | None) -> None:
        """The cache ages, if this is an eviction. O(1)."""
        super().forget(node_id, key)
        del self._extents[node_id]
