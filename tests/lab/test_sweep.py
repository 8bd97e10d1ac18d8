"""Laws of sweeps: parallel replays are those of one process, and what goes wrong in one cell stays there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from looseleaf import ConfigError
from looseleaf.core.auto_pin_config import AutoPinConfig
from looseleaf.lab.replay import replay_instant
from looseleaf.lab.sweep import Cell, Outcome, SweepSettings, attempt, replay_cell
from looseleaf.lab.traces import Trace, TraceRequest
from looseleaf.lab.workers import run_sweep


def regular(name: str, num_requests: int = 60, num_paths: int = 7) -> Trace:
    """Paths of four blocks that come in a round."""
    requests = [
        TraceRequest(number * 1.0, 64, 2, tuple(range(4 * (number % num_paths), 4 * (number % num_paths) + 4)))
        for number in range(num_requests)
    ]
    return Trace(name, 16, tuple(requests))


CELLS = [
    Cell(place, policy, capacity)
    for place in (0, 1)
    for policy in ("lru", "fifo", "optimum")
    for capacity in ("40%", "20blocks")
]


def hits(outcomes: list[tuple[int, Outcome]]) -> dict[int, int | None]:
    return {place: outcome.result and outcome.result.hit_tokens for place, outcome in outcomes}


def test_parallel_replays_are_those_of_one_process() -> None:
    """However many processes: every cell comes once, with the same result, and progress is told."""
    traces = [regular("a"), regular("b", 90, 5)]
    seen: dict[int, int] = {}
    alone = list(run_sweep(traces, CELLS, SweepSettings(is_instant=True), 1, seen.__setitem__))
    spread = list(run_sweep(traces, CELLS, SweepSettings(is_instant=True), 3))
    assert [place for place, _ in alone] == list(range(len(CELLS)))
    assert hits(alone) == hits(spread)
    assert None not in hits(alone).values()
    assert seen == {
        place: 60 if cell.trace == 0 else 90 for place, cell in enumerate(CELLS) if cell.policy != "optimum"
    }
    assert multiprocessing.active_children() == []


def test_a_cell_that_fails_loses_no_other() -> None:
    """A combination that can't be is an outcome with its facts and hint; the others are replayed, in every process."""
    cells = [
        Cell(0, "lru", "10blocks"),
        Cell(0, "lru", "10blocks", None, 12),
        Cell(1, "lru", "5%"),
        Cell(0, "lru", "9blocks"),
    ]
    lengths = Trace("lengths", None, (TraceRequest(0.0, 100, 1, ()),))
    for jobs in (1, 2):
        outcomes = dict(run_sweep([regular("a"), lengths], cells, SweepSettings(is_instant=True), jobs))
        assert [place for place in range(4) if outcomes[place].result is None] == [1, 2]
        assert "asks for 12" in (outcomes[1].error or "")
        assert "whole part" in (outcomes[1].hint or "")
        assert "lengths only" in (outcomes[2].error or "")


def test_an_unknown_failure_is_named() -> None:
    """What nobody foresaw is reported by its type and does not stop the sweep."""
    broken = Trace("broken", 16, (TraceRequest(0.0, 16, 1, ("x",)),))  # type: ignore[arg-type]
    outcome = attempt(broken, Cell(0, "lru", "10blocks"), SweepSettings(is_instant=True))
    assert outcome.result is None
    assert (outcome.error or "").startswith("ValueError: ")


def test_a_killed_worker_loses_its_cell_only() -> None:
    """The system may kill a process that takes too much memory: its cell says so, all others have results."""
    traces = [regular("long", 4000), regular("short")]
    cells = [Cell(0, "lru", "20blocks"), *[Cell(1, policy, "9blocks") for policy in ("lru", "fifo", "lfu")]]
    victims: list[int] = []

    def kill(place: int, _done: int) -> None:
        if place == 0 and not victims:
            victims.extend(child.pid or 0 for child in multiprocessing.active_children())
            os.kill(victims[0], signal.SIGKILL)

    outcomes = dict(run_sweep(traces, cells, SweepSettings(is_instant=True), 2, kill))
    lost = [outcome for outcome in outcomes.values() if outcome.result is None]
    assert sorted(outcomes) == [0, 1, 2, 3]
    assert len(lost) == 1
    assert "killed by signal 9" in (lost[0].error or "")
    assert "--jobs" in (lost[0].hint or "")


def test_who_stops_asking_stops_the_workers() -> None:
    """Leaving early, as Ctrl-C does, ends all processes at once."""
    sweep = run_sweep([regular("a", 20_000)], [Cell(0, "lru", "20blocks")] * 4, SweepSettings(is_instant=True), 2)
    first = run_sweep([regular("a")], [Cell(0, "lru", "20blocks")] * 4, SweepSettings(is_instant=True), 2)
    next(first)
    begin = time.monotonic()
    first.close()
    sweep.close()  # never started
    assert multiprocessing.active_children() == []
    assert time.monotonic() - begin < 5


def test_the_optimum_is_that_of_instant_replays() -> None:
    """In timed replays requests overlap, so the bound does not hold there, and is refused."""
    with pytest.raises(ConfigError, match="at once and alone"):
        replay_cell(regular("a"), Cell(0, "optimum", "64blocks"), SweepSettings(is_instant=False))


def test_cells_are_replays() -> None:
    """A cell is what the replay functions say, with its capacity in any unit, in blocks of the cache."""
    trace = regular("a")
    settings = SweepSettings(is_instant=True, bytes_per_token=2, auto_pin=AutoPinConfig())
    for capacity, block_tokens, blocks in (("50%", None, 14), ("50%", 8, 28), ("448B", None, 14), ("448B", 4, 56)):
        result = replay_cell(trace, Cell(0, "fifo", capacity, None, block_tokens), settings)
        assert result == replay_instant(trace, blocks, "fifo", None, block_tokens, auto_pin=AutoPinConfig())
    timed = replay_cell(trace, Cell(0, "lru", "96blocks", 64, 32), SweepSettings(is_instant=False))
    assert (timed.mode, timed.capacity_blocks, timed.page_tokens, timed.block_tokens) == ("timed", 96, 64, 32)


def test_no_cells(tmp_path: Path) -> None:
    """Nothing to do is done at once."""
    assert list(run_sweep([], [], SweepSettings(is_instant=True), 4)) == []
