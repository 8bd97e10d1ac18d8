"""What automatic pinning does to the hit rate of traces: the same policy and capacity without and with it.

    python bench/auto_pins.py TRACE... [--policies lru,fifo,lfu] [--capacities 1,2,5,10,25,50] [--output FILE]

Each request is served at once and alone, at the trace's time; capacities are % of the trace's unique blocks. Rules are
those of `looseleaf serve` (prefixes of more than 1,024 tokens, or more than 100 requests a second). Prints a table of
points of the token hit rate won or lost, and fails if a cell loses more than `MAX_LOSS_POINTS`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import track

from looseleaf.cli.machine import provenance
from looseleaf.core.auto_pin_config import AutoPinConfig
from looseleaf.lab.replay import replay_instant
from looseleaf.lab.traces import load_trace

MAX_LOSS_POINTS = 0.2


@dataclass(frozen=True)
class Cell:
    """One replay without and one with automatic pinning; hit rates in % of the trace's input tokens."""

    trace: str
    policy: str
    capacity_percent: float
    capacity_blocks: int
    plain: float
    pinned: float
    num_made: int
    num_lapsed: int

    @property
    def points(self) -> float:
        """What automatic pinning won, in points."""
        return self.pinned - self.plain


def measure(task: tuple[str, str, float]) -> Cell:
    """Replay one trace at one capacity twice."""
    path, policy, percent = task
    trace = load_trace(Path(path))
    num_unique = len({block for request in trace.requests for block in request.blocks})
    capacity = int(-(-num_unique * percent // 100))
    plain = replay_instant(trace, capacity, policy)
    pinned = replay_instant(trace, capacity, policy, auto_pin=AutoPinConfig())
    report = pinned.auto_pin
    assert report is not None  # it was on
    return Cell(
        trace.name,
        policy,
        percent,
        capacity,
        100 * plain.token_hit_rate,
        100 * pinned.token_hit_rate,
        report.num_made,
        report.num_lapsed,
    )


def print_table(cells: list[Cell], capacities: list[float]) -> None:
    """A row per trace and policy, a column per capacity: points, and the hit rate without pins in brackets."""
    print("points won (hit rate without automatic pins, %)\n")
    print(f"{'trace':28} {'policy':6} " + "".join(f"{f'{percent:g}%':>16}" for percent in capacities))
    for trace, policy in dict.fromkeys((cell.trace, cell.policy) for cell in cells):
        row = [cell for cell in cells if (cell.trace, cell.policy) == (trace, policy)]
        print(f"{trace[:28]:28} {policy:6} " + "".join(f"{cell.points:+7.2f} ({cell.plain:5.2f})" for cell in row))


def main() -> int:
    """Measure all cells; the number of those that lose too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--policies", default="lru,fifo,lfu")
    parser.add_argument("--capacities", default="1,2,5,10,25,50")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    capacities = [float(percent) for percent in asked.capacities.split(",")]
    policies = asked.policies.split(",")
    tasks = [(trace, policy, percent) for trace in asked.traces for policy in policies for percent in capacities]
    with multiprocessing.Pool(asked.jobs) as pool:
        cells = list(track(pool.imap(measure, tasks), total=len(tasks), description="replays"))
    print_table(cells, capacities)
    losses = [cell for cell in cells if cell.points < -MAX_LOSS_POINTS]
    print(f"\nleast {min(cell.points for cell in cells):+.2f}, most {max(cell.points for cell in cells):+.2f} points")
    if asked.output is not None:
        facts = {**provenance(), "cells": [asdict(cell) | {"points": round(cell.points, 3)} for cell in cells]}
        asked.output.write_text(json.dumps(facts, indent=1) + "\n")
    return len(losses)


if __name__ == "__main__":
    sys.exit(min(1, main()))
