"""All metrics of one server in a registry of their own; `docs/METRICS.md` lists them.

The engine tells `Metrics` what happens (it satisfies the engine's observer protocol by shape: telemetry knows the core
only); the cache is asked at each scrape. There is no global registry, so that engines of one process do not mix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from looseleaf.core.manager import CacheManager
from looseleaf.core.namespaces import account_of
from looseleaf.telemetry.cache_collector import CacheCollector, FragmentationCollector
from looseleaf.telemetry.namespace_labels import NamespaceLabels, UsageCollector, hidden_name
from looseleaf.telemetry.pin_collector import PinCollector
from looseleaf.telemetry.vllm_names import VllmNames

SECONDS_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 1000.0,
)  # fmt: skip
BOOKKEEPING_BUCKETS = (0.0001, 0.00025, 0.0005, *SECONDS_BUCKETS[:8])
TOKEN_BUCKETS = tuple(float(4**power) for power in range(10))
PREEMPTION_CAUSES = ("decode", "prefill")
"""No block for the next token; no blocks for the next part of a prompt. Exported from the start, as 0."""


class EngineLoad(Protocol):
    """What is asked of an engine at each scrape."""

    @property
    def num_running(self) -> int:
        """Requests that hold blocks now."""

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""


@dataclass(frozen=True)
class Exposition:
    """One scrape: `body` in the format `content_type`."""

    body: bytes
    content_type: str


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

    Pass it to the engine as its observer, call `watch(engine)` once, and answer scrapes with `expose`. Thread-safe: the
    engine's thread counts while the server's thread scrapes. With `vllm_names` the numbers that mean the same are
    exported under vLLM's names too, labelled with `model_name`. `name_of` makes of a namespace what may be shown of it:
    by default nothing, since it may hold a secret.
    """

    def __init__(
        self,
        cache: CacheManager,
        *,
        model_name: str = "",
        vllm_names: bool = False,
        name_of: Callable[[str], str] = hidden_name,
    ) -> None:
        self._namespaces = NamespaceLabels(name_of)
        self.registry = CollectorRegistry(auto_describe=False)
        self._load = _LoadCollector()
        asked: list[Collector] = [CacheCollector(cache), self._load]
        for source in (*asked, PinCollector(cache), FragmentationCollector(cache), UsageCollector(cache, name_of)):
            self.registry.register(source)
        seconds, counter = self._seconds, self._counter
        self._first_token = seconds("time_to_first_token", "From arrival of a request to its first token.")
        self._request = seconds("request", "From arrival of a request to its end.")
        self._queue = seconds("queue", "From arrival of a request to its first admission.")
        self._step = seconds("step", "One step: plan, forward pass, commit.")
        self._schedule = seconds("schedule", "The plan of one step.", BOOKKEEPING_BUCKETS)
        help_of_bookkeeping = "What a step takes besides the model for memory: its plan, and the commit."
        self._bookkeeping = seconds("bookkeeping", help_of_bookkeeping, BOOKKEEPING_BUCKETS)
        self._step_tokens = Histogram(
            "looseleaf_step_tokens", "Tokens computed in one step.", buckets=TOKEN_BUCKETS, registry=self.registry
        )
        self._finished = counter("finished_requests", "Requests that ended, by reason.", "reason")
        self._prompt = counter("prompt_tokens", "Prompt tokens of ended requests, cached ones included.")
        self._cached = counter("cached_prompt_tokens", "Prompt tokens of ended requests taken from the cache.")
        self._output = counter("output_tokens", "Generated tokens of ended requests.")
        self._preemptions = counter("preemptions", "Running requests whose blocks were taken, by cause.", "cause")
        self._lost = counter("preempted_tokens", "Computed tokens that preemptions threw away.")
        self._freed = counter("preempted_blocks", "Blocks that preemptions made available.")
        self._shared = counter("shared_in_flight_tokens", "Prompt tokens that another request computed just then.")
        self._forks = counter("forks", "Samples that went on from another request's prompt.")
        self._forked = counter("forked_tokens", "Prompt tokens that they did not compute.")
        help_of_queried = "Prompt tokens looked up, by namespace."
        self._queried = counter("namespace_query_tokens", help_of_queried, "namespace")
        self._found = counter("namespace_hit_tokens", "Those of them that were found, by namespace.", "namespace")
        self._drifts = counter("drifts", "Requests whose conversation left the tokens of its last turn.", "cause")
        self._drifted = counter("drift_lost_tokens", "Tokens of these turns that did not hit for it.", "cause")
        self._resizes = counter("resizes", "Changes of the pool's size, by outcome.", "outcome")
        self._moved = counter("resize_moved_blocks", "Blocks copied to another place since the pool changed its size.")
        for cause in PREEMPTION_CAUSES:
            self._preemptions.labels(cause=cause)
        for outcome in ("done", "refused"):
            self._resizes.labels(outcome=outcome)
        if vllm_names:
            timed = (self._first_token, self._request, self._queue)
            counted = (self._prompt, self._output, self._preemptions)
            self.registry.register(VllmNames([*asked, *timed, *counted], model_name))

    def _seconds(self, name: str, documentation: str, buckets: tuple[float, ...] = SECONDS_BUCKETS) -> Histogram:
        return Histogram(f"looseleaf_{name}_seconds", documentation, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(f"looseleaf_{name}", documentation, labels, registry=self.registry)

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
        commit_seconds: float,
    ) -> None:
        """One step took `seconds`, of them `schedule_seconds` before the model ran and `commit_seconds` to note what it
        wrote. Load is read at the scrape."""
        del num_running, num_waiting
        self._step.observe(seconds)
        self._schedule.observe(schedule_seconds)
        self._bookkeeping.observe(schedule_seconds + commit_seconds)
        self._step_tokens.observe(num_scheduled_tokens)

    def on_first_token(self, *, seconds: float) -> None:
        """A request got its first token `seconds` after it came."""
        self._first_token.observe(seconds)

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

    def on_preempt(self, *, cause: str, num_lost_tokens: int, num_freed_blocks: int) -> None:
        """A running request lost its blocks, of which `num_freed_blocks` became available, and with them
        `num_lost_tokens` computed tokens."""
        self._preemptions.labels(cause=cause).inc()
        self._lost.inc(num_lost_tokens)
        self._freed.inc(num_freed_blocks)

    def on_share(self, *, num_tokens: int) -> None:
        """A request was admitted with `num_tokens` tokens for which it had waited while another computed them."""
        self._shared.inc(num_tokens)

    def on_lookup(self, *, namespace: str, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """A prompt was looked up in a namespace, and so much of it was found."""
        label = self._namespaces.label(account_of(namespace), num_prompt_tokens)
        self._queried.labels(namespace=label).inc(num_prompt_tokens)
        self._found.labels(namespace=label).inc(num_cached_tokens)

    def on_traffic(self, **values: object) -> None:
        """For those who record traffic; counted elsewhere."""

    def on_drift(self, *, cause: str, num_lost_tokens: int) -> None:
        """A conversation did not go on with the tokens of its last turn."""
        self._drifts.labels(cause=cause).inc()
        self._drifted.labels(cause=cause).inc(num_lost_tokens)

    def on_fork(self, *, num_tokens: int) -> None:
        """A sample went on from the `num_tokens` tokens of another request's prompt."""
        self._forks.inc()
        self._forked.inc(num_tokens)

    def on_resize(self, *, outcome: str, num_moved_blocks: int = 0) -> None:
        """The pool has another size ("done"), or that was not possible ("refused")."""
        self._resizes.labels(outcome=outcome).inc()
        self._moved.inc(num_moved_blocks)
