"""A whole server in one process: real cache, real engine, a fake model that notices every wrong block."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from openai import AsyncOpenAI

from looseleaf.core.config import CacheConfig, LayerGroup
from looseleaf.core.manager import CacheManager
from looseleaf.engine.async_engine import AsyncEngine
from looseleaf.engine.config import EngineConfig
from looseleaf.engine.engine import Engine
from looseleaf.server import ServerSettings, create_app
from looseleaf.server.auth import shown_name
from looseleaf.telemetry import Metrics
from looseleaf.testing.fake_runner import FakeRunner
from looseleaf.testing.fake_tokenizer import FakeTokenizer

BLOCK_TOKENS = 16
BLOCK_BYTES = 128
LETTERS = tuple(range(ord("a"), ord("z") + 1))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def eventually(condition: Callable[[], bool], seconds: float = 3.0) -> bool:
    """True as soon as `condition` holds; False after `seconds`."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.002)
    return True


@dataclass
class ManualClock:
    """A clock that goes only when told to."""

    seconds: float = 1000.0

    def __call__(self) -> float:
        return self.seconds


@dataclass
class CountingEngine(AsyncEngine):
    """Counts the aborts that come from the server, and those that ended something."""

    inner: Engine
    aborted: list[str] = field(default_factory=list)
    effective: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        AsyncEngine.__init__(self, self.inner)

    def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        done = super().abort(request_id)
        if done:
            self.effective.append(request_id)
        return done


@dataclass
class Server:
    """What a test may look at, and clients to talk with."""

    cache: CacheManager
    runner: FakeRunner
    engine: CountingEngine
    metrics: Metrics
    app: FastAPI
    tokenizer: FakeTokenizer
    http: httpx.AsyncClient
    openai: AsyncOpenAI

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits or holds a block."""
        inner = self.engine.engine
        stats = self.cache.stats()
        return inner.num_running == inner.num_waiting == stats.active_blocks == stats.num_leases == 0

    async def post(self, path: str, body: dict[str, Any], status: int = 200, **headers: str) -> dict[str, Any]:
        """The JSON answer, after checking the status."""
        response = await self.http.post(path, json=body, headers=headers)
        assert response.status_code == status, response.text
        return response.json()

    async def get(self, path: str, status: int = 200, **headers: str) -> dict[str, Any]:
        """The JSON answer, after checking the status."""
        response = await self.http.get(path, headers=headers)
        assert response.status_code == status, response.text
        return response.json()

    async def pins(self, **headers: str) -> list[dict[str, Any]]:
        """The live pins that the caller sees."""
        return (await self.get("/v1/pins", **headers))["data"]

    async def delete(self, path: str, status: int = 200, **headers: str) -> dict[str, Any]:
        """The JSON answer, after checking the status."""
        response = await self.http.delete(path, headers=headers)
        assert response.status_code == status, response.text
        return response.json()

    async def put(self, path: str, body: Any, status: int = 200, **headers: str) -> dict[str, Any]:
        """The JSON answer, after checking the status."""
        response = await self.http.put(path, json=body, headers=headers)
        assert response.status_code == status, response.text
        return response.json()

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream, which must end with [DONE]."""
        response = await self.http.post(path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


@dataclass
class Wire:
    """The server behind a real socket."""

    server: Server
    port: int

    async def send(self, path: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request and leave the connection open."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        await writer.drain()
        return reader, writer


MakeServer = Callable[..., Awaitable[Server]]


@pytest.fixture
async def make_server() -> AsyncIterator[MakeServer]:
    """Make servers; at the end each must be idle, whole, and without a stamp mismatch."""
    async with AsyncExitStack() as stack:
        servers: list[Server] = []

        async def make(
            *,
            num_pages: int = 8,
            page_tokens: int = 256,
            pin_quota: float = 0.3,
            settings: ServerSettings | None = None,
            tokenizer: FakeTokenizer | None = None,
            vllm_names: bool = False,
            max_running_requests: int = 64,
            max_model_tokens: int = 1024,
            groups: tuple[LayerGroup, ...] = (LayerGroup("full"),),
            clock: Callable[[], float] = time.monotonic,
            **runner_options: Any,
        ) -> Server:
            config = CacheConfig(
                policy="lru",  # an order that tests can foretell
                num_pages=num_pages,
                page_tokens=page_tokens,
                block_tokens=BLOCK_TOKENS,
                pin_quota=pin_quota,
                groups=groups,
                layout="fake/1",
            )
            cache = CacheManager(config, clock)
            tokenizer = tokenizer or FakeTokenizer()
            runner_options.setdefault("alphabet", LETTERS)
            runner = FakeRunner(cache.plan.num_blocks, BLOCK_TOKENS, groups=groups, **runner_options)
            metrics = Metrics(cache, model_name="fake", vllm_names=vllm_names, name_of=shown_name)
            limits = EngineConfig(max_running_requests=max_running_requests, max_model_tokens=max_model_tokens)
            engine = CountingEngine(Engine(cache, runner, tokenizer, limits, observer=metrics))
            sizes = {"bytes_per_block": BLOCK_BYTES, "cache_clock": clock}
            app = create_app(engine, cache, tokenizer, "fake", metrics, settings, **sizes)
            await stack.enter_async_context(app.router.lifespan_context(app))
            http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
            to_openai = httpx.AsyncClient(transport=httpx.ASGITransport(app))
            openai = AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=to_openai, max_retries=0)
            await stack.enter_async_context(http)
            await stack.enter_async_context(to_openai)
            servers.append(Server(cache, runner, engine, metrics, app, tokenizer, http, openai))
            return servers[-1]

        yield make
        for server in servers:
            assert await eventually(lambda server=server: server.is_idle)
            server.cache.check_integrity()
            assert server.runner.mismatches == []


@pytest.fixture
async def server(make_server: MakeServer) -> Server:
    return await make_server()


@asynccontextmanager
async def on_the_wire(server: Server) -> AsyncIterator[Wire]:
    """Serve `server.app` with uvicorn on a free port of 127.0.0.1."""
    config = uvicorn.Config(server.app, host="127.0.0.1", port=0, lifespan="off", log_level="error")
    web = uvicorn.Server(config)
    serving = asyncio.ensure_future(web.serve())
    assert await eventually(lambda: web.started, 5.0)
    try:
        yield Wire(server, web.servers[0].sockets[0].getsockname()[1])
    finally:
        web.should_exit = True
        await serving


@pytest.fixture
def wire() -> Callable[[Server], Any]:
    return on_the_wire


@pytest.fixture
def clock() -> ManualClock:
    """For `make_server(clock=clock)`; tests add to its `seconds`."""
    return ManualClock()


@pytest.fixture(name="eventually")
def eventually_fixture() -> Callable[..., Awaitable[bool]]:
    return eventually
