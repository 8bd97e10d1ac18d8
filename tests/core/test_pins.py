"""Laws of pins: what is pinned stays, within a quota, for its time, and never at the price of the rest."""

from __future__ import annotations

import sys

import pytest

from looseleaf import CacheManager, OutOfBlocks, PinQuotaExceeded, RequestError, UnknownPin, UnknownRequest
from looseleaf.core.pins import PinBook
from looseleaf.testing.clock import ManualClock
from tests.core.conftest import MakeCache, run, start, tokens


def flood(cache: CacheManager, count: int = 40, first: int = 500) -> None:
    """One-off prompts of several times the pool."""
    for number in range(first, first + count):
        run(cache, tokens(number, 16))


def test_pinned_survives_a_flood(make: MakeCache) -> None:
    """A pinned prompt is there after a flood of one-off prompts, an unpinned one is not; after unpin it goes too."""
    cache = make(32)
    run(cache, tokens(1, 24), "long_doc_123")
    run(cache, tokens(2, 24))
    pin = cache.pin(request_id="long_doc_123", cache_type="kv")
    assert (pin.num_tokens, pin.num_pinned_tokens, pin.level, pin.expires_at) == (24, 24, "hard", None)
    flood(cache)
    assert cache.match([*tokens(1, 24), 0]).num_tokens == 24
    assert cache.match([*tokens(2, 24), 0]).num_tokens == 0
    cache.unpin(request_id="long_doc_123", cache_type="kv")
    assert cache.stats().evictable_blocks == cache.stats().cached_blocks
    flood(cache)
    assert cache.match([*tokens(1, 24), 0]).num_tokens == 0


def test_quota_refuses_with_numbers(make: MakeCache) -> None:
    """[P67] A hard pin over quota is refused with the numbers and disturbs nothing; partial=True grants what fits."""
    cache = make(20, pin_quota=0.5)
    run(cache, tokens(1, 32), "eight")
    run(cache, tokens(2, 24), "six")
    first = cache.pin(request_id="eight")
    before = cache.stats()
    with pytest.raises(PinQuotaExceeded) as caught:
        cache.pin(request_id="six")
    error = caught.value
    assert (error.needed_blocks, error.available_blocks, error.quota_blocks, error.hard_pinned_blocks) == (6, 2, 10, 8)
    assert "cannot pin 6 more blocks: 2 left of a quota of 10 blocks, 8 already hard-pinned" in str(error)
    after = cache.stats()
    assert after.num_refused_pins == 1
    assert (after.pinned_blocks, after.num_pins) == (before.pinned_blocks, before.num_pins)
    part = cache.pin(request_id="six", partial=True)
    assert part.num_pinned_tokens == 8
    assert part.is_limited
    with start(cache, tokens(9, 39)):
        pass  # ten blocks are still there for running requests
    with cache.lease(tokens(10, 60)) as lease, pytest.raises(OutOfBlocks, match="10 pinned"):
        lease.reserve(61)
    cache.unpin(first.id)
    assert cache.pins()[0].num_pinned_tokens == 8  # the rest was evicted by then
    run(cache, tokens(2, 24))
    assert cache.pins()[0].num_pinned_tokens == 24  # and is held again when it comes back


def test_everything_pinned_is_a_clear_error(make: MakeCache) -> None:
    """[P67] With all blocks pinned a request is refused with the numbers, it does not hang."""
    cache = make(8, pin_quota=1.0)
    run(cache, tokens(1, 32), "all")
    cache.pin(request_id="all")
    cache.maintain()
    with (
        cache.lease(tokens(2, 4)) as lease,
        pytest.raises(OutOfBlocks, match="cannot reserve 1 blocks: 0 free, 0 evictable, 8"),
    ):
        lease.reserve(4)


def test_shared_blocks_count_once(make: MakeCache) -> None:
    """Two pins on one prefix hold its blocks once; both must be undone before it can go."""
    cache = make(20, pin_quota=0.5)
    run(cache, tokens(1, 24) + tokens(2, 8), "a")
    run(cache, tokens(1, 24) + tokens(3, 8), "b")
    first, second = cache.pin(request_id="a"), cache.pin(request_id="b")
    assert cache.stats().pinned_blocks == 10
    cache.unpin(first.id)
    assert cache.stats().pinned_blocks == 8
    flood(cache)
    assert cache.match([*tokens(1, 24), *tokens(3, 8), 0]).num_tokens == 32
    cache.unpin(second.id)
    assert cache.stats().pinned_blocks == 0


