"""Figures of a cache: the running counters, and the frozen answer of `stats()`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """What only ever grows. Tokens are the unit."""

    num_lookups: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    below_block_tokens: int = 0
    evicted_tokens: int = 0
    cleared_tokens: int = 0
    stored_tokens: int = 0
    slid_out_blocks: int = 0
    over_quota_tokens: int = 0
    num_demand_evictions: int = 0


@dataclass(frozen=True)
class CacheStats:
    """A cache's state at one moment (`num_…`, `…_pages`, `…_blocks`, `waste`) and its counters since the start.

    waste: token places in blocks held by leases that no reserved token fills, as a share of all places in them, 0 to 1.
    uncommitted_tokens: reserved but not written yet, counted apart from waste. hit_rate: hit_tokens / query_tokens, 0
    before the first look-up. below_block_tokens: tokens shared with something stored beyond the last whole block that
    matched. pinned_blocks = hard_pinned_blocks + blocks under soft pins only. slid_out_blocks: blocks of sliding groups
    that were evicted while the rest of their prefix stayed. over_quota_tokens: those of evicted_tokens that went
    since their namespace stored more than its quota. num_demand_evictions: reservations that had to evict
    themselves, since `maintain` had not kept enough free. num_lanes: lanes of all layer groups; a token is stored
    in a block of each.
    """

    num_pages: int
    free_pages: int
    partial_pages: int
    full_pages: int
    page_tokens: int
    block_tokens: int
    num_blocks: int
    free_blocks: int
    active_blocks: int
    cached_blocks: int
    evictable_blocks: int
    pinned_blocks: int
    hard_pinned_blocks: int
    quota_blocks: int
    waste: float
    uncommitted_tokens: int
    num_lookups: int
    query_tokens: int
    hit_tokens: int
    hit_rate: float
    below_block_tokens: int
    stored_tokens: int
    evicted_tokens: int
    cleared_tokens: int
    slid_out_blocks: int
    over_quota_tokens: int
    num_demand_evictions: int
    num_lanes: int
    num_leases: int
    num_pins: int
    num_made_pins: int
    num_unpinned_pins: int
    num_expired_pins: int
    num_refused_pins: int
    num_lapsed_pins: int
    num_namespaces: int
    num_nodes: int


@dataclass(frozen=True)
class ClearResult:
    """What `clear` did. `num_cleared_tokens`: forgotten, their memory free now. `num_kept_tokens`: still in memory
    because a pin or a running request holds them; what only running requests hold is never matched again and freed
    when they end."""

    num_cleared_tokens: int
    num_kept_tokens: int
