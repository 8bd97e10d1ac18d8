"""How long the replay of a trace takes in one process, and where the time goes.

    python bench/replay_speed.py TRACE [--capacity 10%] [--policy lru] [--block-tokens 512,16] [--output FILE]

Each request is served at once and alone. Prints for each block size the seconds of one replay (of the wall and of this
process), without a profiler; then, from a second replay under one, the share of each file of the package, the time in
numpy and builtins counted where it was called from.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import looseleaf
from looseleaf.cli.machine import provenance
from looseleaf.lab.sweep import Cell, SweepSettings, replay_cell
from looseleaf.lab.traces import load_trace

PACKAGE = str(Path(looseleaf.__file__).parent)

FunctionKey: TypeAlias = tuple[str, int, str]
"""How `pstats` names a function: file, line, name."""


@dataclass(frozen=True)
class Speed:
    """One replay. `parts`: share of each file, 0 to 1, the largest first; of a run under the profiler."""

    policy: str
    capacity: str
    block_tokens: int
    capacity_blocks: int
    requests: int
    token_hit_rate: float
    wall_seconds: float
    process_seconds: float
    parts: dict[str, float]

    @property
    def microseconds_per_request(self) -> float:
        """Of this process."""
        return 1e6 * self.process_seconds / self.requests


def measure(replay: Callable[[], Any], policy: str, capacity: str) -> Speed:
    """Replay twice: for the seconds, and for the profile."""
    wall, process = time.perf_counter(), time.process_time()
    result = replay()
    wall, process = time.perf_counter() - wall, time.process_time() - process
    profile = cProfile.Profile()
    profile.runcall(replay)
    return Speed(
        policy,
        capacity,
        result.block_tokens,
        result.capacity_blocks,
        result.requests,
        result.token_hit_rate,
        wall,
        process,
        parts_of(pstats.Stats(profile)),
    )


def parts_of(stats: pstats.Stats) -> dict[str, float]:
    """Share of each file of the package in the time of a profile."""
    seconds: Counter[str] = Counter()
    table: dict[FunctionKey, Any] = stats.stats  # type: ignore[attr-defined]  # the table that is printed
    for function, (_, _, own, _, callers) in table.items():
        if function[0].startswith(PACKAGE):
            seconds[_part(function)] += own
            continue
        for caller, (_, _, own_there, _) in callers.items():
            seconds[_part(caller)] += own_there
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.most_common() if value / total >= 0.005}


def _part(function: FunctionKey) -> str:
    is_ours = function[0].startswith(PACKAGE)
    return Path(function[0]).relative_to(PACKAGE).as_posix() if is_ours else "numpy, from numpy"


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--capacity", default="10%")
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--block-tokens", default="512,16")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    start = time.process_time()
    trace = load_trace(asked.trace)
    print(f"{asked.trace.name}: {len(trace.requests):,} requests, read in {time.process_time() - start:.2f} s")
    speeds = []
    settings = SweepSettings(is_instant=True)
    for text in asked.block_tokens.split(","):
        cell = Cell(0, asked.policy, asked.capacity, None, int(text))
        speed = measure(partial(replay_cell, trace, cell, settings), asked.policy, asked.capacity)
        speeds.append(speed)
        print(
            f"\n{speed.policy}, {speed.capacity}, {speed.block_tokens}-token blocks: {speed.wall_seconds:.2f} s "
            f"({speed.process_seconds:.2f} s of this process, {speed.microseconds_per_request:.0f} µs a request), "
            f"hit rate {speed.token_hit_rate:.2%}"
        )
        for name, share in speed.parts.items():
            print(f"  {share:6.1%}  {name}")
    if asked.output is not None:
        facts = {**provenance(), "replays": [asdict(speed) for speed in speeds]}
        asked.output.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
