"""CPU time of the core's bookkeeping beside its peers': admission of a prompt, decode step of 256 sequences.

    python bench/bookkeeping.py [--vllm-python PATH] [--sglang-python PATH] [--policies adaptive,lru] [--rounds 5]
                                [--output FILE]

One admission is lease, reserve, commit and release of a 2,048-token list of ints, half of it shared; one decode step is
`append_many` and `commit_many`. Pools of 65,536 blocks of 16 tokens, once empty at the begin of each round ("fresh"),
once full, so that every new block evicts one. All sides answer each round in turn, so that whatever else the machine
does meets all; figures are medians over the rounds, ratios (how many times as fast as that peer) medians of each
round's ratio. A Python that has vLLM's or SGLang's package brings that peer in; what is called there is in
`bookkeeping_vllm.py` and `bookkeeping_sglang.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np

from bookkeeping_load import BLOCK_TOKENS, NUM_BLOCKS, NUM_STEPS, OUTPUT_TOKEN, admission_prompts, decode_prompts
from looseleaf import CacheConfig, CacheManager, Lease
from looseleaf.cli.machine import provenance

Figures: TypeAlias = dict[str, float]
PEERS = ("vllm", "sglang")
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
def peer(name: str, python: Path) -> Iterator[subprocess.Popen[str]]:
    """A peer's side in a process of its own."""
    script = Path(__file__).with_name(f"bookkeeping_{name}.py")
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
            raise SystemExit(f"a peer has ended: run {process.args} by hand to see why")
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


def run(policies: list[str], rounds: int, peers: dict[str, subprocess.Popen[str]]) -> dict[str, list[Figures]]:
    """Figures of every side, round by round: by name, and "full" or "fresh"."""
    seen: dict[str, list[Figures]] = {}
    for state, num_before in (("full", NUM_WARM_UP), ("fresh", 0)):
        caches = {policy: make_cache(policy) for policy in policies}
        for number in range(num_before + rounds):
            for name in (*policies, *peers):
                if name in peers:
                    figures = ask(peers[name], number, state)
                else:
                    figures = measure(caches[name] if state == "full" else make_cache(name), number)
                if number >= num_before:
                    seen.setdefault(f"{name}, {state}", []).append(figures)
                    told = f"{figures['admission_us']:9.1f} {figures['decode_step_us']:9.1f} us"
                    print(f"{state:6} {name:9} {told}", flush=True)
    return seen


def summary(seen: dict[str, list[Figures]], peers: list[str]) -> dict[str, dict[str, float]]:
    """Medians, and how many times as fast as each peer."""
    table: dict[str, dict[str, float]] = {}
    for name, rounds in seen.items():
        side, _, state = name.rpartition(", ")
        table[name] = {key: round(statistics.median(figures[key] for figures in rounds), 1) for key in rounds[0]}
        for peer_name in peers if side not in peers else ():
            for key, what in (("admission_us", "admission"), ("decode_step_us", "decode_step")):
                pairs = zip(rounds, seen[f"{peer_name}, {state}"], strict=True)
                ratio = statistics.median(theirs[key] / ours[key] for ours, theirs in pairs)
                table[name][f"{what}_x_{peer_name}"] = round(ratio, 2)
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in PEERS:
        parser.add_argument(f"--{name}-python", type=Path)
    parser.add_argument("--policies", default="adaptive,lru")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    pythons = {name: python for name in PEERS if (python := getattr(arguments, f"{name}_python")) is not None}
    with ExitStack() as stack:
        peers = {name: stack.enter_context(peer(name, python)) for name, python in pythons.items()}
        versions = {name: read_line(process)["version"] for name, process in peers.items()}
        seen = run(arguments.policies.split(","), arguments.rounds, peers)
    result = {"provenance": provenance(), "peers": versions, "table": summary(seen, list(peers)), "rounds": seen}
    print(json.dumps(result["table"], indent=2))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
