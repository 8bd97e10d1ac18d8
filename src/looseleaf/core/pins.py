"""Pins: promises that a prefix is not evicted, with owner, level, expiry and a quota."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from looseleaf.core.blocks import BlockLedger
from looseleaf.core.config import CachePlan, GroupPlan
from looseleaf.core.slid_out import SlidOutQueue
from looseleaf.core.tokens import TOKEN_BYTES
from looseleaf.core.tree import ABSENT, Node, PrefixTree
from looseleaf.core.victims import VictimQueue
from looseleaf.errors import PinQuotaExceeded
from looseleaf.ids import Int64Array, Namespace, RequestId

HARD = "hard"
SOFT = "soft"


@dataclass(frozen=True)
class Pin:
    """A snapshot of one pin.

    `num_tokens`: what was asked. `num_pinned_tokens`: what is held now, whole blocks. `expires_at`: seconds of the
    cache's clock, None without a time to live. `is_limited`: stored tokens of it are not held because the quota is
    used up.
    """

    id: str
    owner: str
    level: str
    priority: int
    namespace: Namespace
    cache_type: str
    request_id: RequestId | None
    num_tokens: int
    num_pinned_tokens: int
    created_at: float
    expires_at: float | None
    refresh: bool
    is_limited: bool


@dataclass(eq=False)
class PinRecord:
    """A live pin. `data` is what it asks for, packed and cut to whole blocks; it holds the path down to `node`, and
    `awaited` is the first block that it lacks (empty if none)."""

    id: str
    data: bytes
    num_blocks: int
    num_tokens: int
    node: Node
    owner: str
    level: str
    priority: int
    cache_type: str
    request_id: RequestId | None
    created_at: float
    ttl_seconds: float | None
    refresh: bool
    expires_at: float | None = None
    awaited: bytes = b""


class PinBook:
    """All live pins and what they hold, under one quota of blocks.

    A pin is anchored at the node where what it holds ends: it covers that node and all above, and in groups that slide
    it *guards* the rows that a hit at its end needs, whether they are there or not. When more of its tokens are stored
    below its anchor it moves down, when they are evicted it moves up. Shared blocks count once; a guarded row counts as
    its blocks. Hard and soft pins together never hold more than the quota; a hard pin displaces soft ones, lowest
    priority first.
    """

    def __init__(
        self, plan: CachePlan, tree: PrefixTree, ledger: BlockLedger, victims: VictimQueue, slid_out: SlidOutQueue
    ) -> None:
        self.quota_blocks = plan.quota_blocks
        self.records: dict[str, PinRecord] = {}
        self.num_hard_blocks = 0
        self.num_soft_blocks = 0  # blocks under soft pins only
        self.num_expired_pins = 0
        self.num_refused_pins = 0
        self._tree = tree
        self._ledger = ledger
        self._victims = victims
        self._slid_out = slid_out
        full = [group for group in plan.groups if not group.slides]
        self._full_lanes = full[0].lanes if full else slice(0, 0)
        self._num_full_lanes = full[0].num_lanes if full else 0
        # By node and by the first block that a pin waits for there (b"" if it has all), so that storing a run looks
        # only at the pins that wait for it.
        self._anchored: dict[int, dict[bytes, dict[str, PinRecord]]] = {}
        self._expiries: list[tuple[float, str]] = []
        self._limited: dict[str, PinRecord] = {}
        self._refilled = (0, 0, 0)  # what was taken, and of which quota, when limited pins were looked at last

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks that any pin holds, each counted once."""
        return self.num_hard_blocks + self.num_soft_blocks

    def anchored_at(self, node: Node) -> list[PinRecord]:
        """The pins whose hold ends at the end of `node`."""
        return [record for records in self._anchored.get(node.id, {}).values() for record in records.values()]

    def snapshot(self, record: PinRecord) -> Pin:
        """What callers see of a pin."""
        node = record.node
        return Pin(
            id=record.id,
            owner=record.owner,
            level=record.level,
            priority=record.priority,
            namespace=node.namespace,
            cache_type=record.cache_type,
            request_id=record.request_id,
            num_tokens=record.num_tokens,
            num_pinned_tokens=node.end * self._tree.block_bytes // TOKEN_BYTES,
            created_at=record.created_at,
            expires_at=record.expires_at,
            refresh=record.refresh,
            is_limited=record.id in self._limited and self._awaited(record, node.end) in node.children,
        )

    # --- making and undoing ---------------------------------------------------------------------------------------

    def add(self, record: PinRecord, *, partial: bool) -> None:
        """Take up a pin anchored at its root, and hold as much of it as is stored and the quota allows.

        Raises:
            PinQuotaExceeded: a hard pin whose stored part does not fit and `partial` is false; nothing has changed
            then.
        """
        if record.level == HARD and not partial:
            self._check_quota(record)
        self.records[record.id] = record
        self._anchor(record, record.node)
        if record.expires_at is not None:
            heapq.heappush(self._expiries, (record.expires_at, record.id))
        self.advance(record)

    def remove(self, record: PinRecord) -> None:
        """Undo a pin: what only it held can be evicted again, and what others lack for want of quota is given to
        them."""
        del self.records[record.id]
        self._limited.pop(record.id, None)
        if len(self._expiries) > 2 * len(self.records) + 64:
            self._expiries = [entry for entry in self._expiries if entry[1] in self.records]
            heapq.heapify(self._expiries)
        self._unanchor(record)
        self._guard(record, record.node, record.node.end, -1)
        for node in record.node.path():
            self._unmark(node, record)
        root = self._tree.root(record.node.namespace)
        if not self.anchored_at(root):
            self._tree.drop_root_if_empty(root)
        self.refill()

    def expire(self, now_seconds: float) -> None:
        """Undo the pins whose time is over. O(1) when there is none."""
        while self._expiries and self._expiries[0][0] <= now_seconds:
            _, pin_id = heapq.heappop(self._expiries)
            record = self.records.get(pin_id)
            if record is None or record.expires_at is None:
                continue
            if record.expires_at > now_seconds:  # it was refreshed since
                heapq.heappush(self._expiries, (record.expires_at, pin_id))
                continue
            self.num_expired_pins += 1
            self.remove(record)

    @property
    def has_expiries(self) -> bool:
        """True if any live pin has a time to live, so that the clock must be read."""
        return bool(self._expiries)

    def refresh(self, root: Node, data: bytes, now_seconds: float) -> None:
        """A request asks for these packed tokens: pins that end within them and are refreshed on use live on from
        now."""
        match = self._tree.find(root, data, len(data) // self._tree.block_bytes)
        for node in match.node.path():
            if node is match.node and match.num_edge_blocks < node.num_blocks:
                return
            for record in self.anchored_at(node):
                if record.refresh and record.ttl_seconds is not None:
                    record.expires_at = now_seconds + record.ttl_seconds

    # --- following the tree ---------------------------------------------------------------------------------------

    def on_stored_below(self, parent: Node, first_block: bytes) -> None:
        """A run that begins with `first_block` was stored below `parent`: pins that wait for it there may hold more."""
        for record in list(self._anchored.get(parent.id, {}).get(first_block, {}).values()):
            self.advance(record)

    def on_evicted(self, node: Node, num_blocks: int) -> None:
        """The last blocks of a leaf are being evicted (before the tree forgets them)."""
        if node.soft_priorities:
            self.num_soft_blocks -= num_blocks * self._num_full_lanes
        assert node.parent is not None  # a root is no leaf that could be evicted
        anchor = node.parent if num_blocks == node.num_blocks else node
        for record in self.anchored_at(node):
            self._unanchor(record)
            self._guard(record, node, node.end, -1)
            self._anchor(record, anchor, node.end - num_blocks)
            self._guard(record, anchor, node.end - num_blocks, 1)

    def on_filled(self, node: Node) -> None:
        """Sliding groups hold rows of this node again: hard pins protect those that they guard."""
        assert node.marks is not None  # there are sliding groups
        for column, group in enumerate(self._slid_out.groups):
            blocks = node.blocks[node.marks.hard_guards[:, column] > 0, group.lanes].ravel()
            self._ledger.protect(blocks[blocks != ABSENT], True)

    def advance(self, record: PinRecord) -> None:
        """Move a pin down along its tokens as far as they are stored and the quota goes."""
        here, size = record.node.end, self._tree.block_bytes
        match = self._tree.find(record.node, record.data[here * size :], record.num_blocks - here)
        num_stored = here + match.num_blocks
        if num_stored > here:
            firsts = [group.first_needed_block(here) for _, group in self._guarded_groups(record)]
            path = match.node.path(min(firsts, default=here))  # what the move changes, not all above
            used = self._used(record, path, here, num_stored)
            fitting = np.flatnonzero(used <= used[0] + self._room(record))
            self._move(record, path, here + int(fitting[-1]) if len(fitting) else here)
        if record.node.end < num_stored:
            self._limited[record.id] = record
        else:
            self._limited.pop(record.id, None)
        self._displace(self.num_pinned_blocks - self.quota_blocks)

    def refill(self) -> None:
        """Quota has become free: give it to pins that lack some, hard ones first, then by priority."""
        state = (self.num_hard_blocks, self.num_soft_blocks, self.quota_blocks)
        if state == self._refilled:
            return
        self._displace(self.num_pinned_blocks - self.quota_blocks)
        for record in sorted(self._limited.values(), key=lambda pin: (pin.level != HARD, -pin.priority)):
            if self._room(record) > 0:
                self.advance(record)
        self._refilled = (self.num_hard_blocks, self.num_soft_blocks, self.quota_blocks)

    def set_quota(self, quota_blocks: int) -> None:
        """Another quota, not below what hard pins hold; soft ones give way."""
        self.quota_blocks = quota_blocks
        self.refill()

    # --- quota ----------------------------------------------------------------------------------------------------

    def _check_quota(self, record: PinRecord) -> None:
        match = self._tree.find(record.node, record.data, record.num_blocks)
        needed = int(self._used(record, match.node.path(), 0, match.num_blocks)[-1])
        available = self._room(record)
        if needed > available:
            self.num_refused_pins += 1
            raise PinQuotaExceeded(needed, available, self.quota_blocks, self.num_hard_blocks)

    def _room(self, record: PinRecord) -> int:
        """Blocks of quota that this pin may take."""
        taken = self.num_hard_blocks if record.level == HARD else self.num_pinned_blocks
        return max(0, self.quota_blocks - taken)

    def _guarded_groups(self, record: PinRecord) -> Iterator[tuple[int, GroupPlan]]:
        for column, group in enumerate(self._slid_out.groups):
            if record.cache_type in ("kv", group.group.name):
                yield column, group

    def _used(self, record: PinRecord, path: list[Node], first: int, last: int) -> Int64Array:
        """Blocks of quota that this pin alone takes if it ends after `first`, `first` + 1, …, `last` blocks, up to a
        constant that is 0 if `path` begins at the root: int64 [last - first + 1].

        `path` goes on from what a pin that ends at `first` guards. Rows that others of its level (for a soft pin, any)
        pin as well cost nothing.
        """
        here, is_hard = record.node.end, record.level == HARD
        base = path[0].start if path else 0
        is_alone = np.empty(path[-1].end - base if path else 0, dtype=np.bool_)
        for node in path:
            num_others = node.num_hard_pins + (0 if is_hard else len(node.soft_priorities)) - (node.end <= here)
            is_alone[node.start - base : node.end - base] = num_others == 0
        summed = np.concatenate(([0], np.cumsum(is_alone)))
        used: Int64Array = summed[first - base : last - base + 1] * self._num_full_lanes
        for column, group in self._guarded_groups(record):
            for node in path:
                assert node.marks is not None  # there are sliding groups
                counts = node.marks.hard_guards[:, column].copy()
                if not is_hard:
                    counts += node.marks.soft_guards[:, column]
                if node.start < here:
                    counts[max(group.first_needed_block(here) - node.start, 0) : here - node.start] -= 1
                is_alone[node.start - base : node.end - base] = counts == 0
            summed = np.concatenate(([0], np.cumsum(is_alone)))
            needed = group.first_needed_blocks(last)[first:] - base
            used = used + (summed[first - base : last - base + 1] - summed[needed]) * group.num_lanes
        return used

    def _displace(self, num_blocks: int) -> None:
        """Take `num_blocks` blocks of quota from soft pins: lowest priority first, newest first, from their tails."""
        if num_blocks <= 0:
            return
        soft = [record for record in reversed(self.records.values()) if record.level == SOFT and record.node.end]
        moved = []
        for record in sorted(soft, key=lambda pin: pin.priority):
            num_blocks -= self._retreat(record, num_blocks)
            moved.append(record)
            if num_blocks <= 0:
                break
        for record in moved:  # what others still pin costs no quota
            self.advance(record)

    def _retreat(self, record: PinRecord, num_blocks: int) -> int:
        """Move a soft pin up until that has set free `num_blocks` blocks of quota, or all it can. Returns how many."""
        before = self.num_pinned_blocks
        path = record.node.path()
        used = self._used(record, path, 0, record.node.end)
        fitting = np.flatnonzero(used <= used[-1] - num_blocks)
        self._move(record, path, int(fitting[-1]) if len(fitting) else 0)
        self._limited[record.id] = record
        return before - self.num_pinned_blocks

    # --- marks ----------------------------------------------------------------------------------------------------

    def _move(self, record: PinRecord, path: list[Node], end: int) -> None:
        """Let a pin end after `end` blocks of `path`, which holds the path of its present end or goes on behind it."""
        here = record.node.end
        if end == here:
            return
        self._unanchor(record)
        self._guard(record, record.node, here, -1)
        anchor = self._tree.root(record.node.namespace)
        for node in path:
            if node.start < end < node.end:
                upper = self._victims.split(node, end - node.start)
                if here < end:  # the part behind `end` is not covered: mark the upper part alone
                    self._mark(upper, record)
                else:
                    self._unmark(node, record)
                anchor = upper
            elif node.end <= end:
                anchor = node
                if node.end > here:
                    self._mark(node, record)
            elif node.end <= here:
                self._unmark(node, record)
        self._anchor(record, anchor)
        self._guard(record, anchor, end, 1)

    def _guard(self, record: PinRecord, node: Node, end: int, sign: int) -> None:
        """Begin (1) or stop (-1) to guard what a hit at `end`, in or at the end of `node`, needs in sliding groups."""
        for column, group in self._guarded_groups(record):
            first = group.first_needed_block(end)
            path = node.path(first)
            for step in path:
                marks = step.marks
                assert marks is not None  # there are sliding groups
                rows = slice(max(0, first - step.start), end - step.start)
                hard, soft = marks.hard_guards[rows, column], marks.soft_guards[rows, column]  # views
                num_hard, num_soft = np.count_nonzero(hard), np.count_nonzero((hard == 0) & (soft > 0))
                counts = hard if record.level == HARD else soft
                counts += sign
                self.num_hard_blocks += (np.count_nonzero(hard) - num_hard) * group.num_lanes
                self.num_soft_blocks += (np.count_nonzero((hard == 0) & (soft > 0)) - num_soft) * group.num_lanes
                if record.level == HARD:
                    blocks = step.blocks[rows, group.lanes]
                    for protected in (True, False):
                        changed = blocks[(hard > 0) == protected].ravel()
                        self._ledger.protect(changed[changed != ABSENT], protected)
            self._slid_out.review(path)

    def _mark(self, node: Node, record: PinRecord) -> None:
        num_blocks = node.num_blocks * self._num_full_lanes
        if record.level == HARD:
            if not node.num_hard_pins:
                self.num_hard_blocks += num_blocks
                if node.soft_priorities:
                    self.num_soft_blocks -= num_blocks
                self._ledger.protect(node.blocks[:, self._full_lanes].ravel(), True)
            node.num_hard_pins += 1
        else:
            if not node.is_pinned:
                self.num_soft_blocks += num_blocks
            node.soft_priorities.append(record.priority)
        node.sealed = True
        self._victims.review(node)

    def _unmark(self, node: Node, record: PinRecord) -> None:
        num_blocks = node.num_blocks * self._num_full_lanes
        if record.level == HARD:
            node.num_hard_pins -= 1
            if not node.num_hard_pins:
                self.num_hard_blocks -= num_blocks
                if node.soft_priorities:
                    self.num_soft_blocks += num_blocks
                self._ledger.protect(node.blocks[:, self._full_lanes].ravel(), False)
        else:
            node.soft_priorities.remove(record.priority)
            if not node.is_pinned:
                self.num_soft_blocks -= num_blocks
        self._victims.review(node)

    def _awaited(self, record: PinRecord, end: int) -> bytes:
        """The first block that a pin lacks when it holds `end` blocks; empty if it has all."""
        return record.data[end * self._tree.block_bytes : (end + 1) * self._tree.block_bytes]

    def _anchor(self, record: PinRecord, node: Node, end: int | None = None) -> None:
        """Note that the hold of a pin ends at `node`, after `end` blocks (`node.end`, unless that is about to
        change)."""
        record.node = node
        record.awaited = self._awaited(record, node.end if end is None else end)
        self._anchored.setdefault(node.id, {}).setdefault(record.awaited, {})[record.id] = record

    def _unanchor(self, record: PinRecord) -> None:
        by_block = self._anchored[record.node.id]
        del by_block[record.awaited][record.id]
        if not by_block[record.awaited]:
            del by_block[record.awaited]
        if not by_block:
            del self._anchored[record.node.id]
