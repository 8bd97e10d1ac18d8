"""All metrics of one server in a registry of their own; `docs/METRICS.md` lists them.

The engine tells `Metrics` what happens (it satisfies the engine's observer protocol by shape: telemetry knows
the core only); the cache is asked at each scrape. There is no global registry, so that several engines in one
process do not mix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from looseleaf.core.manager import CacheManager
from looseleaf.telemetry.cache_collector import CacheCollector
from looseleaf.telemetry.vllm_names import VllmNames

SECONDS_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0,
    100.0, 250.0, 1000.0,
)  # fmt: skip
TOKEN_BUCKETS = tuple(float(4**power) for power in range(10))


class EngineLoad(Protocol):
    """What is asked of an engine at each scrape."""

    @property
    def num_running(self) -> int:
        """Requests that hold blocks now."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        ...


class Exposition:
    """One scrape: `body` in the format `content_type`."""

    def __init__(self, body: bytes, content_type: str) -> None:
        self.body = body
        self.content_type = content_type


class _LoadCollector(Collector):
    """Running and waiting requests at the moment of the scrape; 0 until an engine is watched."""

    def __init__(self) -> None:
        self.load: EngineLoad | None = None

    def collect(self) -> Iterator[Metric]:
        running = 0 if self.load is None else self.load.num_running
        waiting = 0 if self.load is None else self.load.num_waiting
        yield GaugeMetricFamily("looseleaf_running_requests", "Requests that hold blocks now.", value=running)
        yield GaugeMetricFamily("looseleaf_waiting_requests", "Requests in the queue now.", value=waiting)


class Metrics:
    """Metrics of one cache and the engine over it.

    Pass it to the engine as its observer, call `watch(engine)` once, and answer scrapes with `expose`.
    Thread-safe: the engine's thread counts while the server's thread scrapes. With `vllm_names` the numbers
    that mean the same are exported under vLLM's names too, labelled with `model_name`.
    """

    def __init__(self, cache: CacheManager, *, model_name: str = "", vllm_names: bool = False) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._load = _LoadCollector()
        sources: list[Collector] = [CacheCollector(cache), self._load]
        for source in sources:
            self.registry.register(source)
        self._time_to_first_token = self._histogram(
            "looseleaf_time_to_first_token_seconds",
            "From arrival of a request to its first token.",
            SECONDS_BUCKETS,
        )
        self._request = self._histogram(
            "looseleaf_request_seconds", "From arrival of a request to its end.", SECONDS_BUCKETS
        )
        self._queue = self._histogram(
            "looseleaf_queue_seconds", "From arrival of a request to its first admission.", SECONDS_BUCKETS
        )
        self._step = self._histogram("looseleaf_step_seconds", "One step: plan, forward pass, commit.", SECONDS_BUCKETS)
        self._schedule = self._histogram("looseleaf_schedule_seconds", "The plan of one step.", SECONDS_BUCKETS)
        self._step_tokens = self._histogram("looseleaf_step_tokens", "Tokens computed in one step.", TOKEN_BUCKETS)
        self._finished = Counter(
            "looseleaf_finished_requests",
            "Requests that ended, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self._prompt = self._counter(
            "looseleaf_prompt_tokens", "Prompt tokens of ended requests, cached ones included."
        )
        self._cached = self._counter(
            "looseleaf_cached_prompt_tokens", "Prompt tokens of ended requests taken from the cache."
        )
        self._output = self._counter("looseleaf_output_tokens", "Generated tokens of ended requests.")
        self._preemptions = self._counter("looseleaf_preemptions", "Running requests whose blocks were taken.")
        self._lost = self._counter("looseleaf_preempted_tokens", "Computed tokens that preemptions threw away.")
        if vllm_names:
            counted = [
                self._time_to_first_token,
                self._request,
                self._queue,
                self._prompt,
                self._output,
                self._preemptions,
            ]
            self.registry.register(VllmNames([*sources, *counted], model_name))

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, documentation, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, documentation: str) -> Counter:
        return Counter(name, documentation, registry=self.registry)

    def watch(self, load: EngineLoad) -> None:
        """Ask `load` for running and waiting requests at each scrape."""
        self._load.load = load

    def expose(self, accept: str = "") -> Exposition:
        """All metrics in the Prometheus text format, or OpenMetrics where the `Accept` header asks for it."""
        encode, content_type = choose_encoder(accept)
        return Exposition(encode(self.registry), content_type)

    def on_step(
        self,
        *,
        num_scheduled_tokens: int,
        num_running: int,
        num_waiting: int,
        seconds: float,
        schedule_seconds: float,
    ) -> None:
        """One step took `seconds`, of them `schedule_seconds` for its plan. Load is read at the scrape
        instead."""
        del num_running, num_waiting
        self._step.observe(seconds)
        self._schedule.observe(schedule_seconds)
        self._step_tokens.observe(num_scheduled_tokens)

    def on_first_token(self, *, seconds: float) -> None:
        """A request got its first token `seconds` after it came."""
        self._time_to_first_token.observe(seconds)

    def on_finish(
        self,
        *,
        reason: str,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        num_output_tokens: int,
        seconds: float,
        queue_seconds: float,
    ) -> None:
        """A request ended `seconds` after it came, having waited `queue_seconds` for its first admission."""
        self._finished.labels(reason=str(getattr(reason, "value", reason))).inc()
        self._prompt.inc(num_prompt_tokens)
        self._cached.inc(num_cached_tokens)
        self._output.inc(num_output_tokens)
        self._request.observe(seconds)
        self._queue.observe(queue_seconds)

    def on_preempt(self, *, num_lost_tokens: int) -> None:
        """A running request lost its blocks, and with them `num_lost_tokens` computed tokens."""
        self._preemptions.inc()
        self._lost.inc(num_lost_tokens)