def test_pin_before_the_tokens_come(make: MakeCache) -> None:
    """A pin on tokens that are not there yet takes no quota, and holds them as they are computed."""
    cache = make(20, pin_quota=0.5)
    prompt = tokens(1, 21)
    pin = cache.pin(tokens=prompt, owner="ops")
    assert (pin.num_tokens, pin.num_pinned_tokens, cache.stats().pinned_blocks) == (21, 0, 0)
    with cache.lease(prompt) as lease:
        lease.reserve(21)
        lease.commit(9)
        assert cache.pins()[0].num_pinned_tokens == 8
        lease.commit(21)
        assert cache.pins()[0].num_pinned_tokens == 20
    flood(cache)
    assert cache.match([*prompt, 0]).num_tokens == 20


def test_pin_covers_a_prefix_of_an_edge(make: MakeCache) -> None:
    """A pin that ends inside a stored run holds its part only; the continuation hangs below it and can go."""
    cache = make(20, pin_quota=0.5)
    run(cache, tokens(1, 32))
    cache.pin(tokens=tokens(1, 13))
    assert cache.stats().pinned_blocks == 3
    flood(cache)
    assert cache.match(tokens(1, 32)).num_tokens == 12


def test_soft_pins_go_last_and_by_priority(make: MakeCache) -> None:
    """Softly pinned blocks go after everything unpinned, lowest priority first, and are held again when they return."""
    cache = make(12, pin_quota=1.0)
    run(cache, tokens(1, 16), "low")
    run(cache, tokens(2, 16), "high")
    cache.pin(request_id="low", level="soft", priority=1)
    cache.pin(request_id="high", level="soft", priority=5)
    run(cache, tokens(3, 12))
    run(cache, tokens(4, 12))
    assert cache.match([*tokens(1, 16), 0]).num_tokens == 16
    assert cache.match([*tokens(2, 16), 0]).num_tokens == 16
    run(cache, tokens(5, 32))
    assert cache.match([*tokens(1, 16), 0]).num_tokens == 0
    assert cache.match([*tokens(2, 16), 0]).num_tokens == 16
    held = {pin.request_id: pin.num_pinned_tokens for pin in cache.pins()}
    assert held == {"low": 0, "high": 16}
    assert cache.stats().pinned_blocks == 4
    run(cache, tokens(1, 16))
    assert {pin.request_id: pin.num_pinned_tokens for pin in cache.pins()} == {"low": 16, "high": 16}


def test_partly_evicted_soft_pin(make: MakeCache) -> None:
    """A soft pin whose tail is evicted holds the rest, and says how much."""
    cache = make(10, pin_quota=1.0)
    run(cache, tokens(1, 32), "soft")
    cache.pin(request_id="soft", level="soft")
    with start(cache, tokens(2, 15)):
        assert cache.pins()[0].num_pinned_tokens == 24
        assert cache.stats().pinned_blocks == 6
        cache.check_integrity()


def test_hard_pins_displace_soft_ones(make: MakeCache) -> None:
    """Hard and soft together stay within the quota: a hard pin takes it from the soft pin of lowest priority."""
    cache = make(20, pin_quota=0.5)
    for number, name in enumerate(("low", "high", "hard")):
        run(cache, tokens(number, 20), name)
    cache.pin(request_id="low", level="soft", priority=0)
    cache.pin(request_id="high", level="soft", priority=1)
    assert cache.stats().pinned_blocks == 10
    hard = cache.pin(request_id="hard")
    held = {pin.request_id: pin.num_pinned_tokens for pin in cache.pins()}
    assert held == {"low": 0, "high": 20, "hard": 20}
    assert cache.stats().pinned_blocks == 10
    cache.unpin(hard.id)
    held = {pin.request_id: pin.num_pinned_tokens for pin in cache.pins()}
    assert held == {"low": 20, "high": 20}  # quota that becomes free goes back to who lacks it


def test_soft_pin_gets_what_is_left(make: MakeCache) -> None:
    """A soft pin over quota is not refused: it holds what is left."""
    cache = make(20, pin_quota=0.25)
    run(cache, tokens(1, 32), "soft")
    pin = cache.pin(request_id="soft", level="soft")
    assert (pin.num_tokens, pin.num_pinned_tokens, pin.is_limited) == (32, 20, True)


def test_pins_expire_without_a_call(make: MakeCache, clock: ManualClock) -> None:
    """[P61] A pin whose holder never comes back expires when memory is wanted, once; a late unpin is harmless."""
    cache = make(8, pin_quota=1.0)
    run(cache, tokens(1, 32), "gone")
    pin = cache.pin(request_id="gone", ttl_seconds=300)
    assert pin.expires_at == 300
    clock.advance(299)
    with cache.lease(tokens(2, 4)) as lease:
        assert not lease.try_reserve(4)
        clock.advance(2)
        assert lease.try_reserve(4)
    stats = cache.stats()
    assert (stats.num_expired_pins, stats.num_pins, stats.pinned_blocks) == (1, 0, 0)
    before = cache.stats()
    with pytest.raises(UnknownPin):
        cache.unpin(pin.id)
    assert cache.stats() == before


