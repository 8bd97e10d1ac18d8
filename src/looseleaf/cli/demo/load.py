"""The demo's clients: send a workload to a server over HTTP, a few requests at a time, and time what comes back."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from looseleaf.cli.client import ServerError
from looseleaf.cli.demo.workload import DemoRequest, Workload


@dataclass(frozen=True)
class Outcome:
    """One answered request. `first_token_seconds` and `seconds` count from the sending, as the client saw it."""

    request: DemoRequest
    text: str
    first_token_seconds: float
    seconds: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


async def send_all(
    url: str, model: str, workload: Workload, on_done: Callable[[Outcome], None] | None = None
) -> list[Outcome]:
    """Send the workload's requests in order, `num_clients` at a time; the outcomes in the same order.

    Raises:
        ServerError: a request failed; the others are given up.
    """
    queue: Iterator[tuple[int, DemoRequest]] = iter(enumerate(workload.requests))
    outcomes: dict[int, Outcome] = {}
    async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(30.0, read=600.0)) as http:

        async def client() -> None:
            for number, request in queue:
                outcomes[number] = await send(http, model, request)
                if on_done is not None:
                    on_done(outcomes[number])

        clients = [asyncio.ensure_future(client()) for _ in range(workload.num_clients)]
        try:
            await asyncio.gather(*clients)
        finally:
            for task in clients:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
    return [outcomes[number] for number in range(len(workload.requests))]


async def send(http: httpx.AsyncClient, model: str, request: DemoRequest, *, reuse: bool = True) -> Outcome:
    """Stream one completion, greedy.

    Raises:
        ServerError: the server refused it or broke off.
    """
    body = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "stop": list(request.stops),
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "reuse": reuse,
    }
    started = time.perf_counter()
    first_token_seconds: float | None = None
    texts: list[str] = []
    usage: dict[str, Any] = {}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if not response.is_success:
            raise ServerError(f"{request.name}: {(await response.aread()).decode()} (HTTP {response.status_code})")
        async for line in response.aiter_lines():
            event = _event(line)
            if event is None:
                continue
            if "error" in event:
                raise ServerError(f"{request.name}: {event['error']}")
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                texts.append(choice["text"])
                if first_token_seconds is None:
                    first_token_seconds = time.perf_counter() - started
    if not usage:
        raise ServerError(f"{request.name}: the stream broke off")
    seconds = time.perf_counter() - started
    return Outcome(
        request=request,
        text="".join(texts),
        first_token_seconds=seconds if first_token_seconds is None else first_token_seconds,
        seconds=seconds,
        num_prompt_tokens=usage["prompt_tokens"],
        num_cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        num_output_tokens=usage["completion_tokens"],
    )


def _event(line: str) -> dict[str, Any] | None:
    """The JSON of a server-sent event's line; None for empty lines and the end mark."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return None
    event: dict[str, Any] = json.loads(line.removeprefix("data: "))
    return event
