"""A pool of another size, blocks moved together: nothing that is held or pinned is lost, and the answer is clear."""

from __future__ import annotations

import numpy as np
import pytest

from looseleaf import (
    BlocksMoved,
    CacheConfig,
    CacheManager,
    ConfigError,
    LayerGroup,
    LifecycleError,
    OutOfBlocks,
    RequestError,
    ResizeRefused,
)
from looseleaf.core.events import CacheEvent
from looseleaf.testing.mirror import EventMirror
from looseleaf.testing.stamps import StampMemory

from .conftest import MakeCache

HYBRID = (LayerGroup("full"), LayerGroup("window", window_tokens=8, num_lanes=2))


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, num_tokens).tolist()


def serve(cache: CacheManager, tokens: list[int], memory: StampMemory | None = None) -> None:
    with cache.lease(tokens) as lease:
        lease.reserve(len(tokens))
        if memory is not None:
            memory.write(lease, lease.num_cached_tokens, len(tokens))
        lease.commit(len(tokens))


def test_growing_gives_room_at_once(make: MakeCache) -> None:
    """After growth what did not fit fits; quota and figures follow."""
    cache = make(8, pin_quota=0.5)
    lease = cache.lease(prompt(40))
    with pytest.raises(OutOfBlocks):
        lease.reserve(40)
    result = cache.resize(16)
    assert (result.num_pages, result.num_blocks, result.copies, result.num_evicted_blocks) == (16, 16, (), 0)
    lease.reserve(40)
    stats = cache.stats()
    assert (stats.num_blocks, stats.free_blocks, stats.quota_blocks) == (16, 6, 8)
    assert cache.config.num_pages == cache.plan.num_pages == 16
    lease.release()


@pytest.mark.parametrize("groups", [(LayerGroup("full"),), HYBRID], ids=["full", "hybrid"])
def test_shrinking_moves_what_is_held(groups: tuple[LayerGroup, ...]) -> None:
    """[P5] What lies beyond the new end is moved in, what is not needed is evicted; counters and content hold."""
    mirror = EventMirror(4, groups)
    lanes = sum(group.num_lanes for group in groups)
    cache = CacheManager(
        CacheConfig(num_pages=20 * lanes, page_tokens=8, block_tokens=4, groups=groups), on_event=mirror.on_event
    )
    memory = StampMemory(cache.plan.num_blocks, 4)
    for seed in range(4):
        serve(cache, prompt(24, seed), memory)
    lease = cache.lease(prompt(22, seed=9))
    lease.reserve(22)
    memory.write(lease, 0, 22)
    lease.commit(22)
    before = cache.stats()
    result = cache.resize(5 * lanes)
    memory.copy_blocks(result.copies)
    memory.resize(result.num_blocks)
    memory.verify(lease)
    cache.check_integrity()
    after = cache.stats()
    assert result.copies
    assert after.num_blocks == result.num_blocks == 10 * lanes
    assert after.active_blocks == before.active_blocks
    assert max(block for table in lease.tables for block in table.ravel().tolist()) < result.num_blocks
    for seed in range(4):
        assert cache.match([*prompt(24, seed), 1]).num_tokens == mirror.match([*prompt(24, seed), 1])
    lease.release()


def test_a_shrink_is_refused_with_numbers(make: MakeCache) -> None:
    """Running requests and hard pins are not given up: the answer says who needs what, and nothing has changed."""
    cache = make(32, pin_quota=0.5)
    serve(cache, prompt(40))
    cache.pin(prompt(40))
    lease = cache.lease(prompt(48, seed=1))
    lease.reserve(48)
    before = cache.stats()
    with pytest.raises(ResizeRefused, match="12 are held by running requests, 10 are hard-pinned") as caught:
        cache.resize(21)
    assert (caught.value.held_blocks, caught.value.hard_pinned_blocks, caught.value.num_blocks) == (12, 10, 21)
    assert cache.stats() == before
    lease.release()
    with pytest.raises(ResizeRefused, match="pins may hold 9 of so many"):
        cache.resize(18)
    with pytest.raises(ConfigError):
        cache.resize(0)
    assert cache.stats().num_blocks == before.num_blocks


def test_an_engine_moves_its_own_blocks(make: MakeCache) -> None:
    """Once somebody does the copies, nobody else may cause some; what is no number of pages is refused."""
    cache, owner = make(16), object()
    cache.claim_moves(owner)
    for move in (cache.resize, cache.compact):
        with pytest.raises(LifecycleError, match="engine's resize"):
            move(8)
        move(8, by=owner)
    for wrong in (-1, 1.5, True):
        with pytest.raises(RequestError):
            cache.compact(wrong, by=owner)


def test_the_watermark_keeps_its_share(make: MakeCache) -> None:
    """A smaller pool keeps fewer pages ready, a larger one more, and the first size has the first watermark."""
    cache = make(256, blocks_per_page=4, reserve_pages=4)
    for num_pages, reserve_pages in ((16, 1), (2, 1), (1, 0), (64, 4), (128, 8)):
        cache.resize(num_pages)
        assert (cache.config.reserve_pages, cache.plan.reserve_blocks) == (reserve_pages, 4 * reserve_pages)


