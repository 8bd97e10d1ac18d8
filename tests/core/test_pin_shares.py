"""Who gives way to whom, and who gets what becomes free: pins that share prefixes, alike or not, and automatic ones."""

from __future__ import annotations

import pytest

from looseleaf import CacheManager, LayerGroup, NamespaceLayer, PinQuotaExceeded
from looseleaf.core.namespaces import Tenancy
from looseleaf.core.tokens import pack_tokens
from looseleaf.testing.clock import ManualClock
from tests.core.conftest import MakeCache, run, start, tokens


def pin_automatically(cache: CacheManager, prompt: list[int], namespace: str = "") -> str:
    return cache._pins.pin_automatically(Tenancy(namespace, namespace), pack_tokens(prompt))


def held(cache: CacheManager) -> list[int]:
    return [pin.num_pinned_tokens for pin in cache.pins()]


def test_displaced_pins_of_two_priorities_keep_what_costs_nothing(make: MakeCache) -> None:
    """Of two soft pins on one prefix the lower one gives way first; what the other still holds it holds again."""
    cache = make(20, pin_quota=0.2)
    run(cache, tokens(1, 16), "shared")
    run(cache, tokens(2, 8), "hard")
    cache.pin(request_id="shared", level="soft", priority=0)
    cache.pin(request_id="shared", level="soft", priority=1)
    cache.pin(request_id="hard")
    assert held(cache) == [8, 8, 8]


def test_automatic_pins_give_way_to_explicit_soft_ones(make: MakeCache) -> None:
    """A soft pin takes the quota that it needs from automatic pins, no more, whatever its priority."""
    cache = make(40, pin_quota=0.2)
    for number in (1, 2, 3):
        run(cache, tokens(number, 16))
    pin_automatically(cache, tokens(1, 16))
    pin_automatically(cache, tokens(2, 16))
    assert held(cache) == [16, 16]
    pin = cache.pin(tokens(3, 12), level="soft", priority=-5)
    assert held(cache) == [16, 4, 12]
    cache.unpin(pin.id)
    assert held(cache) == [16, 16]


def test_automatic_pins_give_way_to_tokens_that_come(make: MakeCache) -> None:
    """So they do when what an explicit pin waits for is stored."""
    cache = make(40, pin_quota=0.1)
    run(cache, tokens(1, 16))
    pin_automatically(cache, tokens(1, 16))
    cache.pin(tokens(2, 16), level="soft")
    assert held(cache) == [16, 0]
    run(cache, tokens(2, 16))
    assert held(cache) == [0, 16]


def test_automatic_pins_do_not_give_way_in_vain(make: MakeCache) -> None:
    """A pin that its namespace's quota limits takes nothing from automatic pins of other namespaces."""
    cache = make(40, pin_quota=0.1, namespace_pin_quotas={"a": 0.05})
    run(cache, tokens(1, 16))
    run(cache, tokens(2, 16), namespace="a")
    pin_automatically(cache, tokens(1, 16))
    cache.pin(tokens(2, 16), namespace="a", level="soft")
    assert held(cache) == [8, 8]
    cache.pin(tokens(2, 16), namespace="a", level="soft", priority=3)
    assert held(cache) == [8, 8, 8]


def test_pins_that_are_alike_count_for_themselves(make: MakeCache) -> None:
    """A pin like one that was there before has its own hits, served tokens and cost: those since it was made."""
    cache = make(16, pin_quota=0.5)
    run(cache, tokens(1, 32))
    first = cache.pin(tokens(1, 32))
    for _ in range(2):
        run(cache, [*tokens(1, 32), 0])
        for seed in (2, 3):
            run(cache, tokens(seed, 32))
    second = cache.pin(tokens(1, 32))
    assert (second.num_hits, second.served_tokens, second.cost_tokens, second.last_used_at) == (0, 0, 0.0, None)
    before = cache.pins()[0]
    assert before.cost_tokens > 0
    run(cache, [*tokens(1, 32), 0])
    run(cache, tokens(2, 32))
    one, other = cache.pins()
    assert (one.num_hits, other.num_hits, other.served_tokens) == (3, 1, 32)
    assert one.cost_tokens - before.cost_tokens == pytest.approx(other.cost_tokens)
    assert cache.unpin(first.id).num_hits == 3
    assert held(cache) == [32]
    cache.unpin(second.id)
    assert cache.stats().pinned_blocks == 0


