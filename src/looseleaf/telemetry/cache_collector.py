"""What the cache manager knows, as Prometheus families, read at each scrape: nothing is counted or kept twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from looseleaf.core.manager import CacheManager


@dataclass(frozen=True)
class CacheSample:
    """How one field of `CacheManager.stats()` is exported. Rows of one metric differ in `state`, its label."""

    field: str
    metric: str
    documentation: str
    state: str | None = None


_PAGES = "Pages by state: free, partial (some blocks in use), full."
_BLOCKS = "Blocks by state: free, active (held by a lease), cached (reusable, held by none)."

COUNTERS = (
    CacheSample("num_lookups", "looseleaf_lookups", "Look-ups in the prefix tree, one a request."),
    CacheSample("query_tokens", "looseleaf_query_tokens", "Prompt tokens looked up, once a request."),
    CacheSample("hit_tokens", "looseleaf_hit_tokens", "Prompt tokens found in the prefix tree and not computed again."),
    CacheSample(
        "below_block_tokens", "looseleaf_below_block_tokens", "Prompt tokens shared beyond the last whole block."
    ),
    CacheSample("stored_tokens", "looseleaf_stored_tokens", "Tokens that became reusable."),
    CacheSample("evicted_tokens", "looseleaf_evicted_tokens", "Cached tokens forgotten to make room."),
    CacheSample("cleared_tokens", "looseleaf_cleared_tokens", "Cached tokens forgotten because somebody asked for it."),
    CacheSample(
        "num_demand_evictions",
        "looseleaf_demand_evictions",
        "Reservations that had to evict, since not enough was kept free ahead of need.",
    ),
    CacheSample(
        "slid_out_blocks",
        "looseleaf_slid_out_blocks",
        "Blocks evicted of window and chunked groups whose prefix stayed in the others.",
    ),
    CacheSample(
        "over_quota_tokens",
        "looseleaf_over_quota_tokens",
        "Evicted tokens that went since their namespace stored more than its quota.",
    ),
    CacheSample("num_made_pins", "looseleaf_made_pins", "Pins made, automatic ones too."),
    CacheSample("num_unpinned_pins", "looseleaf_unpinned_pins", "Pins that somebody undid."),
    CacheSample("num_expired_pins", "looseleaf_expired_pins", "Pins that ran out."),
    CacheSample("num_refused_pins", "looseleaf_refused_pins", "Pins that the quota did not allow."),
    CacheSample("num_lapsed_pins", "looseleaf_lapsed_pins", "Automatic pins that ended because they did not pay."),
)

GAUGES = (
    CacheSample("page_tokens", "looseleaf_page_tokens", "Size of a page in tokens."),
    CacheSample("block_tokens", "looseleaf_block_tokens", "Size of a block in tokens."),
    CacheSample("num_pages", "looseleaf_pool_pages", "Pages of the pool."),
    CacheSample("free_pages", "looseleaf_pages", _PAGES, "free"),
    CacheSample("partial_pages", "looseleaf_pages", _PAGES, "partial"),
    CacheSample("full_pages", "looseleaf_pages", _PAGES, "full"),
    CacheSample("num_blocks", "looseleaf_pool_blocks", "Blocks of the pool."),
    CacheSample("num_lanes", "looseleaf_lanes", "Lanes of all layer groups: blocks that hold the same tokens."),
    CacheSample("free_blocks", "looseleaf_blocks", _BLOCKS, "free"),
    CacheSample("active_blocks", "looseleaf_blocks", _BLOCKS, "active"),
    CacheSample("cached_blocks", "looseleaf_blocks", _BLOCKS, "cached"),
    CacheSample("evictable_blocks", "looseleaf_evictable_blocks", "Cached blocks that could be taken now."),
    CacheSample("pinned_blocks", "looseleaf_pinned_blocks", "Blocks that pins hold."),
    CacheSample("hard_pinned_blocks", "looseleaf_hard_pinned_blocks", "Blocks that hard pins hold."),
    CacheSample("quota_blocks", "looseleaf_pin_quota_blocks", "Blocks that pins may hold at most."),
    CacheSample(
        "waste", "looseleaf_waste_ratio", "Share of token places in held blocks that no reserved token fills, 0 to 1."
    ),
    CacheSample("uncommitted_tokens", "looseleaf_uncommitted_tokens", "Tokens reserved but not written yet."),
    CacheSample("hit_rate", "looseleaf_hit_ratio", "Hit tokens / query tokens since the start, 0 to 1."),
    CacheSample("num_leases", "looseleaf_leases", "Live leases."),
    CacheSample("num_namespaces", "looseleaf_namespaces", "Namespaces with something stored."),
    CacheSample("num_nodes", "looseleaf_tree_nodes", "Nodes of all prefix trees."),
)

FIELDS_FROM_PINS = ("num_pins",)
"""Fields of `stats()` that `PinCollector` exports, by owner and level."""


class CacheCollector(Collector):
    """Turns `stats()` into metric families at each scrape. Keeps no state of its own."""

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        """All families of the cache, from one call of `stats()`, so that they agree with each other."""
        stats = self._cache.stats()
        for sample in COUNTERS:
            yield CounterMetricFamily(sample.metric, sample.documentation, value=getattr(stats, sample.field))
        families: dict[str, GaugeMetricFamily] = {}
        for sample in GAUGES:
            names, values = ([], []) if sample.state is None else (["state"], [sample.state])
            family = GaugeMetricFamily(sample.metric, sample.documentation, labels=names)
            family = families.setdefault(sample.metric, family)
            family.add_metric(values, float(getattr(stats, sample.field)))
        yield from families.values()


class FragmentationCollector(Collector):
    """Turns `fragmentation()`, which takes milliseconds, into metric families at each scrape."""

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        """How the memory is cut up, all from one call; by layer group where there can be several."""
        cut = self._cache.fragmentation()
        plain = (
            ("page_waste_ratio", "Free blocks in partly used pages, as a share of all blocks.", cut.page_waste),
            ("packing_ratio", "Taken blocks, as a share of all blocks in pages that have any.", cut.packing_degree),
            ("table_bytes", "Bookkeeping: block tables, counts, masks.", float(cut.table_bytes)),
            ("table_bytes_per_token", "The same by token that the pool has room for.", cut.table_bytes_per_token),
        )
        for name, documentation, value in plain:
            yield GaugeMetricFamily(f"looseleaf_{name}", documentation, value=value)
        help_of_runs = "Runs of adjacent free blocks, by the largest power of two of blocks that fits."
        runs = GaugeMetricFamily("looseleaf_free_runs", help_of_runs, labels=["blocks"])
        for length, count in cut.free_runs.items():
            runs.add_metric([str(length)], count)
        help_of_waste = "Share of token places in a group's held blocks that no reserved token fills, 0 to 1."
        waste = GaugeMetricFamily("looseleaf_group_waste_ratio", help_of_waste, labels=["group"])
        help_of_blocks = "Blocks of a layer group: active (held by a lease), cached (held by none)."
        blocks = GaugeMetricFamily("looseleaf_group_blocks", help_of_blocks, labels=["group", "state"])
        for group in cut.groups:
            waste.add_metric([group.name], group.waste)
            blocks.add_metric([group.name, "active"], group.held_blocks)
            blocks.add_metric([group.name, "cached"], group.cached_blocks)
        yield from (runs, waste, blocks)
