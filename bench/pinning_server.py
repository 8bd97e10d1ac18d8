"""A load of the pinning bench on the real server with the demo model, over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx

from looseleaf.cli.build import LoadedModel, MemorySettings, build_stack
from looseleaf.cli.serving import BackgroundServer
from looseleaf.core.auto_pin_config import AutoPinConfig
from looseleaf.engine.config import EngineConfig
from looseleaf.ids import Int32Array
from pinning_figures import Answer, StepLog, run_figures
from pinning_load import Item, Load

PIN_QUOTA = 0.30
MAX_RUNNING = 256


@dataclass(frozen=True)
class Mode:
    """Which pins a run has. `level`: of the explicit pins on all subjects, made before the first request; None: none.
    `auto`: what the cache may pin by itself."""

    name: str
    level: str | None = None
    auto: AutoPinConfig | None = None


@dataclass(frozen=True)
class ServerScene:
    """One pool, one load with its prompts. `num_pages`: of the pool, at most those that the model was loaded with."""

    model: LoadedModel
    num_pages: int
    step_tokens: int
    load: Load
    prompts: list[Int32Array]

    def run(self, mode: Mode, on_done: Callable[[Answer], None] | None = None) -> dict[str, Any]:
        """Serve the load with a fresh cache; the figures."""
        memory = MemorySettings(num_pages=self.num_pages, pin_quota=PIN_QUOTA, auto_pin=mode.auto)
        model = replace(self.model, num_blocks=self.num_pages * memory.blocks_per_page)
        config = EngineConfig(max_running_requests=MAX_RUNNING, max_step_tokens=self.step_tokens)
        logs: list[StepLog] = []

        def observe(cache: Any, metrics: Any) -> StepLog:
            logs.append(StepLog(cache, metrics, time.perf_counter))
            return logs[0]

        stack = build_stack(model, memory, config, observe=observe)
        with BackgroundServer(stack.app) as server:
            answers = asyncio.run(self._send_all(server.url, mode, on_done))
            return run_figures(self.load, answers, logs[0])

    async def _send_all(self, url: str, mode: Mode, on_done: Callable[[Answer], None] | None) -> list[Answer]:
        queue: Iterator[tuple[Item, Int32Array]] = iter(zip(self.load.items, self.prompts, strict=True))
        answers = []
        async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(60.0, read=600.0)) as http:
            await _send(http, Item("warm-up", None, 0, 64, 2, False), self.prompts[-1][:64], reuse=False)
            if mode.level is not None:
                await self._pin_all(http, mode.level)

            async def client() -> None:
                for item, prompt in queue:
                    answers.append(await _send(http, item, prompt))
                    if on_done is not None:
                        on_done(answers[-1])

            await asyncio.gather(*(client() for _ in range(self.load.num_clients)))
        return answers

    async def _pin_all(self, http: httpx.AsyncClient, level: str) -> None:
        """A pin on each subject: it takes effect when the first request computes it."""
        for subject, num_tokens in self.load.subjects.items():
            prompt = next(
                prompt for item, prompt in zip(self.load.items, self.prompts, strict=True) if item.subject == subject
            )
            body = {"tokens": prompt[:num_tokens].tolist(), "owner": "bench", "level": level}
            (await http.post("/v1/pins", json=body)).raise_for_status()


async def _send(http: httpx.AsyncClient, item: Item, prompt: Int32Array, *, reuse: bool = True) -> Answer:
    """Stream one completion of exactly `item.output_tokens` tokens."""
    body = {
        "prompt": prompt.tolist(),
        "max_tokens": item.output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "reuse": reuse,
    }
    started, first, num_cached = time.perf_counter(), None, None
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if not response.is_success:
            raise RuntimeError(f"HTTP {response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            if event["choices"] and first is None:
                first = time.perf_counter() - started
            if event.get("usage"):
                num_cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    seconds = time.perf_counter() - started
    if num_cached is None:
        raise RuntimeError("the stream broke off")
    return Answer(item, started, seconds if first is None else first, seconds, num_cached)
