"""What `stats()`, `fragmentation()` and their like answer, gathered from the parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from looseleaf.core.leasing import LeaseDesk
from looseleaf.core.stats import CacheStats
from looseleaf.core.store import BlockStore
from looseleaf.core.tree import ABSENT
from looseleaf.core.usage import Account, NamespaceUsage


@dataclass(frozen=True)
class PrefixMatch:
    """How much of a prompt would hit now. `num_tokens`: whole blocks, at most num_prompt_tokens - 1. `by_rung`: the
    same tokens by the rung of reuse that gives them. `num_blocks`: blocks, in all lanes, that a lease would hold."""

    num_tokens: int
    num_prompt_tokens: int
    by_rung: Mapping[str, int]
    num_blocks: int = 0


@dataclass(frozen=True)
class Room:
    """What a reservation can have now: blocks that are free, and blocks that can be evicted for it."""

    num_free_blocks: int
    num_evictable_blocks: int


@dataclass(frozen=True)
class GroupUse:
    """Memory of one layer group. `held_blocks`: by leases, each block once. `cached_blocks`: stored, held by nobody.
    `waste`: token places of held blocks that no reserved token fills, as a share of all places in them, 0 to 1."""

    name: str
    kind: str
    num_lanes: int
    held_blocks: int
    cached_blocks: int
    waste: float


@dataclass(frozen=True)
class Fragmentation:
    """How memory is cut up at one moment.

    free_runs: number of runs of adjacent free blocks, by the largest power of two (in blocks) that fits.
    packing_degree: taken blocks in pages that have any, as a share of all blocks there, 0 to 1 (1 if no page is
    used). page_waste: free blocks in partly used pages, as a share of all blocks of the pool; they can be given out
    at once. table_bytes: block tables, reference counts, masks and figures of leases; table_bytes_per_token: by token
    of the pool, over all lanes.
    """

    free_pages: int
    partial_pages: int
    full_pages: int
    free_runs: dict[int, int]
    packing_degree: float
    page_waste: float
    table_bytes: int
    table_bytes_per_token: float
    groups: tuple[GroupUse, ...]


def collect_stats(store: BlockStore, desk: LeaseDesk, page_tokens: int) -> CacheStats:
    """The answer of `CacheManager.stats`. O(pages per block count + leases)."""
    plan, pool, ledger, pins, counters, rows = (
        store.plan, store.pool, store.ledger, store.pins, store.counters, desk.rows,
    )  # fmt: skip
    num_places = ledger.num_active_blocks * plan.block_tokens
    return CacheStats(
        num_pages=plan.num_pages,
        free_pages=pool.num_free_pages,
        partial_pages=pool.num_partial_pages,
        full_pages=plan.num_pages - pool.num_free_pages - pool.num_partial_pages,
        page_tokens=page_tokens,
        block_tokens=plan.block_tokens,
        num_blocks=plan.num_blocks,
        free_blocks=ledger.num_free_blocks,
        active_blocks=ledger.num_active_blocks,
        cached_blocks=ledger.num_cached_blocks,
        evictable_blocks=ledger.num_evictable_blocks,
        pinned_blocks=pins.marks.num_pinned_blocks,
        hard_pinned_blocks=pins.marks.num_hard_blocks,
        quota_blocks=plan.quota_blocks,
        waste=rows.num_unfilled_places / num_places if num_places else 0.0,
        uncommitted_tokens=rows.num_uncommitted_tokens,
        num_lookups=counters.num_lookups,
        query_tokens=counters.query_tokens,
        hit_tokens=counters.hit_tokens,
        hit_rate=counters.hit_tokens / counters.query_tokens if counters.query_tokens else 0.0,
        below_block_tokens=counters.below_block_tokens,
        stored_tokens=counters.stored_tokens,
        evicted_tokens=counters.evicted_tokens,
        cleared_tokens=counters.cleared_tokens,
        slid_out_blocks=counters.slid_out_blocks,
        over_quota_tokens=counters.over_quota_tokens,
        num_demand_evictions=counters.num_demand_evictions,
        num_lanes=plan.num_lanes,
        num_leases=len(desk.live),
        num_pins=len(pins.records),
        num_made_pins=pins.num_changes["made"],
        num_unpinned_pins=pins.num_changes["unpinned"],
        num_expired_pins=pins.num_changes["expired"],
        num_refused_pins=pins.num_changes["refused"],
        num_lapsed_pins=pins.num_changes["lapsed"],
        num_namespaces=store.tree.num_namespaces,
        num_nodes=len(store.tree.nodes),
    )


def collect_usage(store: BlockStore, desk: LeaseDesk) -> list[NamespaceUsage]:
    """The answer of `CacheManager.namespace_usage`. O(accounts + nodes that leases hold)."""
    usage, ledger = store.usage, store.ledger
    held: Counter[Account] = Counter()
    nodes = {node.id: node for lease in desk.live.values() if lease.stores for node in lease.node.path()}
    for node in nodes.values():
        if ledger.counts_runs:
            num_held = node.blocks.size if node.num_holders else 0
        else:
            num_held = int(np.count_nonzero(ledger.refs[node.blocks[node.blocks != ABSENT]]))
        held[usage.of(node.namespace)] += num_held
    for lease in desk.live.values():
        held[usage.of(lease.namespace)] += lease.num_private_blocks
    pinned: Counter[Account] = Counter()
    for namespace, count in store.pins.marks.by_namespace():
        pinned[usage.of(namespace)] += count
    accounts = sorted(usage.accounts.values(), key=lambda account: (-account.used_blocks, -account.query_tokens))
    of_others = [usage.others] if usage.others.num_lookups or usage.others.evicted_tokens else []
    return [
        NamespaceUsage(
            namespace=None if account is usage.others else account.name,
            stored_blocks=account.stored_blocks,
            held_blocks=held[account],
            pinned_blocks=pinned[account],
            quota_blocks=account.quota_blocks,
            num_lookups=account.num_lookups,
            query_tokens=account.query_tokens,
            hit_tokens=account.hit_tokens,
            hit_rate=account.hit_tokens / account.query_tokens if account.query_tokens else 0.0,
            evicted_tokens=account.evicted_tokens,
            over_quota_tokens=account.over_quota_tokens,
        )
        for account in (*accounts, *of_others)
    ]


def measure_fragmentation(store: BlockStore, desk: LeaseDesk) -> Fragmentation:
    """The answer of `CacheManager.fragmentation`. O(blocks)."""
    pool, ledger, plan = store.pool, store.ledger, store.plan
    free = ~pool.taken()
    edges = np.diff(np.concatenate(([False], free, [False])).astype(np.int8))
    lengths = np.flatnonzero(edges == -1) - np.flatnonzero(edges == 1)
    sizes, counts = np.unique(np.floor(np.log2(lengths)).astype(int), return_counts=True)
    num_used_places = (plan.num_pages - pool.num_free_pages) * plan.blocks_per_page
    num_taken = plan.num_blocks - pool.num_free_blocks
    tables = sum(lease.table.nbytes for lease in desk.live.values())
    nodes = sum(node.blocks.nbytes for node in store.tree.nodes.values())
    masks = 8 * plan.num_pages
    arrays = ledger.refs.nbytes + ledger.stored.nbytes + ledger.protected.nbytes
    table_bytes = tables + nodes + masks + arrays + desk.rows.num_bytes
    return Fragmentation(
        free_pages=pool.num_free_pages,
        partial_pages=pool.num_partial_pages,
        full_pages=plan.num_pages - pool.num_free_pages - pool.num_partial_pages,
        free_runs={1 << int(size): int(count) for size, count in zip(sizes, counts, strict=True)},
        packing_degree=num_taken / num_used_places if num_used_places else 1.0,
        page_waste=(num_used_places - num_taken) / plan.num_blocks,
        table_bytes=table_bytes,
        table_bytes_per_token=table_bytes * plan.num_lanes / (plan.num_blocks * plan.block_tokens),
        groups=_group_uses(store, desk),
    )


def _group_uses(store: BlockStore, desk: LeaseDesk) -> tuple[GroupUse, ...]:
    plan, refs = store.plan, store.block_states().refs
    num_unfilled = desk.rows.num_unfilled_places // plan.num_lanes
    uses = []
    for group in plan.groups:
        by_lease = [lease.table[: lease.num_blocks, group.lanes].ravel() for lease in desk.live.values()]
        by_node = [node.blocks[:, group.lanes].ravel() for node in store.tree.nodes.values()]
        empty = np.empty(0, dtype=np.int32)
        held = np.unique(np.concatenate([*by_lease, empty]))
        stored = np.concatenate([*by_node, empty])
        stored = stored[stored != ABSENT]
        num_held = int(np.count_nonzero(held != ABSENT))
        waste = num_unfilled * group.num_lanes / (num_held * plan.block_tokens) if num_held else 0.0
        num_cached = int(np.count_nonzero(refs[stored] == 0))
        uses.append(GroupUse(group.group.name, group.group.kind, group.num_lanes, num_held, num_cached, waste))
    return tuple(uses)
