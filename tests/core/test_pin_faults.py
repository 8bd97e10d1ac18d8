"""Faults that pinning had elsewhere: expiry on every path, what an exception leaves behind, who undoes what."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from looseleaf import (
    CacheConfig,
    CacheManager,
    InvalidTokens,
    LayerGroup,
    Lease,
    LeaseClosed,
    PinQuotaExceeded,
    UnknownPin,
    UnknownRequest,
)
from looseleaf.core.events import CacheEvent, PinChanged
from looseleaf.testing.clock import ManualClock
from tests.core.conftest import MakeCache, run, start, tokens

GROUPS = [
    (LayerGroup("full"),),
    (LayerGroup("full"), LayerGroup("window", window_tokens=8, num_lanes=2)),
    (LayerGroup("chunked", chunk_tokens=12),),
]


# --- P64: expiry on every path ------------------------------------------------------------------------------------


def lists(cache: CacheManager, lease: Lease) -> None:
    assert cache.pins() == []


def remembers(cache: CacheManager, lease: Lease) -> None:
    assert [(past.pin.id, past.end) for past in cache.past_pins()] == [("pin-1", "expired")]


def unpins(cache: CacheManager, lease: Lease) -> None:
    with pytest.raises(UnknownPin):
        cache.unpin("pin-1")
    with pytest.raises(UnknownPin):
        cache.unpin(request_id="doc")
    assert cache.unpin_all(owner="me") == []


def pins_again(cache: CacheManager, lease: Lease) -> None:
    assert cache.pin(tokens(2, 12), level="hard").num_pinned_tokens == 12
    assert cache.stats().hard_pinned_blocks == 3


def counts(cache: CacheManager, lease: Lease) -> None:
    stats = cache.stats()
    assert (stats.num_pins, stats.pinned_blocks, stats.num_expired_pins) == (0, 0, 1)
    assert stats.evictable_blocks == stats.cached_blocks


def has_room(cache: CacheManager, lease: Lease) -> None:
    assert cache.room().num_evictable_blocks == 9


def explains(cache: CacheManager, lease: Lease) -> None:
    with cache.lease([*tokens(1, 24), 0], "later") as later:
        assert later.num_cached_tokens == 24  # what is cached may be used, pinned or not
        assert cache.explain("later").num_pinned_tokens == 0


def refreshes(cache: CacheManager, lease: Lease) -> None:
    run(cache, [*tokens(1, 24), 0])  # a use does not bring it back
    assert cache.pins() == []
    assert cache.stats().num_expired_pins == 1


def reserves(cache: CacheManager, lease: Lease) -> None:
    assert lease.try_reserve(4 + 9 * 4)
    assert cache.match([*tokens(1, 24), 0]).num_tokens == 0


def appends(cache: CacheManager, lease: Lease) -> None:
    for number in range(9 * 4):
        cache.append_many([lease], [number])
        cache.commit_many([lease])
    assert cache.match([*tokens(1, 24), 0]).num_tokens == 0


def forks(cache: CacheManager, lease: Lease) -> None:
    lease.reserve(6)
    lease.append([1, 2])
    lease.commit(6)
    children = [lease.fork() for _ in range(8)]
    assert cache.match([*tokens(1, 24), 0]).num_tokens < 24
    for child in children:
        child.release()


def clears(cache: CacheManager, lease: Lease) -> None:
    cache.clear()
    assert cache.match([*tokens(1, 24), 0]).num_tokens == 0


def resizes(cache: CacheManager, lease: Lease) -> None:
    assert cache.resize(1).num_blocks == 1


def takes_a_smaller_quota(cache: CacheManager, lease: Lease) -> None:
    cache.set_pin_quota(0.0)
    cache.set_pin_quota(0.0, namespace="")


def gains(cache: CacheManager, lease: Lease) -> None:
    assert cache.release_gains([lease])[0].num_blocks == 1


def maintains(cache: CacheManager, lease: Lease) -> None:
    cache.maintain()
    assert cache._store.ledger.num_protected_idle_blocks == 0


PATHS = [
    lists, remembers, unpins, pins_again, counts, has_room, explains, refreshes, reserves, appends, forks, clears,
    resizes, takes_a_smaller_quota, gains, maintains,
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.__name__)
@pytest.mark.parametrize("life", [{"ttl_seconds": 5.0}, {"ttl_seconds": 50.0, "max_ttl_seconds": 5.0}], ids=str)
def test_no_path_honours_an_expired_pin(
    make: MakeCache, clock: ManualClock, path: Callable[[CacheManager, Lease], None], life: dict[str, float]
) -> None:
    """[P64] Whatever is called first after a pin's time is over, single or batch, finds it gone."""
    cache = make(10, pin_quota=0.6)
    run(cache, tokens(1, 24), "doc")
    run(cache, tokens(2, 12))
    lease = start(cache, [7, 7, 7, 7])
    cache.pin(request_id="doc", owner="me", refresh=True, **life)  # type: ignore[arg-type]
    clock.advance(5.0)
    path(cache, lease)
    assert cache.stats().num_expired_pins == 1


