"""Automatic pins: what is worth it is kept, what is not is let go, and nobody pays for the difference."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, replace

import numpy as np
import pytest

from looseleaf import CacheConfig, CacheManager, LayerGroup
from looseleaf.core import habits
from looseleaf.core.auto_pin_config import AutoPinConfig, AutoPinRule
from looseleaf.core.habits import Habits
from looseleaf.core.pressure import Pressure
from looseleaf.errors import ConfigError
from looseleaf.testing.clock import ManualClock

from .conftest import MakeCache, run, tokens

LONG = AutoPinConfig(AutoPinRule(min_tokens=64, min_requests_per_second=None))
FREQUENT = AutoPinConfig(AutoPinRule(min_tokens=None, min_requests_per_second=0.5), rate_window_seconds=20.0)
NUM_BLOCKS = 128
DOCUMENT = tokens(1, 81)  # 20 blocks of 4 tokens, and one token more


@dataclass
class Served:
    """What a load found: tokens of the document that were cached, by its uses."""

    cached: list[int]

    @property
    def kept_share(self) -> float:
        """Share of the later half of the uses that found all of the document."""
        late = self.cached[len(self.cached) // 2 :]
        return sum(num >= 76 for num in late) / len(late)


def flood(
    cache: CacheManager,
    clock: ManualClock,
    num_rounds: int = 24,
    document: list[int] = DOCUMENT,
    num_one_off: int = 30,
    first_one_off: int = 100,
    gap_seconds: float = 10.0,
    **how: object,
) -> Served:
    """A document is asked about every `gap_seconds`, with a flood of other prompts between; they hold 300 blocks."""
    cached = []
    for number in range(num_rounds):
        clock.advance(gap_seconds / 2)
        cached.append(run(cache, [*document, 5000 + number], **how))
        for other in range(num_one_off):
            clock.advance(gap_seconds / 2 / num_one_off)
            run(cache, tokens(first_one_off + number * num_one_off + other, 41))
    return Served(cached)


def test_a_document_survives_a_flood(make: MakeCache, clock: ManualClock) -> None:
    """What comes back again and again, later than eviction lets it live, is pinned and found from then on."""
    plain = flood(make(NUM_BLOCKS), clock)
    assert plain.kept_share == 0
    cache = make(NUM_BLOCKS, auto_pin=LONG)
    served = flood(cache, clock)
    assert served.kept_share == 1
    assert sum(num >= 76 for num in served.cached) > 12  # it learns within a few uses
    pin = next(pin for pin in cache.pins() if pin.is_automatic)
    assert (pin.owner, pin.level, pin.num_pinned_tokens) == ("auto", "soft", 80)
    report = cache.auto_pin_report()
    assert report.is_on
    assert not report.is_paused
    assert report.gained_tokens >= 10 * 80 > report.lost_tokens
    assert report.num_pinned_tokens >= 80
    assert any(candidate.is_pinned and candidate.num_tokens == 80 for candidate in report.candidates)


def test_where_nothing_is_lost_nothing_is_pinned(make: MakeCache, clock: ManualClock) -> None:
    """A document that eviction lets live needs no pin, however often it is used."""
    cache = make(NUM_BLOCKS, auto_pin=LONG)
    served = flood(cache, clock, num_one_off=5)
    assert served.kept_share == 1
    assert cache.pins() == []
    assert cache.auto_pin_report().is_paused


def test_a_prefix_needs_a_rule(make: MakeCache, clock: ManualClock) -> None:
    """What is neither long nor frequent enough is left to eviction; a shorter limit takes it in."""
    cache = make(NUM_BLOCKS, auto_pin=replace(LONG, rule=AutoPinRule(80, None)))
    assert flood(cache, clock).kept_share == 0
    assert cache.pins() == []
    assert flood(make(NUM_BLOCKS, auto_pin=replace(LONG, rule=AutoPinRule(79, None))), clock).kept_share == 1


def test_a_short_prefix_is_pinned_by_its_rate(make: MakeCache, clock: ManualClock) -> None:
    """The rule on requests per second, over the sliding window: short prompts too, but only while they are frequent."""
    short = tokens(1, 21)
    often = make(NUM_BLOCKS, auto_pin=FREQUENT)
    rates = flood(often, clock, num_rounds=60, document=short, gap_seconds=1.0)
    assert min(rates.cached[-20:]) == 20
    assert [pin.num_pinned_tokens for pin in often.pins()] == [20]
    rarely = make(NUM_BLOCKS, auto_pin=FREQUENT)
    assert flood(rarely, clock, num_rounds=60, document=short, gap_seconds=10.0).cached[-1] == 0
    assert rarely.pins() == []


def test_rates_have_hysteresis(make: MakeCache, clock: ManualClock) -> None:
    """A prefix that is frequent once is so until it comes only half as often as the rule asks."""
    habit = Habits()
    cache = make(NUM_BLOCKS, auto_pin=FREQUENT)
    pinner = cache._store.auto_pins
    assert pinner is not None
    rule = AutoPinRule(None, 1.0)
    found = habit.use_again(1, "", 5, 0.0, False, 1.0, 1.0)
    for rate, wanted in ((1.1, True), (0.6, True), (0.5, False), (0.6, False), (1.0, False), (1.01, True)):
        found.rate = rate
        assert pinner._allows(rule, found) is wanted, rate


def test_namespaces_have_rules_of_their_own(make: MakeCache, clock: ManualClock) -> None:
    """A namespace without a rule pins nothing; another one is served as ever, and nothing is shared."""
    auto_pin = replace(LONG, namespaces={"free": None})
    cache = make(NUM_BLOCKS, auto_pin=auto_pin)
    assert flood(cache, clock, namespace="free").kept_share == 0
    assert cache.pins() == []
    assert flood(cache, clock, namespace="paid", first_one_off=2000).kept_share == 1
    assert {pin.namespace for pin in cache.pins()} == {"paid"}


def test_a_dry_run_only_reports(make: MakeCache, clock: ManualClock) -> None:
    """Nothing is pinned and no hit changes, but what would have been pinned, and gained, is told."""
    cache = make(NUM_BLOCKS, auto_pin=replace(LONG, dry_run=True))
    plain = flood(make(NUM_BLOCKS), clock)
    assert flood(cache, clock).cached == plain.cached
    report = cache.auto_pin_report()
    assert cache.pins() == []
    assert (report.dry_run, report.num_pins > 0, report.num_pinned_tokens) == (True, True, 0)
    assert report.gained_tokens >= 10 * 76
    assert any(candidate.is_pinned for candidate in report.candidates)
    cache.set_auto_pin(LONG)
    assert flood(cache, clock, first_one_off=2000).kept_share == 1


def test_it_can_be_switched_at_run_time(make: MakeCache, clock: ManualClock) -> None:
    """Off ends the automatic pins and no others; what is no configuration is refused."""
    cache = make(NUM_BLOCKS, auto_pin=LONG)
    flood(cache, clock)
    mine = cache.pin(tokens(7, 8), owner="me")
    assert len(cache.pins()) > 1
    with pytest.raises(ConfigError, match="AutoPinConfig"):
        cache.set_auto_pin("on")  # type: ignore[arg-type]
    assert len(cache.pins()) > 1
    cache.set_auto_pin(None)
    assert [pin.id for pin in cache.pins()] == [mine.id]
    assert not cache.auto_pin_report().is_on
    assert {past.end for past in cache.past_pins() if past.pin.is_automatic} == {"lapsed"}


def test_explicit_pins_come_first(make: MakeCache, clock: ManualClock) -> None:
    """An automatic pin gives its quota to an explicit one at once, soft or hard."""
    for level in ("hard", "soft"):
        cache = make(NUM_BLOCKS, auto_pin=LONG, pin_quota=0.2)
        flood(cache, clock)
        assert sum(pin.num_pinned_tokens for pin in cache.pins() if pin.is_automatic) >= 80
        run(cache, tokens(3, 97))
        mine = cache.pin(tokens(3, 96), level=level)
        assert mine.num_pinned_tokens == 96
        stats = cache.stats()
        assert stats.pinned_blocks <= stats.quota_blocks == 25
        assert all(pin.num_pinned_tokens <= 4 for pin in cache.pins() if pin.is_automatic)


def test_a_pin_lapses_when_its_uses_end(make: MakeCache, clock: ManualClock) -> None:
    """A document that nobody asks about any more is let go after a few of its gaps, and its memory is used again."""
    cache = make(NUM_BLOCKS, auto_pin=LONG)
    flood(cache, clock)
    assert cache.pins()
    for number in range(300):
        clock.advance(1.0)
        run(cache, tokens(5000 + number, 41))
    assert cache.pins() == []
    assert cache.match(DOCUMENT).num_tokens == 0
    assert cache.stats().num_lapsed_pins == cache.auto_pin_report().num_lapsed > 0


def test_a_request_that_comes_back_is_no_further_use(make: MakeCache, clock: ManualClock) -> None:
    """Preempted requests that look their prompt up again make no habit."""
    cache = make(NUM_BLOCKS, auto_pin=LONG)
    flood(cache, clock, num_rounds=2)
    flood(cache, clock, count_lookup=False, request_id="again", first_one_off=2000)
    assert cache.pins() == []
    assert all(candidate.num_uses <= 2 for candidate in cache.auto_pin_report().candidates)


def test_a_loop_too_long_for_the_pool_is_kept_in_part(make: MakeCache, clock: ManualClock) -> None:
    """Documents in a round, together larger than the pool, all miss under LRU; pins keep what the quota holds."""
    documents = [tokens(number + 1, 81) for number in range(10)]  # 200 blocks
    for auto_pin, num_kept in ((None, 0), (LONG, 1)):  # one of 20 blocks fits under the quota of 38
        cache = make(NUM_BLOCKS, auto_pin=auto_pin)
        for number in range(30):
            cached = []
            for document in documents:
                clock.advance(1.0)
                cached.append(run(cache, [*document, number]))
        assert sorted(cached) == [0] * (10 - num_kept) + [80] * num_kept


def test_groups_that_slide_are_kept_whole(make: MakeCache, clock: ManualClock) -> None:
    """[H99] In a window model an automatic pin keeps what a hit at its end needs in every group."""
    groups = (LayerGroup("full"), LayerGroup("window", window_tokens=16, num_lanes=2))
    plain = flood(make(2 * NUM_BLOCKS, groups=groups), clock, num_one_off=40)
    assert plain.kept_share == 0
    assert flood(make(2 * NUM_BLOCKS, groups=groups, auto_pin=LONG), clock, num_one_off=40).kept_share > 0.8


def test_memory_is_bounded(make: MakeCache, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Habits, first uses and what waits to be judged stay within their limits, however many prefixes come."""
    monkeypatch.setattr(habits, "MAX_HABITS", 50)
    monkeypatch.setattr(habits, "MAX_FIRST_USES", 70)
    cache = make(NUM_BLOCKS, auto_pin=LONG)
    for number in range(300):
        clock.advance(0.1)
        for _ in range(2):
            run(cache, tokens(number + 1, 81))
    pinner = cache._store.auto_pins
    assert pinner is not None
    known = pinner._habits
    assert (len(known.by_key), len(known._first_uses)) <= (50, 70)
    assert len(known._deadlines) <= 350
    assert cache.auto_pin_report().candidates


