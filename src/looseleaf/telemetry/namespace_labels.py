"""Namespaces as labels, a tenant's as one: few have series of their own, and without the secrets that their names may
hold."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from hashlib import blake2b

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from looseleaf.core.manager import CacheManager

MAX_NAMESPACES = 20
"""With series of their own; all others are "other". Counters never go back, so a name once given stays."""

MIN_SHARE = 0.01
"""Of all tokens looked up so far, for a series of its own."""

OTHER = "other"
_MAX_WAITING = 1000


def hidden_name(namespace: str) -> str:
    """`default` for the default namespace, else a digest: the same namespace always has the same."""
    return blake2b(namespace.encode(), digest_size=4).hexdigest() if namespace else "default"


class NamespaceLabels:
    """Gives each namespace a label to count under. Used from one thread."""

    def __init__(self, name_of: Callable[[str], str]) -> None:
        self._name_of = name_of
        self._labels: dict[str, str] = {}
        self._waiting: OrderedDict[str, int] = OrderedDict()
        self._num_tokens = 0

    def label(self, namespace: str, num_tokens: int) -> str:
        """The label under which to count `num_tokens` more tokens of a namespace."""
        self._num_tokens += num_tokens
        known = self._labels.get(namespace)
        if known is not None:
            return known
        if len(self._labels) >= MAX_NAMESPACES:
            return OTHER
        waited = self._waiting.pop(namespace, 0) + num_tokens
        if waited >= MIN_SHARE * self._num_tokens:
            return self._labels.setdefault(namespace, self._name_of(namespace))
        self._waiting[namespace] = waited
        if len(self._waiting) > _MAX_WAITING:
            self._waiting.popitem(last=False)
        return OTHER


class UsageCollector(Collector):
    """What the largest namespaces use now, read at each scrape from `namespace_usage()`; the rest is "other"."""

    def __init__(self, cache: CacheManager, name_of: Callable[[str], str]) -> None:
        self._cache = cache
        self._name_of = name_of

    def collect(self) -> Iterator[Metric]:
        """Blocks by namespace and state, and quotas."""
        help_of_blocks = "Blocks of a namespace, in all lanes: stored, held by running requests, pinned."
        blocks = GaugeMetricFamily("looseleaf_namespace_blocks", help_of_blocks, labels=["namespace", "state"])
        help_of_quota = "Blocks that a namespace may store, where it has a quota."
        quotas = GaugeMetricFamily("looseleaf_namespace_quota_blocks", help_of_quota, labels=["namespace"])
        sums: dict[str, Counter[str]] = {}
        for place, usage in enumerate(self._cache.namespace_usage()):
            name = OTHER if usage.namespace is None or place >= MAX_NAMESPACES else self._name_of(usage.namespace)
            row = sums.setdefault(name, Counter())
            row.update(stored=usage.stored_blocks, held=usage.held_blocks, pinned=usage.pinned_blocks)
            if usage.quota_blocks is not None and name != OTHER:
                quotas.add_metric([name], usage.quota_blocks)
        for name, row in sums.items():
            for state, count in row.items():
                blocks.add_metric([name, state], count)
        yield from (blocks, quotas)
