"""Pins: promises that a prefix is not evicted, with owner, level, expiry and a quota."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from looseleaf.core.blocks import BlockLedger
from looseleaf.core.tokens import TOKEN_BYTES
from looseleaf.core.tree import Node, PrefixTree
from looseleaf.core.victims import VictimQueue
from looseleaf.errors import PinQuotaExceeded
from looseleaf.ids import Namespace, RequestId

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

    A pin is anchored at the node where what it holds ends; it covers that node and all above. When more of its tokens
    are stored below its anchor it moves down, when they are evicted it moves up. Shared blocks count once. Hard and
    soft pins together never hold more than the quota; a hard pin displaces soft ones, lowest priority first.
    """

    def __init__(self, quota_blocks: int, tree: PrefixTree, ledger: BlockLedger, victims: VictimQueue) -> None:
        self.quota_blocks = quota_blocks
        self.records: dict[str, PinRecord] = {}
        self.num_hard_blocks = 0
        self.num_soft_blocks = 0  # blocks under soft pins only
        self.num_hard_idle_blocks = 0  # hard-pinned blocks that no lease holds: cached, yet not evictable
        self.num_expired_pins = 0
        self.num_refused_pins = 0
        self._tree = tree
        self._ledger = ledger
        self._victims = victims
        # By node and by the first block that a pin waits for there (b"" if it has all), so that storing a run looks
        # only at the pins that wait for it.
        self._anchored: dict[int, dict[bytes, dict[str, PinRecord]]] = {}
        self._expiries: list[tuple[float, str]] = []
        self._limited: dict[str, PinRecord] = {}

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
            self.num_soft_blocks -= num_blocks
        assert node.parent is not None  # a root is no leaf that could be evicted
        anchor = node.parent if num_blocks == node.num_blocks else node
        for record in self.anchored_at(node):
            self._unanchor(record)
            self._anchor(record, anchor, node.end - num_blocks)

    def on_held(self, path: list[Node]) -> None:
        """A lease is about to hold this path."""
        for node in path:
            if node.num_hard_pins and not self._ledger.refs[node.blocks[0]]:
                self.num_hard_idle_blocks -= node.num_blocks

    def on_dropped(self, path: list[Node]) -> None:
        """A lease has let go of this path."""
        for node in path:
            if node.num_hard_pins and not self._ledger.refs[node.blocks[0]]:
                self.num_hard_idle_blocks += node.num_blocks

    def advance(self, record: PinRecord) -> None:
        """Move a pin down along its tokens as far as they are stored and the quota goes."""
        size = self._tree.block_bytes
        node = record.node
        limited = False
        while node.end < record.num_blocks and not limited:
            at = node.end * size
            child = node.children.get(record.data[at : at + size])
            if child is None:
                break
            wanted = self._tree.common_blocks(child.tokens, record.data, at, record.num_blocks * size)
            granted = min(wanted, self._room_for(record, child))
            limited = granted < wanted
            if granted == 0:
                break
            if granted < child.num_blocks:
                child = self._victims.split(child, granted)
            self._mark(child, record)
            node = child
        if node is not record.node:
            self._unanchor(record)
            self._anchor(record, node)
        if limited:
            self._limited[record.id] = record
        else:
            self._limited.pop(record.id, None)
        self._displace(self.num_pinned_blocks - self.quota_blocks)

    def refill(self) -> None:
        """Quota has become free: give it to pins that lack some, hard ones first, then by priority."""
        if not self._limited:
            return
        for record in sorted(self._limited.values(), key=lambda pin: (pin.level != HARD, -pin.priority)):
            num_taken = self.num_hard_blocks if record.level == HARD else self.num_pinned_blocks
            if num_taken < self.quota_blocks:
                self.advance(record)

    # --- quota ----------------------------------------------------------------------------------------------------

    def _check_quota(self, record: PinRecord) -> None:
        needed = 0
        for node, num_blocks in self._stored_path(record):
            if not node.num_hard_pins:
                needed += num_blocks
        available = self.quota_blocks - self.num_hard_blocks
        if needed > available:
            self.num_refused_pins += 1
            raise PinQuotaExceeded(needed, available, self.quota_blocks, self.num_hard_blocks)

    def _stored_path(self, record: PinRecord) -> Iterator[tuple[Node, int]]:
        """The nodes that a pin would cover, each with the number of its blocks; read-only."""
        match = self._tree.find(record.node, record.data, record.num_blocks)
        path = match.node.path()
        for node in path:
            yield node, match.num_edge_blocks if node is match.node else node.num_blocks

    def _room_for(self, record: PinRecord, node: Node) -> int:
        """Blocks of `node` that this pin may hold under the quota."""
        if record.level == HARD:
            return node.num_blocks if node.num_hard_pins else self.quota_blocks - self.num_hard_blocks
        return node.num_blocks if node.is_pinned else max(0, self.quota_blocks - self.num_pinned_blocks)

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
        freed = 0
        node = record.node
        self._unanchor(record)
        while freed < num_blocks and not node.is_root and not node.num_hard_pins:
            assert node.parent is not None  # not a root
            surplus = node.num_blocks - (num_blocks - freed)
            if surplus > 0 and len(node.soft_priorities) == 1:
                self._victims.split(node, surplus)
            before = self.num_soft_blocks
            self._unmark(node, record)
            freed += before - self.num_soft_blocks
            node = node.parent
        self._anchor(record, node)
        self._limited[record.id] = record
        return freed

    # --- marks ----------------------------------------------------------------------------------------------------

    def _mark(self, node: Node, record: PinRecord) -> None:
        if record.level == HARD:
            if not node.num_hard_pins:
                self.num_hard_blocks += node.num_blocks
                if node.soft_priorities:
                    self.num_soft_blocks -= node.num_blocks
                if not self._ledger.refs[node.blocks[0]]:
                    self.num_hard_idle_blocks += node.num_blocks
            node.num_hard_pins += 1
        else:
            if not node.is_pinned:
                self.num_soft_blocks += node.num_blocks
            node.soft_priorities.append(record.priority)
        node.sealed = True
        self._victims.review(node)

    def _unmark(self, node: Node, record: PinRecord) -> None:
        if record.level == HARD:
            node.num_hard_pins -= 1
            if not node.num_hard_pins:
                self.num_hard_blocks -= node.num_blocks
                if node.soft_priorities:
                    self.num_soft_blocks += node.num_blocks
                if not self._ledger.refs[node.blocks[0]]:
                    self.num_hard_idle_blocks -= node.num_blocks
        else:
            node.soft_priorities.remove(record.priority)
            if not node.is_pinned:
                self.num_soft_blocks -= node.num_blocks
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
