"""Laws of eviction: leaves first, exactly as much as needed, never what is held."""

from __future__ import annotations

import pytest

from looseleaf import BlocksRemoved, BlocksStored, CacheConfig, CacheManager
from looseleaf.core.events import CacheEvent
from looseleaf.testing.mirror import EventMirror
from tests.core.conftest import MakeCache, run, start, tokens


def test_evicts_what_is_needed_and_no_more(make: MakeCache) -> None:
    """[E48, E54] Ten cached leaves of one block; two missing blocks evict two, the oldest, and eight stay."""
    cache = make(10)
    for number in range(10):
        run(cache, tokens(number, 4))
    with cache.lease(tokens(99, 6)) as lease:
        lease.reserve(6)
        assert cache.stats().evicted_tokens == 8
        assert [cache.match([*tokens(number, 4), 0]).num_tokens for number in range(10)] == [0, 0] + [4] * 8


def test_held_paths_are_not_evicted(make: MakeCache) -> None:
    """[E49, E51] A matched node and all above it stay while a lease holds them; the part behind can go, and all of it
    later."""
    cache = make(8)
    run(cache, tokens(1, 8))
    run(cache, tokens(1, 8) + tokens(2, 12))
    lease = cache.lease(tokens(1, 8) + tokens(2, 4) + [7])
    assert lease.num_cached_tokens == 12
    with start(cache, tokens(3, 19)):
        assert cache.match(tokens(1, 8) + tokens(2, 12)).num_tokens == 12
        assert cache.stats().evictable_blocks == 0
    lease.release()
    assert cache.stats().evictable_blocks == cache.stats().cached_blocks
    run(cache, tokens(4, 31))
    assert cache.match([*tokens(1, 8), 0]).num_tokens == 0


def test_the_tail_of_an_edge_goes_first(make: MakeCache) -> None:
    """A long prompt loses its end first, so that what is left can still be matched."""
    cache = make(8)
    run(cache, tokens(1, 32))
    run(cache, tokens(2, 12))
    assert cache.match(tokens(1, 32)).num_tokens == 20


def test_least_recently_used_goes_first(make: MakeCache) -> None:
    """LRU: a hit makes a prompt young again; FIFO takes no note of it."""
    for policy, survivor in (("lru", 1), ("fifo", 2)):
        cache = make(8, policy=policy)
        run(cache, tokens(1, 16))
        run(cache, tokens(2, 12))
        run(cache, [*tokens(1, 16)])
        run(cache, tokens(3, 16))
        kept = {number: cache.match([*tokens(number, 12), 0]).num_tokens for number in (1, 2)}
        assert kept[survivor] > kept[3 - survivor]


def test_least_frequently_used_goes_first(make: MakeCache) -> None:
    """LFU: two uses outlive one, however recent."""
    cache = make(8, policy="lfu")
    run(cache, tokens(1, 16))
    run(cache, [*tokens(1, 16), 0])
    run(cache, tokens(2, 16))
    run(cache, tokens(3, 16))
    assert cache.match([*tokens(1, 16), 0]).num_tokens == 16


def test_a_block_in_other_hands_is_not_matched(make: MakeCache) -> None:
    """[R31, R32] A block that was evicted and taken by another prompt is found under the new prefix only."""
    cache = make(2)
    run(cache, tokens(1, 8))
    run(cache, tokens(2, 8))
    assert cache.match([*tokens(1, 8), 0]).num_tokens == 0
    assert cache.match([*tokens(2, 8), 0]).num_tokens == 8
    assert cache.stats().cached_blocks == 2


def test_a_hole_cuts_a_match_where_it_is(make: MakeCache) -> None:
    """[R41] A prefix of six blocks whose fifth is gone matches four."""
    cache = make(6)
    run(cache, tokens(1, 24))
    run(cache, tokens(2, 8))
    assert cache.match([*tokens(1, 24), 0]).num_tokens == 16


def test_cascade_of_leaves(make: MakeCache) -> None:
    """[E52] A chain of runs goes from its end, each once, and the total is right."""
    cache = make(12)
    prompt = tokens(1, 8)
    for turn in range(4):
        run(cache, prompt)
        prompt = prompt + tokens(10 + turn, 8)
    events: list[CacheEvent] = []
    before = cache.stats()
    run(cache, tokens(2, 48))
    assert cache.stats().evicted_tokens - before.evicted_tokens == 32
    assert events == []


def test_watermark_evicts_ahead(make: MakeCache) -> None:
    """maintain() keeps whole pages free ahead of need, in steps, and stops when nothing can be evicted."""
    cache = make(64, blocks_per_page=8, reserve_pages=2)
    run(cache, tokens(1, 256))
    assert cache.stats().free_pages == 0
    cache.maintain()
    stats = cache.stats()
    assert (stats.free_pages, stats.free_blocks) == (2, 16)
    cache.maintain()
    assert cache.stats() == stats
    with start(cache, tokens(2, 255)):
        cache.maintain()
        assert cache.stats().evictable_blocks == 0


def test_with_a_watermark_no_reservation_evicts(make: MakeCache) -> None:
    """Eviction happens between steps: with a reserve that covers a step's needs, no allocation has to evict itself."""
    forced = []
    for reserve_pages in (0, 2):
        cache = make(64, blocks_per_page=8, reserve_pages=reserve_pages)
        for seed in range(20):
            cache.maintain()
            with cache.lease([seed] * 3 + list(range(37))) as lease:
                lease.reserve(40)
                lease.commit(40)
        forced.append(cache.stats().num_demand_evictions)
    assert forced[0] > 0
    assert forced[1] == 0


def test_events_rebuild_the_cache() -> None:
    """[M127] One stored event and one removed event per block; a second copy that is dropped is not reported."""
    events: list[CacheEvent] = []
    mirror = EventMirror(4)

    def listen(event: CacheEvent) -> None:
        events.append(event)
        mirror.on_event(event)

    cache = CacheManager(CacheConfig(num_pages=4, page_tokens=4, block_tokens=4), on_event=listen)
    first, second = cache.lease(tokens(1, 5), "a"), cache.lease(tokens(1, 5), "b")
    for lease in (first, second):
        lease.reserve(5)
        lease.commit(5)
    first.release()
    second.release()
    assert [type(event) for event in events] == [BlocksStored]
    run(cache, tokens(2, 16))
    assert [type(event) for event in events] == [BlocksStored, BlocksRemoved, BlocksStored]
    assert mirror.match([*tokens(2, 16), 0]) == 16
    assert mirror.match([*tokens(1, 5), 0]) == 0


def test_uncached_blocks_are_no_evictions(make: MakeCache) -> None:
    """[M128] Blocks that were never cached leave no eviction figure behind."""
    cache = make(4)
    for number in range(1000):
        run(cache, tokens(number, 10), reuse=False)
    assert cache.stats().evicted_tokens == 0


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu"])
def test_eviction_looks_at_few_nodes(make: MakeCache, policy: str) -> None:
    """Victims come from a maintained structure: evicting one block of 4,000 leaves touches no other leaf."""
    cache = make(4096, policy=policy)
    for number in range(4096):
        run(cache, tokens(number, 4))
    looked_at = []
    store = cache._store
    original = store.victims.review
    store.victims.review = lambda node: (looked_at.append(node.id), original(node))[1]  # type: ignore[method-assign]
    run(cache, tokens(5000, 4))
    assert cache.stats().evicted_tokens == 4
    assert len(looked_at) < 10
