"""CPU time of the core's bookkeeping beside vLLM's: admission of a prompt, decode step of 256 sequences.

    python bench/bookkeeping.py [--vllm-python PATH] [--policies adaptive,lru] [--rounds 5] [--output FILE]

One admission is lease, reserve, commit and release of a 2,048-token list of ints, half of it shared; one decode step is
`append_many` and `commit_many`. Pools of 65,536 blocks of 16 tokens, once empty at the begin of each round ("fresh"),
once full, so that every new block evicts one. All sides answer each round in turn, so that whatever else the machine
does meets all; figures are medians over the rounds, ratios medians of each round's ratio. Without a Python that has
vLLM, ours alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np

from bookkeeping_load import BLOCK_TOKENS, NUM_BLOCKS, NUM_STEPS, OUTPUT_TOKEN, admission_prompts, decode_prompts
from looseleaf import CacheConfig, CacheManager, Lease
from looseleaf.cli.machine import provenance

Figures: TypeAlias = dict[str, float]
PEER = "vllm"
NUM_WARM_UP = 2
"""Rounds until every pool is full."""


def serve(cache: CacheManager, prompt: list[int]) -> None:
    """One admission, from the prompt to a block table and back."""
    lease = cache.lease(prompt)
    lease.reserve(len(prompt))
    lease.commit(len(prompt))
    lease.release()


def measure(cache: CacheManager, number: int) -> Figures:
    """The figures of one round."""
    prompts = admission_prompts(number)
    start = time.process_time()
    for prompt in prompts:
        serve(cache, prompt)
    admission = (time.process_time() - start) / len(prompts)
    leases: list[Lease] = []
    for prompt in decode_prompts(number):
        lease = cache.lease(prompt)
        lease.reserve(len(prompt))
        lease.commit(len(prompt))
        leases.append(lease)
    tokens = np.full(len(leases), OUTPUT_TOKEN, dtype=np.int32)
    start = time.process_time()
    for _ in range(NUM_STEPS):
        cache.append_many(leases, tokens)
        cache.commit_many(leases)
    step = (time.process_time() - start) / NUM_STEPS
    for lease in leases:
        lease.release()
    return {"admission_us": admission * 1e6, "decode_step_us": step * 1e6}


@contextmanager
def peer(python: Path) -> Iterator[subprocess.Popen[str]]:
    """vLLM's side in a process of its own, ready to answer."""
    script = Path(__file__).with_name("bookkeeping_vllm.py")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([str(python), str(script)], text=True, **pipes) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def read_line(process: subprocess.Popen[str]) -> dict[str, float]:
    """The next JSON line of the peer."""
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith("{"):
        if not line:
            raise SystemExit("vLLM's side has ended: run bench/bookkeeping_vllm.py by hand to see why")
    figures: dict[str, float] = json.loads(line)
    return figures


def ask(process: subprocess.Popen[str], number: int, state: str) -> Figures:
    """The peer's figures of one round."""
    assert process.stdin is not None
    process.stdin.write(f"{number} {state}\n")
    process.stdin.flush()
    return read_line(process)


def make_cache(policy: str) -> CacheManager:
    """An empty cache."""
    size = {"num_pages": NUM_BLOCKS // 16, "page_tokens": 16 * BLOCK_TOKENS, "block_tokens": BLOCK_TOKENS}
    return CacheManager(CacheConfig(policy=policy, **size))


def run(policies: list[str], rounds: int, process: subprocess.Popen[str] | None) -> dict[str, list[Figures]]:
    """Figures of every side, round by round: by name, and "full" or "fresh"."""
    seen: dict[str, list[Figures]] = {}
    sides = [*policies, *([PEER] if process else [])]
    for state, num_before in (("full", NUM_WARM_UP), ("fresh", 0)):
        caches = {policy: make_cache(policy) for policy in policies}
        for number in range(num_before + rounds):
            for name in sides:
                if process and name == PEER:
                    figures = ask(process, number, state)
                else:
                    figures = measure(caches[name] if state == "full" else make_cache(name), number)
                if number >= num_before:
                    seen.setdefault(f"{name}, {state}", []).append(figures)
                    told = f"{figures['admission_us']:9.1f} {figures['decode_step_us']:9.1f} us"
                    print(f"{state:6} {name:9} {told}", flush=True)
    return seen


def summary(seen: dict[str, list[Figures]]) -> dict[str, dict[str, float]]:
    """Medians, and how many times as fast as the peer."""
    table: dict[str, dict[str, float]] = {}
    for name, rounds in seen.items():
        table[name] = {key: round(statistics.median(figures[key] for figures in rounds), 1) for key in rounds[0]}
        theirs_by_round = seen.get(f"{PEER}, {name.rpartition(', ')[2]}")
        if theirs_by_round is not None:
            for key, ratio in (("admission_us", "admission_ratio"), ("decode_step_us", "decode_step_ratio")):
                pairs = zip(rounds, theirs_by_round, strict=True)
                table[name][ratio] = round(statistics.median(theirs[key] / ours[key] for ours, theirs in pairs), 2)
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vllm-python", type=Path)
    parser.add_argument("--policies", default="adaptive,lru")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    policies = arguments.policies.split(",")
    if arguments.vllm_python is None:
        version, seen = None, run(policies, arguments.rounds, None)
    else:
        with peer(arguments.vllm_python) as process:
            version = read_line(process)["version"]
            seen = run(policies, arguments.rounds, process)
    result = {"provenance": provenance(), "vllm": version, "table": summary(seen), "rounds": seen}
    print(json.dumps(result["table"], indent=2))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
