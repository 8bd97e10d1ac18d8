"""The pool changes its size while requests run."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looseleaf.core.config import LayerGroup
from looseleaf.engine.async_engine import AsyncEngine
from looseleaf.engine.config import EngineConfig
from looseleaf.engine.plan import chained_copies
from looseleaf.engine.request import FinishReason, GenerationRequest
from looseleaf.engine.sampling import SamplingParams
from looseleaf.errors import CapacityError, ConfigError, LifecycleError, ModelError, PromptTooLong, ResizeRefused
from looseleaf.testing.engine_kit import EngineKit
from looseleaf.testing.engine_kit import sample_prompt as prompt_of

GROUPS = (LayerGroup("full"), LayerGroup("window", window_tokens=8, num_lanes=2))
SAMPLES = ["s0", "s1", "s2", "s3"]


def check(kit, requests):
    for request in requests:
        assert kit.tokens(request.request_id) == kit.expected(request)
    assert kit.runner.mismatches == []
    kit.cache.check_integrity()
    stats = kit.cache.stats()
    assert stats.active_blocks == 0
    assert stats.free_blocks + stats.cached_blocks == stats.num_blocks == kit.runner.num_blocks


@pytest.mark.parametrize("groups", [GROUPS[:1], GROUPS, GROUPS[1:]])
@pytest.mark.parametrize("seed", range(4))
def test_running_requests_go_on(groups, seed):
    """[P17] [P5] Grown and shrunk at random while requests run: no token changes, and after each move free, held and
    cached blocks add up to the pool."""
    rng = random.Random(seed)
    kit = EngineKit(72, blocks_per_page=2, groups=groups, config=EngineConfig(max_step_tokens=16))
    requests = [kit.add(f"r{i}", prompt_of(rng.randint(1, 30), seed=i % 4), rng.randint(1, 30)) for i in range(16)]
    num_done = 0
    while kit.engine.has_work:
        future = kit.engine.resize(rng.randint(12, 60)) if rng.random() < 0.3 else None
        kit.step()
        stats = kit.cache.stats()
        assert stats.free_blocks + stats.active_blocks + stats.cached_blocks == stats.num_blocks
        assert stats.num_blocks == kit.runner.num_blocks
        if future is not None and future.exception() is None:
            assert future.result().num_blocks == kit.runner.num_blocks
            num_done += 1
    assert num_done > 2
    check(kit, requests)


def test_two_sizes_before_a_step():
    """[P14] Two sizes asked for before the same step are both applied, in order, and so are their copies."""
    kit = EngineKit(64)
    requests = [kit.add(f"r{i}", prompt_of(12, seed=i), 20) for i in range(4)]
    kit.step(3)
    for name in ("r0", "r2"):
        kit.engine.abort(name)
    futures = [kit.engine.resize(num_pages) for num_pages in (20, 100, 24)]
    kit.step()
    assert [future.result(timeout=0).num_pages for future in futures] == [20, 100, 24]
    assert kit.runner.num_blocks == 24
    kit.run()
    check(kit, [requests[1], requests[3]])


def test_what_is_held_is_not_given_up():
    """A size that running requests don't fit in is refused with the numbers, and nothing changes."""
    kit = EngineKit(64)
    requests = [kit.add(f"r{i}", prompt_of(12, seed=i), 5) for i in range(4)]
    kit.step()
    future = kit.engine.resize(9)
    kit.step()
    error = future.exception(timeout=0)
    assert isinstance(error, ResizeRefused)
    assert (error.num_blocks, error.held_blocks) == (9, 16)
    assert (kit.cache.plan.num_blocks, kit.runner.num_blocks, kit.engine.max_model_tokens) == (64, 64, 256)
    kit.run()
    check(kit, requests)


def test_accepted_requests_stay_possible():
    """A request that waits and would not fit any more refuses the resize; once it is gone the size is possible, and new
    requests are measured by it."""
    kit = EngineKit(64)
    kit.add("running", prompt_of(40, seed=1), 1)
    kit.step()
    long = kit.add("long", prompt_of(200), 5)
    future = kit.engine.resize(40)
    kit.step()
    assert isinstance(future.exception(timeout=0), CapacityError)
    assert "201" in str(future.exception())
    kit.run()
    future = kit.engine.resize(40)
    assert kit.engine.has_work
    kit.step()
    assert future.result(timeout=0).num_pages == 40
    assert kit.engine.max_model_tokens == 160
    with pytest.raises(PromptTooLong, match="160"):
        kit.add("another", prompt_of(160), 1)
    check(kit, [long])


def test_a_smaller_limit_ends_sooner():
    """A running request that still fits ends with "length" at the new limit."""
    kit = EngineKit(64)
    request = kit.add("a", prompt_of(20), 100)
    kit.step(5)
    kit.engine.resize(10)
    kit.run()
    assert kit.reason("a") is FinishReason.LENGTH
    assert kit.tokens("a") == kit.expected(request, 20)