def test_gains_do_not_honour_an_expired_pin(make: MakeCache, clock: ManualClock) -> None:
    """[P64] What a release would give counts blocks whose pin is over, in the batch call too."""
    cache = make(10, pin_quota=0.6)
    lease = start(cache, tokens(1, 24), "doc")
    cache.pin(request_id="doc", ttl_seconds=5)
    clock.advance(5)
    gain = cache.release_gains([lease])[0]
    assert (gain.num_blocks, gain.num_lost_tokens) == (6, 24)


@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_an_expired_pin_has_its_memory_taken(make: MakeCache, clock: ManualClock, groups: object) -> None:
    """[P61] The holder is gone and nobody calls for 301 s: then memory is demanded, and the pin's is taken; it is
    counted once, and the holder's late unpin changes nothing."""
    cache = make(60, pin_quota=1.0, groups=groups)
    run(cache, tokens(1, 40), "doc")
    pin = cache.pin(request_id="doc", ttl_seconds=300)
    clock.advance(301)
    with cache.lease([1]) as lease:
        num_lanes = cache.plan.num_lanes
        assert lease.try_reserve(60 // num_lanes * 4)
        with pytest.raises(UnknownPin):
            cache.unpin(pin.id)
        assert (cache.stats().num_expired_pins, cache.stats().cached_blocks) == (1, 0)


# --- P58, P59, P62: who holds, who lets go -------------------------------------------------------------------------


def test_a_pin_on_what_is_there_already(make: MakeCache) -> None:
    """[P58] Prompts that are pinned and then need nothing loaded, since they are cached, are unpinned as others: no
    block stays protected, and all can be evicted."""
    cache = make(16, pin_quota=1.0)
    run(cache, tokens(1, 16), "first")
    for _ in range(5):
        pin = cache.pin(tokens(1, 16))
        assert run(cache, [*tokens(1, 16), 0]) == 16
        cache.unpin(pin.id)
    assert not cache._store.ledger.protected.any()
    run(cache, tokens(2, 64))
    assert cache.match([*tokens(1, 16), 0]).num_tokens == 0


@pytest.mark.parametrize("level", ["hard", "soft"])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)], ids=str)
@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_a_lease_and_two_pins_end_in_any_order(
    make: MakeCache, groups: object, order: tuple[int, ...], level: str
) -> None:
    """[P59] A lease and two pins on one prefix, undone in any order: freed once, at the last, and all of it."""
    cache = make(60, pin_quota=1.0, groups=groups)
    lease = start(cache, tokens(1, 20), "r")
    first, second = cache.pin(request_id="r", level=level), cache.pin(tokens(1, 15), level=level)
    acts: Sequence[Callable[[], object]] = (
        lease.release,
        lambda: cache.unpin(first.id),
        lambda: cache.unpin(second.id),
    )
    for number in order:
        cache.check_integrity()
        acts[number]()
    stats = cache.stats()
    assert (stats.pinned_blocks, stats.active_blocks, stats.evictable_blocks) == (0, 0, stats.cached_blocks)
    assert not cache._store.block_states().refs.any()
    cache.clear()
    assert cache.stats().free_blocks == 60


@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_nothing_keeps_a_reference_of_its_own(make: MakeCache, groups: object) -> None:
    """[P62] After a prompt was served by whatever way, pinned and unpinned, no holder is left but the cache itself."""
    cache = make(90, pin_quota=1.0, groups=groups)
    waits = cache.pin(tokens(1, 24))  # before the tokens come
    parent = start(cache, tokens(1, 21))
    child = parent.fork()
    follower = start(cache, [*tokens(1, 16), 5, 6, 7, 8, 9])  # splits the pinned run
    skipping = start(cache, tokens(1, 21), reuse=False)
    moved = cache.compact(4).copies
    assert isinstance(moved, tuple)
    for lease in (parent, child, follower, skipping):
        lease.release()
    cache.unpin(waits.id)
    ledger = cache._store.ledger
    assert not cache._store.block_states().refs.any()
    assert not ledger.protected.any()
    assert cache.stats().evictable_blocks == cache.stats().cached_blocks