def test_what_is_judged(make: MakeCache) -> None:
    """A class of habits is judged by those that were used again in time, and by those whose patience has ended."""
    known = Habits()

    def use(key: int, at: float, last: float = 0.0) -> habits.Habit:
        return known.use_again(key, "", 8, last, False, at, 1.0)

    for key in range(20):
        use(key, 10.0)  # second use of each, after a gap of 10 s
    for key in range(10):
        use(key, 20.0)
    assert (known._num_judged[2], known._num_used_again[2]) == (10, 10)
    use(99, 60.0)  # all patience is over
    assert (known._num_judged[2], known._num_used_again[2]) == (30, 10)
    habit = known.by_key[0]
    assert (habit.gap_seconds, habit.longest_gap_seconds, habit.patience_seconds) == (10.0, 10.0, 30.0)
    assert known.worth(habit, 1.0, 20.0) > known.worth(habit, 25.0, 20.0) > known.worth(habit, 25.0, 50.1) == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_ghosts_tell_what_more_memory_would_find(seed: int) -> None:
    """For single blocks under LRU, those that come back within `extra` evictions are what a cache larger by `extra`
    blocks finds; and uses near the tail are about those that a smaller cache misses."""
    rng = random.Random(seed)
    size, extra = 50, 12

    class Lru:
        def __init__(self, num_blocks: int) -> None:
            self.num_blocks, self.used_at = num_blocks, OrderedDict[int, float]()

        def use(self, block: int, now: float) -> tuple[float | None, tuple[int, float] | None]:
            before = self.used_at.pop(block, None)
            self.used_at[block] = now
            return before, self.used_at.popitem(last=False) if len(self.used_at) > self.num_blocks else None

    caches = {num: Lru(num) for num in (size - extra, size, size + extra)}
    pressure, evicted = Pressure(size), dict[int, int]()
    found = dict.fromkeys(caches, 0)
    num_kept = num_near = 0
    for step in range(20_000):
        block = min(int(rng.paretovariate(0.6)), 300)
        before = {num: cache.use(block, float(step)) for num, cache in caches.items()}
        for num, (used_at, _) in before.items():
            found[num] += used_at is not None
        used_at, gone = before[size]
        if used_at is not None:
            num_near += pressure.num_near_tail([used_at], [1], extra)
        elif block in evicted:
            num_kept += pressure.num_kept(np.array([evicted[block]]), extra)
        if gone is not None:
            pressure.on_evicted(1, gone[1])
            evicted[gone[0]] = pressure.num_evicted_blocks
    assert num_kept == pytest.approx(found[size + extra] - found[size], rel=0.25)
    assert 0.8 < num_near / (found[size] - found[size - extra]) < 1.8  # rather too many: it makes pins dearer


