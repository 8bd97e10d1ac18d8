"""What a request costs the bookkeeping as the cache grows: CPU microseconds and bytes per block, 10K to 1M blocks.

    python bench/scale.py [--blocks 10000 100000 1000000] [--policies lru adaptive] [--output FILE]

A request is `match`, `lease`, `reserve`, `commit` and `release` of a 2,048-token prompt (int32 array) in 16-token
blocks: its first half is one of 20 heads that are cached, the rest is new. The pool has as many blocks as are cached
and is filled first with prompts of the same shape, so every measured request evicts the 64 blocks that it stores. A
round is 100 requests; the cost is the median over the rounds of the process' CPU time by request, and `growth` is the
largest cache's by the smallest's.

Memory is the growth of resident memory while the cache is filled, by cached block: tree nodes with their packed tokens
(64 bytes per block), block ids and chain keys, the policy's records and what requests leave in histories. Not in it:
the pool's own arrays, made before, of which untouched pages count when they are first written. Each size and policy
runs in a process of its own. The clock is the real one, so runs are as old as the filling took.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import time
from pathlib import Path

import numpy as np

from looseleaf import CacheConfig, CacheManager
from looseleaf.cli.machine import provenance

BLOCK_TOKENS = 16
PROMPT_TOKENS = 2048
HEAD_TOKENS = 1024
NUM_HEADS = 20


def resident_bytes() -> int:
    """Resident memory of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def draw(rng: np.random.Generator, num_tokens: int) -> np.ndarray:
    """Tokens that nobody shares."""
    return rng.integers(0, 2**31 - 1, num_tokens, dtype=np.int32)


def serve(cache: CacheManager, prompt: np.ndarray) -> None:
    """A whole request."""
    cache.match(prompt)
    lease = cache.lease(prompt)
    lease.reserve(len(prompt))
    lease.commit(len(prompt))
    lease.release()


def measure(policy: str, num_blocks: int, num_rounds: int, num_requests: int) -> dict[str, float]:
    """Figures of one policy at one size: fills a cache, then serves `num_rounds` rounds."""
    rng = np.random.default_rng(0)
    heads = [draw(rng, HEAD_TOKENS) for _ in range(NUM_HEADS)]
    cache = CacheManager(CacheConfig(num_blocks, page_tokens=BLOCK_TOKENS, block_tokens=BLOCK_TOKENS, policy=policy))

    def prompt() -> np.ndarray:
        return np.concatenate([heads[int(rng.integers(NUM_HEADS))], draw(rng, PROMPT_TOKENS - HEAD_TOKENS)])

    before = resident_bytes()
    while cache.stats().free_blocks >= PROMPT_TOKENS // BLOCK_TOKENS:
        serve(cache, prompt())
    num_cached = num_blocks - cache.stats().free_blocks
    num_bytes = resident_bytes() - before
    serve_round(cache, [prompt() for _ in range(num_requests)])  # warms up, and fills what is left
    evicted, hits = cache.stats().evicted_tokens, cache.stats().hit_tokens
    costs = [serve_round(cache, [prompt() for _ in range(num_requests)]) for _ in range(num_rounds)]
    stats = cache.stats()
    num_served = num_rounds * num_requests
    return {
        "cached_blocks": num_cached,
        "cpu_us": round(1e6 * statistics.median(costs), 1),
        "cpu_us_fastest_round": round(1e6 * min(costs), 1),
        "cpu_us_slowest_round": round(1e6 * max(costs), 1),
        "hit_tokens_per_request": round((stats.hit_tokens - hits) / num_served, 1),
        "evicted_blocks_per_request": round((stats.evicted_tokens - evicted) / BLOCK_TOKENS / num_served, 1),
        "memory_bytes_per_block": round(num_bytes / num_cached, 1),
    }


def serve_round(cache: CacheManager, prompts: list[np.ndarray]) -> float:
    """CPU seconds per request."""
    begin = time.process_time()
    for prompt in prompts:
        serve(cache, prompt)
    return (time.process_time() - begin) / len(prompts)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--policies", nargs="+", default=["lru", "adaptive"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    facts = provenance()
    facts["machine"] = f"{facts['machine']['num_processors']} cores {facts['machine']['processor']}"
    figures: dict[str, dict[str, dict[str, float]]] = {policy: {} for policy in arguments.policies}
    start = time.perf_counter()
    for num_blocks in sorted(arguments.blocks):
        for policy in arguments.policies:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                row = pool.apply(measure, (policy, num_blocks, arguments.rounds, arguments.requests))
            figures[policy][str(num_blocks)] = row
            print(
                f"{policy:>9} {num_blocks:>8}: " + "  ".join(f"{name} {value}" for name, value in row.items()),
                flush=True,
            )
    growth = {}
    for policy, rows in figures.items():
        costs = [row["cpu_us"] for row in rows.values()]
        growth[policy] = round(costs[-1] / costs[0], 3)
    seconds = round(time.perf_counter() - start, 1)
    result = {"provenance": facts, "figures": figures, "growth_largest_by_smallest": growth, "wall_seconds": seconds}
    print(f"growth {growth}, {seconds} s")
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