# --- P65: exceptions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["made", "unpinned", "expired", "refused"])
def test_a_listener_that_raises_leaves_no_pin_behind(change: str) -> None:
    """[P65] A listener must not raise; one that does at a pin's event leaves neither a pin that nobody knows the id of,
    nor a pin that can't be undone, nor blocks that stay protected."""
    clock = ManualClock()
    told: list[str] = []

    def listen(event: CacheEvent) -> None:
        if isinstance(event, PinChanged):
            told.append(event.change)
            if event.change == change:
                raise RuntimeError("the listener is broken")

    config = CacheConfig(num_pages=16, page_tokens=4, block_tokens=4, pin_quota=0.5)
    cache = CacheManager(config, clock=clock, on_event=listen)
    run(cache, tokens(1, 16), "doc")
    run(cache, tokens(2, 40), "long")

    def make_and_end() -> None:
        pin = cache.pin(request_id="doc", ttl_seconds=5)
        if change == "unpinned":
            cache.unpin(pin.id)
        elif change == "expired":
            clock.advance(6)
            cache.maintain()
        elif change == "refused":
            cache.unpin(pin.id)
            cache.pin(request_id="long")

    with pytest.raises(RuntimeError, match="broken"):
        make_and_end()
    assert told[-1] == change
    cache.check_integrity()
    stats = cache.stats()
    assert (stats.num_pins, stats.pinned_blocks, stats.evictable_blocks) == (0, 0, stats.cached_blocks)
    with cache.lease(tokens(3, 64)) as lease:
        lease.reserve(64)


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"tokens": [-1]}, InvalidTokens),
        ({"tokens": []}, InvalidTokens),
        ({"tokens": ["a"]}, InvalidTokens),
        ({"request_id": "nobody"}, UnknownRequest),
        ({"request_id": "big"}, PinQuotaExceeded),
    ],
    ids=str,
)
def test_a_failed_pin_changes_nothing(make: MakeCache, how: dict[str, object], error: type[Exception]) -> None:
    """[P65] A pin that is refused for whatever reason leaves the pool, the pins and their marks as they were."""
    cache = make(16, pin_quota=0.25)
    run(cache, tokens(1, 32), "big")
    cache.pin(tokens(1, 8), level="soft")
    before, pins = cache.stats(), cache.pins()
    with pytest.raises(error):
        cache.pin(**how)  # type: ignore[arg-type]
    after = cache.stats()
    assert (after.pinned_blocks, after.num_pins, after.evictable_blocks) == (
        before.pinned_blocks,
        before.num_pins,
        before.evictable_blocks,
    )
    assert cache.pins() == pins


def test_a_lease_that_breaks_off_is_not_pinned(make: MakeCache) -> None:
    """[P65] A prefill that fails between reserve and commit: a pin that waits for its tokens holds what was committed,
    and what was reserved is free."""
    cache = make(16, pin_quota=1.0)
    pin = cache.pin(tokens(1, 40))
    lease = cache.lease(tokens(1, 40), "r")

    def prefill() -> None:
        with lease:
            lease.reserve(40)
            lease.commit(16)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        prefill()
    with pytest.raises(LeaseClosed):
        lease.commit(40)
    assert cache.pins()[0].num_pinned_tokens == 16
    assert cache.stats().free_blocks == 12
    cache.unpin(pin.id)
    with cache.lease(tokens(2, 64)) as lease:
        lease.reserve(64)


# --- races --------------------------------------------------------------------------------------------------------


def test_two_unpins_at_once(make: MakeCache) -> None:
    """[P59] Of eight threads that undo the same hundred pins, exactly one succeeds with each."""
    cache = make(16, pin_quota=1.0)
    run(cache, tokens(1, 16), "doc")
    ids = [cache.pin(request_id="doc", level="soft" if n % 2 else "hard").id for n in range(100)]
    undone: list[str] = []

    def undo() -> None:
        for pin_id in ids:
            with contextlib.suppress(UnknownPin):
                undone.append(cache.unpin(pin_id).id)

    threads = [threading.Thread(target=undo) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(undone) == sorted(ids)
    assert cache.stats().pinned_blocks == 0


def test_a_quota_set_while_the_pool_is_resized(make: MakeCache) -> None:
    """A quota that is set while another thread resizes the pool is a share of the pool that is there then."""
    cache = make(32)
    with cache._lock:
        setter = threading.Thread(target=lambda: cache.set_pin_quota(0.5))
        setter.start()
        time.sleep(0.1)  # it waits for the lock now
        cache.resize(8)
    setter.join()
    assert (cache.plan.num_pages, cache.config.num_pages, cache.stats().quota_blocks) == (8, 8, 4)


def test_a_request_that_comes_back_is_no_new_hit(make: MakeCache) -> None:
    """A preempted request's second look-up stays out of a pin's figures, as it does of the statistics."""
    cache = make(16, pin_quota=1.0)
    run(cache, tokens(1, 16))
    cache.pin(tokens(1, 16))
    run(cache, [*tokens(1, 16), 0], "r")
    run(cache, [*tokens(1, 16), 0], "r", count_lookup=False)
    assert cache.pins()[0].num_hits == 1
