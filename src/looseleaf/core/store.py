"""Stored runs of blocks: matched and held, added, let go, evicted, cleared. Where tree, ledger and victims meet."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from looseleaf.core.auto_pins import AutoPinner
from looseleaf.core.blocks import BlockLedger, BlockStates
from looseleaf.core.config import CachePlan
from looseleaf.core.events import BlocksRemoved, BlocksStored, EventListener
from looseleaf.core.eviction import PolicyFactory, Use
from looseleaf.core.forgotten import CLEARED, EVICTED, EXPENDED, OVER_QUOTA, ForgottenTable
from looseleaf.core.matching import Usable, usable_part
from looseleaf.core.misses import MissLog
from looseleaf.core.namespaces import Border
from looseleaf.core.pages import PagePool
from looseleaf.core.pins import PinBook
from looseleaf.core.pressure import Pressure
from looseleaf.core.quotas import QuotaKeeper
from looseleaf.core.row_marks import RowMarks
from looseleaf.core.sessions import SessionBook
from looseleaf.core.slid_out import COLD_TICK, SlidOutQueue, SlidRows
from looseleaf.core.stats import ClearResult, Counters
from looseleaf.core.tokens import unpack_tokens
from looseleaf.core.tree import ABSENT, Match, Node, PrefixTree
from looseleaf.core.usage import UsageBook
from looseleaf.core.victims import VictimQueue
from looseleaf.errors import OutOfBlocks
from looseleaf.ids import Int32Array, Int64Array, Namespace

MAX_GROWING_BLOCKS = 64
"""A run is lengthened in place up to this length only, since that copies it: growing by a block then costs O(1)."""


@dataclass(slots=True)  # not frozen: two are made for each block that a decode fills
class Holder:
    """Who stores blocks. own_node: it made the node behind which it stores. opened_tick: when its lease was made.
    request: its number for the policy. is_padded: the last block stored is not full of tokens. borders: where its
    prompt changes to another namespace. keys: chain keys of what it stores, where they are known already."""

    own_node: bool
    opened_tick: int
    request: int
    is_padded: bool = False
    borders: Sequence[Border] = ()
    keys: Int64Array | None = None


class BlockStore:
    """The blocks of one pool and what is stored in them. Knows paths and runs; of leases it knows only their block
    ids. Block tables are int32 [num_blocks, num_lanes] with ABSENT where a sliding group holds nothing."""

    def __init__(
        self, plan: CachePlan, factory: PolicyFactory, clock: Callable[[], float], on_event: EventListener | None
    ) -> None:
        self.plan = plan
        self.pool = PagePool(plan.num_pages, plan.blocks_per_page)
        self.ledger = BlockLedger(self.pool, counts_runs=not plan.slides)
        self.tree = PrefixTree(plan.block_tokens, plan.num_lanes)
        self.sliding = [group for group in plan.groups if group.slides]
        self.slid_out = SlidOutQueue(self.sliding, self.tree, self.ledger)
        self.usage = UsageBook()
        self.victims = VictimQueue(factory(plan.num_blocks), self.tree, self.slid_out)
        self.pins = PinBook(plan, self.tree, self.ledger, self.victims, self.slid_out, clock, on_event)
        self.forgotten = ForgottenTable(plan.num_blocks, self.tree.block_bytes)
        self.pressure = Pressure(plan.num_blocks)
        self.sessions = SessionBook(self.tree, self.victims)
        self.counters = Counters()
        self.misses = MissLog(plan.block_tokens, clock())
        self.auto_pins: AutoPinner | None = None
        self.on_event = on_event
        self.tick = 0
        self._seconds = -math.inf
        self._clock = clock
        self._keeps_all = len(self.sliding) < len(plan.groups)
        self.quotas = QuotaKeeper(factory, self.victims, self.tree, self.usage, self.counters, self._evict_over_quota)
        self.set_plan(plan)

    # --- finding and holding --------------------------------------------------------------------------------------

    def find(self, root: Node, data: bytes, max_blocks: int, borders: Sequence[Border] = ()) -> Usable:
        """The longest stored prefix of packed tokens, at most `max_blocks`, from which every group can go on.
        `borders`: those of the tokens' `Tenancy`. Read-only."""
        return usable_part(self.tree.find(root, data, max_blocks, borders), self.sliding)

    def hold(self, match: Match, request: int) -> tuple[Node, Int32Array]:
        """Hold what a usable look-up of request number `request` found; a run matched midway is split there. The last
        node held, and the block table of its path, ABSENT where a group needs no block to go on from its end."""
        node = match.node
        if match.num_edge_blocks < len(node.blocks):
            node = self.victims.split(node, match.num_edge_blocks)
        path = node.path()
        if not path:
            return node, self.tree.no_blocks
        table = path[0].blocks if len(path) == 1 else np.concatenate([step.blocks for step in path])
        if self.sliding:
            firsts = self.first_needed(node.end)
            table = table.copy()
            for group, first in zip(self.plan.groups, firsts, strict=True):
                table[:first, group.lanes] = ABSENT
            self.ledger.hold(table[table != ABSENT])
        self._hold_path(path, request)
        if self.sliding:
            self._mark_needed(node, firsts)
        return node, table

    def let_go(self, node: Node, table: Int32Array, firsts: list[int], request: int, num_output_tokens: int) -> None:
        """Undo `hold`: drop one holder of a block `table`, of which what is stored lies on the path down to `node`, in
        each group from the logical block of `firsts` on. Its request has ended after so many output tokens."""
        node = node.nearest_alive()
        path = node.path()
        use = self.next_use(request)
        tick, seconds, _ = use
        for step in path:
            if not self.sliding:
                self.ledger.drop_run(step.blocks.size, step.num_holders, step.num_hard_pins > 0)
            step.num_holders -= 1
            step.last_tick, step.last_used_at = tick, seconds
        if self.sliding:
            self.ledger.drop(table[table != ABSENT])
        elif node.end < len(table):
            self.ledger.drop(table[node.end :].ravel())
        self.victims.on_released(path, use, num_output_tokens)
        if self.sliding:
            self._mark_needed(node, firsts)
        self.victims.review(node)
        if node.is_root:
            self.drop_if_empty(node)
        if self.usage.over_quota:
            self.quotas.keep()

    def share(self, node: Node, table: Int32Array) -> None:
        """One more holder for the blocks of a table, which have one; those stored lie on the path down to `node`. Not a
        use for the policy."""
        node.sealed = True
        node = node.nearest_alive()
        for step in node.path():
            step.num_holders += 1
        blocks = table if self.sliding else table[node.end :]
        self.ledger.hold(blocks[blocks != ABSENT])

    def block_states(self) -> BlockStates:
        """Who holds each block, and what is stored. O(blocks + nodes)."""
        return self.ledger.states((node.blocks, node.num_holders) for node in self.tree.nodes.values())

    def slide(self, node: Node, blocks: Int32Array, first_block: int, stop_block: int) -> None:
        """A holder of the path down to `node` lets go of `blocks` [n] in one sliding group: those of the logical blocks
        `first_block` to `stop_block` (exclusive)."""
        self.ledger.drop(blocks)
        node = node.nearest_alive()
        self.slid_out.review([step for step in node.path(first_block) if step.start < stop_block])

    def next_use(self, request: int) -> Use:
        """A moment of its own in logical time."""
        self.tick += 1
        now = self._clock()
        if now > self._seconds:
            self._seconds = now
        return Use(self.tick, self._seconds, request)

    def _hold_path(self, path: list[Node], request: int) -> None:
        """One more holder for the runs of a path, to whom a use counts. Where groups slide, the caller counts that of
        their blocks."""
        path[-1].sealed = True
        use = self.next_use(request)
        tick, seconds, _ = use
        for node in path:
            if not self.sliding:
                self.ledger.hold_run(node.blocks.size, node.num_holders, node.num_hard_pins > 0)
            node.num_holders += 1
            node.num_uses += 1
            node.last_tick, node.last_used_at = tick, seconds
            if node.session is not None:
                self.sessions.on_used(node, request)
        if path[-1].queue:  # of its nodes only the last may be a leaf
            self.victims.withdraw(path[-1])
        self.victims.on_hit(path, use)

    def first_needed(self, num_blocks: int) -> list[int]:
        """The first logical block that each group needs to go on behind `num_blocks` blocks."""
        if not self.sliding:
            return [0] * len(self.plan.groups)
        return [group.first_needed_block(num_blocks) for group in self.plan.groups]

    def mark_end(self, node: Node, num_blocks: int) -> None:
        """Somebody will go on behind the first `num_blocks` blocks of the path down to `node`."""
        node = node.nearest_alive()
        self._mark_needed(node, self.first_needed(num_blocks), num_blocks)

    def _mark_needed(self, node: Node, firsts: list[int], end: int | None = None) -> None:
        """A look-up or a lease ended at `node`, or in its path after `end` blocks, and needed, or held, each group's
        rows from `firsts` on."""
        if not self.sliding or node.is_root:
            return
        slides = [first for first, group in zip(firsts, self.plan.groups, strict=True) if group.slides]
        path = node.path(min(slides))
        for step in path:
            assert step.marks is not None  # there are sliding groups
            stop = step.num_blocks if end is None else max(0, end - step.start)
            for column, first in enumerate(slides):
                step.marks.ticks[max(0, first - step.start) : stop, column] = self.tick
        self.slid_out.review(path)

    # --- storing --------------------------------------------------------------------------------------------------

    @property
    def may_store_later(self) -> bool:
        """True if nobody but a reader of the tree can tell when a run was lengthened."""
        return not self.sliding and self.on_event is None and not self.usage.tracks_private

    def add(self, node: Node, data: bytes, blocks: Int32Array, holder: Holder) -> tuple[Node, bool]:
        """Store a holder's blocks behind `node`, where its path ends. `data`: their packed tokens.

        Where an equal run is stored already, the holder changes over to it: `blocks` [n, num_lanes] is overwritten in
        place with the stored ids and the holder's own copies are given back; what a group had let go of there is stored
        again. Returns the new end of its path and whether it made that node.
        """
        size = self.tree.block_bytes
        if node.is_root:
            node = self.tree.root(node.namespace)
        at, own_node = 0, holder.own_node
        while at < len(blocks):
            namespace, stop = node.namespace, len(blocks)
            for border in holder.borders:
                if border.first_block == node.end:
                    namespace = border.namespace
                elif border.first_block > node.end:
                    stop = min(stop, at + border.first_block - node.end)
                    break
            child = self.tree.continuations(node, namespace).get(data[at * size : (at + 1) * size])
            if child is None:
                run = data[at * size : stop * size]
                holder.own_node = own_node
                keys = None if holder.keys is None else holder.keys[at:stop].copy()
                is_padded = holder.is_padded and stop == len(blocks)
                node = self._add_new(node, run, blocks[at:stop].copy(), holder, namespace, keys, is_padded)
                at = stop
                own_node = True
                continue
            num_equal = self.tree.common_blocks(child.tokens, data, at * size, stop * size)
            if num_equal < child.num_blocks:
                child = self.victims.split(child, num_equal)
            self._change_over(child, blocks[at : at + num_equal], holder.request)
            node, at = child, at + num_equal
            own_node = False
        if self.usage.over_quota:
            self.quotas.keep()
        return node, own_node

    def _change_over(self, node: Node, blocks: Int32Array, request: int) -> None:
        """A holder of own copies `blocks` of the node's run takes the stored ones, and stores those that are absent."""
        own, stored = blocks.flatten(), node.blocks.ravel()
        if self.sliding:
            if (stored == ABSENT).any():
                self._fill(node, blocks)
                is_own = blocks != node.blocks
                own, stored = blocks[is_own], node.blocks[is_own]
                self.pins.marks.on_filled(node)
            self.ledger.hold(stored)
        self._hold_path([node], request)
        self.ledger.drop(own)
        blocks[:] = node.blocks

    def _fill(self, node: Node, blocks: Int32Array) -> None:
        for group in self.sliding:
            rows = np.flatnonzero(node.blocks[:, group.first_lane] == ABSENT)
            if len(rows) == 0:
                continue
            filled: Int32Array = blocks[rows, group.lanes]
            node.blocks[rows, group.lanes] = filled
            self.ledger.store(filled.ravel())
            self.usage.add_blocks(node.namespace, stored=filled.size)
            if self.on_event is not None:
                keys = self.forgotten.keys_of(node)
                for row, ids in zip(rows.tolist(), filled, strict=True):
                    parent = self.forgotten.key_before(node, row)
                    tokens = node.tokens[row * self.tree.block_bytes : (row + 1) * self.tree.block_bytes]
                    name = group.group.name
                    self.on_event(
                        BlocksStored(
                            node.namespace, parent, keys[row : row + 1], ids[None], unpack_tokens(tokens), name
                        )
                    )

    def _add_new(
        self,
        node: Node,
        data: bytes,
        blocks: Int32Array,
        holder: Holder,
        namespace: Namespace,
        keys: Int64Array | None,
        is_padded: bool,
    ) -> Node:
        """Store a run of a holder that is not stored yet, in `namespace`: longer, where the holder's own node still has
        one history, else as a child. `keys`: its chain keys, if they are known; `is_padded`: its last block is."""
        if self.sliding:
            self.ledger.store(blocks.ravel())
        self.usage.add_blocks(namespace, stored=blocks.size)
        self.counters.stored_tokens += len(blocks) * self.plan.block_tokens
        tick = COLD_TICK + holder.opened_tick
        grows = holder.own_node and node.is_leaf and not (node.sealed or is_padded)
        if grows and namespace == node.namespace and node.num_blocks < MAX_GROWING_BLOCKS:
            leaf = node
            self.tree.extend(node, data, blocks)
            self.victims.on_extended(node, len(blocks))
            if node.marks is not None:
                node.marks.extend(len(blocks), tick)
        else:
            if self.sliding and not holder.own_node:  # runs part here: others may end here too
                self._mark_needed(node, self.first_needed(node.end))
            leaf = self.tree.insert(node, data, blocks, namespace)
            leaf.num_holders = 1
            leaf.sealed = is_padded
            use = self.next_use(holder.request)
            leaf.last_tick, leaf.last_used_at = use.tick, use.seconds
            if self.sliding:
                leaf.marks = RowMarks(len(blocks), len(self.sliding), tick)
            leaf.chain_keys = keys
            key = int(self.forgotten.keys_of(leaf)[0]) if self.victims.policy.uses_keys else 0
            self.victims.on_stored(leaf, use, key, is_padded)
            self.sessions.on_stored(leaf, holder.request)
            if node.queue:  # it is no leaf any more
                self.victims.withdraw(node)
        if self.on_event is not None:
            first = leaf.num_blocks - len(blocks)
            names = self.forgotten.keys_of(leaf)[first:]
            parent = self.forgotten.key_before(leaf, first)
            self.on_event(BlocksStored(leaf.namespace, parent, names, blocks.copy(), unpack_tokens(data)))
        if leaf is not node and self.pins.anchorages:
            self.pins.on_stored_below(node, namespace, data[: self.tree.block_bytes])
        return leaf

    # --- forgetting -----------------------------------------------------------------------------------------------

    def make_room(self, num_blocks: int, wanted: Mapping[Namespace, int]) -> bool:
        """Have at least `num_blocks` free blocks, evicting if need be; False, with nothing evicted, if that can't be.
        `wanted`: how many of them namespaces are about to take, which counts against their quotas and shares."""
        missing = num_blocks - self.ledger.num_free_blocks
        if missing <= 0:
            return True
        self.expire_pins()
        if missing > self.ledger.num_evictable_blocks:
            return False
        self.counters.num_demand_evictions += 1
        if self.victims.shares is None:
            self.evict(missing)
        else:
            with self.quotas.expecting(wanted):
                self.evict(missing - self.quotas.evict_own(wanted, missing))
        return True

    def out_of_blocks(self, needed: int) -> OutOfBlocks:
        """The error for a reservation of `needed` more blocks, with the figures of this moment."""
        ledger = self.ledger
        return OutOfBlocks(needed, ledger.num_free_blocks, ledger.num_evictable_blocks, self.pins.marks.num_hard_blocks)

    def evict(self, num_blocks: int, *, spare_soft: bool = False) -> int:
        """Evict cached blocks until `num_blocks` are freed or none is left. Returns how many it freed.

        First rows that only slid out of windows, and what sessions left behind; then leaves in the policy's order, the
        tail of a run first, and rows that were needed longer ago than those; then what soft pins cover, unless
        `spare_soft`. Frees exactly `num_blocks` if there are so many and one lane. Costs O(log victims) per node.
        """
        freed = 0
        while freed < num_blocks:
            slid = self.slid_out.first() if self.sliding else None
            leaf = self.victims.next(spare_soft)
            most, shares = num_blocks - freed, self.victims.shares
            if shares is not None and leaf is not None and leaf.queue == "unpinned":
                most = min(most, shares.most_from(leaf))
                if slid is not None and slid.is_warm and shares.goes_after(slid.node, leaf):
                    slid = None
            if slid is not None and _goes_first(slid, leaf, spare_soft):
                freed += self._evict_rows(slid, num_blocks - freed)
            elif leaf is not None:
                freed += self._evict_tail(leaf, most)
            else:
                break
        self.pins.refill()
        return freed

    def set_plan(self, plan: CachePlan) -> None:
        """Other quotas of stored blocks, or another size. O(nodes) if accounts get a policy of their own."""
        self.plan = plan
        self.quotas.set(plan, lambda node: int(self.forgotten.keys_of(node)[0]))

    def _evict_over_quota(self, leaf: Node, num_blocks: int) -> int:
        freed = self._evict_tail(leaf, num_blocks, OVER_QUOTA)
        self.pins.refill()
        return freed

    def _evict_tail(self, leaf: Node, num_blocks: int, cause: int = EVICTED) -> int:
        """Evict as much of a leaf's tail as frees `num_blocks` blocks, or all of it."""
        num_rows = -(-num_blocks // self.plan.num_lanes)
        if self.sliding:
            from_tail = np.cumsum(np.count_nonzero(leaf.blocks != ABSENT, axis=1)[::-1])
            num_rows = int(np.searchsorted(from_tail, num_blocks)) + 1
        num_rows = min(num_rows, leaf.num_blocks)
        self._count_evicted(leaf, num_rows)
        return self._forget_tail(leaf, num_rows, cause)

    def _count_evicted(self, node: Node, num_rows: int) -> None:
        num_tokens = num_rows * self.plan.block_tokens
        self.counters.evicted_tokens += num_tokens
        self.usage.of(node.namespace).evicted_tokens += num_tokens

    def _evict_rows(self, slid: SlidRows, num_blocks: int) -> int:
        """Evict rows of one sliding group; what nothing is left of goes too."""
        node = slid.node
        rows, blocks = self.slid_out.cut_out(slid, num_blocks)
        freed = self.ledger.forget(blocks)
        self.usage.add_blocks(node.namespace, stored=-len(blocks))
        self.counters.slid_out_blocks += freed
        if self.on_event is not None:
            keys, name = self.forgotten.keys_of(node)[rows], self.sliding[slid.column].group.name
            self.on_event(BlocksRemoved(node.namespace, keys, "evicted", name))
        while not self._keeps_all and node.queue in ("expendable", "unpinned") and (node.blocks == ABSENT).all():
            parent = node.parent
            assert parent is not None  # a root is in no queue
            self._count_evicted(node, node.num_blocks)
            self._forget_tail(node, node.num_blocks, EVICTED)
            node = parent
        return freed

    def expire_pins(self) -> None:
        """Undo pins whose time is over."""
        if self.pins.has_expiries:
            self.pins.expire(self._clock())

    def clear(self, namespace: Namespace | None) -> ClearResult:
        """Forget every stored run that no pin covers, in one namespace or in all (None), and what other namespaces
        store behind it; held ones are detached."""
        roots = [root for root in list(self.tree.roots.values()) if namespace is None or root.namespace == namespace]
        begun = [] if namespace is None else list(self.tree.layered.get(namespace, {}).values())
        num_cleared = num_kept = 0
        for top in (*roots, *begun):
            nodes = [node for node in top.subtree() if not node.is_root and node.alive]
            for node in reversed(nodes):  # children before parents
                if node.is_pinned or node.num_holders:
                    num_kept += node.num_blocks
                else:
                    num_cleared += node.num_blocks
                if not node.is_pinned:
                    self._forget_tail(node, node.num_blocks, CLEARED)
        for root in roots:
            self.drop_if_empty(root)
        tokens = self.plan.block_tokens
        self.counters.cleared_tokens += num_cleared * tokens
        return ClearResult(num_cleared * tokens, num_kept * tokens)

    def _forget_tail(self, node: Node, num_blocks: int, cause: int) -> int:
        """Forget the last blocks of a leaf's run; the node goes with its last block. Returns how many became free."""
        parent = node.parent
        assert parent is not None  # roots own no blocks
        first = node.num_blocks - num_blocks
        keys = self.forgotten.keys_of(node)[first:]
        blocks: Int32Array = node.blocks[first:].ravel()
        if self.sliding:
            blocks = blocks[blocks != ABSENT]
        was_kept = self.auto_pins is not None and self.auto_pins.on_forgotten(node, num_blocks)
        if node.queue == "expendable" and cause == EVICTED:
            cause = EXPENDED  # says nothing of how long blocks live
        elif cause == EVICTED and not was_kept:
            self.pressure.on_evicted(len(blocks), node.last_used_at)
        self.forgotten.record(keys, cause, self._clock(), self.pressure.num_evicted_blocks)
        self.pins.on_evicted(node, num_blocks)
        num_freed = self.ledger.forget(blocks) if self.sliding else self.ledger.forget_run(blocks, node.num_holders)
        self.usage.add_blocks(node.namespace, stored=-len(blocks))
        if num_blocks < node.num_blocks:
            self.tree.shorten(node, num_blocks)
            self.victims.on_shortened(node, num_blocks, int(keys[0]))
        else:
            self.victims.on_gone(node, None if cause == CLEARED else int(keys[0]))
            self.tree.remove(node)
            if parent.is_root:
                self.drop_if_empty(parent)
            else:
                self.victims.review(parent)
        if self.on_event is not None:
            self.on_event(BlocksRemoved(node.namespace, keys, "cleared" if cause == CLEARED else "evicted"))
        return num_freed

    def drop_if_empty(self, root: Node) -> None:
        """Forget a namespace that stores nothing and for whose tokens no pin waits."""
        if not self.pins.anchored_at(root):
            self.tree.drop_root_if_empty(root)


def _goes_first(slid: SlidRows, leaf: Node | None, spare_soft: bool) -> bool:
    """True if rows of a sliding group go before the next leaf."""
    if leaf is None:
        return not (slid.is_soft and spare_soft)
    due = 0 if leaf.queue == "expendable" else leaf.last_tick
    return not slid.is_soft and (leaf.queue == "soft" or slid.key < due)
