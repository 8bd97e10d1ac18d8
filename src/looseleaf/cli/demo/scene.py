"""The stage of the demo: how much memory, which limits, and one run of a workload on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from looseleaf.cli.build import LoadedModel, MemorySettings, build_stack
from looseleaf.cli.client import ServerClient
from looseleaf.cli.demo.figures import Run, figures_of
from looseleaf.cli.demo.load import Outcome, send, send_all
from looseleaf.cli.demo.recorder import MemoryRecorder
from looseleaf.cli.demo.workload import DemoRequest, Workload
from looseleaf.cli.serving import BackgroundServer
from looseleaf.core.manager import CacheManager
from looseleaf.engine.config import EngineConfig
from looseleaf.telemetry import Metrics

DEMO_MEMORY = MemorySettings(num_pages=96)
"""4,096 tokens of the demo model's six lanes, if all are kept: less than the burst of letters."""
DEMO_STEP_TOKENS = 1024
"""A step computes at most this many tokens, so that a short question does not wait for all of a document."""
WARM_UP = DemoRequest("warm-up", "one-off", "The first step of a process is slower than the others." * 8, max_tokens=2)


@dataclass(frozen=True)
class Scene:
    """What both runs have in common. `memory_tokens`: that fit if every layer keeps them. `burst_tokens`: tokens of the
    one-off prompts."""

    model_name: str
    memory_tokens: int
    memory_bytes: int
    page_tokens: int
    block_tokens: int
    max_step_tokens: int
    max_answer_tokens: int
    num_clients: int
    num_requests: int
    burst_tokens: int


def scene_of(model: LoadedModel, memory: MemorySettings, workload: Workload) -> Scene:
    """The facts of a workload on a model."""
    num_lanes = sum(group.num_lanes for group in model.runner.info.groups)
    one_off = [request.prompt for request in workload.requests if request.kind == "one-off"]
    return Scene(
        model_name=model.name,
        memory_tokens=model.num_blocks // num_lanes * memory.block_tokens,
        memory_bytes=model.num_blocks * model.bytes_per_block,
        page_tokens=memory.page_tokens,
        block_tokens=memory.block_tokens,
        max_step_tokens=DEMO_STEP_TOKENS,
        max_answer_tokens=max(request.max_tokens for request in workload.requests),
        num_clients=workload.num_clients,
        num_requests=len(workload.requests),
        burst_tokens=sum(len(model.tokenizer.encode(prompt)) for prompt in one_off),
    )


def run_plain(
    model: LoadedModel, memory: MemorySettings, workload: Workload, on_done: Callable[[Outcome], None] | None = None
) -> Run:
    """Serve the workload without reuse or pins, room for prompt + max_tokens set aside for each request."""
    config = EngineConfig(max_step_tokens=DEMO_STEP_TOKENS, reuse=False, reserve_output=True)
    return _run(model, memory, workload, config, pinned=None, on_done=on_done)


def run_looseleaf(
    model: LoadedModel, memory: MemorySettings, workload: Workload, on_done: Callable[[Outcome], None] | None = None
) -> Run:
    """Serve the workload with reuse, the policy pinned from the start (it is computed by the first who needs it)."""
    config = EngineConfig(max_step_tokens=DEMO_STEP_TOKENS)
    return _run(model, memory, workload, config, pinned=workload.policy, on_done=on_done)


def _run(
    model: LoadedModel,
    memory: MemorySettings,
    workload: Workload,
    config: EngineConfig,
    pinned: str | None,
    on_done: Callable[[Outcome], None] | None,
) -> Run:
    recorders: list[MemoryRecorder] = []

    def observe(cache: CacheManager, metrics: Metrics) -> MemoryRecorder:
        recorders.append(MemoryRecorder(cache, metrics))
        return recorders[0]

    stack = build_stack(model, memory, config, observe=observe)
    with BackgroundServer(stack.app) as server:
        asyncio.run(_warm_up(server.url, model.name))
        recorders[0].start()
        if pinned is not None:
            ServerClient(server.url, key=None).call("POST", "/v1/pins", {"text": pinned, "owner": "demo"})
        started = time.perf_counter()
        outcomes = asyncio.run(send_all(server.url, model.name, workload, on_done))
        seconds = time.perf_counter() - started
    return Run(tuple(outcomes), figures_of(outcomes, seconds, recorders[0]))


async def _warm_up(url: str, model_name: str) -> None:
    """One request that is neither counted nor stored."""
    async with httpx.AsyncClient(base_url=url, timeout=600.0) as http:
        await send(http, model_name, WARM_UP, reuse=False)