def test_the_library_has_it_off() -> None:
    """Without `auto_pin` the cache pins nothing by itself and learns nothing."""
    cache = CacheManager(CacheConfig(num_pages=4))
    assert cache.config.auto_pin is None
    assert not cache.auto_pin_report().is_on
    with pytest.raises(ConfigError):
        AutoPinRule(min_tokens=-1)
    with pytest.raises(ConfigError):
        AutoPinConfig(rate_window_seconds=0)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_breaks_around_automatic_pins(make: MakeCache, clock: ManualClock, seed: int) -> None:
    """With explicit pins, other quotas and sizes, clears, aborts and switches in between, every invariant holds."""
    rng = random.Random(seed)
    groups = (LayerGroup("full"), LayerGroup("window", window_tokens=16)) if seed % 2 else (LayerGroup("full"),)
    cache = make(2 * NUM_BLOCKS, groups=groups, auto_pin=LONG, pin_quota=0.4)
    documents = [tokens(number + 1, 81) for number in range(8)]
    num_made = 0
    for number in range(1500):
        clock.advance(rng.expovariate(2.0))
        namespace = rng.choice(["", "", "other"])
        if rng.random() < 0.4:
            prompt = [*rng.choice(documents[: 2 + number // 300]), number]
        else:
            prompt = tokens(100 + number, rng.choice([9, 41, 60]))
        with cache.lease(prompt, namespace=namespace) as lease:
            if not lease.try_reserve(len(prompt)) or rng.random() < 0.05:
                continue  # aborted before it was computed
            lease.commit(len(prompt))
        act = rng.random()
        if act < 0.03:
            cache.pin(rng.choice(documents), level=rng.choice(["hard", "soft"]), partial=True, ttl_seconds=20)
        elif act < 0.05 and cache.pins():
            cache.unpin(rng.choice(cache.pins()).id)
        elif act < 0.06:
            cache.set_pin_quota(rng.choice([0.4, 0.6]), rng.choice([None, "other"]))
        elif act < 0.07:
            cache.resize(rng.choice([NUM_BLOCKS, 2 * NUM_BLOCKS, 3 * NUM_BLOCKS]))
        elif act < 0.075:
            cache.clear(rng.choice([None, "other"]), include_pins=rng.random() < 0.5)
        elif act < 0.08:
            cache.set_auto_pin(rng.choice([None, replace(LONG, dry_run=True)]))
            cache.set_auto_pin(LONG)
        elif act < 0.1:
            cache.compact(4)
        num_made += sum(pin.is_automatic for pin in cache.pins())
        if number % 10 == 0:
            cache.check_integrity()
            stats = cache.stats()
            assert stats.pinned_blocks <= stats.quota_blocks
            assert cache.auto_pin_report().num_pins <= 1024
    assert num_made > 0
