"""A client that leaves frees its blocks, over real sockets."""

from __future__ import annotations

import asyncio

import pytest
from openai import AsyncOpenAI

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MODES = [(path, stream) for path in (COMPLETIONS, CHAT) for stream in (False, True)]


def body_for(path: str, stream: bool, max_tokens: int = 500) -> dict:
    text = "a question of some length, so that it takes several blocks"
    prompt = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    return {**prompt, "stream": stream, "max_tokens": max_tokens, "ignore_eos": True}


@pytest.mark.parametrize(("path", "stream"), MODES)
async def test_leaving_in_the_middle(make_server, wire, eventually, path, stream):
    """[S108] A socket dropped after two tokens ends the request: soon nothing runs and no block is held."""
    server = await make_server(delay_seconds=0.01)
    async with wire(server) as on_wire:
        reader, writer = await on_wire.send(path, body_for(path, stream))
        if stream:
            received = b""
            while received.count(b"data: ") < 3:
                received += await reader.read(4096)
        else:
            assert await eventually(lambda: server.runner.num_steps > 3)
        assert not server.is_idle
        writer.close()
        assert await eventually(lambda: server.is_idle)
        assert server.runner.num_steps < 200
        assert len(server.engine.effective) == 1


@pytest.mark.parametrize(("path", "stream"), MODES)
async def test_leaving_before_the_first_token(make_server, wire, eventually, path, stream):
    """[S108] A socket dropped while the prompt is computed ends the request after that step."""
    server = await make_server(delay_seconds=0.15)
    async with wire(server) as on_wire:
        _, writer = await on_wire.send(path, body_for(path, stream))
        assert await eventually(lambda: server.engine.engine.num_running == 1)
        writer.close()
        assert await eventually(lambda: server.is_idle)
        assert server.runner.num_steps <= 3


@pytest.mark.parametrize(("path", "stream"), MODES)
async def test_leaving_the_queue(make_server, wire, eventually, path, stream):
    """[S108] A socket dropped while its request waits in the queue takes it out; the one that runs is not touched."""
    server = await make_server(delay_seconds=0.01, max_running_requests=1)
    async with wire(server) as on_wire:
        first = asyncio.ensure_future(server.post(COMPLETIONS, body_for(COMPLETIONS, False, max_tokens=60)))
        assert await eventually(lambda: server.engine.engine.num_running == 1)
        _, writer = await on_wire.send(path, body_for(path, stream))
        assert await eventually(lambda: server.engine.engine.num_waiting == 1)
        writer.close()
        assert await eventually(lambda: server.engine.engine.num_waiting == 0)
        assert server.engine.engine.num_running == 1
        assert (await first)["usage"]["completion_tokens"] == 60


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_ends_all_choices(make_server, wire, eventually, stream):
    """[S108] A client that leaves a request of several prompts and choices ends all of them."""
    server = await make_server(delay_seconds=0.01)
    async with wire(server) as on_wire:
        body = {"prompt": ["ab", "cd"], "n": 3, "max_tokens": 500, "stream": stream, "ignore_eos": True}
        _, writer = await on_wire.send(COMPLETIONS, body)
        assert await eventually(lambda: server.engine.engine.num_running == 6)
        writer.close()
        assert await eventually(lambda: server.is_idle)
        assert len(server.engine.effective) == 6


async def test_aborts_count_only_those_who_left(make_server, wire, eventually):
    """[S109] 50 requests that end normally cause no abort; 50 that are dropped cause 50, each effective once."""
    server = await make_server(delay_seconds=0.001, num_pages=16)
    async with wire(server) as on_wire:
        bodies = [body_for(*MODES[index % 4], max_tokens=3) for index in range(50)]
        paths = [MODES[index % 4][0] for index in range(50)]
        sockets = [await on_wire.send(path, body) for path, body in zip(paths, bodies, strict=True)]
        for reader, writer in sockets:
            status = await reader.readline()
            assert b"200" in status
            writer.write_eof()
            await reader.read()
            writer.close()
        assert await eventually(lambda: server.is_idle)
        assert server.engine.aborted == []
        server.runner.delay_seconds = 0.01
        bodies = [body_for(*MODES[index % 4], max_tokens=400) for index in range(50)]
        sockets = [await on_wire.send(path, body) for path, body in zip(paths, bodies, strict=True)]
        inner = server.engine.engine
        assert await eventually(lambda: inner.num_running + inner.num_waiting == 50, 5.0)
        for _, writer in sockets:
            writer.close()
        assert await eventually(lambda: server.is_idle, 2.0)
        assert len(server.engine.effective) == len(set(server.engine.effective)) == 50
        assert sorted(set(server.engine.aborted)) == sorted(server.engine.effective)


async def test_the_official_client_closes_a_stream(make_server, wire, eventually):
    """[S108] Closing a stream of the official client ends the request, whatever of it was read."""
    server = await make_server(delay_seconds=0.01)
    async with (
        wire(server) as on_wire,
        AsyncOpenAI(base_url=f"http://127.0.0.1:{on_wire.port}/v1", api_key="k") as client,
    ):
        for num_read in (1, 5):
            stream = await client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=500, stream=True
            )
            for _ in range(num_read):
                await stream.__anext__()
            assert not server.is_idle
            await stream.close()
            assert await eventually(lambda: server.is_idle)
    assert len(server.engine.effective) == 2


async def test_leaving_a_warming(make_server, wire, eventually):
    """[S108] Warming is work of its client too: it ends when the client leaves."""
    server = await make_server(delay_seconds=0.1)
    async with wire(server) as on_wire:
        _, writer = await on_wire.send("/v1/cache/warm", {"text": "w" * 200})
        assert await eventually(lambda: server.engine.engine.num_running == 1)
        writer.close()
        assert await eventually(lambda: server.is_idle)
        assert len(server.engine.effective) <= 1


async def test_the_next_client_is_served_after_a_drop(make_server, wire, eventually):
    """[S108] What a client that left had computed may be reused, and is right."""
    server = await make_server(delay_seconds=0.005)
    async with wire(server) as on_wire:
        _, writer = await on_wire.send(COMPLETIONS, body_for(COMPLETIONS, True))
        assert await eventually(lambda: server.runner.num_steps > 20)
        writer.close()
        assert await eventually(lambda: server.is_idle)
        answer = await server.post(COMPLETIONS, body_for(COMPLETIONS, False, max_tokens=30))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
