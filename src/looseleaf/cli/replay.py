"""`looseleaf replay`: what a cache would do to recorded traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from looseleaf.cli.auto_pin import RULE, AutoPinOption, MinRateOption, MinTokensOption, auto_pin_config
from looseleaf.cli.failures import friendly_errors
from looseleaf.cli.output import print_json, stderr_console, stdout_console
from looseleaf.cli.progress import new_progress
from looseleaf.core.auto_pin_config import AutoPinConfig
from looseleaf.core.config import CacheConfig
from looseleaf.core.eviction import POLICIES
from looseleaf.errors import ConfigError
from looseleaf.lab.capacity import capacity_blocks
from looseleaf.lab.replay import ReplayResult, replay_instant
from looseleaf.lab.timed import RateModel, replay_timed
from looseleaf.lab.traces import Trace, load_trace

DEFAULT_BLOCK_TOKENS = 16
DEFAULT_PAGE_TOKENS = 256
_RATES = RateModel()


@dataclass(frozen=True)
class ReplaySettings:
    """What the command line asks for; None where it leaves the choice to the mode."""

    capacity: str
    policy: str
    page_tokens: int | None
    block_tokens: int | None
    bytes_per_token: int | None
    rates: RateModel
    auto_pin: AutoPinConfig | None


def replay(
    trace: Annotated[Path, typer.Argument(help="Mooncake JSONL, prefix-trace/1, or CSV with request lengths.")],
    capacity: Annotated[str, typer.Option(help="5% of the trace's unique blocks, 388blocks, or 2GiB.")] = "5%",
    policy: Annotated[str, typer.Option(help=f"Which cached blocks go first: {', '.join(POLICIES)}.")] = "lru",
    page_tokens: Annotated[int | None, typer.Option(help="Tokens of a page. Default: 256.")] = None,
    block_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a block. Default: 16; with --instant the trace's own.")
    ] = None,
    bytes_per_token: Annotated[
        int | None, typer.Option(help="Bytes of K and V of one token, for a capacity in bytes.")
    ] = None,
    instant: Annotated[bool, typer.Option("--instant", help="Serve each request at once and alone.")] = False,
    prefill_rate: Annotated[float, typer.Option(help="Prompt tokens a second and request.")] = _RATES.prefill_rate,
    decode_rate: Annotated[float, typer.Option(help="Output tokens a second and request.")] = _RATES.decode_rate,
    auto_pin: AutoPinOption = "off",
    auto_pin_min_tokens: MinTokensOption = str(RULE.min_tokens),
    auto_pin_min_rate: MinRateOption = f"{RULE.min_requests_per_second:g}",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Replay a trace through the cache that serves: hits, waste and evictions of a capacity and a policy."""
    with friendly_errors():
        rates = RateModel(prefill_rate, decode_rate)
        automatic = auto_pin_config(auto_pin, auto_pin_min_tokens, auto_pin_min_rate)
        settings = ReplaySettings(capacity, policy, page_tokens, block_tokens, bytes_per_token, rates, automatic)
        loaded = _load(trace)
        with _progress(len(loaded.requests), is_shown=not as_json) as on_progress:
            result = (_instant if instant else _timed)(loaded, settings, on_progress)
        if as_json:
            print_json(asdict(result))
        else:
            stdout_console().print(_table(result))


def _load(path: Path) -> Trace:
    try:
        return load_trace(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _instant(trace: Trace, settings: ReplaySettings, on_progress: Callable[[int], None]) -> ReplayResult:
    block_tokens = settings.block_tokens or trace.block_tokens or DEFAULT_BLOCK_TOKENS
    return replay_instant(
        trace,
        _capacity(trace, settings, block_tokens),
        settings.policy,
        settings.page_tokens,
        settings.block_tokens,
        on_progress,
        settings.auto_pin,
    )


def _timed(trace: Trace, settings: ReplaySettings, on_progress: Callable[[int], None]) -> ReplayResult:
    page_tokens = settings.page_tokens or DEFAULT_PAGE_TOKENS
    block_tokens = settings.block_tokens or DEFAULT_BLOCK_TOKENS
    config = CacheConfig(1, page_tokens=page_tokens, block_tokens=block_tokens, policy=settings.policy)
    num_blocks = _capacity(trace, settings, block_tokens)
    num_pages = num_blocks * block_tokens // page_tokens
    if num_pages < 1:
        raise ConfigError(
            f"a capacity of {settings.capacity!r} is {num_blocks} blocks of {block_tokens} tokens, less than one "
            f"page of {page_tokens} tokens",
            "give more, or use smaller pages",
        )
    config = replace(config, num_pages=num_pages, auto_pin=settings.auto_pin)
    return replay_timed(trace, config, settings.rates, on_progress)


def _capacity(trace: Trace, settings: ReplaySettings, block_tokens: int) -> int:
    """The capacity in blocks of `block_tokens`; a share counts the trace's own blocks.

    Raises:
        ConfigError: not a capacity, or a share of a trace that tells lengths only.
    """
    if settings.capacity.strip().endswith("%") and trace.block_tokens is None:
        raise ConfigError(
            f"{trace.name} tells lengths only, so {settings.capacity!r} of its unique blocks cannot be counted",
            "write the capacity as 388blocks, or in bytes with --bytes-per-token",
        )
    num_unique_blocks = trace.num_unique_blocks * (trace.block_tokens or 0) // block_tokens
    block_bytes = None if settings.bytes_per_token is None else settings.bytes_per_token * block_tokens
    return capacity_blocks(settings.capacity, num_unique_blocks, block_bytes)


@contextmanager
def _progress(num_requests: int, *, is_shown: bool) -> Iterator[Callable[[int], None]]:
    if not is_shown:
        yield lambda _: None
        return
    with new_progress(stderr_console()) as progress:
        task = progress.add_task(f"replaying {num_requests:,} requests", total=num_requests)
        yield lambda done: progress.update(task, completed=done)


def _table(result: ReplayResult) -> Table:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in asdict(result).items():
        is_share = name in ("token_hit_rate", "waste")
        shown = f"{value:.2%}" if is_share else f"{value:,}" if isinstance(value, int) else str(value)
        table.add_row(name.replace("_", " "), shown)
    return table
