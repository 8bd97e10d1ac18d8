"""Blocks that change their place: another number of pages, or whole pages made free. The tensors do the copies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from looseleaf.core.config import CachePlan
from looseleaf.core.events import BlocksMoved
from looseleaf.core.leasing import LeaseDesk
from looseleaf.core.store import BlockStore
from looseleaf.core.tree import ABSENT
from looseleaf.errors import ResizeRefused
from looseleaf.ids import Int32Array


@dataclass(frozen=True)
class ResizeResult:
    """A pool of another size. `copies`: pairs (from_block, to_block) that the tensors must do before anything else, all
    read before any is written, before a shrink or after a growth."""

    num_pages: int
    num_blocks: int
    num_evicted_blocks: int
    copies: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class CompactionResult:
    """Blocks moved together. `copies` as in `ResizeResult`; `num_freed_pages`: whole pages free now that were not."""

    num_freed_pages: int
    copies: tuple[tuple[int, int], ...]


def resize(store: BlockStore, desk: LeaseDesk, plan: CachePlan) -> ResizeResult:
    """Give the pool the pages of `plan`; see `CacheManager.resize`. O(blocks + nodes)."""
    ledger = store.ledger
    num_bound = ledger.num_active_blocks + ledger.num_protected_idle_blocks
    if num_bound > plan.num_blocks or not store.pins.quotas.fits(plan):
        raise ResizeRefused(
            plan.num_blocks, ledger.num_active_blocks, store.pins.marks.num_hard_blocks, plan.quota_blocks
        )
    num_taken = ledger.num_blocks - ledger.num_free_blocks
    num_evicted = store.evict(num_taken - plan.num_blocks) if num_taken > plan.num_blocks else 0
    taken = store.pool.taken()
    free = np.flatnonzero(~taken[: plan.num_blocks]).astype(np.int32)
    outside = np.flatnonzero(taken[plan.num_blocks :]).astype(np.int32) + np.int32(plan.num_blocks)
    inside = free[: len(outside)]
    _move(store, desk, outside, inside, plan.num_pages)
    store.pressure.num_blocks = plan.num_blocks
    store.victims.policy.resize(plan.num_blocks)
    store.set_plan(plan)
    store.pins.set_quotas(plan)
    return ResizeResult(plan.num_pages, plan.num_blocks, num_evicted, _pairs(outside, inside))


def compact(store: BlockStore, desk: LeaseDesk, num_pages: int) -> CompactionResult:
    """Free up to `num_pages` more whole pages; see `CacheManager.compact`. O(blocks + nodes).

    The emptiest pages that no lease holds a block of are emptied into the free places of the others.
    """
    pool = store.pool
    per_page = pool.blocks_per_page
    taken = pool.taken().reshape(-1, per_page)
    num_taken = taken.sum(axis=1)
    is_held = store.block_states().refs.reshape(-1, per_page).sum(axis=1) > 0
    order = np.argsort(num_taken, kind="stable")
    emptied = order[(num_taken[order] > 0) & (num_taken[order] < per_page) & ~is_held[order]]
    is_partial = (num_taken > 0) & (num_taken < per_page)
    room = int((per_page - num_taken[is_partial]).sum())
    chosen: list[int] = []
    needed = 0
    for page in emptied.tolist():
        count = int(num_taken[page])
        room -= per_page - count  # its own free places are not room any more
        if len(chosen) == num_pages or needed + count > room:
            break
        chosen.append(page)
        needed += count
    if not chosen:
        return CompactionResult(0, ())
    is_chosen = np.zeros(len(taken), dtype=np.bool_)
    is_chosen[chosen] = True
    sources = np.flatnonzero((taken & is_chosen[:, None]).ravel()).astype(np.int32)
    targets = np.flatnonzero((~taken & (is_partial & ~is_chosen)[:, None]).ravel()).astype(np.int32)[:needed]
    _move(store, desk, sources, targets, pool.num_pages)
    return CompactionResult(len(chosen), _pairs(sources, targets))


def _move(store: BlockStore, desk: LeaseDesk, sources: Int32Array, targets: Int32Array, num_pages: int) -> None:
    """Let blocks change their ids wherever these are noted, in a pool of `num_pages` pages."""
    num_before = store.ledger.num_blocks
    store.ledger.move(sources, targets, num_pages)
    if len(sources) == 0:
        return
    new_id = np.arange(num_before + 1, dtype=np.int32)
    new_id[sources] = targets
    new_id[-1] = ABSENT  # so that ABSENT, as an index from the end, stays what it is
    for node in store.tree.nodes.values():
        node.blocks = new_id[node.blocks]
    desk.rename(new_id)
    if store.on_event is not None:
        store.on_event(BlocksMoved(sources, targets))


def _pairs(sources: Int32Array, targets: Int32Array) -> tuple[tuple[int, int], ...]:
    return tuple(zip(sources.tolist(), targets.tolist(), strict=True))
