"""The engine in its thread, read from asyncio: streams, aborts, failures, stopping."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest

from looseleaf.engine.async_engine import AsyncEngine
from looseleaf.engine.request import FinishReason, GenerationRequest
from looseleaf.engine.sampling import SamplingParams
from looseleaf.errors import DuplicateRequest, InvalidTokens, LifecycleError, PromptTooLong
from looseleaf.testing.engine_kit import EngineKit
from looseleaf.testing.engine_kit import sample_prompt as prompt_of


def request_of(name, num_tokens=9, max_tokens=8, seed=0):
    return GenerationRequest(name, prompt_of(num_tokens, seed), SamplingParams(max_tokens=max_tokens, temperature=0.0))


async def until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.002)


def count_aborts(kit):
    """Calls of Engine.abort that had an effect."""
    effective = []
    abort = kit.engine.abort
    kit.engine.abort = lambda name: abort(name) and (effective.append(name) or True)
    return effective


def test_streams_give_the_tokens():
    """Twenty streams at once: each gives its own tokens, in order, and ends after its last delta."""
    kit = EngineKit(num_blocks=64)

    async def read(running, request):
        return [delta async for delta in running.submit(request)]

    async def main():
        with AsyncEngine(kit.engine) as running:
            requests = [request_of(f"r{i}", 5 + i, seed=i) for i in range(20)]
            results = await asyncio.gather(*(read(running, request) for request in requests))
        for request, deltas in zip(requests, results, strict=True):
            assert [token for delta in deltas for token in delta.token_ids] == kit.expected(request)
            assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
            assert deltas[-1].finish_reason is FinishReason.LENGTH

    asyncio.run(main())


def test_the_loop_is_never_blocked():
    """While steps take 250 ms each, the event loop goes on in between, and submit does not wait for a step."""
    kit = EngineKit(delay_seconds=0.25)

    async def main():
        longest, before, is_done = 0.0, time.monotonic(), False

        async def tick():
            nonlocal longest, before
            while not is_done:
                await asyncio.sleep(0.001)
                now = time.monotonic()
                longest, before = max(longest, now - before), now

        with AsyncEngine(kit.engine) as running:
            ticking = asyncio.create_task(tick())
            streams = [running.submit(request_of(f"r{i}", max_tokens=4, seed=i)) for i in range(4)]
            for stream in streams:
                async for _ in stream:
                    pass
            is_done = True
            await ticking
        return longest

    assert asyncio.run(main()) < 0.2


def test_refusals_come_at_once():
    """Wrong requests raise from submit itself, in the caller; the running one is not disturbed."""
    kit = EngineKit(max_model_tokens=64)

    async def main():
        with AsyncEngine(kit.engine) as running:
            stream = running.submit(request_of("a", max_tokens=40))
            with pytest.raises(DuplicateRequest):
                running.submit(request_of("a"))
            with pytest.raises(PromptTooLong):
                running.submit(request_of("b", num_tokens=64))
            with pytest.raises(InvalidTokens):
                running.submit(GenerationRequest("c", [300], SamplingParams()))
            deltas = [delta async for delta in stream]
        assert deltas[-1].usage.num_output_tokens == 40

    asyncio.run(main())


def test_fifty_normal_ends_abort_nothing():
    """[S109] Requests that end by themselves cause no abort, closed or dropped afterwards or not."""
    kit = EngineKit()
    effective = count_aborts(kit)

    async def main():
        with AsyncEngine(kit.engine) as running:
            for i in range(50):
                stream = running.submit(request_of(f"r{i}", max_tokens=2, seed=i))
                async for _ in stream:
                    pass
                if i % 2:
                    await stream.aclose()
                    await stream.aclose()
                assert not stream.abort()

    asyncio.run(main())
    assert effective == []


@pytest.mark.parametrize("way", ["aclose", "with", "break", "cancel", "abort", "drop-unread"])
def test_leaving_early_aborts_once(way):
    """[S109] [S108] Fifty streams left early: fifty aborts, each effective once, and every block comes free."""
    kit = EngineKit(num_blocks=64, delay_seconds=0.001)
    effective = count_aborts(kit)

    async def leave(running, i):
        stream = running.submit(request_of(f"r{i}", max_tokens=200, seed=i))
        if way == "aclose":
            await anext(stream)
            await stream.aclose()
            await stream.aclose()
        elif way == "with":
            async with stream:
                await anext(stream)
        elif way == "break":
            async for _ in stream:
                break
        elif way == "cancel":
            task = asyncio.create_task(anext_of(stream))
            await asyncio.sleep(0.003)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif way == "abort":
            await anext(stream)
            assert stream.abort()
            assert not stream.abort()
            last = [delta async for delta in stream][-1]
            assert last.finish_reason is FinishReason.ABORT
        if way not in ("abort", "break", "drop-unread"):
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    async def anext_of(stream):
        while True:
            await anext(stream)

    async def main():
        with AsyncEngine(kit.engine) as running:
            for i in range(50):
                await leave(running, i)
            gc.collect()
            await until(lambda: not kit.engine.has_work)
            assert kit.cache.stats().active_blocks == 0

    asyncio.run(main())
    assert sorted(effective) == sorted(f"r{i}" for i in range(50))


def test_abort_while_waiting():
    """[S108] A client that leaves while its request still waits in the queue is gone at the next step."""
    kit = EngineKit(num_blocks=8, delay_seconds=0.002)

    async def main():
        with AsyncEngine(kit.engine) as running:
            first = running.submit(request_of("a", num_tokens=20, max_tokens=8))
            second = running.submit(request_of("b", num_tokens=20, max_tokens=8, seed=1))
            await until(lambda: kit.engine.num_waiting == 1)
            await second.aclose()
            await until(lambda: kit.engine.num_waiting == 0)
            assert [delta async for delta in first][-1].finish_reason is FinishReason.LENGTH

    asyncio.run(main())


def test_failed_step_does_not_stop_the_engine():
    """An exception of the model ends the step's requests with ERROR; the next request is served."""
    kit = EngineKit()

    async def main():
        with AsyncEngine(kit.engine) as running:
            kit.runner.fail_next()
            last = [delta async for delta in running.submit(request_of("a"))][-1]
            assert last.finish_reason is FinishReason.ERROR
            assert "RuntimeError" in str(last.error)
            request = request_of("b")
            tokens = [token async for delta in running.submit(request) for token in delta.token_ids]
            assert tokens == kit.expected(request)
            assert running.failure is None

    asyncio.run(main())


