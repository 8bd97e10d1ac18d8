"""What many pins cost: calls that a step makes, counted, with thousands of live pins of every kind."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from looseleaf import CacheManager
from tests.core.conftest import MakeCache, run, start, tokens

MANY = 3000


def count_calls(act: Callable[[], object]) -> int:
    """Python calls, and calls of built-ins, that `act` makes."""
    num_calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
    return num_calls


def wait_for_other_tokens(cache: CacheManager) -> None:
    for number in range(MANY):
        cache.pin(tokens(10_000 + number, 8))


def want_quota(cache: CacheManager) -> None:
    """Soft pins that lack quota: `make_crowded` has used it up, and their tokens are held by running requests."""
    start(cache, tokens(7000, 16))
    for number in range(MANY):
        cache.pin(tokens(7000, 16), level="soft", priority=-1 - number % 3)


def want_quota_of_a_namespace(cache: CacheManager) -> None:
    start(cache, tokens(7000, 16), namespace="small")
    for _ in range(MANY):
        cache.pin(tokens(7000, 16), namespace="small", level="soft")


def hold_softly(cache: CacheManager) -> None:
    for number in range(MANY):
        cache.pin(tokens(2, 16), level="soft", priority=number % 5)


def refreshed(cache: CacheManager) -> None:
    for number in range(MANY):
        cache.pin(tokens(2, 16), ttl_seconds=10.0 + number, refresh=True)


CROWDS = [wait_for_other_tokens, want_quota, want_quota_of_a_namespace, hold_softly, refreshed]


def make_crowded(make: MakeCache) -> CacheManager:
    """A full cache of 128 blocks, whose quota is used up: 4 blocks hard, 4 soft, the rest soft in pieces of 4 of one
    priority below."""
    cache = make(128, pin_quota=0.25, namespace_pin_quotas={"small": 0.0})
    run(cache, tokens(1, 16), "hard")
    run(cache, tokens(2, 16), "soft")
    cache.pin(request_id="hard")
    cache.pin(request_id="soft", level="soft", priority=9)
    for number in range(3, 9):
        run(cache, tokens(number, 16))
        cache.pin(tokens(number, 16), level="soft", priority=1)
    for number in range(20, 60):
        run(cache, tokens(number, 16))
    assert cache.stats().pinned_blocks == 32
    return cache


def serve_under_pressure(cache: CacheManager) -> None:
    for number in range(100, 104):
        run(cache, [*tokens(2, 16), *tokens(number, 16)])
    cache.maintain()


def change_pins(cache: CacheManager) -> None:
    """Pins come and go, and take quota from each other."""
    for _ in range(3):
        cache.unpin(cache.pin(tokens(1, 12)).id)
        hard = cache.pin(tokens(59, 16))
        cache.unpin(hard.id)


def follow_a_running_request(cache: CacheManager) -> None:
    """A hard pin that grows by a block in each step and takes its quota from soft ones."""
    pin = cache.pin(tokens(300, 24))
    with cache.lease(tokens(300, 24)) as lease:
        for end in range(4, 25, 4):
            lease.reserve(end)
            lease.commit(end)
    cache.unpin(pin.id)


def evict_soft_pins(cache: CacheManager) -> None:
    """More is needed than what nobody pins: soft pins give way, and quota becomes free."""
    room = cache.room()
    unpinned = room.num_free_blocks + room.num_evictable_blocks - 20
    for end in range(unpinned, unpinned + 4):
        with cache.lease(tokens(400, end * 4)) as lease:
            lease.reserve(end * 4)


ACTS = [serve_under_pressure, change_pins, follow_a_running_request, evict_soft_pins]


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("crowd", CROWDS)
def test_a_crowd_of_pins_is_not_walked(
    make: MakeCache, crowd: Callable[[CacheManager], None], act: Callable[[CacheManager], None]
) -> None:
    """Thousands of pins add less than a call each to steps, pins and unpins: nobody walks them."""
    few, many = make_crowded(make), make_crowded(make)
    crowd(many)
    alone, crowded = count_calls(lambda: act(few)), count_calls(lambda: act(many))
    assert crowded < 2 * alone + MANY // 4
