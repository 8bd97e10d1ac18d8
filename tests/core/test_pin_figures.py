"""Pins found again, bounded, and accounted for: labels, parts, longest life, quotas by namespace, use and cost."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from looseleaf import ConfigError, LayerGroup, PinQuotaExceeded, RequestError
from looseleaf.testing.clock import ManualClock

from .conftest import MakeCache, run, tokens


def test_unpin_by_owner(make: MakeCache) -> None:
    """All pins of an owner can be undone at once, in one namespace or in all."""
    cache = make(32, pin_quota=1.0)
    for number, (owner, namespace) in enumerate([("ops", ""), ("ops", "a"), ("dev", ""), ("ops", "")]):
        cache.pin(tokens(number, 8), namespace=namespace, owner=owner, labels={"n": str(number)})
    gone = cache.unpin_all(owner="ops", namespace="")
    assert [pin.labels["n"] for pin in gone] == ["0", "3"]
    assert [(pin.owner, pin.namespace) for pin in cache.pins()] == [("ops", "a"), ("dev", "")]
    assert len(cache.unpin_all(owner="ops")) == 1
    assert cache.unpin_all(owner="ops") == []


def test_a_prompt_without_its_answer(make: MakeCache) -> None:
    """part="prompt" pins what was asked, not what was generated; last_token cuts anywhere."""
    cache = make(32, pin_quota=1.0)
    with cache.lease(tokens(1, 13), "r") as lease:
        lease.reserve(13)
        lease.commit(13)
        lease.append(tokens(2, 10))
        lease.reserve(23)
        lease.commit(23)
        assert cache.pin(request_id="r", part="prompt").num_pinned_tokens == 12
    assert cache.pin(request_id="r").num_pinned_tokens == 20
    prompt = cache.pin(request_id="r", part="prompt")
    assert (prompt.num_tokens, prompt.num_pinned_tokens) == (13, 12)
    part = cache.pin(request_id="r", last_token=9)
    assert (part.num_tokens, part.num_pinned_tokens) == (9, 8)
    assert cache.pin(tokens(1, 13), last_token=5).num_tokens == 5
    with pytest.raises(RequestError, match="only 23 tokens"):
        cache.pin(request_id="r", last_token=24)
    for wrong in ({"part": "answer"}, {"last_token": 0}, {"max_ttl_seconds": -1.0}, {"priority": -(2**31)}):
        with pytest.raises(RequestError):
            cache.pin(request_id="r", **wrong)


def test_a_longest_life(make: MakeCache, clock: ManualClock) -> None:
    """However often a pin is refreshed, it ends when its longest life is over."""
    cache = make(16, pin_quota=1.0)
    run(cache, tokens(1, 17), "doc")
    cache.pin(request_id="doc", ttl_seconds=10, max_ttl_seconds=25, refresh=True)
    for _ in range(3):
        clock.advance(8)
        run(cache, tokens(1, 17))
    assert cache.pins()[0].expires_at == 25
    clock.advance(1)
    assert cache.pins() == []
    cache.pin(tokens(1, 17), max_ttl_seconds=5)
    assert cache.pins()[0].expires_at == 30


def test_a_namespace_has_a_quota_of_its_own(make: MakeCache) -> None:
    """A namespace's pins stay within its quota, and all pins within that of all; the refusal says which it was."""
    cache = make(40, pin_quota=0.5, namespace_pin_quotas={"a": 0.1})
    for namespace in ("a", "b"):
        with cache.lease(tokens(1, 24), namespace=namespace) as lease:
            lease.reserve(24)
            lease.commit(24)
    with pytest.raises(PinQuotaExceeded, match="quota of namespace 'a' of 4 blocks") as caught:
        cache.pin(tokens(1, 24), namespace="a")
    assert (caught.value.needed_blocks, caught.value.available_blocks, caught.value.namespace) == (6, 4, "a")
    assert cache.pin(tokens(1, 24), namespace="b").num_pinned_tokens == 24
    soft = cache.pin(tokens(1, 24), namespace="a", level="soft")
    assert soft.num_pinned_tokens == 16
    hard = cache.pin(tokens(1, 24), namespace="a", partial=True)
    assert hard.num_pinned_tokens == 16