def test_death_is_told_to_everybody():
    """If the engine itself breaks, streams end with ERROR, submit refuses with the cause, stop still works."""
    kit = EngineKit(delay_seconds=0.002)

    async def main():
        running = AsyncEngine(kit.engine)
        running.start()
        stream = running.submit(request_of("a", max_tokens=100))
        await anext(stream)
        kit.cache.maintain = lambda: 1 // 0
        last = [delta async for delta in stream][-1]
        assert last.finish_reason is FinishReason.ERROR
        assert isinstance(running.failure, ZeroDivisionError)
        with pytest.raises(LifecycleError, match="ZeroDivisionError"):
            running.submit(request_of("b"))
        running.stop()

    asyncio.run(main())


@pytest.mark.parametrize("is_started", [True, False])
def test_stop_ends_every_stream(is_started):
    """stop() aborts what is left, ends the thread, can be called again; nothing can be submitted or started after."""
    kit = EngineKit(delay_seconds=0.002)

    async def main():
        running = AsyncEngine(kit.engine)
        if is_started:
            running.start()
            running.start()
        streams = [running.submit(request_of(f"r{i}", max_tokens=100)) for i in range(3)]
        if is_started:
            await anext(streams[0])
        await asyncio.to_thread(running.stop)
        running.stop()
        for stream in streams:
            assert [delta async for delta in stream][-1].finish_reason is FinishReason.ABORT
        assert kit.cache.stats().active_blocks == 0
        with pytest.raises(LifecycleError):
            running.submit(request_of("late"))
        with pytest.raises(LifecycleError):
            running.start()

    asyncio.run(main())
    assert not [thread for thread in threading.enumerate() if thread.name == "looseleaf-engine"]


def test_submit_from_threads_and_other_loops():
    """Requests may be submitted from plain threads and read in any event loop."""
    kit = EngineKit(num_blocks=128, delay_seconds=0.001)
    results = {}

    def client(running, i):
        async def read():
            return [token async for delta in running.submit(request_of(f"r{i}", seed=i)) for token in delta.token_ids]

        results[i] = asyncio.run(read())

    with AsyncEngine(kit.engine) as running:
        threads = [threading.Thread(target=client, args=(running, i)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert results == {i: kit.expected(request_of(f"r{i}", seed=i)) for i in range(8)}


def test_closed_loop_aborts_its_requests():
    """A request whose event loop is gone is aborted; those of other loops go on."""
    kit = EngineKit(num_blocks=64, delay_seconds=0.002)
    kept = []

    async def begin(running):
        stream = running.submit(request_of("a", max_tokens=100))
        await anext(stream)
        kept.append(stream)

    async def end(running):
        request = request_of("b", max_tokens=20, seed=1)
        tokens = [token async for delta in running.submit(request) for token in delta.token_ids]
        assert tokens == kit.expected(request)
        await until(lambda: not kit.engine.has_work)

    with AsyncEngine(kit.engine) as running:
        asyncio.run(begin(running))
        asyncio.run(end(running))
    assert not kept[0].abort()
