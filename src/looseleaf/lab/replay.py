"""Replay of a trace, each request served at once and alone: what a policy and a capacity would have hit.

The rules are those of a referee that works on blocks: each block of the trace is one block of the cache (or several
smaller ones), filled with tokens of its own; one token is added to each prompt so that all of it can hit; a partial
last block, if the trace tells it, weighs the tokens that it has; of a request longer than the capacity only the first
blocks are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from looseleaf.core.auto_pin_config import AutoPinConfig
from looseleaf.core.auto_pins import AutoPinReport
from looseleaf.core.config import CacheConfig
from looseleaf.core.manager import CacheManager
from looseleaf.errors import ConfigError
from looseleaf.ids import Int32Array
from looseleaf.lab.traces import Trace, TraceRequest


@dataclass(frozen=True)
class ReplayResult:
    """What a replay found. Tokens are those of the trace. `waste`: share of the token places in held blocks that hold
    nothing, over the trace's time (instant: over its requests).

    peak_blocks: most blocks in use at once, cached ones included. evicted_blocks: cached blocks that had to go.
    peak_held_tokens: most token places in blocks held by requests; peak_used_tokens: most of them that tokens were
    reserved for. preemptions: how often a running request gave its blocks up. auto_pin: what
    automatic pinning did, None if it was off.
    """

    trace: str
    policy: str
    mode: str
    capacity_blocks: int
    page_tokens: int
    block_tokens: int
    requests: int
    input_tokens: int
    hit_tokens: int
    token_hit_rate: float
    waste: float
    peak_blocks: int
    evicted_blocks: int
    peak_held_tokens: int
    peak_used_tokens: int
    preemptions: int = 0
    auto_pin: AutoPinReport | None = None


@dataclass
class TraceClock:
    """The clock of a cache that serves a trace."""

    seconds: float = 0.0

    def __call__(self) -> float:
        """Seconds since the trace began."""
        return self.seconds


def replay_instant(
    trace: Trace,
    capacity_blocks: int,
    policy: str = "lru",
    page_tokens: int | None = None,
    block_tokens: int | None = None,
    on_progress: Callable[[int], None] | None = None,
    auto_pin: AutoPinConfig | None = None,
    config: CacheConfig = CacheConfig(1),
) -> ReplayResult:
    """Serve each request of `trace` at once and alone, in order.

    Args:
        trace: must tell which blocks its prompts have.
        capacity_blocks: blocks of the cache; exact, also where it is no whole number of pages.
        policy: name of an eviction policy.
        page_tokens: tokens of a page, 256 if None; at least one block. Hits do not depend on it.
        block_tokens: tokens of a block of the cache, the trace's own if None; a whole part of it.
        on_progress: is called with the number of requests done.
        auto_pin: what the cache may pin by itself; None: nothing.
        config: quotas and the like; its sizes and its policy do not count.

    Raises:
        ConfigError: the trace has lengths only, or sizes that do not go together.
    """
    size = replayed_block_tokens(trace, block_tokens)
    page = max(page_tokens or 256, size)
    num_pages = -(-capacity_blocks * size // page)
    config = replace(
        config,
        num_pages=num_pages,
        page_tokens=page,
        block_tokens=size,
        policy=policy,
        num_known_requests=0,
        auto_pin=auto_pin,
    )
    unit = size if auto_pin else 1  # all tokens of a block are equal: one tells as much, unless their number matters
    clock = TraceClock()
    cache = CacheManager(replace(config, page_tokens=page // size * unit, block_tokens=unit), clock=clock)
    num_spare = cache.plan.num_blocks - capacity_blocks
    with cache.lease(np.zeros(1, dtype=np.int32), request_id="spare", count_lookup=False, reuse=False) as spare:
        spare.reserve(num_spare * unit)  # the last page's blocks beyond the capacity
        return _serve_all(trace, cache, clock, capacity_blocks, config, on_progress)


def replayed_block_tokens(trace: Trace, block_tokens: int | None) -> int:
    """Tokens of a block of the cache when `trace` is replayed instantly in blocks of `block_tokens`, None for its own.

    Raises:
        ConfigError: the trace has lengths only, or blocks that can't be cut like that.
    """
    if trace.block_tokens is None:
        raise ConfigError(
            f"{trace.name} tells lengths only, not which blocks prompts share", "replay it without --instant"
        )
    size = trace.block_tokens if block_tokens is None else block_tokens
    if size < 1 or trace.block_tokens % size:
        raise ConfigError(
            f"{trace.name} has blocks of {trace.block_tokens} tokens, --block-tokens asks for {size}",
            f"with --instant a block of the trace is one or several blocks of the cache: use {trace.block_tokens} or a "
            "whole part of it",
        )
    for number, request in enumerate(trace.requests):
        num_whole, rest = divmod(request.num_input_tokens, trace.block_tokens)
        if not 0 <= len(request.blocks) - num_whole <= bool(rest):
            raise ConfigError(
                f"request {number} of {trace.name} has {request.num_input_tokens} tokens in {len(request.blocks)} "
                f"blocks, which are not blocks of {trace.block_tokens} tokens",
                "give the size that the trace was made with",
            )
    return size


def num_cache_blocks(request: TraceRequest, trace_block_tokens: int, block_tokens: int) -> int:
    """Blocks of `block_tokens` that the told part of a request's prompt fills, the last one maybe in part."""
    told = min(len(request.blocks) * trace_block_tokens, request.num_input_tokens)
    return -(-told // block_tokens)


def _serve_all(
    trace: Trace,
    cache: CacheManager,
    clock: TraceClock,
    capacity_blocks: int,
    config: CacheConfig,
    on_progress: Callable[[int], None] | None,
) -> ReplayResult:
    """`config`: the cache as asked for; `cache` may hold fewer tokens in a block."""
    size, trace_size, unit = config.block_tokens, trace.block_tokens or 0, cache.plan.block_tokens
    hit_tokens = num_places = num_filled = peak_held = peak_used = 0
    fewest_free = capacity_blocks
    for number, request in enumerate(trace.requests):
        clock.seconds = request.at_seconds
        num_input = request.num_input_tokens
        num_blocks = num_cache_blocks(request, trace_size, size)
        prompt = _prompt(request.blocks, trace_size // size * unit, num_blocks * unit)
        with cache.lease(prompt, "served", request.namespace, session=request.session) as lease:
            hit_tokens += min(lease.num_cached_tokens // unit * size, num_input)
            num_stored = min(num_blocks, capacity_blocks)
            lease.reserve(num_stored * unit)
            if num_stored * size > num_input:  # the last block is not full
                lease.commit((num_stored - 1) * unit)
                lease.commit(num_stored * unit, is_padded=True)
            else:
                lease.commit(num_stored * unit)
            lease.num_output_tokens = request.num_output_tokens
            fewest_free = min(fewest_free, cache.room().num_free_blocks)
        num_held = num_stored * size
        num_used = min(num_held, num_input)
        num_places += num_held
        num_filled += num_used
        peak_held, peak_used = max(peak_held, num_held), max(peak_used, num_used)
        if on_progress is not None:
            on_progress(number + 1)
    input_tokens = sum(request.num_input_tokens for request in trace.requests)
    return ReplayResult(
        trace=trace.name,
        policy=config.policy,
        mode="instant",
        capacity_blocks=capacity_blocks,
        page_tokens=config.page_tokens,
        block_tokens=size,
        requests=len(trace.requests),
        input_tokens=input_tokens,
        hit_tokens=hit_tokens,
        token_hit_rate=hit_tokens / input_tokens if input_tokens else 0.0,
        waste=1 - num_filled / num_places if num_places else 0.0,
        peak_blocks=capacity_blocks - fewest_free,
        evicted_blocks=cache.stats().evicted_tokens // unit,
        peak_held_tokens=peak_held,
        peak_used_tokens=peak_used,
        auto_pin=cache.auto_pin_report() if config.auto_pin else None,
    )


def _prompt(blocks: Sequence[int], tokens_per_block: int, num_tokens: int) -> Int32Array:
    """Each block of the trace filled with its id, cut to `num_tokens`, and one token more: int32 [num_tokens + 1]."""
    prompt = np.zeros(len(blocks) * tokens_per_block + 1, dtype=np.int32)
    prompt[:-1].reshape(-1, tokens_per_block)[:] = np.array(blocks, dtype=np.int32)[:, None]
    return prompt[: num_tokens + 1]
