"""Many clients at once, and a server that answers while the model computes."""

from __future__ import annotations

import asyncio
import threading

import httpx
import pytest

from looseleaf.engine.sampling import SamplingParams

pytestmark = pytest.mark.anyio


async def test_32_parallel_streams_each_get_their_own_text(make_server, wire):
    """32 clients that stream at once over sockets each get exactly the text that their prompt gets alone."""
    server = await make_server(num_pages=16, max_running_requests=12)
    params = SamplingParams(max_tokens=20, temperature=0)

    async def one(client: httpx.AsyncClient, index: int) -> tuple[str, str]:
        prompt = [index, *range(60 + index % 5)]
        expected = server.tokenizer.decode(server.runner.expected_tokens(prompt, 20, params))
        body = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "stream": True}
        text = ""
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += httpx.Response(200, content=line[6:]).json()["choices"][0]["text"]
        return text, expected

    async with wire(server) as on_wire, httpx.AsyncClient(base_url=f"http://127.0.0.1:{on_wire.port}") as client:
        results = await asyncio.gather(*(one(client, index) for index in range(32)))
    assert all(text == expected for text, expected in results)


async def test_health_answers_while_a_step_runs(server, eventually, monkeypatch):
    """/health, /metrics, statistics, pins, look-ups and new requests are taken while a step runs, however long it
    takes."""
    may_go_on = threading.Event()
    execute = server.runner.execute

    def held(batch):
        assert may_go_on.wait(30)
        return execute(batch)

    monkeypatch.setattr(server.runner, "execute", held)
    body = {"prompt": "abc", "max_tokens": 2}
    running = [asyncio.ensure_future(server.post("/v1/completions", body))]
    try:
        assert await eventually(lambda: server.engine.engine.num_running == 1)
        running.append(asyncio.ensure_future(server.post("/v1/completions", body)))
        assert await eventually(lambda: server.engine.engine.num_waiting == 1)
        assert (await server.get("/health"))["num_running"] == 1
        await server.get("/v1/cache/stats")
        await server.get("/v1/pins")
        await server.post("/v1/cache/match", {"text": "abc"})
        assert (await server.http.get("/metrics")).status_code == 200
        assert server.runner.num_steps == 0
    finally:
        may_go_on.set()
    await asyncio.gather(*running)


async def test_slow_tokenizing_does_not_hold_up_others(server):
    """A text whose tokenizing takes long is tokenized beside the event loop: others are answered meanwhile."""
    may_go_on = threading.Event()
    encode = server.tokenizer.encode

    def slowly(text: str) -> list[int]:
        assert may_go_on.wait(5)
        return encode(text)

    server.tokenizer.encode = slowly
    running = asyncio.ensure_future(server.post("/v1/completions", {"prompt": "abc", "max_tokens": 1}))
    try:
        await asyncio.sleep(0.05)
        await server.get("/health")
        assert not running.done()
    finally:
        may_go_on.set()
    await running


async def test_stopping_ends_open_streams(make_server):
    """When the engine stops, an open stream gets its last event and ends; a plain request is 503."""
    server = await make_server(delay_seconds=0.01)
    body = {"prompt": "abc", "max_tokens": 500, "ignore_eos": True}
    stream = asyncio.ensure_future(server.events("/v1/completions", body))
    plain = asyncio.ensure_future(server.post("/v1/completions", body, 503))
    while server.engine.engine.num_running < 2:
        await asyncio.sleep(0.005)
    await asyncio.to_thread(server.engine.stop)
    assert (await stream)[-1]["choices"][0]["finish_reason"] == "abort"
    assert (await plain)["error"]["code"] == "aborted"
