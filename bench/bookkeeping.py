"""Cost of the core's bookkeeping, in microseconds: admission of a 2,048-token prompt, decode step of 256 sequences.

    python bench/bookkeeping.py [--cached-blocks 60000] [--repeats 5]

Prompts are lists of ints, half of each shared (20 prefixes of 1,024 tokens); the pool has 65,536 blocks of 16 tokens,
`--cached-blocks` of them filled with other prompts at first. One admission is lease, reserve, commit and release; one
decode step is `append_many` and `commit_many`. Prints JSON; medians over the repeats.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

import numpy as np

from looseleaf import CacheConfig, CacheManager, Lease
from looseleaf.cli.machine import provenance

NUM_BLOCKS = 65_536
BLOCK_TOKENS = 16


def filled(num_cached_blocks: int) -> CacheManager:
    """A cache that holds `num_cached_blocks` blocks of prompts of 128 blocks each."""
    cache = CacheManager(CacheConfig(num_pages=NUM_BLOCKS // 16, page_tokens=256, block_tokens=BLOCK_TOKENS))
    rng = np.random.default_rng(0)
    for _ in range(num_cached_blocks // 128):
        serve(cache, rng.integers(0, 2**31 - 1, 2048, dtype=np.int32))
    return cache


def serve(cache: CacheManager, prompt: list[int] | np.ndarray) -> None:
    """One admission, from the prompt to a block table and back."""
    lease = cache.lease(prompt)
    lease.reserve(len(prompt))
    lease.commit(len(prompt))
    lease.release()


def admission_us(cache: CacheManager, rng: random.Random) -> float:
    """Mean microseconds of 600 admissions."""
    prefixes = [[rng.randrange(32_000) for _ in range(1024)] for _ in range(20)]
    prompts = [rng.choice(prefixes) + [rng.randrange(32_000) for _ in range(1024)] for _ in range(600)]
    start = time.perf_counter()
    for prompt in prompts:
        serve(cache, prompt)
    return (time.perf_counter() - start) / len(prompts) * 1e6


def decode_us(cache: CacheManager, rng: random.Random) -> float:
    """Mean microseconds of 100 decode steps of 256 sequences with 512-token prompts."""
    leases: list[Lease] = []
    for _ in range(256):
        lease = cache.lease([rng.randrange(32_000) for _ in range(512)])
        lease.reserve(512)
        lease.commit(512)
        leases.append(lease)
    tokens = np.full(256, 5, dtype=np.int32)
    start = time.perf_counter()
    for _ in range(100):
        cache.append_many(leases, tokens)
        cache.commit_many(leases)
    seconds = time.perf_counter() - start
    for lease in leases:
        lease.release()
    return seconds / 100 * 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cached-blocks", type=int, default=60_000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    cache = filled(arguments.cached_blocks)
    rng = random.Random(0)
    admissions = [admission_us(cache, rng) for _ in range(arguments.repeats)]
    decodes = [decode_us(cache, rng) for _ in range(arguments.repeats)]
    result = {
        "provenance": provenance(),
        "cached_blocks": arguments.cached_blocks,
        "admission_us": round(statistics.median(admissions), 1),
        "decode_step_us": round(statistics.median(decodes), 1),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
