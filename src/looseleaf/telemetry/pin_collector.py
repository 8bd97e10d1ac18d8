"""Who pins what, as Prometheus families, read at each scrape."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from looseleaf.core.auto_pins import NOTHING
from looseleaf.core.manager import CacheManager
from looseleaf.core.pin_record import Pin
from looseleaf.telemetry.cache_collector import CacheSample

MAX_OWNERS = 20
"""Owners with series of their own: those that hold most blocks. The rest is "other"."""

MANY_PINS = 1000
MAX_SHARE = 0.01
"""Of so many pins or more, or with automatic pinning, nothing is read again before reading takes so small a share of
the time."""


@dataclass(frozen=True)
class PinSample:
    """A figure of a pin, exported as a sum by owner and level."""

    metric: str
    documentation: str
    of: Callable[[Pin], float]


PIN_SAMPLES = (
    PinSample("looseleaf_pins", "Live pins.", lambda _: 1.0),
    PinSample("looseleaf_limited_pins", "Live pins that lack something for want of quota.", lambda p: p.is_limited),
    PinSample(
        "looseleaf_pinned_tokens", "What live pins hold; overlaps count for each.", lambda p: p.num_pinned_tokens
    ),
    PinSample("looseleaf_pin_blocks", "Blocks of live pins; overlaps count for each.", lambda p: p.num_blocks),
    PinSample("looseleaf_pin_hits", "Look-ups that reused all that a live pin holds.", lambda p: p.num_hits),
    PinSample("looseleaf_pin_served_tokens", "Tokens that look-ups found in live pins.", lambda p: p.served_tokens),
    PinSample("looseleaf_pin_cost_tokens", "Estimate of what live pins made others compute.", lambda p: p.cost_tokens),
)


AUTO_SAMPLES = (
    CacheSample("is_on", "looseleaf_auto_pin_on", "1 if the cache pins by itself, or would in a dry run."),
    CacheSample("is_paused", "looseleaf_auto_pin_paused", "1 while it makes no pins because they did not pay."),
    CacheSample("gained_tokens", "looseleaf_auto_pin_gained_tokens", "Tokens found that would have been evicted."),
    CacheSample("lost_tokens", "looseleaf_auto_pin_lost_tokens", "Tokens evicted instead that were missed."),
)
"""Of `AutoPinReport`."""


@dataclass(frozen=True)
class _Key:
    """Labels of one series."""

    owner: str
    level: str
    automatic: str


class PinCollector(Collector):
    """Turns `pins()` into sums by owner and level. What takes long is not read at every scrape (see `MAX_SHARE`)."""

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._sums: dict[_Key, list[float]] = {}
        self._report = NOTHING
        self._read_again_at = 0.0

    def collect(self) -> Iterator[Metric]:
        """One family for each of `PIN_SAMPLES` and `AUTO_SAMPLES`."""
        if time.monotonic() >= self._read_again_at:
            self._read()
        for place, sample in enumerate(PIN_SAMPLES):
            family = GaugeMetricFamily(sample.metric, sample.documentation, labels=["owner", "level", "automatic"])
            for key, sums in self._sums.items():
                family.add_metric([key.owner, key.level, key.automatic], sums[place])
            yield family
        for figure in AUTO_SAMPLES:
            number = float(getattr(self._report, figure.field))
            yield GaugeMetricFamily(figure.metric, figure.documentation, value=number)

    def _read(self) -> None:
        started = time.monotonic()
        pins = self._cache.pins()
        blocks: Counter[str] = Counter()
        for pin in pins:
            blocks[pin.owner] += pin.num_blocks
        shown = {owner for owner, _ in blocks.most_common(MAX_OWNERS)}
        by_key: dict[_Key, list[float]] = {}
        for pin in pins:
            owner = pin.owner if pin.owner in shown else "other"
            sums = by_key.setdefault(_Key(owner, pin.level, str(pin.is_automatic).lower()), [0.0] * len(PIN_SAMPLES))
            for place, sample in enumerate(PIN_SAMPLES):
                sums[place] += sample.of(pin)
        self._sums, self._report = by_key, self._cache.auto_pin_report()
        if self._report.is_on or len(pins) >= MANY_PINS:
            now = time.monotonic()
            self._read_again_at = now + (now - started) / MAX_SHARE
