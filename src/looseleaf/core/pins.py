"""Pins: promises that a prefix is not evicted, with owner, level, expiry and a quota."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping

import numpy as np

from looseleaf.core.blocks import BlockLedger
from looseleaf.core.config import CachePlan
from looseleaf.core.events import EventListener, PinChanged
from looseleaf.core.namespaces import Tenancy
from looseleaf.core.pin_marks import PinMarks
from looseleaf.core.pin_queue import PinQueue
from looseleaf.core.pin_quotas import PinQuotas
from looseleaf.core.pin_record import HARD, NONE_AWAITED, SOFT, Anchorage, Awaited, PastPin, Pin, PinHold, PinRecord
from looseleaf.core.slid_out import SlidOutQueue
from looseleaf.core.tokens import TOKEN_BYTES
from looseleaf.core.tree import Node, PrefixTree
from looseleaf.core.victims import VictimQueue
from looseleaf.errors import PinQuotaExceeded
from looseleaf.ids import Int64Array, Namespace

MAX_PAST_PINS = 256
"""Ended and refused pins that are remembered."""

MAX_FAILED_REFILLS = 16
"""Pins that are offered quota which has become free though it is too little for them, before that is left at it."""


class PinBook:
    """All live pins and what they hold, under one quota of blocks.

    Pins that are alike (same tokens, same terms) share one hold: a thousand pins on a system prompt cost no more than
    one. A hold is anchored at the node where it ends: it covers that node and all above, and in groups that slide it
    *guards* the rows that a hit at its end needs, whether they are there or not. When more of its tokens are stored
    below its anchor it moves down, when they are evicted it moves up. Shared blocks count once; a guarded row counts as
    its blocks. Hard and soft pins together never hold more than the quota; a hard pin displaces soft ones, lowest
    priority first.
    """

    def __init__(
        self,
        plan: CachePlan,
        tree: PrefixTree,
        ledger: BlockLedger,
        victims: VictimQueue,
        slid_out: SlidOutQueue,
        clock: Callable[[], float],
        on_event: EventListener | None,
    ) -> None:
        self.records: dict[str, PinRecord] = {}
        self.holds: dict[tuple[Tenancy, str, int, str, bytes], PinHold] = {}  # by terms: pins that are alike share one
        self.past: deque[PastPin] = deque(maxlen=MAX_PAST_PINS)
        self.num_changes: Counter[str] = Counter()  # by what `PinChanged` calls them
        self._clock = clock
        self._on_event = on_event
        self._tree = tree
        self._ledger = ledger
        self._victims = victims
        self.marks = PinMarks(plan, ledger, victims, slid_out)
        self.quotas = PinQuotas(plan, self.marks)
        quotas = self.quotas.by_namespace
        self.soft = PinQueue(lambda pin: (pin.priority, -pin.number), lambda pin: pin.tenancy.namespaces, quotas)
        self.limited = PinQueue(  # by where the block lies that it waits for: where the first has no room, nobody has
            lambda pin: (pin.level != HARD, -pin.priority, pin.number), lambda pin: (pin.awaited.namespace,), quotas
        )
        self.anchorages: dict[int, Anchorage] = {}  # by node
        self._price_tokens = 0.0  # what one block, pinned since the start, has cost others
        self._expiries: list[tuple[float, str]] = []
        self._refilled = 0  # changes of what is taken when limited pins were looked at last
        self._num_refreshed = 0  # live pins that use keeps alive

    def anchored_at(self, node: Node) -> Collection[PinHold]:
        """The holds that end at the end of `node`. O(1)."""
        anchorage = self.anchorages.get(node.id)
        return () if anchorage is None else anchorage.holds.values()

    def snapshot(self, record: PinRecord) -> Pin:
        """What callers see of a pin."""
        expires_at = self._expiry(record)  # brings the hold's figures up to date
        hold, node = record.hold, record.node
        num_hits = hold.num_hits - record.hits_before
        return Pin(
            id=record.id,
            owner=record.owner,
            level=hold.level,
            priority=hold.priority,
            namespace=record.namespace,
            cache_type=hold.cache_type,
            request_id=record.request_id,
            num_tokens=record.num_tokens,
            num_pinned_tokens=node.end * self._tree.block_bytes // TOKEN_BYTES,
            num_blocks=self.marks.held_blocks(hold),
            labels=dict(record.labels),
            created_at=record.created_at,
            expires_at=expires_at,
            last_used_at=hold.hit_at if num_hits else None,
            refresh=record.refresh,
            is_limited=hold.number in self.limited.holds,
            is_automatic=hold.is_automatic,
            num_hits=num_hits,
            served_tokens=hold.served_tokens - record.served_before,
            cost_tokens=hold.cost_tokens - record.cost_before,
        )

    # --- use and cost ---------------------------------------------------------------------------------------------

    def on_hit(self, path: list[Node], data: bytes, tenancy: Tenancy, now_seconds: float) -> None:
        """A look-up of packed tokens reuses this path. O(path) however many pins there are: uses are counted by node.

        A pin that ends with the last token asked for is used too, though that token is computed again.
        """
        nodes = path
        if path and len(data) == (path[-1].end + 1) * self._tree.block_bytes:
            ahead = self._tree.continuations(path[-1], tenancy.at(path[-1].end))
            last = ahead.get(data[-self._tree.block_bytes :])
            nodes = path if last is None or last.num_blocks > 1 else [*path, last]
        for node in nodes:
            use = self.anchorages.get(node.id)
            if use is not None:
                use.num_hits += 1
                use.num_served_blocks += min(node.end, path[-1].end)
                use.hit_at = now_seconds

    def refresh(self, root: Node, data: bytes, tenancy: Tenancy, now_seconds: float) -> None:
        """A request asks for these packed tokens: pins that end within them and are refreshed on use live on from
        now."""
        if not self._num_refreshed:
            return
        match = self._tree.find(root, data, len(data) // self._tree.block_bytes, tenancy.borders)
        for node in match.node.path():
            if node is match.node and match.num_edge_blocks < node.num_blocks:
                return
            use = self.anchorages.get(node.id)
            if use is not None:
                use.asked_at = now_seconds

    def on_recomputed(self, num_tokens: int) -> None:
        """So many tokens that were evicted are asked for again: what is pinned and idle has its share in that."""
        num_idle = self._ledger.num_cached_blocks
        if num_idle:
            self._price_tokens += num_tokens / num_idle

    def _settle(self, hold: PinHold) -> None:
        """Bring a hold's figures up to date with its node's uses and the price of memory."""
        use = self.anchorages[hold.node.id]
        num_new = use.num_hits - hold.hit_mark
        hold.num_hits += num_new
        hold.served_tokens += (use.num_served_blocks - hold.served_mark) * self._tree.block_bytes // TOKEN_BYTES
        hold.hit_mark, hold.served_mark = use.num_hits, use.num_served_blocks
        if num_new:
            hold.hit_at = use.hit_at
        hold.cost_tokens += (self._price_tokens - hold.price_mark) * self.marks.held_blocks(hold)
        hold.price_mark = self._price_tokens
        if use.asked_at is not None:
            hold.asked_at = use.asked_at if hold.asked_at is None else max(hold.asked_at, use.asked_at)

    def _expiry(self, record: PinRecord) -> float | None:
        """When a pin ends, with what refreshed it since; None if never."""
        self._settle(record.hold)
        expiry, asked_at = record.expires_at, record.hold.asked_at
        if expiry is not None and record.refresh and record.ttl_seconds is not None and asked_at is not None:
            expiry = max(expiry, asked_at + record.ttl_seconds)
        if expiry is None or record.last_expiry is None:
            return expiry if record.last_expiry is None else record.last_expiry
        return min(expiry, record.last_expiry)

    # --- making and undoing ---------------------------------------------------------------------------------------

    def add(self, record: PinRecord, *, partial: bool) -> None:
        """Take up a pin anchored at its root, and hold as much of it as is stored and the quota allows.

        Raises:
            PinQuotaExceeded: a hard pin whose stored part does not fit and `partial` is false; nothing has changed
            then.
        """
        hold = record.hold
        if hold.level == HARD and not partial:
            self._check_quota(record)
        alike = self.holds.setdefault(hold.terms, hold)
        if alike is hold:
            self._anchor(hold, hold.node)
        else:
            self._settle(alike)
        record.hold = alike
        record.hits_before, record.served_before = alike.num_hits, alike.served_tokens
        record.cost_before = alike.cost_tokens
        alike.records[record.id] = self.records[record.id] = record
        self._num_refreshed += record.refresh
        expiry = self._expiry(record)
        if expiry is not None:
            heapq.heappush(self._expiries, (expiry, record.id))
        self.advance(alike)
        try:
            self._tell("made", record)
        except BaseException:
            self._drop(record)  # nobody would know its id
            raise

    def remove(self, record: PinRecord, end: str) -> Pin:
        """Undo a pin: what only it held can be evicted again, and what others lack for want of quota is given to
        them. Its last snapshot. `end`: why, see `PastPin`."""
        snapshot = self.snapshot(record)
        self.past.append(PastPin(snapshot, end, self._clock()))
        self._drop(record)
        self._tell(end, record)
        return snapshot

    def _drop(self, record: PinRecord) -> None:
        hold = record.hold
        del self.records[record.id], hold.records[record.id]
        self._num_refreshed -= record.refresh
        if len(self._expiries) > 2 * len(self.records) + 64:
            self._expiries = [entry for entry in self._expiries if entry[1] in self.records]
            heapq.heapify(self._expiries)
        if hold.records:
            return
        del self.holds[hold.terms]
        self._unanchor(hold)
        self.soft.discard(hold)
        self.limited.discard(hold)
        self.marks.guard(hold, hold.node, hold.node.end, -1)
        for node in hold.node.path():
            self.marks.unmark(node, hold)
        root = self._tree.root(hold.tenancy.root)
        if not self.anchored_at(root):
            self._tree.drop_root_if_empty(root)
        self.refill()

    def _tell(self, change: str, record: PinRecord) -> None:
        self.num_changes[change] += 1
        if self._on_event is not None:
            self._on_event(
                PinChanged(record.id, change, record.namespace, record.owner, record.hold.level, record.num_tokens)
            )

    def expire(self, now_seconds: float) -> None:
        """Undo the pins whose time is over. O(1) when there is none."""
        while self._expiries and self._expiries[0][0] <= now_seconds:
            _, pin_id = heapq.heappop(self._expiries)
            record = self.records.get(pin_id)
            if record is None:
                continue
            expiry = self._expiry(record)
            assert expiry is not None  # it is in the queue
            if expiry > now_seconds:  # it was refreshed since
                heapq.heappush(self._expiries, (expiry, pin_id))
                continue
            self.remove(record, "expired")

    @property
    def has_expiries(self) -> bool:
        """True if any live pin has a time to live, so that the clock must be read."""
        return bool(self._expiries)

    # --- following the tree ---------------------------------------------------------------------------------------

    def on_stored_below(self, parent: Node, namespace: Namespace, first_block: bytes) -> None:
        """A run that begins with `first_block` was stored in `namespace` below `parent`: pins that wait for it there
        may hold more."""
        for hold in self._waiting(parent, Awaited(namespace, first_block)):
            self.advance(hold)

    def _waiting(self, parent: Node, awaited: Awaited) -> list[PinHold]:
        anchorage = self.anchorages.get(parent.id)
        return [] if anchorage is None else list(anchorage.by_awaited.get(awaited, {}).values())

    def on_evicted(self, node: Node, num_blocks: int) -> None:
        """The last blocks of a leaf are being evicted (before the tree forgets them)."""
        self.marks.on_tail_evicted(node, num_blocks)
        if not self.anchorages:
            return
        assert node.parent is not None  # a root is no leaf that could be evicted
        anchor = node
        if num_blocks == node.num_blocks:
            anchor = node.parent
            for hold in self._waiting(anchor, Awaited(node.namespace, node.tokens[: self._tree.block_bytes])):
                self.limited.discard(hold)  # what it lacks is not there any more
        for hold in list(self.anchored_at(node)):
            self._unanchor(hold)
            self.marks.guard(hold, node, node.end, -1)
            self._anchor(hold, anchor, node.end - num_blocks)
            self.marks.guard(hold, anchor, node.end - num_blocks, 1)

    def advance(self, hold: PinHold) -> None:
        """Move a hold down along its tokens as far as they are stored and the quota goes."""
        here, size = hold.node.end, self._tree.block_bytes
        moved: list[PinHold] = []
        while True:
            match = self._tree.find(hold.node, hold.data[here * size :], hold.num_blocks - here, hold.tenancy.borders)
            num_stored = here + match.num_blocks
            if num_stored == here:
                break
            path = match.node.path(self.marks.first_guarded(hold, here))  # what the move changes, not all above
            used = self.quotas.used(hold, path, here, num_stored)
            gave_way = self._displace_automatic(hold, used)
            if not gave_way:
                rooms = self.quotas.rooms(hold)
                fits = [taken <= taken[0] + rooms[namespace] for namespace, taken in used.items()]
                fitting = np.flatnonzero(np.logical_and.reduce(fits))
                self._move(hold, path, here + int(fitting[-1]) if len(fitting) else here)
                break
            moved += gave_way  # perhaps from this very path: look again
        self._note_limit(hold)
        for namespace in hold.tenancy.namespaces:
            self._displace_excess(namespace)
        for other in moved:  # what others still pin costs no quota
            self.advance(other)

    def _note_limit(self, hold: PinHold) -> None:
        if hold.awaited.block in self._tree.continuations(hold.node, hold.awaited.namespace):
            self.limited.add(hold)
        else:
            self.limited.discard(hold)

    def refill(self) -> None:
        """Quota has become free: give it to pins that lack some, hard ones first, then by priority."""
        if self.marks.num_changes == self._refilled:
            return
        least = self.marks.num_full_lanes or 1
        failed: list[PinHold] = []
        while len(failed) < MAX_FAILED_REFILLS:
            hold = next((pin for pin in self.limited.heads() if self.quotas.room(pin) >= least), None)
            if hold is None:
                break
            self.advance(hold)
            if hold.number in self.limited.holds:
                self.limited.discard(hold)
                failed.append(hold)
        for hold in failed:
            self.limited.add(hold)
        self._refilled = self.marks.num_changes

    def set_quotas(self, plan: CachePlan) -> None:
        """Other quotas, none below what hard pins hold; soft ones give way."""
        self.quotas.set(plan)
        for queue in (self.soft, self.limited):
            queue.set_quotas(self.quotas.by_namespace)
        for namespace in ("", *self.quotas.by_namespace):
            self._displace_excess(namespace)
        self._refilled = -1
        self.refill()

    # --- quota ----------------------------------------------------------------------------------------------------

    def _check_quota(self, record: PinRecord) -> None:
        hold = record.hold
        match = self._tree.find(hold.node, hold.data, hold.num_blocks, hold.tenancy.borders)
        used = self.quotas.used(hold, match.node.path(), 0, match.num_blocks)
        rooms = self.quotas.rooms(hold)
        short = [namespace for namespace, taken in used.items() if taken[-1] > rooms[namespace]]
        if not short:
            return
        self._refuse(record)
        tightest = min(short, key=lambda namespace: (rooms[namespace], namespace is None))
        taken = self.quotas.taken(tightest, hard_only=True)
        raise PinQuotaExceeded(int(used[tightest][-1]), rooms[tightest], self.quotas.of(tightest), taken, tightest)

    def _refuse(self, record: PinRecord) -> None:
        self._anchor(record.hold, record.node)
        self.past.append(PastPin(self.snapshot(record), "refused", self._clock()))
        self._unanchor(record.hold)
        self._tell("refused", record)

    def _displace_excess(self, namespace: Namespace) -> None:
        """Let soft pins give way where the pins of all, or those of `namespace`, hold more than their quota."""
        moved = self._displace(self.quotas.excess(None))
        moved += self._displace(self.quotas.excess(namespace), namespace)
        for hold in moved:  # what others still pin costs no quota
            self.advance(hold)

    def _displace_automatic(self, hold: PinHold, used: Mapping[Namespace | None, Int64Array]) -> list[PinHold]:
        """Let automatic pins give way to an explicit soft one whose use of quotas is to grow from the first to the last
        of `used`. Which did."""
        if hold.level == HARD or hold.is_automatic:
            return []
        moved: list[PinHold] = []
        needed = int(used[None][-1] - used[None][0])
        for namespace in self.quotas.under(hold):
            own = int(used[namespace][-1] - used[namespace][0])
            moved += self._displace(self.quotas.excess(namespace) + own, namespace, only_automatic=True)
            needed -= max(0, self.quotas.excess(namespace) + own)
        return moved + self._displace(self.quotas.excess(None) + needed, only_automatic=True)

    def _displace(
        self, num_blocks: int, namespace: Namespace | None = None, *, only_automatic: bool = False
    ) -> list[PinHold]:
        """Take `num_blocks` blocks of quota from soft pins, those of a namespace or all: lowest priority first, newest
        first, from their tails. Which gave way."""
        moved: list[PinHold] = []
        while num_blocks > 0:
            hold = next(iter(self.soft.heads(namespace)), None)
            if hold is None or (only_automatic and not hold.is_automatic):
                break
            num_blocks -= self._retreat(hold, num_blocks, namespace)
            moved.append(hold)
        return moved

    def _retreat(self, hold: PinHold, num_blocks: int, namespace: Namespace | None) -> int:
        """Move a soft pin up until that has set free `num_blocks` blocks of quota, of that of `namespace` if given, or
        all it can. Returns how many."""
        before = self.quotas.taken(namespace)
        path = hold.node.path()
        used = self.marks.used(hold, path, 0, hold.node.end, namespace)
        fitting = np.flatnonzero(used <= used[-1] - num_blocks)
        self._move(hold, path, int(fitting[-1]) if len(fitting) else 0)
        self._note_limit(hold)
        return before - self.quotas.taken(namespace)

    # --- marks ----------------------------------------------------------------------------------------------------

    def _move(self, hold: PinHold, path: list[Node], end: int) -> None:
        """Let a pin end after `end` blocks of `path`, which holds the path of its present end or goes on behind it."""
        here = hold.node.end
        if end == here:
            return
        self._unanchor(hold)
        self.marks.guard(hold, hold.node, here, -1)
        anchor = self._tree.root(hold.tenancy.root)
        for node in path:
            if node.start < end < node.end:
                upper = self._victims.split(node, end - node.start)
                if here < end:  # the part behind `end` is not covered: mark the upper part alone
                    self.marks.mark(upper, hold)
                else:
                    self.marks.unmark(node, hold)
                anchor = upper
            elif node.end <= end:
                anchor = node
                if node.end > here:
                    self.marks.mark(node, hold)
            elif node.end <= here:
                self.marks.unmark(node, hold)
        self._anchor(hold, anchor)
        self.marks.guard(hold, anchor, end, 1)

    def _awaited(self, hold: PinHold, end: int) -> Awaited:
        """The first block that a pin lacks when it holds `end` blocks."""
        block = hold.data[end * self._tree.block_bytes : (end + 1) * self._tree.block_bytes]
        return Awaited(hold.tenancy.at(end), block) if block else NONE_AWAITED

    def _anchor(self, hold: PinHold, node: Node, end: int | None = None) -> None:
        """Note that the hold of a pin ends at `node`, after `end` blocks (`node.end`, unless that is about to
        change)."""
        hold.node = node
        hold.awaited = self._awaited(hold, node.end if end is None else end)
        anchorage = self.anchorages.setdefault(node.id, Anchorage())
        anchorage.holds[hold.number] = hold
        anchorage.by_awaited.setdefault(hold.awaited, {})[hold.number] = hold
        hold.hit_mark, hold.served_mark = anchorage.num_hits, anchorage.num_served_blocks
        hold.price_mark = self._price_tokens
        if hold.level == SOFT:
            (self.soft.discard if node.is_root else self.soft.add)(hold)

    def _unanchor(self, hold: PinHold) -> None:
        self._settle(hold)
        anchorage = self.anchorages[hold.node.id]
        del anchorage.holds[hold.number]
        del anchorage.by_awaited[hold.awaited][hold.number]
        if not anchorage.by_awaited[hold.awaited]:
            del anchorage.by_awaited[hold.awaited]
        if not anchorage.holds:
            del self.anchorages[hold.node.id]
