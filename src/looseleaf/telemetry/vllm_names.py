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
        blocks: Metric | None = None
        pool: Metric | None = None
        for source in self._sources:
            for family in source.collect():
                if family.name == "looseleaf_blocks":
                    blocks = family
                elif family.name == "looseleaf_pool_blocks":
                    pool = family
                elif family.name in RENAMED:
                    yield self._renamed(family)
        if blocks is not None and pool is not None:
            yield self._usage(blocks, pool)

    def _renamed(self, family: Metric) -> Metric:
        renamed = Metric(RENAMED[family.name], family.documentation, family.type)
        for sample in family.samples:
            name = RENAMED[family.name] + sample.name.removeprefix(family.name)
            renamed.samples.append(Sample(name, {**self._labels, **sample.labels}, sample.value))
        return renamed

    def _usage(self, blocks: Metric, pool: Metric) -> Metric:
        active = sum(sample.value for sample in blocks.samples if sample.labels.get("state") == "active")
        total = sum(sample.value for sample in pool.samples)
        name = "vllm:kv_cache_usage_perc"
        usage = Metric(name, "Share of the blocks held by running requests; 1 means all.", "gauge")
        usage.samples.append(Sample(name, dict(self._labels), active / total if total else 0.0))
        return usage
