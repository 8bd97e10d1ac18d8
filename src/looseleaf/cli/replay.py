"""`looseleaf replay`: what a cache would do to recorded traffic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from looseleaf.cli.auto_pin import RULE, AutoPinOption, MinRateOption, MinTokensOption, auto_pin_config
from looseleaf.cli.failures import FAILED, friendly_errors, say_error
from looseleaf.cli.machine import num_processors
from looseleaf.cli.output import print_json, stderr_console
from looseleaf.cli.progress import new_progress
from looseleaf.cli.replay_report import Report, check_plot, print_table, result_table, single_row
from looseleaf.core.config import CacheConfig
from looseleaf.core.eviction import POLICIES
from looseleaf.core.settings import unknown_setting
from looseleaf.errors import ConfigError
from looseleaf.lab.capacity import capacity_blocks
from looseleaf.lab.optimum import OPTIMUM
from looseleaf.lab.sweep import Cell, Outcome, SweepSettings, replay_cell, with_references
from looseleaf.lab.timed import RateModel
from looseleaf.lab.traces import Trace, load_trace
from looseleaf.lab.workers import run_sweep

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells count it."""

_RATES = RateModel()
_CONFIG = CacheConfig(1)

TracesArgument = Annotated[
    list[Path],
    typer.Argument(help="Recordings of `serve --record`, Mooncake JSONL, prefix-trace/1, or CSV with request lengths."),
]
CapacityOption = Annotated[
    str, typer.Option(help="5% of a trace's unique blocks, 388blocks, or 2GiB; or several: 1%,5%.")
]
PolicyOption = Annotated[
    str,
    typer.Option(help=f"Which cached blocks go first: {', '.join(POLICIES)}; several, or all; optimum is the bound."),
]
PageOption = Annotated[str | None, typer.Option(help="Tokens of a page; or several. Default: 256.")]
BlockOption = Annotated[
    str | None, typer.Option(help="Tokens of a block; or several. Default: 16; with --instant the trace's own.")
]
TraceBlockOption = Annotated[int | None, typer.Option(help="Tokens of a block of a Mooncake trace. Default: 512.")]
BytesOption = Annotated[int | None, typer.Option(help="Bytes of K and V of one token, for a capacity in bytes.")]
InstantOption = Annotated[bool, typer.Option("--instant", help="Serve each request at once and alone.")]
PrefillOption = Annotated[float, typer.Option(help="Prompt tokens a second and request.")]
DecodeOption = Annotated[float, typer.Option(help="Output tokens a second and request.")]
MaxRunningOption = Annotated[int | None, typer.Option(help="Requests served at once. Default: as many as fit.")]
PinQuotaOption = Annotated[float, typer.Option(help="Share of all blocks that pins may hold, 0 to 1.")]
OptimumOption = Annotated[
    bool, typer.Option("--optimum", help="Compare with the offline optimum and LRU; needs --instant.")
]
PlotOption = Annotated[
    Path | None, typer.Option(help="Draw hit rates over capacities: FILE.png, FILE.svg or FILE.html.")
]
JobsOption = Annotated[int | None, typer.Option(help="Processes that replay. Default: one for each processor.")]


