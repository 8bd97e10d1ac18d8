"""What a request costs the bookkeeping as the cache grows: CPU microseconds and bytes per block, 10K to 1M blocks.

    python bench/scale.py [--blocks 10000 100000 1000000] [--policies lru adaptive] [--output FILE]

A request is `match`, `lease`, `reserve`, `commit` and `release` of a 2,048-token prompt (int32 array) in 16-token
blocks: its first half is one of 20 heads that are cached, the rest is new. The pool has as many blocks as are cached
and is filled first with prompts of the same shape, so every measured request evicts the 64 blocks that it stores. A
round is 100 requests. Each size and policy has a process of its own; all are filled first, then rounds are interleaved,
each first in its turn, since other work runs on the machine. The cost is the median over the rounds of the process' CPU
time by request; `growth` is the median over the rounds of a size's cost by that of the smallest in the same round.
Quartiles stand beside both.

Memory is the growth of resident memory while the cache is filled, by cached block: tree nodes with their packed tokens
(64 bytes per block), block ids and chain keys, the policy's records and what requests leave in histories. Not in it:
the pool's own arrays, made before, of which untouched pages count when they are first written. The clock is the real
one, so runs are as old as the filling took.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
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


def work(pipe: Connection, policy: str, num_blocks: int, num_requests: int) -> None:
    """A process with one cache: fills it and sends its memory, then a round's CPU seconds per request whenever it is
    told True, and at the end what the rounds did."""
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
    first = cache.stats()
    pipe.send({"cached_blocks": num_cached, "memory_bytes_per_block": round(num_bytes / num_cached, 1)})
    num_served = 0
    while pipe.recv():
        pipe.send(serve_round(cache, [prompt() for _ in range(num_requests)]))
        num_served += num_requests
    last = cache.stats()
    num_evicted = (last.evicted_tokens - first.evicted_tokens) / BLOCK_TOKENS
    pipe.send(
        {
            "hit_tokens_per_request": round((last.hit_tokens - first.hit_tokens) / num_served, 1),
            "evicted_blocks_per_request": round(num_evicted / num_served, 1),
        }
    )


class Subject:
    """A process with a cache of one size and policy. `seconds`: CPU seconds per request of each round."""

    def __init__(self, policy: str, num_blocks: int, num_requests: int) -> None:
        self.policy, self.num_blocks, self.seconds = policy, num_blocks, list[float]()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, policy, num_blocks, num_requests), daemon=True)
        self._process.start()
        theirs.close()
        self.figures: dict[str, object] = self._pipe.recv()

    def round(self) -> None:
        """One more round."""
        self._pipe.send(True)
        self.seconds.append(self._pipe.recv())

    def end(self, smallest: Subject) -> None:
        """Work the figures out and let the process end."""
        self._pipe.send(False)
        self.figures.update(self._pipe.recv())
        self._process.join()
        ratios = [mine / other for mine, other in zip(self.seconds, smallest.seconds, strict=True)]
        self.figures["cpu_us"] = round(1e6 * statistics.median(self.seconds), 1)
        self.figures["cpu_us_quartiles"] = [round(1e6 * value, 1) for value in quartiles(self.seconds)]
        self.figures["growth"] = round(statistics.median(ratios), 3)
        self.figures["growth_quartiles"] = [round(value, 3) for value in quartiles(ratios)]


def quartiles(values: list[float]) -> tuple[float, float]:
    """The first and the third."""
    first, _, third = statistics.quantiles(values, n=4)
    return first, third


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
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    start = time.perf_counter()
    sizes = sorted(arguments.blocks)
    subjects = [Subject(policy, size, arguments.requests) for size in sizes for policy in arguments.policies]
    for number in range(arguments.rounds):
        first = number % len(subjects)
        for subject in subjects[first:] + subjects[:first]:
            subject.round()
    smallest = {subject.policy: subject for subject in reversed(subjects)}
    figures: dict[str, dict[str, dict[str, object]]] = {policy: {} for policy in arguments.policies}
    for subject in subjects:
        subject.end(smallest[subject.policy])
        figures[subject.policy][str(subject.num_blocks)] = subject.figures
        row = "  ".join(f"{name} {value}" for name, value in subject.figures.items())
        print(f"{subject.policy:>9} {subject.num_blocks:>8}: {row}", flush=True)
    seconds = round(time.perf_counter() - start, 1)
    result = {
        **provenance(),
        "rounds": arguments.rounds,
        "requests_per_round": arguments.requests,
        "figures": figures,
        "wall_seconds": seconds,
    }
    print(f"{seconds} s")
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
