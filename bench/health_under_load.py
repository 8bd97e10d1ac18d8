"""Does a step hold up the HTTP event loop? `GET /health` of the real server while the model computes.

    python bench/health_under_load.py [--seconds 20] [--output FILE]

Starts `looseleaf serve` (the demo model, or `--model`) as a process of its own and asks /health every 20 ms, one
connection, alone and under loads: 16 streams that decode; these and cold prompts of 2,000 tokens; these and whole
answers with log-probabilities; these and long texts to tokenize. Prints percentiles in milliseconds, and the steps'
mean time beside them (from /metrics).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np

from looseleaf.cli.machine import provenance

PAUSE_SECONDS = 0.02
NUM_STREAMS = 16


class Load:
    """What clients do while health is asked."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._rng = random.Random(5)

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(1000, 200_000) for _ in range(count)]

    async def _complete(self, **body: Any) -> None:
        asked = {"temperature": 0, "ignore_eos": True, **body}
        (await self._http.post("/v1/completions", json=asked)).raise_for_status()

    async def stream(self) -> None:
        """One stream of 64 tokens."""
        await self._complete(prompt=self._tokens(100), max_tokens=64, stream=True)

    async def prefill(self) -> None:
        """A cold prompt."""
        await self._complete(prompt=self._tokens(2000), max_tokens=1)

    async def logprobs(self) -> None:
        """An answer with the 5 most likely tokens at each place."""
        await self._complete(prompt=self._tokens(100), max_tokens=100, logprobs=5)

    async def text(self) -> None:
        """A text of about 200,000 characters: tokenized, and refused or looked up."""
        words = " ".join(str(self._rng.random()) for _ in range(10_000))
        await self._http.post("/v1/cache/match", json={"text": words})


async def repeat(make: Callable[[], Awaitable[None]]) -> None:
    """Again and again, until cancelled."""
    while True:
        await make()


async def ask_health(http: httpx.AsyncClient, seconds: float) -> list[float]:
    """Seconds of each answer."""
    taken, deadline = [], time.perf_counter() + seconds
    while (start := time.perf_counter()) < deadline:
        (await http.get("/health")).raise_for_status()
        taken.append(time.perf_counter() - start)
        await asyncio.sleep(PAUSE_SECONDS)
    return taken


async def step_seconds(http: httpx.AsyncClient) -> tuple[float, float]:
    """Sum and number of all steps so far."""
    lines = (await http.get("/metrics")).text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return float(values["looseleaf_step_seconds_sum"]), float(values["looseleaf_step_seconds_count"])


@contextlib.asynccontextmanager
async def serving(arguments: list[str]) -> AsyncIterator[str]:
    """URL of a server in a process of its own."""
    command = [sys.executable, "-m", "looseleaf.cli", "serve", *arguments, "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        text = ""
        for line in cast(Any, process.stdout):
            text += line
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(text)["url"]
                return
        raise RuntimeError(f"the server ended with {process.wait()}")
    finally:
        process.terminate()
        process.wait(30)


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Figures of each load."""
    figures: dict[str, Any] = {}
    async with serving([arguments.model] if arguments.model else []) as url:
        limits = httpx.Limits(max_connections=100)
        async with (
            httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http,
            httpx.AsyncClient(base_url=url, timeout=300) as health,
        ):
            load = Load(http)
            await load.stream()
            loads: dict[str, list[Callable[[], Awaitable[None]]]] = {
                "idle": [],
                "decoding": [load.stream] * NUM_STREAMS,
                "decoding, cold prompts": [load.stream] * NUM_STREAMS + [load.prefill] * 2,
                "decoding, log-probabilities": [load.stream] * NUM_STREAMS + [load.logprobs] * 4,
                "decoding, long texts": [load.stream] * NUM_STREAMS + [load.text] * 2,
            }
            for name, clients in loads.items():
                tasks = [asyncio.ensure_future(repeat(client)) for client in clients]
                await asyncio.sleep(1.0 if tasks else 0.0)
                total, number = await step_seconds(health)
                taken = await ask_health(health, arguments.seconds)
                total_after, number_after = await step_seconds(health)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                p50, p95, p99 = np.percentile(np.array(taken) * 1000, [50, 95, 99])
                figures[name] = {
                    "checks": len(taken),
                    "p50_ms": round(float(p50), 2),
                    "p95_ms": round(float(p95), 2),
                    "p99_ms": round(float(p99), 2),
                    "most_ms": round(1000 * max(taken), 2),
                    "mean_step_ms": round(1000 * (total_after - total) / max(1, number_after - number), 2),
                    "steps": int(number_after - number),
                }
                print(name, figures[name], file=sys.stderr, flush=True)
    return figures


def main() -> int:
    """Measure; print or save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="folder or hub id; the demo model without it")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    result = {"provenance": provenance(), "health": asyncio.run(measure(arguments))}
    text = json.dumps(result, indent=2)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