@pytest.mark.parametrize("num_pages", [200, 12])
def test_a_runner_without_memory(num_pages):
    """The runner refuses: the cache has its old size again, what had moved is moved in the tensors too, all go on."""
    kit = EngineKit(64)
    requests = [kit.add(f"r{i}", prompt_of(12, seed=i), 20) for i in range(4)]
    kit.step(3)
    for name in ("r0", "r2"):
        kit.engine.abort(name)
    resize = kit.runner.resize

    def refuse_once(num_blocks, copies):
        kit.runner.resize = resize
        raise CapacityError("no memory for that")

    kit.runner.resize = refuse_once
    future = kit.engine.resize(num_pages)
    kit.step()
    assert isinstance(future.exception(timeout=0), CapacityError)
    assert kit.cache.plan.num_blocks == kit.runner.num_blocks == 64
    kit.run()
    check(kit, [requests[1], requests[3]])


@pytest.mark.parametrize("groups", [GROUPS[:1], GROUPS])
@pytest.mark.parametrize("num_pages", [16, 20, 30, 100])
@pytest.mark.parametrize("gone", [[], ["s0"], ["s2"], ["s1", "s3"], SAMPLES[1:]])
def test_forks_that_wait_for_their_copies(groups, num_pages, gone):
    """[P10] A resize between a fork and the copy of its tail, with the parent or the forks gone or not: every sample
    that is left reads its own tokens."""
    kit = EngineKit(100, groups=groups)
    filler = kit.add("filler", prompt_of(40, seed=5), 1)  # its blocks come first, so that the samples must move
    kit.step()
    requests = kit.add_samples(SAMPLES, prompt_of(6), 9, temperature=1.0, seed=1)
    kit.step()
    assert kit.engine._scheduler.copies
    kit.cache.clear()
    for name in gone:
        kit.engine.abort(name)
    future = kit.engine.resize(num_pages)
    other = kit.add("other", prompt_of(13, seed=3), 4)
    kit.run()
    assert future.exception() is None or num_pages < 30
    check(kit, [request for request in [filler, other, *requests] if request.request_id not in gone])


def test_sizes_changed_long_after_a_fork():
    """[P10] A fork's copies are done once: resizes after that, when the blocks are long gone, don't meet them."""
    kit = EngineKit(200)
    filler = kit.add("filler", prompt_of(400, seed=5), 1)
    kit.step()
    requests = kit.add_samples(SAMPLES, prompt_of(6), 40, temperature=1.0, seed=1)
    kit.step(3)
    assert all(kit.engine._sequences[name].held.copies == [] for name in SAMPLES)
    kit.cache.clear()
    futures = []
    for num_pages in (60, 50, 80, 45):
        futures.append(kit.engine.resize(num_pages))
        kit.step(2)
    assert [future.result(timeout=0).num_pages for future in futures] == [60, 50, 80, 45]
    kit.run()
    check(kit, [filler, *requests])


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6, unique_by=lambda pair: pair[1]),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6, unique_by=lambda pair: pair[1]),
    st.integers(0, 10),
)
def test_copies_then_moves_are_one_set_of_copies(copies, moves, num_blocks):
    """[P14] Copies and then moves give the same memory as the chained copies at once."""
    moves = [move for move in moves if move[1] < num_blocks]
    memory = list(range(10))

    def done(memory, pairs):
        before = list(memory)
        for from_block, to_block in pairs:
            memory[to_block] = before[from_block]
        return memory

    expected = done(done(list(memory), copies), moves)[:num_blocks]
    assert done(list(memory), chained_copies(copies, moves, num_blocks))[:num_blocks] == expected


@pytest.mark.parametrize("num_pages", [0, -1, 2.5, "many", True, None])
def test_no_size(num_pages):
    """What is no size is refused at once."""
    kit = EngineKit()
    with pytest.raises(ConfigError):
        kit.engine.resize(num_pages)
    assert not kit.engine.has_work


def test_an_idle_engine_wakes_up():
    """A resize of an engine in its thread is done without a request, and beside one; after a stop it is refused."""
    kit = EngineKit(32, delay_seconds=0.01)

    async def main():
        with AsyncEngine(kit.engine) as running:
            result = await asyncio.wait_for(asyncio.wrap_future(running.resize(40)), 5)
            assert result.num_pages == kit.cache.plan.num_pages == 40
            request = GenerationRequest("a", prompt_of(9), SamplingParams(max_tokens=20, temperature=0.0))
            stream = running.submit(request)
            first = await anext(stream)
            future = running.resize(50)
            assert future.cancel() or future.result(5)
            tokens = [token async for delta in stream for token in delta.token_ids]
            assert [*first.token_ids, *tokens] == kit.expected(request)
        with pytest.raises(LifecycleError):
            running.resize(20)

    asyncio.run(main())


def test_nobody_waits_for_a_dead_engine():
    """If the engine dies, who waits for a resize is told."""
    kit = EngineKit()
    running = AsyncEngine(kit.engine)
    kit.cache.maintain = lambda: 1 // 0
    kit.engine._take_in = lambda: 1 // 0
    future = running.resize(40)
    running.start()
    assert isinstance(future.exception(timeout=5), ModelError)
    running.stop()


def test_sizes_asked_for_before_a_stop_are_answered():
    """An engine that was never started answers at its stop."""
    kit = EngineKit()
    running = AsyncEngine(kit.engine)
    future = running.resize(40)
    running.stop()
    assert future.result(timeout=0).num_pages == 40
