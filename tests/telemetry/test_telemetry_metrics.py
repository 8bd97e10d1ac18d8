"""Metrics: complete, documented, consistent with the cache, monotonic, and the same under vLLM's names."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from looseleaf.core.auto_pin_config import AutoPinConfig
from looseleaf.core.config import CacheConfig, LayerGroup
from looseleaf.core.manager import CacheManager
from looseleaf.core.pin_record import Pin
from looseleaf.core.stats import CacheStats
from looseleaf.telemetry import Metrics
from looseleaf.telemetry.cache_collector import COUNTERS, FIELDS_FROM_PINS, GAUGES
from looseleaf.telemetry.namespace_labels import MAX_NAMESPACES, hidden_name
from looseleaf.telemetry.pin_collector import MANY_PINS, MAX_OWNERS
from looseleaf.telemetry.vllm_names import RENAMED

DOCUMENT = Path(__file__).parents[2] / "docs" / "METRICS.md"
UNITS = (
    "_tokens",
    "_blocks",
    "_bytes",
    "_pages",
    "_seconds",
    "_ratio",
    "_requests",
    "_leases",
    "_pins",
    "_namespaces",
    "_nodes",
)
COUNTS = ("looseleaf_lookups", "looseleaf_preemptions", "looseleaf_pages", "looseleaf_blocks", "looseleaf_leases",
          "looseleaf_pins", "looseleaf_namespaces", "looseleaf_lanes", "looseleaf_forks", "looseleaf_resizes",
          "looseleaf_demand_evictions", "looseleaf_free_runs", "looseleaf_table_bytes_per_token",
          "looseleaf_drifts", "looseleaf_pin_hits", "looseleaf_auto_pin_on", "looseleaf_auto_pin_paused")  # fmt: skip


@dataclass
class Load:
    """An engine's load."""

    num_running: int = 0
    num_waiting: int = 0


@pytest.fixture
def cache() -> CacheManager:
    return CacheManager(CacheConfig(num_pages=4, page_tokens=64, block_tokens=16))


@pytest.fixture
def metrics(cache: CacheManager) -> Metrics:
    return Metrics(cache, model_name="m", vllm_names=True)


