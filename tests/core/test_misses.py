"""Laws of the miss summary: every token that was looked up is in it once, by reason, and old ones take no more room."""

from __future__ import annotations

import random

import pytest

from looseleaf import CacheManager, LayerGroup, MissSummary, RequestError
from looseleaf.core import misses as module
from looseleaf.core.namespaces import NamespaceLayer
from looseleaf.testing.clock import ManualClock
from tests.core.conftest import MakeCache, run, start, tokens


def check_sums(cache: CacheManager) -> MissSummary:
    """The summary of everything, which agrees with the counters and with its own parts."""
    stats, summary = cache.stats(), cache.miss_summary()
    assert (summary.num_lookups, summary.query_tokens) == (stats.num_lookups, stats.query_tokens)
    assert (summary.hit_tokens, summary.hit_rate) == (stats.hit_tokens, stats.hit_rate)
    for parts in ([summary], summary.buckets, [*summary.by_namespace.values()]):
        for part in parts:
            assert part.query_tokens == part.hit_tokens + sum(part.missed_tokens.values())
            assert part.hit_tokens == sum(part.hit_tokens_by_rung.values())
            assert min([0, *part.missed_tokens.values(), *part.hit_tokens_by_rung.values()]) == 0
        assert sum(part.query_tokens for part in parts) == summary.query_tokens
        assert sum(part.num_lookups for part in parts) == summary.num_lookups
    return summary


def missed(cache: CacheManager, prompt: list[int], **how: object) -> dict[str, int]:
    """What one look-up adds to the missed tokens by reason."""
    before = cache.miss_summary().missed_tokens
    run(cache, prompt, **how)  # type: ignore[arg-type]
    after = check_sums(cache).missed_tokens
    return {reason: count - before.get(reason, 0) for reason, count in after.items() if count != before.get(reason)}


def test_every_reason(make: MakeCache) -> None:
    """Missed tokens go to the reason of the first miss, what can't hit to one of its own; the rest was never seen."""
    cache = make(12)
    prompt = tokens(1, 14)
    assert missed(cache, prompt) == {"never_seen": 12, "always_computed": 2}
    assert missed(cache, prompt) == {"always_computed": 2}
    assert missed(cache, prompt[:13]) == {"always_computed": 1}
    assert missed(cache, prompt[:12]) == {"always_computed": 4}
    assert missed(cache, prompt[:4]) == {"below_one_block": 4}
    assert missed(cache, [*prompt[:10], *tokens(2, 8)]) == {"diverged": 6, "below_one_block": 2, "always_computed": 2}
    assert missed(cache, [*prompt[:3], *tokens(3, 6)]) == {"never_seen": 5, "below_one_block": 3, "always_computed": 1}
    assert missed(cache, prompt, namespace="a") == {"other_namespace": 12, "always_computed": 2}
    cache.clear()
    assert missed(cache, [*prompt, *tokens(4, 8)]) == {"cleared": 12, "never_seen": 8, "always_computed": 2}
    run(cache, tokens(5, 40), reuse=False)
    cache.clear("a")
    with cache.lease([1], reuse=False) as lease:
        lease.reserve(10 * 4)
    assert missed(cache, [*prompt, *tokens(4, 12)]) == {"evicted": 12, "never_seen": 4, "always_computed": 2}
    assert cache.miss_summary().requests["skipped"] == 2


