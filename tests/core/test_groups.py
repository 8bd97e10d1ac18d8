"""Layer groups: what slides out, what stays reusable, where a prefix can be gone on from, in lanes of one pool."""

from __future__ import annotations

import random

import numpy as np
import pytest

from looseleaf import CacheConfig, CacheManager, LayerGroup, Lease, OutOfBlocks, PinQuotaExceeded
from looseleaf.core.config import CachePlan

from .conftest import MakeCache

FULL = LayerGroup("full")
WINDOW = LayerGroup("window", window_tokens=16, num_lanes=2)
HYBRID = (FULL, WINDOW)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, num_tokens).tolist()


def serve(cache: CacheManager, tokens: list[int], request_id: str | None = None, step: int = 8) -> Lease:
    """Compute a prompt in chunks, as an engine does; the lease stays open."""
    lease = cache.lease(tokens, request_id)
    for end in range(lease.num_cached_tokens + step, len(tokens) + step, step):
        end = min(end, len(tokens))
        lease.reserve(end)
        lease.commit(end)
    return lease


@pytest.mark.parametrize("num_tokens", [8, 15, 16, 17, 32, 80])
def test_a_window_lets_go(make: MakeCache, num_tokens: int) -> None:
    """A window group holds the last window (in whole blocks) and no more; the full group holds everything."""
    cache = make(128, groups=HYBRID)
    lease = serve(cache, prompt(num_tokens))
    num_blocks = -(-num_tokens // 4)
    first = max(0, num_tokens // 4 * 4 - 16) // 4
    assert lease.first_blocks == {"full": 0, "window": first}
    assert lease.block_tables["full"].shape == (num_blocks,)
    assert lease.block_tables["window"].shape == (num_blocks - first, 2)
    assert cache.stats().active_blocks == num_blocks + 2 * (num_blocks - first)
    lease.release()


def test_chunks_let_go_at_their_end(make: MakeCache) -> None:
    """[H104] Chunked attention keeps the tokens of the open chunk; exactly at a chunk's end it needs nothing."""
    cache = make(64, groups=(FULL, LayerGroup("chunked", chunk_tokens=16)))
    for num_tokens, first in ((15, 0), (16, 4), (17, 4), (31, 4), (32, 8)):
        lease = serve(cache, prompt(num_tokens, seed=num_tokens))
        assert lease.first_blocks["chunked"] == first
        assert cache.match([*lease.token_ids.tolist(), 5]).num_tokens == num_tokens // 4 * 4
        lease.release()


@pytest.mark.parametrize("hit_tokens", [4, 12, 16, 20, 40, 80])
def test_hits_inside_at_and_after_the_window(make: MakeCache, hit_tokens: int) -> None:
    """[H99] While there is room, a prefix of any length hits: what slid out is still there for another request."""
    cache = make(256, groups=HYBRID)
    serve(cache, prompt(80)).release()
    other = serve(cache, [*prompt(80)[:hit_tokens], *prompt(9, seed=1)])
    assert other.num_cached_tokens == hit_tokens
    assert other.firsts[1] == max(0, (hit_tokens + 9) // 4 * 4 - 16) // 4
    other.release()


def test_a_hit_needs_its_window(make: MakeCache) -> None:
    """[H98] [H107] A prefix hits only where every group holds what it needs; a loss is explained, by the group."""
    cache = make(60, groups=HYBRID)
    tokens = prompt(80)  # 20 blocks in the full lane, 2 x 20 in the window's
    serve(cache, tokens).release()
    filler = serve(cache, prompt(32, seed=3))  # needs 8 + 2 * 8 blocks at most: rows that slid out go
    filler.release()
    assert cache.stats().evicted_tokens == 0
    assert cache.stats().slid_out_blocks > 0
    assert cache.match([*tokens, 1]).num_tokens == 80  # the window at its end is there
    lease = cache.lease(tokens[:48], "cut")  # this one is gone, at least in part
    explanation = cache.explain("cut")
    assert lease.num_cached_tokens < 44
    assert explanation.reason == "window_cut"
    assert "'window'" in explanation.message
    assert explanation.first_missed_token == lease.num_cached_tokens
    assert explanation.num_shared_tokens == 44
    lease.release()


def test_branch_points_are_learned(make: MakeCache) -> None:
    """What a second request shares with a first is worth keeping: from the third on it hits, under pressure too."""
    cache = make(3 * 48, groups=HYBRID)
    shared = prompt(64, seed=9)
    hits = []
    for number in range(6):
        lease = serve(cache, [*shared, *prompt(40, seed=100 + number)], f"r{number}")
        hits.append(lease.num_cached_tokens)
        lease.release()
        serve(cache, prompt(60, seed=200 + number)).release()  # one-off traffic in between
    assert hits[2:] == [64] * 4


@pytest.mark.parametrize("num_blocks", [112, 124, 140])
def test_where_prompts_part_is_kept(make: MakeCache, num_blocks: int) -> None:
    """Where a second prompt parts from a first, a third hits, though the pool is full of younger one-off prompts."""
    cache = make(num_blocks, groups=HYBRID)
    shared, hits = prompt(64, seed=9), []
    for number in range(8):
        lease = serve(cache, [*shared, *prompt(48, seed=100 + number)])
        hits.append(lease.num_cached_tokens)
        lease.release()
        for seed in range(3):
            serve(cache, prompt(40, seed=1000 + 10 * number + seed)).release()
    assert hits[2:] == [64] * 6


def test_an_end_that_somebody_waits_for_is_kept(make: MakeCache) -> None:
    """A place behind which another request will go on survives the rest of a long prefill in a full pool."""
    found = []
    for is_expected in (False, True):
        cache = make(3 * 56, groups=HYBRID)
        for seed in range(8):
            serve(cache, prompt(72, seed=50 + seed)).release()
        tokens = prompt(160)
        leader = cache.lease(tokens)
        if is_expected:
            leader.expect_end(40)
        for end in range(8, 161, 8):
            leader.reserve(end)
            leader.commit(end)
        found.append(cache.match([*tokens[:40], 1]).num_tokens)
        leader.release()
    assert found[0] < 40
    assert found[1] == 40


def test_rows_that_slid_out_go_before_leaves(make: MakeCache) -> None:
    """Memory for a new prompt comes from the inside of long ones before any prompt's end is lost."""
    cache = make(96, groups=HYBRID)
    first, second = prompt(80), prompt(80, seed=1)
    serve(cache, first).release()
    serve(cache, second).release()
    assert cache.match([*first, 1]).num_tokens == 80
    assert cache.match([*second, 1]).num_tokens == 80
    assert cache.stats().evicted_tokens == 0


def test_all_memory_serves_every_group(make: MakeCache) -> None:
    """No share of the pool belongs to a group: the same blocks serve many short prompts, then a long one."""
    cache = make(60, groups=HYBRID)
    short = [serve(cache, prompt(16, seed=seed)) for seed in range(5)]  # 4 + 2 * 4 blocks each: 60
    assert cache.stats().free_blocks == 0
    assert [use.held_blocks for use in cache.fragmentation().groups] == [20, 40]
    for lease in short:
        lease.release()
    long = serve(cache, prompt(160), step=4)  # 40 in the full lane, 2 * (4 + 1) at most in the window's
    assert [use.held_blocks for use in cache.fragmentation().groups] == [40, 8]
    long.release()


def test_a_full_pool_says_so_for_all_lanes(make: MakeCache) -> None:
    """A reservation needs a block in every lane; if they can't be had, nothing changes."""
    cache = make(16, groups=HYBRID)
    lease = cache.lease(prompt(40))
    lease.reserve(20)
    with pytest.raises(OutOfBlocks) as caught:
        lease.reserve(24)
    assert (caught.value.needed, caught.value.free) == (3, 1)
    assert lease.num_reserved_tokens == 20
    lease.release()


def test_windows_only(make: MakeCache) -> None:
    """Where every layer slides, any length fits, and nothing is left of a prompt whose rows are all gone."""
    cache = make(16, groups=(LayerGroup("window", window_tokens=16, num_lanes=2),))
    assert cache.plan.num_tokens > 10**8
    lease = serve(cache, prompt(400), step=4)
    assert cache.stats().active_blocks == 8
    lease.release()
    assert cache.match([*prompt(400), 1]).num_tokens == 400
    for seed in range(1, 4):
        serve(cache, prompt(64, seed=seed), step=4).release()
    assert cache.match([*prompt(400), 1]).num_tokens == 0


def test_no_empty_nodes_stay(make: MakeCache) -> None:
    """A node of which no group holds anything is forgotten at once, however much its policy likes it."""
    cache = make(16, groups=(LayerGroup("window", window_tokens=16),), policy="lfu")
    for seed in range(1, 60):
        for _ in range(4):
            serve(cache, prompt(40, seed=seed), step=4).release()
        serve(cache, prompt(40, seed=1000 + seed), step=4).release()
    assert cache.stats().num_nodes <= cache.plan.num_blocks


@pytest.mark.parametrize("num_tokens", [31, 32, 33, 34])
def test_fork_in_the_middle_of_a_block(make: MakeCache, num_tokens: int) -> None:
    """[P10] [H105] A fork shares what each group holds and copies the partial tail of every lane, lane by lane."""
    cache = make(96, groups=HYBRID)
    parent = serve(cache, prompt(num_tokens))
    child = parent.fork()
    num_full = num_tokens // 4
    assert child.firsts == parent.firsts
    for own, theirs, first in zip(child.tables, parent.tables, child.firsts, strict=True):
        assert own[: num_full - first].tolist() == theirs[: num_full - first].tolist()
    expected = []
    if num_tokens % 4:
        tails = zip(parent.tables, child.tables, strict=True)
        expected = [pair for theirs, own in tails for pair in zip(theirs[-1].tolist(), own[-1].tolist(), strict=True)]
    assert child.copies == expected
    parent.release()
    cache.check_integrity()
    child.release()


def test_a_slid_out_block_belongs_to_its_new_owner(make: MakeCache) -> None:
    """[H101] A row that slid out and was evicted is not freed again by the lease that had it."""
    cache = make(30, groups=HYBRID)
    old = serve(cache, prompt(36), step=4)
    young = serve(cache, prompt(16, seed=1), step=4)  # takes blocks that slid out of `old`
    held = {block for table in young.tables for block in table.ravel().tolist()}
    old.release()
    cache.check_integrity()
    after = {block for table in young.tables for block in table.ravel().tolist()}
    assert after == held
    assert cache.match([*prompt(16, seed=1), 1]).num_tokens == 16
    young.release()


@pytest.mark.parametrize("level", ["hard", "soft"])
def test_pins_hold_across_groups(make: MakeCache, level: str) -> None:
    """A pinned prefix hits after a flood: its window is kept as well, and counts as what it takes."""
    cache = make(120, groups=HYBRID, pin_quota=0.4)
    tokens = prompt(64)
    serve(cache, tokens).release()
    pin = cache.pin(tokens, level=level)
    assert pin.num_pinned_tokens == 64
    assert cache.stats().pinned_blocks == 16 + 2 * 4
    for seed in range(1, 12):
        serve(cache, prompt(80, seed=seed)).release()
    assert cache.match([*tokens, 1]).num_tokens == 64
    cache.unpin(pin.id)
    assert cache.stats().pinned_blocks == 0
    for seed in range(20, 32):
        serve(cache, prompt(80, seed=seed)).release()
    assert cache.match([*tokens, 1]).num_tokens == 0


def test_pins_of_one_group(make: MakeCache) -> None:
    """A pin of the full group alone keeps its path, not its window."""
    cache = make(120, groups=HYBRID, pin_quota=0.4)
    tokens = prompt(64)
    serve(cache, tokens).release()
    cache.pin(tokens, cache_type="full")
    assert cache.stats().pinned_blocks == 16
    for seed in range(1, 12):
        serve(cache, prompt(80, seed=seed)).release()
    cache.lease([*tokens, 1], "cut").release()
    assert cache.explain("cut").reason == "window_cut"


def test_pin_quota_counts_windows(make: MakeCache) -> None:
    """A hard pin that fits without its window is refused with the numbers; a part of it is granted on request."""
    cache = make(100, groups=HYBRID, pin_quota=0.2)
    tokens = prompt(64)
    serve(cache, tokens).release()
    with pytest.raises(PinQuotaExceeded) as caught:
        cache.pin(tokens)
    assert (caught.value.needed_blocks, caught.value.available_blocks) == (24, 20)
    pin = cache.pin(tokens, partial=True)
    assert pin.num_pinned_tokens == 48  # 12 blocks and a window of 2 * 4
    assert cache.stats().hard_pinned_blocks == 20


def test_a_window_that_was_gone_is_pinned_again(make: MakeCache) -> None:
    """A pin on a prefix whose window was evicted guards it from when it is computed again."""
    cache = make(60, groups=HYBRID, pin_quota=0.5)
    tokens = prompt(80)
    serve(cache, tokens).release()
    serve(cache, prompt(32, seed=3)).release()
    assert cache.match([*tokens[:48], 1]).num_tokens < 48
    pin = cache.pin(tokens[:48], partial=True)
    assert pin.num_pinned_tokens == 48
    serve(cache, [*tokens[:48], 1, 2, 3]).release()
    for seed in range(4, 12):
        serve(cache, prompt(40, seed=seed)).release()
    assert cache.match([*tokens[:48], 1]).num_tokens == 48


def test_partly_evicted_soft_pin_guards_what_is_left(make: MakeCache) -> None:
    """A soft pin whose tail had to go moves its window up; what it holds counts, no more (the fixture checks)."""
    cache = make(60, groups=HYBRID, pin_quota=1.0)
    tokens = prompt(64)
    serve(cache, tokens).release()
    cache.pin(tokens, level="soft")
    with cache.lease(prompt(64, seed=1)) as lease:
        lease.reserve(56)  # 42 blocks: all that is not pinned, and a part of what is
        cache.check_integrity()
        held = cache.pins()[0].num_pinned_tokens
        assert 0 < held < 64
        assert cache.stats().pinned_blocks == held // 4 + 2 * min(held // 4, 4)


@pytest.mark.parametrize("level", ["hard", "soft"])
def test_a_growing_pin_stays_within_its_quota(make: MakeCache, level: str) -> None:
    """A pin made before its tokens moves its window along as they come, to the last block that the quota allows."""
    cache = make(100, groups=HYBRID, pin_quota=0.2)
    tokens = prompt(80)
    cache.pin(tokens, level=level)
    lease = serve(cache, tokens, step=4)
    assert cache.pins()[0].num_pinned_tokens == 48
    assert cache.pins()[0].is_limited
    assert cache.stats().pinned_blocks == 20
    lease.release()


def test_the_beginning_stays_reusable_longest(make: MakeCache) -> None:
    """Of rows that slid out together the deepest goes first, so that short common beginnings still hit."""
    cache = make(60, groups=HYBRID)
    tokens = prompt(76)
    serve(cache, tokens, step=100).release()  # 57 blocks
    with cache.lease(prompt(12, seed=1)) as lease:
        lease.reserve(12)  # 9 blocks: 3 rows of the window's two lanes go
    hits = [cache.match([*tokens[: 4 * end], 1]).num_tokens // 4 for end in range(1, 16)]
    assert hits[:11] == list(range(1, 12))
    assert hits[-1] < 15


def test_the_plan_bounds_what_is_held() -> None:
    """`blocks_for` is never less than what a sequence holds at once, and not much more."""
    rng = random.Random(5)
    for _ in range(60):
        groups = rng.choice([HYBRID, (WINDOW,), (FULL, LayerGroup("chunked", chunk_tokens=rng.choice([8, 16])))])
        step, length = rng.choice([1, 3, 8, 50]), rng.randint(1, 120)
        cache = CacheManager(CacheConfig(num_pages=500, page_tokens=4, block_tokens=4, groups=groups))
        lease = cache.lease(prompt(length))
        most = 0
        for end in range(step, length + step, step):
            lease.reserve(min(end, length))
            most = max(most, cache.stats().active_blocks)
            lease.commit(min(end, length))
        planned = cache.plan.blocks_for(length, step)
        assert most <= planned <= most + (3 + step // 4) * cache.plan.num_lanes
        lease.release()


def test_the_longest_sequence_of_a_pool() -> None:
    """`num_tokens` of a plan fits when it is computed in small steps; one block more does not."""
    plan = CachePlan.of(CacheConfig(num_pages=40, page_tokens=4, block_tokens=4, groups=HYBRID))
    assert plan.blocks_for(plan.num_tokens, 4) <= 40 < plan.blocks_for(plan.num_tokens + 4, 4)