def scrape(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(metrics.expose().body.decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return scrape(metrics)[name, tuple(sorted(labels.items()))]


def run_request(cache: CacheManager, tokens: list[int]) -> None:
    with cache.lease(tokens) as lease:
        lease.reserve(len(tokens))
        lease.commit(len(tokens))


def by_namespace(metrics: Metrics) -> dict[str, tuple[float, float]]:
    """Query and hit tokens of each namespace that is shown."""
    samples = scrape(metrics)
    names = [labels[0][1] for name, labels in samples if name == "looseleaf_namespace_query_tokens_total"]
    found = "looseleaf_namespace_query_tokens_total", "looseleaf_namespace_hit_tokens_total"
    return {name: tuple(samples[metric, (("namespace", name),)] for metric in found) for name in names}


def exported_names(metrics: Metrics) -> set[str]:
    return {family.name for family in metrics.registry.collect()}


def test_every_figure_of_the_cache_is_exported():
    """Each field of `stats()` is a metric, or is exported from the pins."""
    exported = {sample.field for sample in (*COUNTERS, *GAUGES)} | set(FIELDS_FROM_PINS)
    assert exported == {field.name for field in fields(CacheStats)}


def test_every_metric_is_documented(metrics):
    """docs/METRICS.md has a row for each metric and no row for anything else."""
    counters = {family.name for family in metrics.registry.collect() if family.type == "counter"}
    names = {f"{name}_total" if name in counters else name for name in exported_names(metrics)}
    rows = [line.split("`")[1] for line in DOCUMENT.read_text("utf-8").splitlines() if line.startswith("| `")]
    assert len(rows) == len(set(rows))
    assert set(rows) == names


def test_names_have_our_prefix_and_a_unit(metrics):
    """Every own name begins with looseleaf_ and ends in its unit or in what is counted."""
    own = [name for name in exported_names(metrics) if not name.startswith("vllm:")]
    assert own
    for name in own:
        assert name.startswith("looseleaf_")
        assert name.endswith(UNITS) or name in COUNTS, name


def test_gauges_say_what_stats_say(cache, metrics):
    """A scrape agrees with `stats()`: blocks and pages by state add up, the pool is whole."""
    run_request(cache, list(range(40)))
    held = cache.lease(list(range(40)))
    held.reserve(41)
    stats = cache.stats()
    samples = scrape(metrics)
    for state, expected in (
        ("free", stats.free_blocks),
        ("active", stats.active_blocks),
        ("cached", stats.cached_blocks),
    ):
        assert samples["looseleaf_blocks", (("state", state),)] == expected
    for state, expected in (("free", stats.free_pages), ("partial", stats.partial_pages), ("full", stats.full_pages)):
        assert samples["looseleaf_pages", (("state", state),)] == expected
    assert samples["looseleaf_waste_ratio", ()] == pytest.approx(stats.waste)
    assert samples["looseleaf_waste_ratio", ()] > 0
    assert samples["looseleaf_leases", ()] == 1
    assert samples["vllm:kv_cache_usage_perc", (("engine", "0"), ("model_name", "m"))] == stats.active_blocks / 16
    held.release()


def test_fragmentation_says_which_group_wastes_what():
    """A lease of 40 tokens in a full lane and two window lanes of 32 tokens: the scrape agrees with `fragmentation()`
    in every figure, and names each group."""
    groups = (LayerGroup("full"), LayerGroup("window", window_tokens=32, num_lanes=2))
    cache = CacheManager(CacheConfig(num_pages=4, page_tokens=64, block_tokens=16, groups=groups))
    metrics = Metrics(cache)
    run_request(cache, list(range(100, 140)))
    with cache.lease(list(range(40))) as lease:
        lease.reserve(40)
        cut = cache.fragmentation()
        samples = scrape(metrics)
    assert samples["looseleaf_page_waste_ratio", ()] == pytest.approx(cut.page_waste)
    assert samples["looseleaf_packing_ratio", ()] == pytest.approx(cut.packing_degree)
    assert samples["looseleaf_table_bytes", ()] == cut.table_bytes > 0
    assert samples["looseleaf_table_bytes_per_token", ()] == pytest.approx(cut.table_bytes_per_token)
    assert samples["looseleaf_lanes", ()] == 3
    runs = {int(labels[0][1]): count for (name, labels), count in samples.items() if name == "looseleaf_free_runs"}
    assert runs == cut.free_runs != {}
    assert [group.held_blocks for group in cut.groups] == [3, 6]
    for group in cut.groups:
        name = ("group", group.name)
        assert samples["looseleaf_group_waste_ratio", (name,)] == pytest.approx(group.waste)
        assert group.waste == pytest.approx(8 / 48)
        assert samples["looseleaf_group_blocks", (name, ("state", "active"))] == group.held_blocks
        assert samples["looseleaf_group_blocks", (name, ("state", "cached"))] == group.cached_blocks > 0


def test_counters_only_grow(cache, metrics):
    """[M125] After each of many requests, evictions and clears no counter is below what it was; a ratio is not reset
    by steps."""
    before = scrape(metrics)
    for round_number in range(12):
        run_request(cache, [round_number, *range(47)])
        run_request(cache, list(range(60)))
        metrics.on_step(
            num_scheduled_tokens=3, num_running=1, num_waiting=0, seconds=0.01, schedule_seconds=0.001, commit_seconds=0
        )
        if round_number == 8:
            cache.clear()
        now = scrape(metrics)
        for key, old in before.items():
            if key[0].endswith(("_total", "_count", "_sum", "_bucket")):
                assert now[key] >= old, key
        before = now
    stats = cache.stats()
    assert before["looseleaf_query_tokens_total", ()] == stats.query_tokens == 12 * 108
    assert before["looseleaf_hit_tokens_total", ()] == stats.hit_tokens > 0
    ratio = value(metrics, "looseleaf_hit_ratio")
    for _ in range(100):
        metrics.on_step(
            num_scheduled_tokens=1, num_running=1, num_waiting=0, seconds=0.01, schedule_seconds=0.001, commit_seconds=0
        )
    assert value(metrics, "looseleaf_hit_ratio") == ratio == pytest.approx(stats.hit_tokens / stats.query_tokens)


def test_pins_by_owner_and_level(cache, metrics):
    """Pins and their tokens are exported by owner and level, with any owner's name, and are gone after the pin is."""
    run_request(cache, list(range(64)))
    odd = 'ops"\n\\x'
    hard = cache.pin(tokens=list(range(32)), owner=odd)
    cache.pin(tokens=list(range(48)), owner="b", level="soft")
    of_odd = {"owner": odd, "level": "hard", "automatic": "false"}
    of_b = {"owner": "b", "level": "soft", "automatic": "false"}
    assert value(metrics, "looseleaf_pins", **of_odd) == 1
    assert value(metrics, "looseleaf_pinned_tokens", **of_odd) == 32
    assert value(metrics, "looseleaf_pinned_tokens", **of_b) == 48  # what both pin counts for each
    assert value(metrics, "looseleaf_pin_blocks", **of_b) == 3
    cache.unpin(hard.id)
    assert ("looseleaf_pins", tuple(sorted(of_odd.items()))) not in scrape(metrics)


def test_what_pins_served_held_back_and_cost(metrics, cache):
    """Hits, served tokens, cost and pins that the quota holds back are the sums of what `pins()` says, by owner."""
    run_request(cache, list(range(64)))
    run_request(cache, list(range(100, 164)))
    cache.pin(tokens=list(range(64)), owner="a", partial=True)
    cache.pin(tokens=list(range(100, 164)), owner="a", partial=True)  # of a quota of 4 blocks nothing is left
    for _ in range(3):
        run_request(cache, list(range(70)))
    run_request(cache, list(range(1000, 1192)))
    run_request(cache, list(range(100, 164)))  # was evicted for the one before, since what is pinned was not
    pins = cache.pins()
    of_a = {"owner": "a", "level": "hard", "automatic": "false"}
    assert value(metrics, "looseleaf_limited_pins", **of_a) == 1 == sum(pin.is_limited for pin in pins)
    assert value(metrics, "looseleaf_pin_hits", **of_a) == 3 == sum(pin.num_hits for pin in pins)
    assert value(metrics, "looseleaf_pin_served_tokens", **of_a) == 3 * 64
    cost = value(metrics, "looseleaf_pin_cost_tokens", **of_a)
    assert cost == pytest.approx(sum(pin.cost_tokens for pin in cache.pins()))
    assert cost > 0


def test_automatic_pinning_is_exported():
    """Whether it is on, and what it gained and lost, are those of `auto_pin_report()`."""
    for config in (None, AutoPinConfig()):
        cache = CacheManager(CacheConfig(num_pages=4, page_tokens=64, block_tokens=16, auto_pin=config))
        metrics, report = Metrics(cache), cache.auto_pin_report()
        assert value(metrics, "looseleaf_auto_pin_on") == (config is not None) == report.is_on
        assert value(metrics, "looseleaf_auto_pin_paused") == report.is_paused
        assert value(metrics, "looseleaf_auto_pin_gained_tokens") == report.gained_tokens
        assert value(metrics, "looseleaf_auto_pin_lost_tokens") == report.lost_tokens


def test_owners_of_series_are_few():
    """However many owners there are, those that hold most have series of their own and the rest are "other": no
    series is lost and none is made up."""
    cache = CacheManager(CacheConfig(num_pages=64, page_tokens=64, block_tokens=16, pin_quota=1.0))
    metrics = Metrics(cache)
    for number in range(30):
        tokens = [number] * (64 if number < 10 else 16)
        run_request(cache, tokens)
        cache.pin(tokens=tokens, owner=f"owner-{number:02}", level="soft" if number % 2 else "hard")
    samples = {dict(labels)["owner"]: number for (name, labels), number in scrape(metrics).items()
               if name == "looseleaf_pin_blocks"}  # fmt: skip
    assert {f"owner-{number:02}" for number in range(10)} <= set(samples)
    assert len(samples) == MAX_OWNERS + 1
    of_all = {labels: number for (name, labels), number in scrape(metrics).items() if name == "looseleaf_pin_blocks"}
    assert sum(of_all.values()) == 10 * 4 + 20


def test_many_pins_are_not_read_at_every_scrape(monkeypatch):
    """Reading thousands of pins holds the cache's lock: it happens at most so often that it takes 1% of the time.
    Few pins are read at each scrape."""
    cache = CacheManager(CacheConfig(num_pages=1, page_tokens=16, block_tokens=16))
    metrics = Metrics(cache)
    now = 100.0
    monkeypatch.setattr("looseleaf.telemetry.pin_collector.time.monotonic", lambda: now)
    read, num_reads = cache.pins, 0

    def slow() -> list[Pin]:
        nonlocal now, num_reads
        now, num_reads = now + 0.1, num_reads + 1
        return read()

    monkeypatch.setattr(cache, "pins", slow)
    few = {"owner": "few", "level": "hard", "automatic": "false"}
    for number in range(MANY_PINS):
        cache.pin(tokens=[number] * 16, owner="few")
        if number < 2:
            assert value(metrics, "looseleaf_pins", **few) == number + 1
    assert value(metrics, "looseleaf_pins", **few) == MANY_PINS
    cache.pin(tokens=[7], owner="few")
    now += 9.0
    assert value(metrics, "looseleaf_pins", **few) == MANY_PINS
    now += 1.5
    assert value(metrics, "looseleaf_pins", **few) == MANY_PINS + 1
    assert num_reads == 4


def test_what_the_engine_reports(metrics):
    """Each call of the observer lands in its histogram or counter, in seconds and tokens."""
    metrics.on_first_token(seconds=0.2)
    metrics.on_step(
        num_scheduled_tokens=100,
        num_running=2,
        num_waiting=1,
        seconds=0.05,
        schedule_seconds=0.002,
        commit_seconds=0.001,
    )
    metrics.on_preempt(cause="decode", num_lost_tokens=30, num_freed_blocks=2)
    metrics.on_share(num_tokens=48)
    for num_tokens in (40, 30):
        metrics.on_fork(num_tokens=num_tokens)
    metrics.on_resize(outcome="done", num_moved_blocks=5)
    metrics.on_resize(outcome="refused")
    metrics.on_finish(
        reason="stop", num_prompt_tokens=50, num_cached_tokens=32, num_output_tokens=7, seconds=1.5, queue_seconds=0.5
    )
    samples = {name: number for (name, _), number in scrape(metrics).items()}
    assert samples["looseleaf_time_to_first_token_seconds_sum"] == 0.2
    assert samples["looseleaf_step_seconds_sum"] == 0.05
    assert samples["looseleaf_schedule_seconds_sum"] == 0.002
    assert samples["looseleaf_step_tokens_sum"] == 100
    assert samples["looseleaf_request_seconds_sum"] == 1.5
    assert samples["looseleaf_queue_seconds_sum"] == 0.5
    assert samples["looseleaf_prompt_tokens_total"] == 50
    assert samples["looseleaf_cached_prompt_tokens_total"] == 32
    assert samples["looseleaf_output_tokens_total"] == 7
    assert samples["looseleaf_bookkeeping_seconds_sum"] == pytest.approx(0.003)
    assert value(metrics, "looseleaf_preemptions_total", cause="decode") == 1
    assert value(metrics, "looseleaf_preemptions_total", cause="prefill") == 0
    assert samples["looseleaf_preempted_tokens_total"] == 30
    assert samples["looseleaf_preempted_blocks_total"] == 2
    assert samples["looseleaf_shared_in_flight_tokens_total"] == 48
    assert (samples["looseleaf_forks_total"], samples["looseleaf_forked_tokens_total"]) == (2, 70)
    assert value(metrics, "looseleaf_resizes_total", outcome="done") == 1
    assert value(metrics, "looseleaf_resizes_total", outcome="refused") == 1
    assert samples["looseleaf_resize_moved_blocks_total"] == 5
    assert value(metrics, "looseleaf_finished_requests_total", reason="stop") == 1


def test_hits_by_namespace(metrics):
    """What is looked up and found counts for its namespace, of which only a digest is shown unless somebody says what
    may be."""
    for namespace, found in (("", 0), ("secret", 16), ("secret", 32), ("", 8)):
        metrics.on_lookup(namespace=namespace, num_prompt_tokens=40, num_cached_tokens=found)
    by_name = by_namespace(metrics)
    assert by_name.pop("default") == (80, 8)
    ((name, counts),) = by_name.items()
    assert counts == (80, 48)
    assert "secret" not in metrics.expose().body.decode()
    assert by_namespace(Metrics(CacheManager(CacheConfig(1)), name_of=str.upper)) == {}
    named = Metrics(CacheManager(CacheConfig(1)), name_of=str.upper)
    named.on_lookup(namespace="secret", num_prompt_tokens=4, num_cached_tokens=1)
    assert by_namespace(named) == {"SECRET": (4, 1)}
    assert name == hidden_name("secret")


def test_namespaces_with_series_are_few():
    """However many namespaces there are, few have series; none that takes less than 1% of the tokens has one; what is
    other stays other, so no counter goes back; sums are those of all look-ups."""
    metrics = Metrics(CacheManager(CacheConfig(1)), name_of=str)
    before: dict[str, tuple[float, float]] = {}
    for number in range(3000):
        name = "large" if number % 2 else f"n{number}"
        metrics.on_lookup(namespace=name, num_prompt_tokens=10, num_cached_tokens=number % 10)
        if number % 500 == 0 or number == 2999:
            now = by_namespace(metrics)
            assert len(now) <= MAX_NAMESPACES + 1
            assert all(now[name] >= counts for name, counts in before.items())
            before = now
    assert "large" in before
    for number in range(100):
        metrics.on_lookup(namespace=f"late{number}", num_prompt_tokens=10, num_cached_tokens=0)
    assert not any(name.startswith("late") for name in by_namespace(metrics))
    assert sum(queried for queried, _ in by_namespace(metrics).values()) == 31_000
    assert sum(found for _, found in by_namespace(metrics).values()) == sum(number % 10 for number in range(3000))


def test_what_namespaces_use():
    """Blocks by namespace and state are those of `namespace_usage()`, a tenant's as one, with its quota; beyond the 20
    largest they are summed up as other."""
    cache = CacheManager(CacheConfig(16, 64, 16, namespace_quotas={'tenant="t"': 0.5}))
    metrics = Metrics(cache, name_of=str)
    for number in range(MAX_NAMESPACES + 5):
        with cache.lease([number] * 40, namespace=f"n{number}") as lease:
            lease.reserve(40)
            lease.commit(40)
    for salt in ("a", "b"):
        with cache.lease([1] * 40, namespace=f'tenant="t"/salt="{salt}"') as lease:
            lease.reserve(40)
            lease.commit(40)
    cache.pin([1] * 40, namespace='tenant="t"/salt="a"')
    with cache.lease([1] * 40, namespace='tenant="t"/salt="b"'):
        samples = scrape(metrics)
    blocks = {labels: count for (name, labels), count in samples.items() if name == "looseleaf_namespace_blocks"}
    of_tenant = {state: count for ((_, name), (_, state)), count in blocks.items() if name == 'tenant="t"'}
    assert of_tenant == {"stored": 4, "held": 2, "pinned": 2}
    assert samples["looseleaf_namespace_quota_blocks", (("namespace", 'tenant="t"'),)] == 32
    names = {name for (_, name), _ in blocks}
    assert len(names) == MAX_NAMESPACES + 1
    stored = sum(count for (_, (_, state)), count in blocks.items() if state == "stored")
    assert stored == cache.stats().cached_blocks + cache.stats().active_blocks


def test_drifts_by_cause(metrics):
    """Drifts and what they cost count by their cause."""
    for num_lost_tokens in (16, 0):
        metrics.on_drift(cause="template_rewrote", num_lost_tokens=num_lost_tokens)
    assert value(metrics, "looseleaf_drifts_total", cause="template_rewrote") == 2
    assert value(metrics, "looseleaf_drift_lost_tokens_total", cause="template_rewrote") == 16


def test_load_is_read_at_the_scrape(metrics):
    """Running and waiting are those of the moment, 0 before an engine is watched."""
    assert value(metrics, "looseleaf_running_requests") == 0
    load = Load(3, 2)
    metrics.watch(load)
    assert value(metrics, "looseleaf_running_requests") == 3
    load.num_running, load.num_waiting = 0, 1
    assert value(metrics, "looseleaf_running_requests") == 0
    assert value(metrics, "looseleaf_waiting_requests") == 1
    assert value(metrics, "vllm:num_requests_waiting", model_name="m", engine="0") == 1


def test_vllm_names_carry_the_same_numbers(cache, metrics):
    """Each renamed series has the value of ours and vLLM's labels."""
    run_request(cache, list(range(40)))
    run_request(cache, list(range(40)))
    metrics.on_first_token(seconds=0.2)
    for cause in ("decode", "prefill", "prefill"):
        metrics.on_preempt(cause=cause, num_lost_tokens=1, num_freed_blocks=0)
    metrics.on_finish(
        reason="length", num_prompt_tokens=40, num_cached_tokens=32, num_output_tokens=9, seconds=1, queue_seconds=0
    )
    samples = scrape(metrics)
    renamed = 0
    for (name, labels), number in samples.items():
        if name.startswith("vllm:") and name != "vllm:kv_cache_usage_perc":
            assert {("engine", "0"), ("model_name", "m")} <= set(labels)
            ours = next(own for own, theirs in RENAMED.items() if name.startswith(theirs) and name[len(theirs) :] in (
                "", "_total", "_bucket", "_count", "_sum", "_created"))  # fmt: skip
            suffix = name.removeprefix(RENAMED[ours])
            rest = tuple(label for label in labels if label[0] not in ("engine", "model_name"))
            if ours != "looseleaf_preemptions":
                assert samples[ours + suffix, rest] == number
            renamed += 1
    assert renamed > len(RENAMED)
    for name, expected in (
        ("vllm:prefix_cache_queries_total", 80),
        ("vllm:prefix_cache_hits_total", 32),
        ("vllm:generation_tokens_total", 9),
        ("vllm:num_preemptions_total", 3),
        ("vllm:prompt_tokens_total", 40),
        ("vllm:time_to_first_token_seconds_count", 1),
    ):
        assert samples[name, (("engine", "0"), ("model_name", "m"))] == expected


def test_vllm_names_are_off_by_default(cache):
    """Without the switch there are our names only."""
    assert not [name for name in exported_names(Metrics(cache)) if not name.startswith("looseleaf_")]


def test_two_servers_in_one_process_do_not_mix(cache):
    """Each `Metrics` has a registry of its own."""
    first, second = Metrics(cache), Metrics(cache)
    first.on_preempt(cause="decode", num_lost_tokens=1, num_freed_blocks=0)
    assert value(second, "looseleaf_preemptions_total", cause="decode") == 0


def test_openmetrics_if_asked(metrics):
    """The Accept header chooses OpenMetrics, which ends in its end mark."""
    plain = metrics.expose()
    assert plain.content_type.startswith("text/plain")
    open_metrics = metrics.expose("application/openmetrics-text; version=1.0.0")
    assert open_metrics.content_type.startswith("application/openmetrics-text")
    assert open_metrics.body.endswith(b"# EOF\n")


def test_counting_while_scraping(metrics):
    """The engine's thread counts while the server's scrapes; nothing is lost."""

    def count() -> None:
        for _ in range(2000):
            metrics.on_preempt(cause="decode", num_lost_tokens=1, num_freed_blocks=0)

    threads = [threading.Thread(target=count) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        scrape(metrics)
    for thread in threads:
        thread.join()
    assert value(metrics, "looseleaf_preemptions_total", cause="decode") == 6000