def test_pins_that_are_alike_end_each_at_its_time(make: MakeCache, clock: ManualClock) -> None:
    """Of pins that are alike each has its own time to live, refreshed or not; the last one to end sets free."""
    cache = make(16, pin_quota=1.0)
    run(cache, tokens(1, 16))
    for ttl_seconds, refresh in ((5, False), (7, True), (9, False)):
        cache.pin(tokens(1, 16), ttl_seconds=ttl_seconds, refresh=refresh)
    clock.advance(4)
    run(cache, tokens(1, 17))
    assert [pin.expires_at for pin in cache.pins()] == [5, 11, 9]
    cache.pin(tokens(1, 16), ttl_seconds=1, refresh=True)  # that use was before it
    assert cache.pins()[-1].expires_at == 5
    for seconds, left in ((1, 2), (4, 1), (2, 0)):
        clock.advance(seconds)
        assert len(cache.pins()) == left
        assert cache.stats().pinned_blocks == (4 if left else 0)


@pytest.mark.parametrize("levels", [("hard", "soft"), ("soft", "hard"), ("hard", "hard"), ("soft", "soft")], ids=str)
def test_diverging_prompts_split_what_is_pinned(make: MakeCache, levels: tuple[str, str]) -> None:
    """Prompts that part inside a pinned run split it: pins that end before, at and behind the parting hold what they
    held, and each can be undone alone."""
    cache = make(32, pin_quota=1.0)
    run(cache, tokens(1, 24))
    ends = (8, 12, 16, 24)
    pins = [cache.pin(tokens(1, 24), last_token=end, level=levels[number % 2]) for number, end in enumerate(ends)]
    for end in (4, 12, 14, 20):
        run(cache, [*tokens(1, end), *tokens(end, 8)])
        cache.check_integrity()
    assert held(cache) == list(ends)
    assert cache.stats().pinned_blocks == 6
    for pin in pins[::-1]:
        cache.unpin(pin.id)
        left = [end for end in ends if end < pin.num_pinned_tokens]
        assert cache.stats().pinned_blocks == (max(left) // 4 if left else 0)


def test_a_group_alone_can_be_pinned(make: MakeCache) -> None:
    """A pin on one group that slides guards its rows alone, counts them, and keeps that group's hit possible as long as
    the others are there."""
    groups = (LayerGroup("full"), LayerGroup("window", window_tokens=8, num_lanes=2))
    cache = make(60, pin_quota=0.17, groups=groups)
    run(cache, tokens(1, 24))
    window = cache.pin(tokens(1, 24), cache_type="window")
    assert (window.num_pinned_tokens, cache.stats().pinned_blocks) == (24, window.num_blocks)
    assert window.num_blocks == 6 + 2 * 2  # what keeps all, and two rows of the window in two lanes
    run(cache, tokens(2, 4))
    with pytest.raises(PinQuotaExceeded):
        cache.pin(tokens(2, 4), cache_type="full")


def test_a_namespace_lives_while_pins_wait_in_it(make: MakeCache) -> None:
    """A namespace that stores nothing is kept while a pin waits in it, also behind an old lease, and forgotten after
    the last of them."""
    cache = make(8, pin_quota=1.0)
    pin = cache.pin(tokens(1, 8), namespace="a")
    lease = start(cache, tokens(2, 8), namespace="a")
    cache.clear("a")
    lease.release()
    assert cache.stats().num_namespaces == 1
    run(cache, tokens(1, 8), namespace="a")
    assert held(cache) == [8]
    cache.clear("a", include_pins=True)
    assert cache.stats().num_namespaces == 0
    assert cache.past_pins()[0].pin.id == pin.id
    for number in range(20):
        cache.unpin(cache.pin(tokens(1, 8), namespace=f"n{number}").id)
    assert cache.stats().num_namespaces == 0


def test_automatic_pins_on_one_prefix_keep_what_costs_nothing(make: MakeCache) -> None:
    """Of two automatic pins on one prefix, both of which gave way, each holds what the other still holds."""
    cache = make(40, pin_quota=0.1)
    run(cache, tokens(1, 16))
    run(cache, tokens(2, 8))
    pin_automatically(cache, tokens(1, 16))
    pin_automatically(cache, tokens(1, 12))
    cache.pin(tokens(2, 8), level="soft")
    assert held(cache) == [8, 8, 8]


def test_an_explicit_pin_on_the_path_of_an_automatic_one(make: MakeCache) -> None:
    """An explicit soft pin that goes on behind an automatic one takes all of the quota for both."""
    cache = make(40, pin_quota=0.1)
    run(cache, tokens(1, 24))
    pin_automatically(cache, tokens(1, 16))
    pin = cache.pin(tokens(1, 24), level="soft")
    assert (held(cache), cache.stats().pinned_blocks) == ([16, 16], 4)
    assert pin.is_limited
    cache.set_pin_quota(0.15)
    assert (held(cache), cache.stats().pinned_blocks) == ([16, 24], 6)


@pytest.mark.parametrize("level", ["hard", "soft"])
def test_a_pin_follows_a_window_within_its_quota(make: MakeCache, level: str) -> None:
    """A pin whose group slides gives back what slid out as it goes on: the quota of one window lets it follow to the
    end."""
    cache = make(20, pin_quota=0.1, groups=(LayerGroup("window", window_tokens=8),))
    cache.pin(tokens(1, 24), level=level)
    with cache.lease(tokens(1, 24)) as lease:
        for end in range(4, 25, 4):
            lease.reserve(end)
            lease.commit(end)
            assert held(cache) == [end]
    assert cache.stats().pinned_blocks == 2
    assert cache.match([*tokens(1, 24), 0]).num_tokens == 24


def test_the_other_pin_is_still_refreshed(make: MakeCache, clock: ManualClock) -> None:
    """One refreshed pin that ends takes nothing from another."""
    cache = make(16, pin_quota=1.0)
    run(cache, tokens(1, 17))
    first = cache.pin(tokens(1, 17), ttl_seconds=10, refresh=True)
    cache.pin(tokens(1, 12), ttl_seconds=10, refresh=True)
    cache.unpin(first.id)
    clock.advance(5)
    run(cache, tokens(1, 17))
    assert [pin.expires_at for pin in cache.pins()] == [15]


def test_a_full_layer_holds_up_no_pin_that_waits_in_another(make: MakeCache) -> None:
    """Quota of all goes to a pin whose next block lies in a namespace without a quota of its own, though an earlier pin
    waits for the full layer in which both begin."""
    cache = make(16, pin_quota=0.25, namespace_pin_quotas={"": 0.125})
    shared, own = tokens(1, 12), tokens(2, 12)
    layers = (NamespaceLayer("", 4),)
    run(cache, shared)
    run(cache, shared[:4] + own, namespace="a", layers=layers)
    first = cache.pin(shared, level="soft")
    second = cache.pin(shared[:4] + own, namespace="a", layers=layers, level="soft")
    assert (first.num_pinned_tokens, second.num_pinned_tokens) == (8, 12)
    cache.set_pin_quota(0.5)
    now = {pin.id: pin.num_pinned_tokens for pin in cache.pins()}
    assert now == {first.id: 8, second.id: 16}
