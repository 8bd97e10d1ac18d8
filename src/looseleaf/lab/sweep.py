"""Many replays: one cell per trace, policy, capacity and size, in this process or spread over several."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from looseleaf.core.auto_pin_config import AutoPinConfig
from looseleaf.core.config import CacheConfig
from looseleaf.errors import ConfigError, LooseleafError
from looseleaf.lab.capacity import capacity_blocks
from looseleaf.lab.optimum import OPTIMUM, Optimum, gap_closed
from looseleaf.lab.replay import ReplayResult, replay_instant, replayed_block_tokens
from looseleaf.lab.timed import RateModel, replay_timed
from looseleaf.lab.traces import Trace

DEFAULT_BLOCK_TOKENS = 16
DEFAULT_PAGE_TOKENS = 256


@dataclass(frozen=True)
class Cell:
    """One replay. `trace`: its place among those of the sweep. `policy`: of eviction, or "optimum". `capacity`: as
    people write it. `page_tokens`, `block_tokens`: None leaves them to the mode."""

    trace: int
    policy: str
    capacity: str
    page_tokens: int | None = None
    block_tokens: int | None = None


@dataclass(frozen=True)
class SweepSettings:
    """What all cells have in common. `config`: quotas and the like; its sizes and its policy do not count."""

    is_instant: bool
    rates: RateModel = field(default_factory=RateModel)
    bytes_per_token: int | None = None
    auto_pin: AutoPinConfig | None = None
    config: CacheConfig = field(default_factory=lambda: CacheConfig(1))


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: its result, or why there is none, in facts and a hint."""

    cell: Cell
    result: ReplayResult | None
    seconds: float = 0.0
    error: str | None = None
    hint: str | None = None


OnProgress = Callable[[int], None]
"""Is called with the number of requests done."""


def replay_cell(
    trace: Trace, cell: Cell, settings: SweepSettings, on_progress: OnProgress | None = None
) -> ReplayResult:
    """Replay one cell.

    Raises:
        ConfigError: sizes, capacity or policy can't be, with this trace.
    """
    if settings.is_instant:
        block_tokens = replayed_block_tokens(trace, cell.block_tokens)
        num_blocks = _capacity(trace, cell, settings, block_tokens)
        if cell.policy == OPTIMUM:
            return Optimum(trace, block_tokens).replay(num_blocks)
        return replay_instant(
            trace,
            num_blocks,
            cell.policy,
            cell.page_tokens,
            block_tokens,
            on_progress,
            settings.auto_pin,
            settings.config,
        )
    if cell.policy == OPTIMUM:
        raise ConfigError("the offline optimum is that of requests served at once and alone", "add --instant")
    page_tokens = cell.page_tokens or DEFAULT_PAGE_TOKENS
    block_tokens = cell.block_tokens or DEFAULT_BLOCK_TOKENS
    config = replace(
        settings.config,
        page_tokens=page_tokens,
        block_tokens=block_tokens,
        policy=cell.policy,
        auto_pin=settings.auto_pin,
        num_known_requests=0,
    )
    num_blocks = _capacity(trace, cell, settings, block_tokens)
    num_pages = num_blocks * block_tokens // page_tokens
    if num_pages < 1:
        raise ConfigError(
            f"a capacity of {cell.capacity!r} is {num_blocks} blocks of {block_tokens} tokens, less than one "
            f"page of {page_tokens} tokens",
            "give more, or use smaller pages",
        )
    return replay_timed(trace, replace(config, num_pages=num_pages), settings.rates, on_progress)


def _capacity(trace: Trace, cell: Cell, settings: SweepSettings, block_tokens: int) -> int:
    """The capacity in blocks of `block_tokens`; a share counts the trace's own blocks.

    Raises:
        ConfigError: not a capacity, or a share of a trace that tells lengths only.
    """
    if cell.capacity.strip().endswith("%") and trace.block_tokens is None:
        raise ConfigError(
            f"{trace.name} tells lengths only, so {cell.capacity!r} of its unique blocks cannot be counted",
            "write the capacity as 388blocks, or in bytes with --bytes-per-token",
        )
    num_unique_blocks = trace.num_unique_blocks * (trace.block_tokens or 0) // block_tokens
    block_bytes = None if settings.bytes_per_token is None else settings.bytes_per_token * block_tokens
    return capacity_blocks(cell.capacity, num_unique_blocks, block_bytes)


def attempt(trace: Trace, cell: Cell, settings: SweepSettings, on_progress: OnProgress | None = None) -> Outcome:
    """Replay one cell; an error becomes its outcome."""
    begin = time.perf_counter()
    try:
        result = replay_cell(trace, cell, settings, on_progress)
    except LooseleafError as error:
        return Outcome(cell, None, time.perf_counter() - begin, error.facts, error.hint)
    except Exception as error:  # whatever it is, the other cells go on
        return Outcome(cell, None, time.perf_counter() - begin, f"{type(error).__name__}: {error}")
    return Outcome(cell, result, time.perf_counter() - begin)


def attempt_all(
    traces: Sequence[Trace],
    cells: Iterable[tuple[int, Cell]],
    settings: SweepSettings,
    on_progress: Callable[[int, int], None],
) -> Iterator[tuple[int, Outcome]]:
    """Replay numbered cells one after the other in this process. `on_progress`: number of the cell, requests done."""
    for number, cell in cells:
        yield number, attempt(traces[cell.trace], cell, settings, partial(on_progress, number))


@dataclass(frozen=True)
class Standing:
    """Where a cell's hit rate lies between plain LRU and the offline optimum of the same trace, capacity and sizes.
    `gap_closed`: see `optimum.gap_closed`; None where there is no gap to speak of."""

    lru_token_hit_rate: float
    optimum_token_hit_rate: float
    gap_closed: float | None


def with_references(cells: Sequence[Cell]) -> list[Cell]:
    """The cells, and what is missing to say how they stand: LRU and the optimum for each trace, capacity and size;
    those of one trace together."""
    wanted = dict.fromkeys([*cells, *(reference for cell in cells for reference in _references(cell))])
    return sorted(wanted, key=lambda cell: cell.trace)


def standing_of(cell: Cell, outcomes: Mapping[Cell, Outcome]) -> Standing | None:
    """How a cell stands; None if it or one of those that it is compared with has no result."""
    results = [outcomes[key].result for key in (cell, *_references(cell)) if key in outcomes]
    if len(results) < 3 or None in results:
        return None
    own, lru, best = (result.token_hit_rate for result in results if result is not None)
    return Standing(lru, best, gap_closed(own, lru, best))


def _references(cell: Cell) -> tuple[Cell, Cell]:
    return replace(cell, policy="lru"), replace(cell, policy=OPTIMUM)