def test_cut_by_a_window(make: MakeCache) -> None:
    """What is stored but can't be used for want of a window is told apart."""
    cache = make(64, groups=(LayerGroup("full"), LayerGroup("window", window_tokens=8)))
    prompt = tokens(1, 32)
    run(cache, prompt)
    with cache.lease([1], reuse=False) as lease:  # evicts rows that only slid out
        lease.reserve((cache.stats().free_blocks + 4) // 2 * 4)
    assert missed(cache, [*prompt[:20], *tokens(2, 9)]) == {"window_cut": 12, "never_seen": 8, "always_computed": 1}


def test_who_counts(make: MakeCache) -> None:
    """[M121, M122, M130] A preempted request that comes back is no look-up and no hit; one that skips the cache is a
    request, but no look-up."""
    cache = make(32)
    run(cache, tokens(1, 17), "r")
    run(cache, tokens(1, 17), "r", count_lookup=False)
    run(cache, tokens(1, 17), reuse=False)
    with start(cache, tokens(2, 9)) as lease:
        lease.fork().release()
    summary = check_sums(cache)
    assert (summary.num_lookups, summary.query_tokens, summary.hit_tokens) == (2, 26, 0)
    assert summary.requests == {"never_seen": 2, "skipped": 1}


def test_rungs(make: MakeCache, clock: ManualClock) -> None:
    """Tokens that another request computed meanwhile are a rung of their own, in the minute of the look-up."""
    cache = make(32)
    run(cache, tokens(1, 17))
    lease = cache.lease(tokens(1, 17))
    clock.advance(200)
    run(cache, tokens(1, 5))
    with pytest.raises(RequestError, match="17 of 16 cached tokens"):
        lease.note_in_flight(17)
    lease.note_in_flight(12)
    lease.release()
    summary = check_sums(cache)
    assert summary.hit_tokens_by_rung == {"exact": 8, "in_flight": 12}
    assert [bucket.hit_tokens_by_rung for bucket in summary.buckets] == [{"exact": 4, "in_flight": 12}, {"exact": 4}]
    assert cache.explain(lease.request_id).by_rung == {"exact": 4, "in_flight": 12}
    assert cache.miss_summary(since_seconds=100).query_tokens == 5


def test_over_time(make: MakeCache, clock: ManualClock) -> None:
    """A summary of the last minutes leaves out what is older; buckets follow each other, oldest first."""
    cache = make(32)
    for minute in range(10):
        run(cache, tokens(minute, 5 + minute))
        clock.advance(60)
    summary = check_sums(cache)
    assert [bucket.query_tokens for bucket in summary.buckets] == [5 + minute for minute in range(10)]
    assert [bucket.seconds for bucket in summary.buckets] == sorted((b.seconds for b in summary.buckets), reverse=True)
    recent = cache.miss_summary(since_seconds=125)
    assert (recent.query_tokens, recent.seconds) == (12 + 13 + 14, 125)
    assert cache.miss_summary(since_seconds=1e9).query_tokens == summary.query_tokens
    assert cache.miss_summary(since_seconds=0).as_sentence == "Nothing was looked up."


def test_by_namespace(make: MakeCache) -> None:
    """Each namespace has its own hit rate; a prompt counts in the request's own, wherever its beginning lies."""
    cache = make(64)
    layers = [NamespaceLayer("", 8)]
    for _ in range(2):
        run(cache, tokens(1, 9), namespace="a")
        run(cache, tokens(2, 17), namespace="b", layers=layers)
    summary = check_sums(cache)
    assert {name: part.hit_rate for name, part in summary.by_namespace.items()} == {"a": 8 / 18, "b": 16 / 34}
    alone = cache.miss_summary(namespace="b")
    assert (alone.query_tokens, alone.hit_tokens, [*alone.by_namespace]) == (34, 16, ["b"])
    assert [bucket.query_tokens for bucket in alone.buckets] == [34]
    assert cache.miss_summary(namespace="c").query_tokens == 0


def test_memory_is_bounded(make: MakeCache, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes become hours, hours one sum, and namespaces beyond a limit count in the sum of all: nothing is lost."""
    monkeypatch.setattr(module, "MAX_NAMESPACES", 3)
    cache = make(64)
    for number in range(5):
        run(cache, tokens(1, 5), namespace=f"tenant-{number}")
    assert [*cache.miss_summary().by_namespace] == ["tenant-0", "tenant-1", "tenant-2"]
    assert cache.miss_summary().query_tokens == 25
    for number in range(400):
        run(cache, tokens(1, 5 + number % 7), namespace=f"tenant-{number % 11}")
        clock.advance(random.Random(number).choice([1, 61, 700, 4000]))
    summary = check_sums_without_namespaces(cache)
    assert len(summary.buckets) <= module.NUM_MINUTES + module.NUM_HOURS + 1
    assert summary.buckets[0].num_lookups > 100
    assert len(summary.by_namespace) <= 3 * len(summary.buckets)
    assert sum(bucket.query_tokens for bucket in summary.buckets) == summary.query_tokens


def check_sums_without_namespaces(cache: CacheManager) -> MissSummary:
    stats, summary = cache.stats(), cache.miss_summary()
    assert (summary.query_tokens, summary.hit_tokens) == (stats.query_tokens, stats.hit_tokens)
    assert summary.query_tokens == summary.hit_tokens + sum(summary.missed_tokens.values())
    return summary


def test_any_traffic_adds_up(make: MakeCache, clock: ManualClock) -> None:
    """Whatever is asked for, found, evicted, cleared and cut, all of it is told once."""
    rng = random.Random(4)
    for groups in ((LayerGroup("full"),), (LayerGroup("full"), LayerGroup("window", window_tokens=8))):
        cache = make(48, groups=groups)
        for number in range(300):
            prompt = tokens(rng.randrange(6), rng.randrange(1, 30)) + tokens(rng.randrange(20), rng.randrange(9))
            layers = [NamespaceLayer("s", 1 + len(prompt) // 2)] if rng.random() < 0.3 else []
            how: dict[str, object] = {"namespace": rng.choice(["", "", "a"]), "layers": layers}
            run(cache, prompt, reuse=rng.random() < 0.9, **how)
            clock.advance(rng.choice([0, 30, 100]))
            if number % 40 == 39:
                cache.clear(rng.choice([None, "a"]))
        assert len(check_sums(cache).missed_tokens) >= 6


def test_in_words(make: MakeCache) -> None:
    """One sentence tells all, the largest share first."""
    cache = make(12)
    assert cache.miss_summary().as_sentence == "Nothing was looked up."
    run(cache, tokens(1, 17))
    run(cache, tokens(1, 17))
    run(cache, tokens(1, 6))
    sentence = cache.miss_summary().as_sentence
    assert sentence.startswith("Of 40 tokens in 3 look-ups 50.0% were found; 40.0% were never seen before; 10.0% are ")