def test_refresh_on_use(make: MakeCache, clock: ManualClock) -> None:
    """With refresh=True a reuse starts the time to live anew; reading does not."""
    cache = make(16, pin_quota=1.0)
    prompt = tokens(1, 17)
    run(cache, prompt, "kept")
    run(cache, tokens(2, 17), "lapses")
    cache.pin(request_id="kept", ttl_seconds=10, refresh=True)
    cache.pin(request_id="lapses", ttl_seconds=10)
    clock.advance(8)
    run(cache, prompt)
    run(cache, tokens(2, 17))
    cache.match(prompt)
    clock.advance(8)
    assert [(pin.request_id, pin.expires_at) for pin in cache.pins()] == [("kept", 18.0)]
    clock.advance(2)
    assert cache.pins() == []


def test_refresh_by_exactly_the_pinned_prompt(make: MakeCache, clock: ManualClock) -> None:
    """The prompt that is pinned refreshes its pin, though its last block can't hit; an expired one stays expired."""
    cache = make(16, pin_quota=1.0)
    run(cache, tokens(1, 16), "doc")
    cache.pin(request_id="doc", ttl_seconds=10, refresh=True)
    clock.advance(8)
    run(cache, tokens(1, 16))
    assert cache.pins()[0].expires_at == 18
    clock.advance(10)
    run(cache, tokens(1, 16))
    assert cache.pins() == []
    assert cache.stats().num_expired_pins == 1


def test_hard_pin_takes_back_quota_from_soft_ones(make: MakeCache) -> None:
    """Quota that a hard pin gives up goes to a hard pin that lacks some before it goes to soft ones."""
    cache = make(20, pin_quota=0.2)
    for number, name in enumerate(("soft", "first", "second")):
        run(cache, tokens(number, 16), name)
    cache.pin(request_id="soft", level="soft")
    first = cache.pin(request_id="first")
    second = cache.pin(request_id="second", partial=True)
    assert (second.num_pinned_tokens, second.is_limited) == (0, True)
    cache.unpin(first.id)
    held = {pin.request_id: pin.num_pinned_tokens for pin in cache.pins()}
    assert held == {"soft": 0, "second": 16}


def test_displaced_pins_keep_what_costs_nothing(make: MakeCache) -> None:
    """Of two soft pins on one prefix neither loses what the other still holds."""
    cache = make(20, pin_quota=0.2)
    run(cache, tokens(1, 16), "shared")
    run(cache, tokens(2, 8), "hard")
    for _ in range(2):
        cache.pin(request_id="shared", level="soft")
    cache.pin(request_id="hard")
    assert [pin.num_pinned_tokens for pin in cache.pins()] == [8, 8, 8]


def test_a_pin_is_limited_only_while_something_is_there_to_hold(make: MakeCache) -> None:
    """`is_limited` speaks of stored tokens, not of tokens that are gone or to come."""
    cache = make(8, pin_quota=0.0)
    run(cache, tokens(1, 16), "soft")
    assert cache.pin(request_id="soft", level="soft").is_limited
    cache.clear()
    assert not cache.pins()[0].is_limited


def test_waiting_pins_cost_nobody_else(make: MakeCache) -> None:
    """Storing a prompt looks only at pins that wait for it, however many wait for others."""
    cache = make(64, pin_quota=1.0)
    for number in range(1000):
        cache.pin(tokens=tokens(number, 8))
    looked_at: list[str] = []
    book = cache._store.pins
    advance = book.advance
    book.advance = lambda record: (looked_at.append(record.id), advance(record))[1]  # type: ignore[method-assign]
    run(cache, tokens(7, 8))
    run(cache, tokens(5000, 8))
    assert looked_at == ["pin-8"]


def test_a_growing_pin_costs_what_is_new(make: MakeCache) -> None:
    """A pin that follows a growing sequence does not walk all that it holds for each new block."""
    cache = make(600, pin_quota=1.0)
    prompt = tokens(1, 2200)
    cache.pin(prompt)
    lease = cache.lease(prompt)
    calls = []
    for end in range(4, 2200, 4):
        lease.reserve(end)
        num_calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal num_calls
            num_calls += event == "call"

        sys.setprofile(count)
        lease.commit(end)
        sys.setprofile(None)
        calls.append(num_calls)
    assert cache.pins()[0].num_pinned_tokens == 2196
    assert max(calls[-50:]) < 2 * max(calls[50:100])
    lease.release()


