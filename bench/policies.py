"""Every eviction policy on every trace at every capacity, beside LRU and the offline optimum.

    python bench/policies.py TRACE... [--policies lru,adaptive] [--capacities 1,2,5,10,25,50] [--jobs 2] [--output FILE]

Each request is served at once and alone, at the trace's time, in the trace's own blocks; capacities are % of the
trace's unique blocks. Policies are all that there are unless some are named. Prints hit rates in % of input tokens, by
trace and policy; then the share of the gap between LRU and the optimum that each policy closes, (policy - LRU) /
(optimum - LRU), in %; then its mean over all cells in which the two are at least 0.1 points apart (elsewhere it says
nothing), and how far below LRU it ever is. A Mooncake trace whose blocks have another size than 512 tokens is named
FILE:SIZE.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from looseleaf.cli.machine import provenance
from looseleaf.core.eviction import POLICIES
from looseleaf.lab.optimum import OPTIMUM
from looseleaf.lab.sweep import Cell, Outcome, SweepSettings, standing_of, with_references
from looseleaf.lab.traces import Trace, load_trace
from looseleaf.lab.workers import run_sweep


@dataclass(frozen=True)
class Row:
    """One policy on one trace at one capacity; hit rates in % of the trace's input tokens, `gap_closed` from 0 to 1."""

    trace: str
    policy: str
    capacity: str
    capacity_blocks: int
    hit_rate: float
    lru: float
    optimum: float
    gap_closed: float | None
    seconds: float

    @property
    def points(self) -> float:
        """Above LRU."""
        return self.hit_rate - self.lru


@dataclass(frozen=True)
class Summary:
    """A policy over all cells: mean share of the gap closed, in how many cells there is one, and the worst cell."""

    policy: str
    mean_gap_closed: float | None
    num_gaps: int
    least_points: float
    most_points: float


def replay_everything(traces: Sequence[Trace], cells: Sequence[Cell], jobs: int) -> dict[Cell, Outcome]:
    """All cells and what they are compared with."""
    wanted = with_references(cells)
    outcomes: dict[Cell, Outcome] = {}
    done = [0] * len(wanted)
    lengths = [len(traces[cell.trace].requests) for cell in wanted]
    with Progress() as progress:
        task = progress.add_task("replays", total=sum(lengths))

        def update(place: int, num_done: int) -> None:
            progress.advance(task, num_done - done[place])
            done[place] = num_done

        for place, outcome in run_sweep(traces, wanted, SweepSettings(is_instant=True), jobs, update):
            outcomes[wanted[place]] = outcome
            update(place, lengths[place])
    return outcomes


def rows_of(cells: Sequence[Cell], outcomes: dict[Cell, Outcome]) -> list[Row]:
    """A row for each cell that has a result; failures go to stderr."""
    rows = []
    for cell in cells:
        outcome, standing = outcomes[cell], standing_of(cell, outcomes)
        if outcome.result is None or standing is None:
            print(f"no result for {cell}: {outcome.error}", file=sys.stderr)
            continue
        rows.append(
            Row(
                outcome.result.trace,
                cell.policy,
                cell.capacity,
                outcome.result.capacity_blocks,
                100 * outcome.result.token_hit_rate,
                100 * standing.lru_token_hit_rate,
                100 * standing.optimum_token_hit_rate,
                standing.gap_closed,
                outcome.seconds,
            )
        )
    return rows


def summaries(rows: Sequence[Row]) -> list[Summary]:
    """By policy, the best first."""
    found = []
    for policy in dict.fromkeys(row.policy for row in rows if row.policy != OPTIMUM):
        own = [row for row in rows if row.policy == policy]
        shares = [row.gap_closed for row in own if row.gap_closed is not None]
        mean = sum(shares) / len(shares) if shares else None
        points = [row.points for row in own]
        found.append(Summary(policy, mean, len(shares), min(points), max(points)))
    return sorted(found, key=lambda summary: -(summary.mean_gap_closed or 0))


def print_tables(rows: Sequence[Row], capacities: Sequence[str]) -> None:
    """Hit rates, shares of the gap, and the summary."""
    head = "".join(f"{capacity:>9}" for capacity in capacities)
    for title, shown in (("hit rate, %", "hit_rate"), ("share of the gap closed, %", "gap_closed")):
        print(f"\n{title}\n{'trace':28} {'policy':10}{head}")
        for trace, policy in dict.fromkeys((row.trace, row.policy) for row in rows):
            if policy in ("lru", OPTIMUM) and shown == "gap_closed":
                continue
            own = {row.capacity: getattr(row, shown) for row in rows if (row.trace, row.policy) == (trace, policy)}
            scale = 1 if shown == "hit_rate" else 100
            cells = (own.get(capacity) for capacity in capacities)
            print(
                f"{trace[:28]:28} {policy:10}"
                + "".join(f"{'-' if c is None else f'{scale * c:.2f}':>9}" for c in cells)
            )
    print(f"\n{'policy':10} {'mean share of the gap closed':>30} {'gaps':>6} {'worst':>8} {'best':>8} points above LRU")
    for summary in summaries(rows):
        mean = "-" if summary.mean_gap_closed is None else f"{100 * summary.mean_gap_closed:.1f}%"
        print(
            f"{summary.policy:10} {mean:>30} {summary.num_gaps:>6} {summary.least_points:>+8.2f} "
            f"{summary.most_points:>+8.2f}"
        )


def _rounded(record: Row | Summary) -> dict[str, object]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in vars(record).items()}


def main() -> int:
    """Replay, print, save; 1 if a cell failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--policies", default=",".join([*POLICIES, OPTIMUM]))
    parser.add_argument("--capacities", default="1,2,5,10,25,50")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    parts = [name.partition(":") for name in asked.traces]
    traces = [load_trace(Path(path), int(size) if size else None) for path, _, size in parts]
    capacities = [f"{text}%" for text in asked.capacities.split(",")]
    policies = asked.policies.split(",")
    cells = [Cell(trace, policy, text) for trace in range(len(traces)) for policy in policies for text in capacities]
    rows = rows_of(cells, replay_everything(traces, cells, asked.jobs))
    print_tables(rows, capacities)
    if asked.output is not None:
        facts = {
            **provenance(),
            "summary": [_rounded(summary) for summary in summaries(rows)],
            "cells": [_rounded(row) for row in rows],
        }
        asked.output.write_text(json.dumps(facts, indent=1) + "\n")
    return int(len(rows) < len(cells))


if __name__ == "__main__":
    sys.exit(main())
