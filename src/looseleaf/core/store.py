"""Stored runs of blocks: matched and held, added, let go, evicted, cleared. Where tree, ledger, victims and pins
meet."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from looseleaf.core.blocks import BlockLedger
from looseleaf.core.config import CachePlan
from looseleaf.core.events import BlocksRemoved, BlocksStored, EventListener
from looseleaf.core.eviction import EvictionPolicy
from looseleaf.core.forgotten import CLEARED, EVICTED, ForgottenTable
from looseleaf.core.pages import PagePool
from looseleaf.core.pins import PinBook
from looseleaf.core.stats import ClearResult, Counters
from looseleaf.core.tokens import unpack_tokens
from looseleaf.core.tree import EMPTY_BLOCKS, Match, Node, PrefixTree
from looseleaf.core.victims import VictimQueue
from looseleaf.errors import OutOfBlocks
from looseleaf.ids import Int32Array, Namespace

MAX_GROWING_BLOCKS = 64
"""A run is lengthened in place up to this length only, since that copies it: growing by a block then costs O(1)."""


class BlockStore:
    """The blocks of one pool and what is stored in them. Knows paths and runs; of leases it knows only their block
    ids."""

    def __init__(
        self, plan: CachePlan, policy: EvictionPolicy, clock: Callable[[], float], on_event: EventListener | None
    ) -> None:
        self.plan = plan
        self.pool = PagePool(plan.num_pages, plan.blocks_per_page)
        self.ledger = BlockLedger(self.pool)
        self.tree = PrefixTree(plan.block_tokens)
        self.victims = VictimQueue(policy, self.tree, self.ledger)
        self.pins = PinBook(plan.quota_blocks, self.tree, self.ledger, self.victims)
        self.forgotten = ForgottenTable(plan.num_blocks, self.tree.block_bytes)
        self.counters = Counters()
        self._clock = clock
        self._on_event = on_event
        self._tick = 0

    @property
    def num_evictable_blocks(self) -> int:
        """Cached blocks that can be evicted, soft-pinned ones included."""
        return self.ledger.num_cached_blocks - self.pins.num_hard_idle_blocks

    # --- holding --------------------------------------------------------------------------------------------------

    def hold(self, match: Match) -> tuple[Node, Int32Array]:
        """Hold what a look-up found; a run matched midway is split there. The last node held, and all its path's
        blocks."""
        node = match.node
        if match.num_edge_blocks < node.num_blocks:
            node = self.victims.split(node, match.num_edge_blocks)
        path = node.path()
        if not path:
            return node, EMPTY_BLOCKS
        blocks = np.concatenate([step.blocks for step in path])
        self._hold_path(path, blocks)
        return node, blocks

    def let_go(self, node: Node, blocks: Int32Array) -> None:
        """Undo `hold`: drop one holder of `blocks`, of which those stored lie on the path down to `node`."""
        while not node.alive:  # cleared while it was held
            assert node.parent is not None  # a root is always alive
            node = node.parent
        path = node.path()
        self.ledger.drop(blocks)
        self.pins.on_dropped(path)
        self._tick += 1
        self.victims.policy.release([step.id for step in path], self._tick)
        self.victims.review(node)
        if node.is_root:
            self.drop_if_empty(node)

    def share(self, node: Node, blocks: Int32Array) -> None:
        """One more holder for blocks that have one; those stored lie on the path down to `node`. Not a use for the
        policy."""
        node.sealed = True
        self.ledger.hold(blocks)

    def _hold_path(self, path: list[Node], blocks: Int32Array) -> None:
        self.pins.on_held(path)
        self.ledger.hold(blocks)
        path[-1].sealed = True
        self._tick += 1
        self.victims.policy.hit([step.id for step in path], self._tick)
        self.victims.review(path[-1])

    # --- storing --------------------------------------------------------------------------------------------------

    def add(self, node: Node, own_node: bool, data: bytes, blocks: Int32Array) -> tuple[Node, bool]:
        """Store a holder's blocks behind `node`, where its path ends. `data`: their packed tokens.

        Where an equal run is stored already, the holder changes over to it: `blocks` is overwritten in place with the
        stored ids and the holder's own copies are given back. `own_node` says that `node` was made by this holder.
        Returns the new end of its path and whether it made that node.
        """
        size = self.tree.block_bytes
        if node.is_root:
            node = self.tree.root(node.namespace)
        at = 0
        while at < len(blocks):
            child = node.children.get(data[at * size : (at + 1) * size])
            if child is None:
                return self._add_new(node, own_node, data[at * size :], blocks[at:].copy()), True
            num_equal = self.tree.common_blocks(child.tokens, data, at * size, len(data))
            if num_equal < child.num_blocks:
                child = self.victims.split(child, num_equal)
            own = blocks[at : at + num_equal].copy()
            self._hold_path([child], child.blocks)
            self.ledger.drop(own)
            blocks[at : at + num_equal] = child.blocks
            node, own_node, at = child, False, at + num_equal
        return node, False

    def _add_new(self, node: Node, own_node: bool, data: bytes, blocks: Int32Array) -> Node:
        """Store a run that is not stored yet: longer, where the holder's own node still has one history, else as a
        child."""
        self.ledger.store(blocks)
        self.counters.stored_tokens += len(blocks) * self.plan.block_tokens
        parent_block = None if node.is_root else int(node.blocks[-1])
        if own_node and not node.sealed and not node.children and node.num_blocks < MAX_GROWING_BLOCKS:
            self.tree.extend(node, data, blocks)
            leaf = node
        else:
            leaf = self.tree.insert(node, data, blocks)
            self._tick += 1
            self.victims.policy.insert(leaf.id, self._tick)
            self.victims.review(node)
            self.pins.on_stored_below(node, data[: self.tree.block_bytes])
        if self._on_event is not None:
            self._on_event(BlocksStored(leaf.namespace, parent_block, blocks.copy(), unpack_tokens(data)))
        return leaf

    # --- forgetting -----------------------------------------------------------------------------------------------

    def make_room(self, num_blocks: int) -> bool:
        """Have at least `num_blocks` free blocks, evicting if need be; False, with nothing evicted, if that can't
        be."""
        missing = num_blocks - self.ledger.num_free_blocks
        if missing <= 0:
            return True
        self.expire_pins()
        if missing > self.num_evictable_blocks:
            return False
        self.evict(missing)
        return True

    def out_of_blocks(self, needed: int) -> OutOfBlocks:
        """The error for a reservation of `needed` more blocks, with the figures of this moment."""
        return OutOfBlocks(needed, self.ledger.num_free_blocks, self.num_evictable_blocks, self.pins.num_hard_blocks)

    def evict(self, num_blocks: int, *, spare_soft: bool = False) -> int:
        """Evict cached blocks, leaves first and the tail of a run first, until `num_blocks` are freed or none is left.

        `spare_soft` leaves softly pinned ones alone. Frees exactly `num_blocks` if there are so many. Returns how
        many it freed. Costs O(log victims) per node touched.
        """
        freed = 0
        while freed < num_blocks:
            node = self.victims.next(spare_soft)
            if node is None:
                break
            count = min(node.num_blocks, num_blocks - freed)
            self._forget_tail(node, count, EVICTED)
            freed += count
        if freed:
            self.counters.evicted_tokens += freed * self.plan.block_tokens
            self.pins.refill()
        return freed

    def expire_pins(self) -> None:
        """Undo pins whose time is over."""
        if self.pins.has_expiries:
            self.pins.expire(self._clock())

    def clear(self, namespace: Namespace | None) -> ClearResult:
        """Forget every stored run that no pin covers, in one namespace or in all (None); held ones are detached."""
        roots = [root for root in list(self.tree.roots.values()) if namespace is None or root.namespace == namespace]
        num_cleared = num_kept = 0
        for root in roots:
            nodes = [node for node in root.subtree() if not node.is_root]
            for node in reversed(nodes):  # children before parents
                if node.is_pinned:
                    num_kept += node.num_blocks
                    continue
                num_blocks = node.num_blocks
                num_freed = self._forget_tail(node, num_blocks, CLEARED)
                num_cleared += num_freed
                num_kept += num_blocks - num_freed
            self.drop_if_empty(root)
        tokens = self.plan.block_tokens
        self.counters.cleared_tokens += num_cleared * tokens
        return ClearResult(num_cleared * tokens, num_kept * tokens)

    def _forget_tail(self, node: Node, num_blocks: int, cause: int) -> int:
        """Forget the last blocks of a leaf's run; the node goes with its last block. Returns how many became free."""
        parent = node.parent
        assert parent is not None  # roots own no blocks
        self.forgotten.record(node, num_blocks, cause, self._clock())
        blocks = node.blocks[node.num_blocks - num_blocks :].copy()
        self.pins.on_evicted(node, num_blocks)
        num_freed = self.ledger.forget(blocks)
        if num_blocks < node.num_blocks:
            self.tree.shorten(node, num_blocks)
        else:
            self.victims.withdraw(node)
            self.victims.policy.forget(node.id)
            self.tree.remove(node)
            if parent.is_root:
                self.drop_if_empty(parent)
            else:
                self.victims.review(parent)
        if self._on_event is not None:
            self._on_event(BlocksRemoved(node.namespace, blocks, "evicted" if cause == EVICTED else "cleared"))
        return num_freed

    def drop_if_empty(self, root: Node) -> None:
        """Forget a namespace that stores nothing and for whose tokens no pin waits."""
        if not self.pins.anchored_at(root):
            self.tree.drop_root_if_empty(root)
