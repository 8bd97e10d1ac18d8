"""Reuse and pins on the real server with the demo model: what a seen prompt saves, and what a pin is worth in a flood.

    python bench/first_light.py [--output FILE]

1. Time to first token of 1,500-token prompts, cold and seen before.
2. A pinned and an unpinned 1,000-token prompt after one-off prompts of three times the pool; then after unpinning.
   (The pool has the bytes of 8,192 tokens in all layers.)
3. A pin of 200% of the quota: refused with the numbers, nothing else disturbed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from looseleaf.cli.build import MemorySettings, ModelSettings, build_stack, load_model
from looseleaf.cli.machine import provenance
from looseleaf.cli.serving import BackgroundServer
from looseleaf.engine.config import EngineConfig

POOL_TOKENS = 8192
"""If every layer kept every token; the model's windows leave room for more."""
NUM_LANES = 6
WINDOW_BLOCKS = 5 * 512 // 16
PIN_QUOTA = 0.1
PROMPT_TOKENS = 1500
PINNED_TOKENS = 1000
FLOOD_TOKENS = 512
REPEATS = 5


class Client:
    """Requests by token ids, so that lengths are exact."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120)
        self._rng = random.Random(7)

    def prompt(self, num_tokens: int) -> list[int]:
        """Random tokens that nobody asked before."""
        return [self._rng.randrange(1000, 200_000) for _ in range(num_tokens)]

    def first_token(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds to the first streamed token, and how many prompt tokens were cached."""
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": True, "ignore_eos": True}
        body["stream_options"] = {"include_usage": True}
        start = time.perf_counter()
        first = 0.0
        cached = 0
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if event["choices"] and not first:
                    first = time.perf_counter() - start
                if event.get("usage"):
                    cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        return first, cached

    def complete(self, prompt: list[int], request_id: str | None = None) -> int:
        """Serve a prompt to its end; how many tokens were cached."""
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        if request_id is not None:
            body["request_id"] = request_id
        answer = self._http.post("/v1/completions", json=body).raise_for_status().json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    def flood(self) -> None:
        """One-off prompts of three times the pool."""
        for _ in range(3 * POOL_TOKENS // FLOOD_TOKENS):
            self.complete(self.prompt(FLOOD_TOKENS))

    def post(self, path: str, **body: Any) -> httpx.Response:
        """POST a JSON body."""
        return self._http.post(path, json=body)

    def delete(self, path: str) -> None:
        """DELETE, which must succeed."""
        self._http.delete(path).raise_for_status()

    def stats(self) -> dict[str, Any]:
        """The cache's figures."""
        answer: dict[str, Any] = self._http.get("/v1/cache/stats").raise_for_status().json()
        return answer


def warm_against_cold(client: Client) -> dict[str, Any]:
    """Time to first token of prompts of `PROMPT_TOKENS`, first and second time."""
    client.complete(client.prompt(PROMPT_TOKENS))  # the process warms up
    cold, warm, cached = [], [], []
    for _ in range(REPEATS):
        prompt = client.prompt(PROMPT_TOKENS)
        cold.append(client.first_token(prompt)[0])
        seconds, num_cached = client.first_token(prompt)
        warm.append(seconds)
        cached.append(num_cached)
        client.post("/v1/cache/clear")
    share = statistics.median(warm) / statistics.median(cold)
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "cached_tokens": cached,
        "cold_seconds": cold,
        "warm_seconds": warm,
        "warm_share_of_cold": round(share, 4),
    }


def pinned_in_a_flood(client: Client) -> dict[str, Any]:
    """Cached tokens of a pinned and an unpinned prompt after a flood, and of the first after unpinning."""
    pinned, loose = client.prompt(PINNED_TOKENS), client.prompt(PINNED_TOKENS)
    client.complete(pinned, "long_doc_123")
    client.complete(loose)
    pin = client.post("/v1/pins", request_id="long_doc_123", owner="bench").raise_for_status().json()
    client.flood()
    result = {"pin": pin, "cached_pinned": client.complete(pinned), "cached_unpinned": client.complete(loose)}
    client.delete(f"/v1/pins/{pin['id']}")
    client.flood()
    result["cached_after_unpin"] = client.complete(pinned)
    return result


def over_quota(client: Client) -> dict[str, Any]:
    """Ask for twice the quota, in one pin: the answer, and what changed."""
    client.post("/v1/cache/clear")
    prompt = client.prompt((2 * client.stats()["quota_blocks"] - WINDOW_BLOCKS) * 16)
    client.complete(prompt)
    before = client.stats()
    answer = client.post("/v1/pins", tokens=prompt)
    after = client.stats()
    changed = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    return {
        "asked_tokens": len(prompt),
        "status": answer.status_code,
        "error": answer.json()["error"],
        "changed": changed,
    }


def main() -> int:
    """Run all three and print or save the figures; 1 if one of them is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    memory = MemorySettings(num_pages=NUM_LANES * POOL_TOKENS // 256, pin_quota=PIN_QUOTA)
    model = load_model(ModelSettings(), memory)
    stack = build_stack(model, memory, EngineConfig(max_running_requests=8))
    with BackgroundServer(stack.app) as server:
        client = Client(server.url)
        result = {
            "provenance": provenance(),
            "pool_tokens": POOL_TOKENS,
            "warm_against_cold": warm_against_cold(client),
            "pinned_in_a_flood": pinned_in_a_flood(client),
            "over_quota": over_quota(client),
        }
    model.close()
    text = json.dumps(result, indent=2)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    print(text)
    whole_blocks = PINNED_TOKENS // 16 * 16
    flood = result["pinned_in_a_flood"]
    missed = [
        result["warm_against_cold"]["warm_share_of_cold"] > 0.15,
        flood["cached_pinned"] != whole_blocks,
        flood["cached_unpinned"] != 0,
        flood["cached_after_unpin"] != 0,
        result["over_quota"]["status"] != 409,
    ]
    return int(any(missed))


if __name__ == "__main__":
    sys.exit(main())