def test_limited_pins_are_not_walked_at_each_eviction(make: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pins that lack quota are looked at again when quota was given back, not whenever something is evicted."""
    cache = make(64, pin_quota=0.25)
    run(cache, tokens(1, 100), "doc")
    cache.pin(request_id="doc", level="soft")
    advanced = []
    advance = PinBook.advance
    monkeypatch.setattr(PinBook, "advance", lambda book, record: (advanced.append(record), advance(book, record))[1])
    for seed in range(2, 20):
        run(cache, tokens(seed, 100))
    assert len(advanced) <= 1


def test_cancelled_pins_leave_nothing(make: MakeCache) -> None:
    """Thousands of pins made and undone leave no expiries behind."""
    cache = make(8)
    for number in range(2000):
        cache.unpin(cache.pin(tokens=tokens(number, 8), ttl_seconds=86_400).id)
    assert len(cache._store.pins._expiries) < 200


def test_watermark_spares_soft_pins(make: MakeCache) -> None:
    """Softly pinned blocks go when they are needed, not to keep pages ready."""
    cache = make(16, pin_quota=1.0, reserve_pages=8)
    run(cache, tokens(1, 64), "soft")
    cache.pin(request_id="soft", level="soft")
    cache.maintain()
    assert cache.stats().cached_blocks == 16


@pytest.mark.parametrize("release_first", [True, False])
def test_freed_once_in_either_order(make: MakeCache, release_first: bool) -> None:
    """[P58, P59, P62] Held and pinned, undone in either order: evictable exactly once, at the second."""
    cache = make(8, pin_quota=1.0)
    lease = start(cache, tokens(1, 16), "both")
    pin = cache.pin(request_id="both")
    steps = [lease.release, lambda: cache.unpin(pin.id)]
    first, second = steps if release_first else reversed(steps)
    first()
    assert cache.stats().evictable_blocks == 0
    second()
    assert cache.stats().evictable_blocks == 4
    flood(cache, 1)


def test_unpin_by_request_undoes_the_latest(make: MakeCache) -> None:
    """unpin(request_id=...) undoes the latest pin of that id and cache type; then the one before; then it is
    unknown."""
    cache = make(16, pin_quota=1.0)
    run(cache, tokens(1, 16), "doc")
    first = cache.pin(request_id="doc", cache_type="kv", owner="first")
    cache.pin(request_id="doc", cache_type="full", owner="other type")
    second = cache.pin(request_id="doc", cache_type="kv", owner="second")
    assert cache.unpin(request_id="doc", cache_type="kv").id == second.id
    assert cache.unpin(request_id="doc").id == first.id
    with pytest.raises(UnknownPin):
        cache.unpin(request_id="doc")
    assert [pin.owner for pin in cache.pins()] == ["other type"]


def test_pin_of_a_live_request_covers_what_is_committed(make: MakeCache) -> None:
    """A live request's pin covers what it has committed at the call, not what follows."""
    cache = make(16, pin_quota=1.0)
    with cache.lease(tokens(1, 24), "live") as lease:
        lease.reserve(24)
        lease.commit(10)
        pin = cache.pin(request_id="live")
        assert (pin.num_tokens, pin.num_pinned_tokens) == (10, 8)
        lease.commit(24)
    assert cache.pins()[0].num_pinned_tokens == 8


def test_finished_requests_are_known_for_a_while(make: MakeCache) -> None:
    """The last requests can be pinned by id; older ones are unknown, and that says so."""
    cache = make(16, pin_quota=1.0, num_known_requests=3)
    for number in range(5):
        run(cache, tokens(number, 5), f"r{number}")
    cache.pin(request_id="r2")
    with pytest.raises(UnknownRequest, match="last 3 finished requests"):
        cache.pin(request_id="r1")
    with pytest.raises(UnknownRequest):
        cache.explain("r1")


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"tokens": [1], "request_id": "r"},
        {"tokens": [1], "level": "firm"},
        {"tokens": [1], "cache_type": "window"},
        {"tokens": [1], "ttl_seconds": 0},
        {"tokens": [1], "ttl_seconds": "5"},
        {"tokens": [1], "level": "soft", "priority": None},
        {"tokens": [1], "ttl_seconds": float("nan")},
    ],
    ids=str,
)
def test_bad_pins_are_refused(make: MakeCache, how: dict[str, object]) -> None:
    """A pin call that makes no sense is refused and makes no pin."""
    cache = make(8)
    with pytest.raises(RequestError):
        cache.pin(**how)  # type: ignore[arg-type]
    with pytest.raises(RequestError):
        cache.unpin()
    assert cache.pins() == []


def test_a_pin_serves_its_namespace_only(make: MakeCache) -> None:
    """Pins belong to a namespace."""
    cache = make(32)
    run(cache, tokens(1, 16), namespace="a")
    run(cache, tokens(1, 16), namespace="b")
    cache.pin(tokens=tokens(1, 16), namespace="a")
    flood(cache)
    assert cache.match([*tokens(1, 16), 0], namespace="a").num_tokens == 16
    assert cache.match([*tokens(1, 16), 0], namespace="b").num_tokens == 0
