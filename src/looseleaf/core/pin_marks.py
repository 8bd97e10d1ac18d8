"""What pins mark: nodes that they cover, rows that they guard, and how many blocks that is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from looseleaf.core.blocks import BlockLedger
from looseleaf.core.config import CachePlan, GroupPlan
from looseleaf.core.pin_record import HARD, PinHold
from looseleaf.core.slid_out import SlidOutQueue
from looseleaf.core.tree import ABSENT, Node
from looseleaf.core.victims import VictimQueue
from looseleaf.ids import Int64Array, Namespace


class PinMarks:
    """Marks of all pins on nodes (groups that keep all) and rows (groups that slide), and the blocks that they take.

    Shared blocks count once, under a hard pin if there is one. A guarded row counts as its blocks, there or not.
    """

    def __init__(self, plan: CachePlan, ledger: BlockLedger, victims: VictimQueue, slid_out: SlidOutQueue) -> None:
        self.num_hard_blocks = 0
        self.num_soft_blocks = 0  # blocks under soft pins only
        self.num_changes = 0  # of these two, ever
        self._hard_in: dict[Namespace, int] = {}
        self._soft_in: dict[Namespace, int] = {}
        self._ledger = ledger
        self._victims = victims
        self._slid_out = slid_out
        full = [group for group in plan.groups if not group.slides]
        self._full_lanes = full[0].lanes if full else slice(0, 0)
        self.num_full_lanes = full[0].num_lanes if full else 0

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks that any pin holds, each counted once."""
        return self.num_hard_blocks + self.num_soft_blocks

    def taken_blocks(self, namespace: Namespace, *, hard_only: bool = False) -> int:
        """Blocks that the pins of one namespace hold, each counted once."""
        hard = self._hard_in.get(namespace, 0)
        return hard if hard_only else hard + self._soft_in.get(namespace, 0)

    def by_namespace(self) -> Iterator[tuple[Namespace, int]]:
        """The namespaces in which pins hold blocks, and how many, each counted once."""
        for namespace in self._hard_in.keys() | self._soft_in.keys():
            yield namespace, self.taken_blocks(namespace)

    def held_blocks(self, hold: PinHold) -> int:
        """Blocks, in all lanes, that a hold takes, shared or not."""
        return self._taken(hold.node.end, [group for _, group in self._guarded_groups(hold)])

    def num_blocks_at(self, end: int) -> int:
        """Blocks, in all lanes, that a pin of all groups takes which ends after `end` blocks."""
        return self._taken(end, self._slid_out.groups)

    def _taken(self, end: int, sliding: Iterable[GroupPlan]) -> int:
        guarded = [(end - group.first_needed_block(end)) * group.num_lanes for group in sliding]
        return end * self.num_full_lanes + sum(guarded)

    def first_guarded(self, hold: PinHold, end: int) -> int:
        """The first logical block that a pin which ends after `end` blocks guards; `end` if it guards none."""
        return min((group.first_needed_block(end) for _, group in self._guarded_groups(hold)), default=end)

    def used(
        self, hold: PinHold, path: list[Node], first: int, last: int, namespace: Namespace | None = None
    ) -> Int64Array:
        """Blocks of quota, of that of `namespace` if given, that this pin alone takes if it ends after `first`,
        `first` + 1, …, `last` blocks, up to a constant that is 0 if `path` begins at the root: int64
        [last - first + 1].

        `path` goes on from what a pin that ends at `first` guards. Rows that others of its level (for a soft pin, any)
        pin as well cost nothing.
        """
        here, is_hard = hold.node.end, hold.level == HARD
        base = path[0].start if path else 0
        is_alone = np.empty(path[-1].end - base if path else 0, dtype=np.bool_)
        for node in path:
            num_others = node.num_hard_pins + (0 if is_hard else len(node.soft_priorities)) - (node.end <= here)
            is_counted = namespace in (None, node.namespace)
            is_alone[node.start - base : node.end - base] = is_counted and num_others == 0
        summed = np.concatenate(([0], np.cumsum(is_alone)))
        used: Int64Array = summed[first - base : last - base + 1] * self.num_full_lanes
        for column, group in self._guarded_groups(hold):
            for node in path:
                assert node.marks is not None  # there are sliding groups
                counts = node.marks.hard_guards[:, column].copy()
                if not is_hard:
                    counts += node.marks.soft_guards[:, column]
                if node.start < here:
                    counts[max(group.first_needed_block(here) - node.start, 0) : here - node.start] -= 1
                is_counted = namespace in (None, node.namespace)
                is_alone[node.start - base : node.end - base] = (counts == 0) & is_counted
            summed = np.concatenate(([0], np.cumsum(is_alone)))
            needed = group.first_needed_blocks(last)[first:] - base
            used = used + (summed[first - base : last - base + 1] - summed[needed]) * group.num_lanes
        return used

    def mark(self, node: Node, hold: PinHold) -> None:
        """A pin covers this node from now on."""
        num_blocks = node.num_blocks * self.num_full_lanes
        if hold.level == HARD:
            if not node.num_hard_pins:
                self._count(node, num_blocks, -num_blocks if node.soft_priorities else 0)
                self._ledger.protect_run(node.blocks[:, self._full_lanes].ravel(), True, node.num_holders)
            node.num_hard_pins += 1
        else:
            if not node.is_pinned:
                self._count(node, 0, num_blocks)
            node.soft_priorities += (hold.priority,)
        node.sealed = True
        self._victims.review(node)

    def unmark(self, node: Node, hold: PinHold) -> None:
        """A pin that covered this node does not any more."""
        num_blocks = node.num_blocks * self.num_full_lanes
        if hold.level == HARD:
            node.num_hard_pins -= 1
            if not node.num_hard_pins:
                self._count(node, -num_blocks, num_blocks if node.soft_priorities else 0)
                self._ledger.protect_run(node.blocks[:, self._full_lanes].ravel(), False, node.num_holders)
        else:
            at = node.soft_priorities.index(hold.priority)
            node.soft_priorities = node.soft_priorities[:at] + node.soft_priorities[at + 1 :]
            if not node.is_pinned:
                self._count(node, 0, -num_blocks)
        self._victims.review(node)

    def guard(self, hold: PinHold, node: Node, end: int, sign: int) -> None:
        """Begin (1) or stop (-1) to guard what a hit at `end`, in or at the end of `node`, needs in sliding groups."""
        for column, group in self._guarded_groups(hold):
            first = group.first_needed_block(end)
            path = node.path(first)
            for step in path:
                marks = step.marks
                assert marks is not None  # there are sliding groups
                rows = slice(max(0, first - step.start), end - step.start)
                hard, soft = marks.hard_guards[rows, column], marks.soft_guards[rows, column]  # views
                num_hard, num_soft = int(np.count_nonzero(hard)), int(np.count_nonzero((hard == 0) & (soft > 0)))
                counts = hard if hold.level == HARD else soft
                counts += sign
                num_hard = int(np.count_nonzero(hard)) - num_hard
                num_soft = int(np.count_nonzero((hard == 0) & (soft > 0))) - num_soft
                self._count(step, num_hard * group.num_lanes, num_soft * group.num_lanes)
                if hold.level == HARD:
                    blocks = step.blocks[rows, group.lanes]
                    for protected in (True, False):
                        changed = blocks[(hard > 0) == protected].ravel()
                        self._ledger.protect(changed[changed != ABSENT], protected)
            self._slid_out.review(path)

    def on_filled(self, node: Node) -> None:
        """Sliding groups hold rows of this node again: hard pins protect those that they guard."""
        assert node.marks is not None  # there are sliding groups
        for column, group in enumerate(self._slid_out.groups):
            blocks = node.blocks[node.marks.hard_guards[:, column] > 0, group.lanes].ravel()
            self._ledger.protect(blocks[blocks != ABSENT], True)

    def on_tail_evicted(self, node: Node, num_blocks: int) -> None:
        """The last blocks of a node that no hard pin covers are being forgotten."""
        if node.soft_priorities:
            self._count(node, 0, -num_blocks * self.num_full_lanes)

    def _guarded_groups(self, hold: PinHold) -> Iterator[tuple[int, GroupPlan]]:
        for column, group in enumerate(self._slid_out.groups):
            if hold.cache_type in ("kv", group.group.name):
                yield column, group

    def _count(self, node: Node, num_hard: int, num_soft: int) -> None:
        """So many more blocks are under hard pins, and under soft pins only."""
        self.num_changes += num_hard != 0 or num_soft != 0
        for counts, number in ((self._hard_in, num_hard), (self._soft_in, num_soft)):
            if number:
                left = counts.get(node.namespace, 0) + number
                if left:
                    counts[node.namespace] = left
                else:
                    del counts[node.namespace]
        self.num_hard_blocks += num_hard
        self.num_soft_blocks += num_soft
