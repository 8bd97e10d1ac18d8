"""What the cache manager knows, as Prometheus families, read at each scrape: nothing is counted twice or kept
twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from looseleaf.core.manager import CacheManager


@dataclass(frozen=True)
class CacheSample:
    """How one field of `CacheManager.stats()` is exported: `metric` is the name, `state` its label where it
    has one."""

    field: str
    metric: str
    state: str | None = None


COUNTERS = (
    CacheSample("num_lookups", "looseleaf_lookups"),
    CacheSample("query_tokens", "looseleaf_query_tokens"),
    CacheSample("hit_tokens", "looseleaf_hit_tokens"),
    CacheSample("below_block_tokens", "looseleaf_below_block_tokens"),
    CacheSample("stored_tokens", "looseleaf_stored_tokens"),
    CacheSample("evicted_tokens", "looseleaf_evicted_tokens"),
    CacheSample("cleared_tokens", "looseleaf_cleared_tokens"),
    CacheSample("num_expired_pins", "looseleaf_expired_pins"),
    CacheSample("num_refused_pins", "looseleaf_refused_pins"),
)

GAUGES = (
    CacheSample("page_tokens", "looseleaf_page_tokens"),
    CacheSample("block_tokens", "looseleaf_block_tokens"),
    CacheSample("num_pages", "looseleaf_pool_pages"),
    CacheSample("free_pages", "looseleaf_pages", "free"),
    CacheSample("partial_pages", "looseleaf_pages", "partial"),
    CacheSample("full_pages", "looseleaf_pages", "full"),
    CacheSample("num_blocks", "looseleaf_pool_blocks"),
    CacheSample("free_blocks", "looseleaf_blocks", "free"),
    CacheSample("active_blocks", "looseleaf_blocks", "active"),
    CacheSample("cached_blocks", "looseleaf_blocks", "cached"),
    CacheSample("evictable_blocks", "looseleaf_evictable_blocks"),
    CacheSample("pinned_blocks", "looseleaf_pinned_blocks"),
    CacheSample("hard_pinned_blocks", "looseleaf_hard_pinned_blocks"),
    CacheSample("quota_blocks", "looseleaf_pin_quota_blocks"),
    CacheSample("waste", "looseleaf_waste_ratio"),
    CacheSample("uncommitted_tokens", "looseleaf_uncommitted_tokens"),
    CacheSample("hit_rate", "looseleaf_hit_ratio"),
    CacheSample("num_leases", "looseleaf_leases"),
    CacheSample("num_namespaces", "looseleaf_namespaces"),
    CacheSample("num_nodes", "looseleaf_tree_nodes"),
)

FIELDS_FROM_PINS = ("num_pins",)
"""Fields of `stats()` that are exported from `pins()` instead, by owner and level."""

HELP = {
    "looseleaf_lookups": "Look-ups in the prefix tree, one a request.",
    "looseleaf_query_tokens": "Prompt tokens looked up in the prefix tree, once a request.",
    "looseleaf_hit_tokens": "Prompt tokens found in the prefix tree and not computed again.",
    "looseleaf_below_block_tokens": "Prompt tokens shared with something stored beyond the last whole block.",
    "looseleaf_stored_tokens": "Tokens that became reusable.",
    "looseleaf_evicted_tokens": "Cached tokens forgotten to make room.",
    "looseleaf_cleared_tokens": "Cached tokens forgotten because somebody asked for it.",
    "looseleaf_expired_pins": "Pins that ran out.",
    "looseleaf_refused_pins": "Pins that the quota did not allow.",
    "looseleaf_page_tokens": "Size of a page in tokens.",
    "looseleaf_block_tokens": "Size of a block in tokens.",
    "looseleaf_pool_pages": "Pages of the pool.",
    "looseleaf_pages": "Pages by state: free, partial (some blocks in use), full.",
    "looseleaf_pool_blocks": "Blocks of the pool.",
    "looseleaf_blocks": "Blocks by state: free, active (held by a lease), cached (reusable, held by none).",
    "looseleaf_evictable_blocks": "Cached blocks that could be taken now.",
    "looseleaf_pinned_blocks": "Blocks that pins hold.",
    "looseleaf_hard_pinned_blocks": "Blocks that hard pins hold.",
    "looseleaf_pin_quota_blocks": "Blocks that pins may hold at most.",
    "looseleaf_waste_ratio": "Share of token places in held blocks that no reserved token fills, 0 to 1.",
    "looseleaf_uncommitted_tokens": "Tokens reserved but not written yet.",
    "looseleaf_hit_ratio": "Hit tokens / query tokens since the start, 0 to 1.",
    "looseleaf_leases": "Live leases.",
    "looseleaf_namespaces": "Namespaces with something stored.",
    "looseleaf_tree_nodes": "Nodes of all prefix trees.",
    "looseleaf_pins": "Live pins by owner and level.",
    "looseleaf_pinned_tokens": "Tokens that pins hold, by owner and level; overlaps count for each.",
}


class CacheCollector(Collector):
    """Turns `stats()` and `pins()` into metric families at each scrape. Keeps no state of its own."""

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        """All families of the cache, from one call of `stats()`, so that they agree with each other."""
        stats = self._cache.stats()
        for sample in COUNTERS:
            value = getattr(stats, sample.field)
            yield CounterMetricFamily(sample.metric, HELP[sample.metric], value=value)
        yield from self._gauges(stats)
        yield from self._pins()

    def _gauges(self, stats: object) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for sample in GAUGES:
            labels = [] if sample.state is None else ["state"]
            family = families.get(sample.metric)
            if family is None:
                family = families[sample.metric] = GaugeMetricFamily(sample.metric, HELP[sample.metric], labels=labels)
            family.add_metric([] if sample.state is None else [sample.state], float(getattr(stats, sample.field)))
        yield from families.values()

    def _pins(self) -> Iterator[Metric]:
        num_pins: dict[tuple[str, str], int] = {}
        num_tokens: dict[tuple[str, str], int] = {}
        for pin in self._cache.pins():
            key = (pin.owner, pin.level)
            num_pins[key] = num_pins.get(key, 0) + 1
            num_tokens[key] = num_tokens.get(key, 0) + pin.num_pinned_tokens
        for name, values in (("looseleaf_pins", num_pins), ("looseleaf_pinned_tokens", num_tokens)):
            family = GaugeMetricFamily(name, HELP[name], labels=["owner", "level"])
            for (owner, level), value in sorted(values.items()):
                family.add_metric([owner, level], float(value))
            yield family
