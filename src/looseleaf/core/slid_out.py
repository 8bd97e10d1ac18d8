"""Rows of sliding groups that nobody holds: which of them goes next, when memory is needed.

A row that slid out of a window is needed again only by a look-up that ends less than a window behind it. So rows are
ordered by the last time at which a look-up or a lease ended so that it needed them; those that only ever slid out, the
inner parts of long prompts, go first. Pinned ones never go (hard) or last (soft).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from looseleaf.core.blocks import BlockLedger
from looseleaf.core.config import GroupPlan
from looseleaf.core.row_marks import NOT_QUEUED
from looseleaf.core.tree import ABSENT, Node, PrefixTree
from looseleaf.ids import Int32Array, Int64Array

COLD_TICK = -(2**60)
"""Added to the logical time of rows that were never needed by an end: they go before all others, oldest lease first."""

SOFT_TICK = 2**61
"""Added to the logical time of rows that a soft pin guards: they go after all others."""


@dataclass(frozen=True)
class SlidRows:
    """The next rows to evict: those of `node` in sliding group number `column` that have this `key`."""

    node: Node
    column: int
    key: int

    @property
    def is_warm(self) -> bool:
        """A look-up or a lease once ended so that it needed them, and no pin guards them."""
        return self.key >= 0 and not self.is_soft

    @property
    def is_soft(self) -> bool:
        """A soft pin guards them."""
        return self.key >= SOFT_TICK // 2


class SlidOutQueue:
    """Nodes by the lowest key among their evictable rows, in a heap with lazy entries.

    `review` is called for a node whenever rows of it may have become evictable, or evictable earlier; whatever makes
    rows less evictable (held again, needed again) is found out when they surface. Never scans the tree.
    """

    def __init__(self, groups: list[GroupPlan], tree: PrefixTree, ledger: BlockLedger) -> None:
        self.groups = groups
        self._tree = tree
        self._ledger = ledger
        self._heap: list[tuple[int, int, int, int]] = []

    def review(self, nodes: list[Node]) -> None:
        """Have each node in the queue at the place that its rows demand. O(rows) each."""
        for node in nodes:
            marks = node.marks
            if marks is None:
                continue
            for column in range(len(self.groups)):
                keys = self.keys(node, column)
                lowest = int(keys.min()) if len(keys) else NOT_QUEUED
                if lowest < marks.queued[column]:
                    marks.queued[column] = lowest
                    heapq.heappush(self._heap, (lowest, -node.end, node.id, column))

    def first(self) -> SlidRows | None:
        """The rows to evict next, None if there are none. They stay queued."""
        while self._heap:
            queued, _, node_id, column = self._heap[0]
            node = self._tree.nodes.get(node_id)
            if node is None or node.marks is None or node.marks.queued[column] != queued:
                heapq.heappop(self._heap)
                continue
            keys = self.keys(node, column)
            lowest = int(keys.min()) if len(keys) else NOT_QUEUED
            if lowest == queued:
                return SlidRows(node, column, queued)
            heapq.heappop(self._heap)
            node.marks.queued[column] = lowest
            if lowest != NOT_QUEUED:
                heapq.heappush(self._heap, (lowest, -node.end, node_id, column))
        return None

    def cut_out(self, slid: SlidRows, num_blocks: int) -> tuple[Int64Array, Int32Array]:
        """Take up to `num_blocks` blocks' worth of these rows out of their node, last rows first. The rows, and the
        blocks that they had."""
        node, group = slid.node, self.groups[slid.column]
        rows = np.flatnonzero(self._is_evictable(node, slid.column))
        rows = rows[self._keys_of(node, slid.column, rows) == slid.key]
        num_rows = -(-num_blocks // group.num_lanes)
        rows = rows[-num_rows:]
        blocks: Int32Array = node.blocks[rows, group.lanes].ravel()
        node.blocks[rows, group.lanes] = ABSENT
        return rows, blocks

    def keys(self, node: Node, column: int) -> Int64Array:
        """Keys of the node's evictable rows in a sliding group."""
        return self._keys_of(node, column, np.flatnonzero(self._is_evictable(node, column)))

    def _is_evictable(self, node: Node, column: int) -> npt.NDArray[np.bool_]:
        assert node.marks is not None  # callers have checked
        blocks = node.blocks[:, self.groups[column].first_lane]
        found: npt.NDArray[np.bool_] = (
            (blocks != ABSENT) & (self._ledger.refs[blocks] == 0) & (node.marks.hard_guards[:, column] == 0)
        )
        return found

    def _keys_of(self, node: Node, column: int, rows: Int64Array) -> Int64Array:
        assert node.marks is not None  # callers have checked
        guarded = node.marks.soft_guards[rows, column] > 0
        keys: Int64Array = node.marks.ticks[rows, column] + np.where(guarded, SOFT_TICK, 0)
        return keys