def replay(
    trace: TracesArgument,
    capacity: CapacityOption = "5%",
    policy: PolicyOption = _CONFIG.policy,
    page_tokens: PageOption = None,
    block_tokens: BlockOption = None,
    trace_block_tokens: TraceBlockOption = None,
    bytes_per_token: BytesOption = None,
    instant: InstantOption = False,
    prefill_rate: PrefillOption = _RATES.prefill_rate,
    decode_rate: DecodeOption = _RATES.decode_rate,
    max_running: MaxRunningOption = None,
    pin_quota: PinQuotaOption = _CONFIG.pin_quota,
    auto_pin: AutoPinOption = "off",
    auto_pin_min_tokens: MinTokensOption = str(RULE.min_tokens),
    auto_pin_min_rate: MinRateOption = f"{RULE.min_requests_per_second:g}",
    optimum: OptimumOption = False,
    plot: PlotOption = None,
    jobs: JobsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Replay traces through the cache that serves: hits, waste and evictions of a capacity and a policy, or of many."""
    with friendly_errors():
        rates = RateModel(prefill_rate, decode_rate, max_running)
        automatic = auto_pin_config(auto_pin, auto_pin_min_tokens, auto_pin_min_rate)
        settings = SweepSettings(instant, rates, bytes_per_token, automatic, CacheConfig(1, pin_quota=pin_quota))
        cells = _cells(len(set(trace)), capacity, policy, page_tokens, block_tokens)
        if optimum and not instant:
            raise ConfigError("the offline optimum is that of requests served at once and alone", "add --instant")
        if plot is not None:
            check_plot(plot)
        if jobs is not None and jobs < 1:
            raise ConfigError(f"--jobs is {jobs}; it must be at least 1")
        trace = list(dict.fromkeys(trace))
        traces = _load_all(trace, trace_block_tokens)
        num_jobs = jobs or num_processors()
        wanted = with_references(cells) if instant and (optimum or plot is not None) else cells
        outcomes, was_stopped = _replay_all(traces, wanted, settings, num_jobs, is_shown=not as_json)
        report = Report(cells, outcomes, trace, optimum)
        _print(report, as_json=as_json)
        if plot is not None:
            report.save_plot(plot)
    if was_stopped:
        say_error(f"stopped after {len(outcomes)} of {len(wanted)} replays")
        raise typer.Exit(INTERRUPTED)
    if report.failed:
        raise typer.Exit(FAILED)


def _cells(
    num_traces: int, capacity: str, policy: str, page_tokens: str | None, block_tokens: str | None
) -> list[Cell]:
    """All combinations of what comma-separated lists name, trace by trace.

    Raises:
        ConfigError: an empty list, an unknown policy, or what can never be a capacity or a size.
    """
    capacities = _listed("--capacity", capacity)
    for text in capacities:
        capacity_blocks(text, 1_000_000, 1)
    known = [*POLICIES, OPTIMUM]
    policies = list(POLICIES) if policy == "all" else _listed("--policy", policy)
    for name in policies:
        if name not in known:
            raise unknown_setting(name, known, "policy")
    pages, blocks = _sizes("--page-tokens", page_tokens), _sizes("--block-tokens", block_tokens)
    return [Cell(*combination) for combination in product(range(num_traces), policies, capacities, pages, blocks)]


def _listed(option: str, text: str) -> list[str]:
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if "" in names:
        raise ConfigError(f"{option} is {text!r}; it must be one or several, with commas between")
    return names


def _sizes(option: str, text: str | None) -> list[int | None]:
    if text is None:
        return [None]
    parts = _listed(option, text)
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"{option} is {text!r}; it must be a number of tokens, or several with commas between")
    return [int(part) for part in parts]


def _load_all(paths: Sequence[Path], block_tokens: int | None) -> list[Trace]:
    """The traces; those of equal names are named by their paths."""
    traces = [_load(path, block_tokens) for path in paths]
    names = Counter(trace.name for trace in traces)
    return [
        replace(trace, name=str(path)) if names[trace.name] > 1 else trace
        for path, trace in zip(paths, traces, strict=True)
    ]


def _load(path: Path, block_tokens: int | None) -> Trace:
    try:
        return load_trace(path, block_tokens)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _replay_all(
    traces: Sequence[Trace], cells: Sequence[Cell], settings: SweepSettings, jobs: int, *, is_shown: bool
) -> tuple[dict[Cell, Outcome], bool]:
    """What became of the cells, and whether Ctrl-C left some out. The errors of a single one go through."""
    outcomes: dict[Cell, Outcome] = {}
    with _progress([len(traces[cell.trace].requests) for cell in cells], is_shown=is_shown) as on_progress:
        if len(cells) == 1:
            only = cells[0]
            result = replay_cell(traces[only.trace], only, settings, lambda done: on_progress(0, done))
            return {only: Outcome(only, result)}, False
        try:
            for place, outcome in run_sweep(traces, cells, settings, jobs, on_progress):
                on_progress(place, len(traces[outcome.cell.trace].requests))
                outcomes[cells[place]] = outcome
        except KeyboardInterrupt:
            return outcomes, True
    return outcomes, False


@contextmanager
def _progress(num_requests: Sequence[int], *, is_shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar over the requests of all cells; yields what takes the place of a cell and how many it has done."""
    if not is_shown:
        yield lambda _place, _done: None
        return
    done = [0] * len(num_requests)
    with new_progress(stderr_console()) as progress:
        task = progress.add_task("", total=sum(num_requests))

        def update(place: int, num_done: int) -> None:
            step, done[place] = num_done - done[place], num_done
            progress.update(task, advance=step)
            if num_done == num_requests[place]:
                describe(progress)

        def describe(progress: Progress) -> None:
            num_over = sum(map(int.__eq__, done, num_requests))
            what = f"{num_over} of {len(done)} replays" if len(done) > 1 else f"{num_requests[0]:,} requests"
            progress.update(task, description=what)

        describe(progress)
        yield update


def _print(report: Report, *, as_json: bool) -> None:
    """One result, or all of a sweep, and what failed.

    Raises:
        ConfigError: the only replay asked for failed.
    """
    if len(report.cells) == 1 and report.failed:
        raise ConfigError(report.failed[0].error or "", report.failed[0].hint)
    single = len(report.cells) == 1 and report.outcomes.get(report.cells[0])
    if single and single.result is not None:
        row = single_row(single.result, report.standing(single.cell))
        print_json(row) if as_json else print_table(result_table(row))
        return
    if as_json:
        print_json(report.as_json())
    for table in () if as_json else report.tables():
        print_table(table)
    for outcome in report.failed:
        cell = outcome.cell
        sizes = "".join(
            f", {size}-token {name}"
            for name, size in (("pages", cell.page_tokens), ("blocks", cell.block_tokens))
            if size
        )
        say_error(
            f"{report.traces[cell.trace].name}, {cell.policy}, {cell.capacity}{sizes}: {outcome.error}", outcome.hint
        )
