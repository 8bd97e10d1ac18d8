"""The same numbers under the names of vLLM's dashboards, for those whose meaning is equal.

Checked against the `vllm:` metrics of vLLM's v1 engine: `prefix_cache_queries` and `prefix_cache_hits` count
tokens, `kv_cache_usage_perc` is 1 when every block is held by a running request (cached blocks that can be
taken count as free), and every series carries the labels `model_name` and `engine`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

RENAMED: Mapping[str, str] = {
    "looseleaf_query_tokens": "vllm:prefix_cache_queries",
    "looseleaf_hit_tokens": "vllm:prefix_cache_hits",
    "looseleaf_running_requests": "vllm:num_requests_running",
    "looseleaf_waiting_requests": "vllm:num_requests_waiting",
    "looseleaf_preemptions": "vllm:num_preemptions",
    "looseleaf_prompt_tokens": "vllm:prompt_tokens",
    "looseleaf_output_tokens": "vllm:generation_tokens",
    "looseleaf_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "looseleaf_request_seconds": "vllm:e2e_request_latency_seconds",
    "looseleaf_queue_seconds": "vllm:request_queue_time_seconds",
}


class VllmNames(Collector):
    """Repeats what other collectors say, renamed. `sources` are asked at each scrape."""

    def __init__(self, sources: Iterable[Collector], model_name: str) -> None:
        self._sources = tuple(sources)
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        """The families of `RENAMED`, and the usage of the memory as a ratio from 0 to 1."""
        num_active = num_blocks = 0.0
        for source in self._sources:
            for family in source.collect():
                if family.name == "looseleaf_blocks":
                    num_active = sum(sample.value for sample in family.samples if sample.labels["state"] == "active")
                elif family.name == "looseleaf_pool_blocks":
                    num_blocks = family.samples[0].value
                elif family.name in RENAMED:
                    yield self._renamed(family)
        name = "vllm:kv_cache_usage_perc"
        usage = Metric(name, "Share of the blocks held by running requests; 1 means all.", "gauge")
        usage.samples.append(Sample(name, self._labels, num_active / num_blocks if num_blocks else 0.0))
        yield usage

    def _renamed(self, family: Metric) -> Metric:
        """`family` under its other name; what we tell apart by cause, vLLM does not."""
        renamed = Metric(RENAMED[family.name], family.documentation, family.type)
        sums: dict[tuple[str, str | None], float] = {}
        for sample in family.samples:
            key = (RENAMED[family.name] + sample.name.removeprefix(family.name), sample.labels.get("le"))
            if not sample.name.endswith("_created"):
                sums[key] = sums.get(key, 0.0) + sample.value
        for (name, bound), value in sums.items():
            labels = self._labels if bound is None else {**self._labels, "le": bound}
            renamed.samples.append(Sample(name, labels, value))
        return renamed