def test_soft_pins_give_way_to_a_smaller_quota(make: MakeCache) -> None:
    """A smaller pool has a smaller quota: soft pins keep what fits, the rest is evictable."""
    cache = make(32, pin_quota=0.5)
    serve(cache, prompt(60))
    pin = cache.pin(prompt(60), level="soft")
    assert pin.num_pinned_tokens == 60
    cache.resize(20)
    assert cache.pins()[0].num_pinned_tokens == 40
    assert cache.stats().pinned_blocks == 10


def test_pending_copies_of_a_fork_follow(make: MakeCache) -> None:
    """A fork's copy that was not done yet names its blocks by their new ids."""
    cache = make(16)
    serve(cache, prompt(40))
    parent = cache.lease(prompt(10, seed=1))
    parent.reserve(10)
    parent.commit(10)
    child = parent.fork()
    cache.resize(4)
    assert child.copies == [(int(parent.block_table[2]), int(child.block_table[2]))]
    child.copies = [(99, 98)]  # of a larger pool, done and never cleared
    cache.resize(6)
    cache.resize(4)
    parent.release()
    child.release()


def test_compaction_frees_whole_pages() -> None:
    """Cached blocks scattered over pages are moved together; held ones stay; everything still hits."""
    events: list[CacheEvent] = []
    cache = CacheManager(CacheConfig(num_pages=8, page_tokens=16, block_tokens=4), on_event=events.append)
    memory = StampMemory(cache.plan.num_blocks, 4)
    for seed in range(5):  # one block each: they share pages, then every second one is gone
        serve(cache, prompt(16, seed), memory)
    for seed in (0, 2):
        with cache.lease(prompt(8, seed + 50)) as lease:
            lease.reserve(8)
    held = cache.lease(prompt(5, seed=77))
    held.reserve(5)
    memory.write(held, 0, 5)
    held.commit(5)
    big = cache.lease(prompt(64, seed=78))
    big.reserve(64)  # evicts tails here and there
    big.release()
    table = held.block_table.tolist()
    before = cache.fragmentation()
    result = cache.compact(8)
    memory.copy_blocks(result.copies)
    after = cache.fragmentation()
    assert result.num_freed_pages >= 1
    assert after.free_pages == before.free_pages + result.num_freed_pages
    assert after.packing_degree >= before.packing_degree
    assert held.block_table.tolist() == table
    memory.verify(held)
    cache.check_integrity()
    mirror = EventMirror(4)
    for event in events:
        mirror.on_event(event)
    moved = [event for event in events if isinstance(event, BlocksMoved)]
    assert sum(len(event.from_blocks) for event in moved) == len(result.copies)
    for seed in range(5):
        with cache.lease([*prompt(16, seed), 1]) as lease:
            assert lease.num_cached_tokens == mirror.match([*prompt(16, seed), 1])
            memory.verify(lease)
    held.release()


def test_fragmentation_figures(make: MakeCache) -> None:
    """Runs, pages by state, packing degree and waste are those of a layout that can be counted by hand."""
    cache = make(32, blocks_per_page=8)
    first = cache.lease(prompt(30))
    first.reserve(30)  # 8 blocks of page 0, 2 token places unfilled
    second = cache.lease(prompt(4, seed=1))
    second.reserve(4)  # 1 block of page 1
    figures = cache.fragmentation()
    assert (figures.free_pages, figures.partial_pages, figures.full_pages) == (2, 1, 1)
    assert figures.free_runs == {16: 1}  # 23 blocks in a row
    assert figures.packing_degree == 9 / 16
    assert figures.page_waste == 7 / 32
    assert figures.groups[0].held_blocks == 9
    assert figures.groups[0].waste == 2 / 36 == cache.stats().waste
    assert figures.table_bytes > 0
    first.release()
    second.release()


def test_room_to_grow(make: MakeCache) -> None:
    """A sequence that is expected to grow gets its tail where it can grow in place; a finished one fills a gap."""
    cache = make(64, blocks_per_page=8)
    other = cache.lease(prompt(16))
    other.reserve(16)  # 4 blocks of a page: 4 are free there
    growing = cache.lease(prompt(8, seed=1), expected_tokens=32)
    growing.reserve(8)
    assert growing.block_table[0] // 8 != other.block_table[0] // 8
    growing.reserve(32)
    assert (np.diff(growing.block_table) == 1).all()
    short = cache.lease(prompt(8, seed=2), expected_tokens=8)
    short.reserve(8)
    assert short.block_table[0] // 8 == other.block_table[0] // 8
    for lease in (other, growing, short):
        lease.release()


def test_release_gains(make: MakeCache) -> None:
    """What releasing a lease gives, and loses, is what it holds alone and no pin keeps."""
    cache = make(32, pin_quota=1.0)
    tokens = prompt(16)
    first = cache.lease(tokens)
    first.reserve(24)
    first.commit(16)
    second = cache.lease([*tokens, 1, 2, 3])
    second.reserve(19)
    assert [(gain.num_blocks, gain.num_lost_tokens) for gain in cache.release_gains([first, second])] == [
        (2, 0),
        (1, 0),
    ]
    second.commit(19)
    assert cache.release_gains([second])[0].num_lost_tokens == 3
    second.release()
    assert cache.release_gains([first])[0].num_lost_tokens == 16
    cache.pin(tokens)
    assert (cache.release_gains([first])[0].num_blocks, cache.release_gains([first])[0].num_lost_tokens) == (2, 0)
    first.release()