def test_quotas_change_at_run_time(make: MakeCache) -> None:
    """A larger quota is used at once, a smaller one takes from soft pins, and hard ones refuse it with the numbers."""
    cache = make(40, pin_quota=0.1)
    run(cache, tokens(1, 48), "doc")
    pin = cache.pin(request_id="doc", level="soft")
    assert pin.num_pinned_tokens == 16
    cache.set_pin_quota(0.2)
    assert (cache.pins()[0].num_pinned_tokens, cache.stats().quota_blocks) == (32, 8)
    cache.set_pin_quota(0.05, namespace="")
    assert cache.pins()[0].num_pinned_tokens == 8
    cache.set_pin_quota(0.2, namespace="")
    cache.pin(request_id="doc", partial=True)
    with pytest.raises(PinQuotaExceeded, match="quota of 6 blocks"):
        cache.set_pin_quota(0.15)
    with pytest.raises(PinQuotaExceeded, match="of namespace ''"):
        cache.set_pin_quota(0.15, namespace="")
    with pytest.raises(ConfigError):
        cache.set_pin_quota(1.5)
    with pytest.raises(ConfigError):
        cache.set_pin_quota(-1, namespace="x")
    assert (cache.stats().quota_blocks, cache.config.pin_quota) == (8, 0.2)


def test_uses_are_counted(make: MakeCache, clock: ManualClock) -> None:
    """A pin tells how often it served, how many tokens, and when last; one that shares its prefix its own part."""
    cache = make(32, pin_quota=1.0)
    run(cache, tokens(1, 21), "doc")
    whole, part = cache.pin(request_id="doc"), cache.pin(request_id="doc", last_token=8)
    clock.advance(5)
    run(cache, [*tokens(1, 20), 7, 7, 7])
    run(cache, [*tokens(1, 12), 8, 8, 8, 8, 8])
    clock.advance(1)
    cache.match(tokens(1, 21))
    found = {pin.id: pin for pin in cache.pins()}
    assert (found[whole.id].num_hits, found[whole.id].served_tokens) == (1, 20)
    assert (found[part.id].num_hits, found[part.id].served_tokens) == (2, 16)
    assert found[part.id].last_used_at == clock() - 1
    late = cache.pin(request_id="doc")
    assert (late.num_hits, late.last_used_at) == (0, None)


def test_pins_cost_others(make: MakeCache) -> None:
    """Tokens computed again after their eviction are charged to what was pinned meanwhile, by its share of memory."""
    cache = make(16, pin_quota=0.5)
    run(cache, tokens(1, 32), "doc")  # 8 of 16 blocks
    pin = cache.pin(request_id="doc")
    for _ in range(2):
        for seed in (2, 3):
            run(cache, tokens(seed, 32))
    explanation = None
    with cache.lease(tokens(2, 32), "again"):
        explanation = cache.explain("again")
    assert explanation.reason == "evicted"
    assert explanation.num_evicted_tokens == 28  # of 32, the last block is always computed
    cost = cache.pins()[0].cost_tokens
    assert cost == pytest.approx(3 * 28 * 8 / 16)  # three such look-ups, half of the idle memory is the pin's
    assert cache.unpin(pin.id).cost_tokens == pytest.approx(cost)


def test_many_pins_cost_a_look_up_nothing(make: MakeCache) -> None:
    """Uses are counted by node: a thousand refreshed pins on one prefix are not walked at each look-up."""
    cache = make(64, pin_quota=1.0)
    run(cache, tokens(1, 40), "doc")
    for _ in range(1000):
        cache.pin(request_id="doc", ttl_seconds=1000, refresh=True)
    calls = count_calls(lambda: run(cache, [*tokens(1, 40), 1]))
    assert calls < 1000
    assert all(pin.num_hits == 1 for pin in cache.pins())


def count_calls(action: Callable[[], object]) -> int:
    """Python calls made by `action`."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def test_held_blocks_of_a_pin(make: MakeCache) -> None:
    """A pin says what it takes in all lanes: its path in the full group, a window of it in the others."""
    cache = make(120, groups=(LayerGroup("full"), LayerGroup("window", window_tokens=16, num_lanes=2)), pin_quota=1.0)
    run(cache, tokens(1, 64), "doc")
    assert cache.pin(request_id="doc").num_blocks == 16 + 2 * 4
