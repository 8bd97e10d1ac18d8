"""Replays in parallel processes. A worker that dies takes its own cell with it and no other.

Why not `concurrent.futures`: there one killed process (no memory left) breaks the pool and loses all that was running
and waiting; and what a task needs, here whole traces, is sent again with each.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import TypeAlias

from looseleaf.lab.sweep import Cell, Outcome, SweepSettings, attempt, attempt_all
from looseleaf.lab.traces import Trace

REPORT_SECONDS = 0.2
"""A worker says this often how far it is."""

Report: TypeAlias = "int | Outcome"
"""What a worker sends: requests done, or what became of its cell."""


def run_sweep(
    traces: Sequence[Trace],
    cells: Sequence[Cell],
    settings: SweepSettings,
    jobs: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[int, Outcome]]:
    """Replay all cells, `jobs` at a time; (place of the cell, outcome) as each is done. Whoever stops asking, or is
    interrupted while it waits, stops the workers.

    Args:
        traces: what `Cell.trace` counts.
        cells: what to replay; those of the same trace together.
        settings: what all have in common.
        jobs: processes; 1 replays in this one.
        on_progress: is called with the place of a cell and how many of its requests are done.
    """
    report = on_progress or (lambda _cell, _done: None)
    waiting = deque(enumerate(cells))
    num_workers = min(jobs, len(cells))
    if num_workers <= 1:
        yield from attempt_all(traces, waiting, settings, report)
        return
    workers = {worker.pipe: worker for worker in (_Worker.start(settings) for _ in range(num_workers))}
    try:
        for worker in workers.values():
            worker.give(waiting.popleft(), traces)
        while workers:
            for pipe in wait(list(workers)):
                worker = workers[pipe]  # type: ignore[index]  # what was waited for
                message = worker.receive()
                if isinstance(message, int):
                    report(worker.cell[0], message)
                    continue
                number, was_lost = worker.cell[0], worker.is_lost
                if was_lost or not waiting:
                    del workers[worker.pipe]
                    worker.stop()
                if waiting:
                    if was_lost:
                        worker = _Worker.start(settings)
                        workers[worker.pipe] = worker
                    worker.give(waiting.popleft(), traces)
                yield number, message
    finally:
        for worker in workers.values():
            worker.stop()


@dataclass(eq=False)
class _Worker:
    """A process and the pipe to it. `known`: traces that it has."""

    process: SpawnProcess
    pipe: Connection
    known: set[int] = field(default_factory=set)
    cell: tuple[int, Cell] = (-1, Cell(-1, "", ""))
    is_lost: bool = False

    @classmethod
    def start(cls, settings: SweepSettings) -> _Worker:
        """A new process that waits for cells."""
        context = multiprocessing.get_context("spawn")  # forking a process with threads (a progress bar) may hang
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, settings), daemon=True)
        with _interrupts_held():
            process.start()
        theirs.close()
        return cls(process, ours)

    def give(self, cell: tuple[int, Cell], traces: Sequence[Trace]) -> None:
        """Have it replay a numbered cell; its trace goes along if it has not got it yet."""
        self.cell = cell
        place = cell[1].trace
        with suppress(OSError):  # it is dead; `receive` will tell
            self.pipe.send((cell[1], None if place in self.known else traces[place]))
        self.known.add(place)

    def receive(self) -> Report:
        """What it says next; if it died, that is the outcome of its cell."""
        try:
            message: Report = self.pipe.recv()
        except (EOFError, OSError):
            self.is_lost = True
            self.process.join()
            code = self.process.exitcode or 0
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            hint = "if memory ran out, use fewer --jobs" if code == -signal.SIGKILL else None
            return Outcome(self.cell[1], None, error=f"the process of this replay {how}", hint=hint)
        return message

    def stop(self) -> None:
        """End it, whatever it does."""
        self.pipe.close()
        self.process.terminate()
        self.process.join()


def _work(pipe: Connection, settings: SweepSettings) -> None:
    """A worker: cells in, reports out, until the pipe closes."""
    traces: dict[int, Trace] = {}
    next_report = 0.0

    def report(done: int) -> None:
        nonlocal next_report
        if time.monotonic() >= next_report:
            next_report = time.monotonic() + REPORT_SECONDS
            pipe.send(done)

    with suppress(EOFError, OSError):
        while True:
            cell, trace = pipe.recv()
            if trace is not None:
                traces[cell.trace] = trace
            pipe.send(attempt(traces[cell.trace], cell, settings, report))


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits until the end of this scope. What is started here never sees it: its parent is who stops it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # it would lift the mask as it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
