"""Many clients at once, and a server that answers while the model computes."""

from __future__ import annotations

import asyncio
import threading
import time

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


@pytest.mark.parametrize("long_work", ["echo", "logprobs", "streamed logprobs", "match", "clear"])
async def test_long_work_is_done_beside_the_event_loop(server, long_work, monkeypatch):
    """What may take long (decoding for echo and log-probabilities, look-ups, clearing) holds up nobody else: health is
    answered while it lasts."""
    may_go_on, begun = threading.Event(), threading.Event()

    def held(method):
        def call(*args, **kwargs):
            if threading.current_thread().name != "looseleaf-engine":
                begun.set()
                assert may_go_on.wait(5)
            return method(*args, **kwargs)

        return call

    asked = {"prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}
    path, body = {
        "echo": ("/v1/completions", {**asked, "echo": True}),
        "logprobs": ("/v1/completions", {**asked, "logprobs": 2}),
        "streamed logprobs": ("/v1/completions", {**asked, "logprobs": 2, "stream": True}),
        "match": ("/v1/cache/match", {"tokens": [5, 6, 7]}),
        "clear": ("/v1/cache/clear", {}),
    }[long_work]
    if long_work in ("match", "clear"):
        monkeypatch.setattr(server.cache, long_work, held(getattr(server.cache, long_work)))
    else:
        server.tokenizer.decode = held(server.tokenizer.decode)
    running = asyncio.ensure_future(server.http.post(path, json=body))
    try:
        assert await asyncio.to_thread(begun.wait, 5)
        await server.get("/health")
        assert not running.done()
    finally:
        may_go_on.set()
    assert (await running).status_code == 200


async def test_a_request_is_taken_while_the_tokenizer_is_busy(server, eventually):
    """A prompt of token ids is queued, and others are answered, while some long text holds the tokenizer: only the
    engine's thread asks it for the text of tokens."""
    is_free = threading.Event()
    decode, askers = server.tokenizer.decode, set()

    def waiting(*args, **kwargs):
        askers.add(threading.current_thread().name)
        assert is_free.wait(5)
        return decode(*args, **kwargs)

    server.tokenizer.decode = waiting
    running = asyncio.ensure_future(server.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 2}))
    try:
        assert await eventually(lambda: bool(askers))
        await server.get("/health")
    finally:
        is_free.set()
    await running
    assert askers == {"looseleaf-engine"}


async def test_health_is_quick_under_load(make_server, wire):
    """With steps that compute for 300 ms, then work in Python for 10, and 16 streams at once, most health checks are
    answered in a third of a step: they do not wait for its end. `bench/health_under_load.py` has percentiles."""
    server = await make_server(num_pages=16, delay_seconds=0.3)
    execute = server.runner.execute

    def busy(batch):
        until = time.perf_counter() + 0.01
        while time.perf_counter() < until:
            pass
        return execute(batch)

    server.runner.execute = busy
    body = {"max_tokens": 5, "temperature": 0, "stream": True, "ignore_eos": True}
    seconds = []
    async with wire(server) as on_wire, httpx.AsyncClient(base_url=f"http://127.0.0.1:{on_wire.port}") as client:
        prompts = [[index, *range(40)] for index in range(16)]
        running = [asyncio.ensure_future(client.post("/v1/completions", json={**body, "prompt": p})) for p in prompts]
        while not all(task.done() for task in running):
            start = time.perf_counter()
            assert (await client.get("/health")).status_code == 200
            seconds.append(time.perf_counter() - start)
            await asyncio.sleep(0.005)
        await asyncio.gather(*running)
    assert len(seconds) >= 10
    assert sorted(seconds)[len(seconds) * 3 // 4] < 0.1
