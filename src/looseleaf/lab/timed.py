"""Replay of a trace in its own time: requests live as long as prefill and decoding take at given rates.

A rate model instead of a model: every request computes its uncached prompt at `prefill_rate` tokens/s from its
admission on, then one token per step of 1 / `decode_rate` seconds, all requests alike. Memory is the real
`CacheManager`: admission, growth, preemption, reuse, eviction and upkeep between steps happen as they would.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from looseleaf.core.config import CacheConfig
from looseleaf.core.lease import Lease
from looseleaf.core.manager import CacheManager
from looseleaf.errors import ConfigError, OutOfBlocks
from looseleaf.ids import Int32Array
from looseleaf.lab.replay import ReplayResult, TraceClock
from looseleaf.lab.traces import Trace, TraceRequest

OUTPUT_TOKEN = 2**31 - 1
"""Fills generated places; no block id of a trace is as high. What a trace does not tell lies right below it."""

FIRST_GUESS_TOKENS = 128
MEMORY_OF_OUTPUTS = 0.02
"""How many output tokens a request is expected to have: a moving mean of what the finished ones had."""


class Watcher(Protocol):
    """Looks at the memory while a trace is served. It must change nothing."""

    def on_finish(self, now: float, cache: CacheManager, lease: Lease) -> None:
        """A complete request, `now` seconds after the trace began, just before its lease is released."""


@dataclass(frozen=True)
class RateModel:
    """How fast the imagined machine is, in tokens per second and request. `max_running`: requests that it serves at
    once, as far as memory goes; None: any number."""

    prefill_rate: float = 8000.0
    decode_rate: float = 40.0
    max_running: int | None = None

    def __post_init__(self) -> None:
        """Refuse rates that are not positive.

        Raises:
            ConfigError: names the rate, or the limit.
        """
        if self.max_running is not None and self.max_running < 1:
            raise ConfigError(f"max_running is {self.max_running}; at least 1 request must run, or nothing ever does")
        for name in ("prefill_rate", "decode_rate"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be positive, in tokens per second")


@dataclass(eq=False)
class _Sequence:
    """A request on its way: `tokens` int32, what it must have in memory before it can go on."""

    number: int
    request: TraceRequest
    tokens: Int32Array
    num_left: int
    lease: Lease | None = None
    ready_at: float = 0.0
    counted: bool = False


@dataclass
class _Figures:
    hit_tokens: int = 0
    unfilled_places: float = 0.0
    places: float = 0.0
    peak_blocks: int = 0
    peak_held_tokens: int = 0
    peak_used_tokens: int = 0
    num_preemptions: int = 0


@dataclass
class _Simulation:
    cache: CacheManager
    rates: RateModel
    watcher: Watcher | None = None
    expected_output: float = FIRST_GUESS_TOKENS
    waiting: deque[_Sequence] = field(default_factory=deque)
    prefilling: list[_Sequence] = field(default_factory=list)
    decoding: list[_Sequence] = field(default_factory=list)
    figures: _Figures = field(default_factory=_Figures)

    def admit(self, now: float) -> None:
        """First come, first served, as long as the whole sequence and one token more fit."""
        limit = math.inf if self.rates.max_running is None else self.rates.max_running
        while self.waiting and len(self.prefilling) + len(self.decoding) < limit:
            sequence = self.waiting[0]
            if not self._may_fit(sequence):
                return
            lease = self.cache.lease(
                sequence.tokens,
                str(sequence.number),
                sequence.request.namespace,
                count_lookup=not sequence.counted,
                session=sequence.request.session,
                expected_tokens=len(sequence.tokens) + int(self.expected_output),
            )
            if not lease.try_reserve(len(sequence.tokens) + 1):
                lease.release()
                return
            self.waiting.popleft()
            sequence.lease = lease
            sequence.ready_at = now + (len(sequence.tokens) - lease.num_cached_tokens) / self.rates.prefill_rate
            if not sequence.counted:
                self.figures.hit_tokens += lease.num_cached_tokens
                sequence.counted = True
            self.prefilling.append(sequence)

    def _may_fit(self, sequence: _Sequence) -> bool:
        """False if a lease would be in vain: read-only, so that waiting does not count as use."""
        room, plan = self.cache.room(), self.cache.plan
        num_blocks = -(-(len(sequence.tokens) + 1) // plan.block_tokens) * plan.num_lanes
        num_available = room.num_free_blocks + room.num_evictable_blocks
        return num_blocks <= num_available or (
            num_blocks - self.cache.match(sequence.tokens, sequence.request.namespace).num_blocks <= num_available
        )

    def step(self, now: float) -> None:
        """What is prefilled starts to decode; what decodes gets a token; what is complete goes; then upkeep."""
        ready = [sequence for sequence in self.prefilling if sequence.ready_at <= now]
        if ready:
            self.prefilling = [sequence for sequence in self.prefilling if sequence.ready_at > now]
            for sequence in ready:
                _lease_of(sequence).commit(len(sequence.tokens))
                self.decoding.append(sequence)
        self._decode()
        done = [sequence for sequence in self.decoding if sequence.num_left <= 0]
        if done:
            self.decoding = [sequence for sequence in self.decoding if sequence.num_left > 0]
            for sequence in done:
                if self.watcher is not None:
                    self.watcher.on_finish(now, self.cache, _lease_of(sequence))
                _lease_of(sequence).release()
                self.expected_output += MEMORY_OF_OUTPUTS * (sequence.request.num_output_tokens - self.expected_output)
        self.cache.maintain()

    def _decode(self) -> None:
        while self.decoding:
            leases = [_lease_of(sequence) for sequence in self.decoding]
            try:
                self.cache.append_many(leases, np.full(len(leases), OUTPUT_TOKEN, dtype=np.int32))
            except OutOfBlocks:
                self._preempt()
                continue
            self.cache.commit_many(leases)
            for sequence in self.decoding:
                sequence.num_left -= 1
            return

    def _preempt(self) -> None:
        """The latest arrival gives its blocks up and comes back with all tokens that it has."""
        victim = max(self.decoding, key=lambda sequence: sequence.number)
        lease = _lease_of(victim)
        victim.tokens = lease.token_ids
        lease.release()
        victim.lease = None
        self.figures.num_preemptions += 1
        self.decoding.remove(victim)
        self.waiting.appendleft(victim)

    def measure(self, seconds: float) -> None:
        """Weigh the present state with the time that it lasts."""
        stats = self.cache.stats()
        places = stats.active_blocks * stats.block_tokens
        used = round(places * (1 - stats.waste))
        figures = self.figures
        figures.places += places * seconds
        figures.unfilled_places += (places - used) * seconds
        figures.peak_blocks = max(figures.peak_blocks, stats.num_blocks - stats.free_blocks)
        figures.peak_held_tokens = max(figures.peak_held_tokens, places)
        figures.peak_used_tokens = max(figures.peak_used_tokens, used)


def replay_timed(
    trace: Trace,
    config: CacheConfig,
    rates: RateModel | None = None,
    on_progress: Callable[[int], None] | None = None,
    watcher: Watcher | None = None,
) -> ReplayResult:
    """Serve `trace` in its own time. Requests that can never fit are left out of memory and hits, but count as input.

    Args:
        trace: with blocks, or with lengths only (then nothing is shared).
        config: of the cache.
        rates: prefill and decode rates; 8,000 and 40 tokens/s if None.
        on_progress: is called with the number of requests that have arrived.
        watcher: is shown the memory as requests finish.
    """
    rates = rates or RateModel()
    clock = TraceClock()
    simulation = _Simulation(CacheManager(config, clock=clock), rates, watcher)
    dt = 1.0 / rates.decode_rate
    now = 0.0
    arrived = 0
    requests = trace.requests
    while arrived < len(requests) or simulation.waiting or simulation.prefilling or simulation.decoding:
        if not (simulation.waiting or simulation.prefilling or simulation.decoding):
            now = max(now, requests[arrived].at_seconds)
        while arrived < len(requests) and requests[arrived].at_seconds <= now:
            request = requests[arrived]
            if request.num_input_tokens + request.num_output_tokens + 1 <= simulation.cache.plan.num_tokens:
                tokens = _tokens(request, arrived, trace.block_tokens)
                simulation.waiting.append(_Sequence(arrived, request, tokens, request.num_output_tokens))
            arrived += 1
            if on_progress is not None:
                on_progress(arrived)
        clock.seconds = now
        simulation.admit(now)
        simulation.measure(dt)
        now += dt
        simulation.step(now)
    return _result(trace, config, simulation)


def _result(trace: Trace, config: CacheConfig, simulation: _Simulation) -> ReplayResult:
    figures = simulation.figures
    stats = simulation.cache.stats()
    input_tokens = sum(request.num_input_tokens for request in trace.requests)
    return ReplayResult(
        trace=trace.name,
        policy=config.policy,
        mode="timed",
        capacity_blocks=stats.num_blocks,
        page_tokens=config.page_tokens,
        block_tokens=config.block_tokens,
        requests=len(trace.requests),
        input_tokens=input_tokens,
        hit_tokens=figures.hit_tokens,
        token_hit_rate=figures.hit_tokens / input_tokens if input_tokens else 0.0,
        waste=figures.unfilled_places / figures.places if figures.places else 0.0,
        peak_blocks=figures.peak_blocks,
        evicted_blocks=stats.evicted_tokens // config.block_tokens,
        peak_held_tokens=figures.peak_held_tokens,
        peak_used_tokens=figures.peak_used_tokens,
        preemptions=figures.num_preemptions,
        auto_pin=simulation.cache.auto_pin_report() if config.auto_pin else None,
    )


def _lease_of(sequence: _Sequence) -> Lease:
    assert sequence.lease is not None  # only admitted sequences are asked
    return sequence.lease


def _tokens(request: TraceRequest, number: int, block_tokens: int | None) -> Int32Array:
    """int32 [num_input_tokens]: each block of the trace filled with its id, what no block is told for with a token that
    no other request has.

    Raises:
        ConfigError: whole blocks are missing.
    """
    tokens = np.full(max(1, request.num_input_tokens), OUTPUT_TOKEN - 1 - number, dtype=np.int32)
    if block_tokens is None or not request.blocks:
        return tokens
    told = np.repeat(np.array(request.blocks, dtype=np.int32), block_tokens)[: len(tokens)]
    if len(tokens) - len(told) >= block_tokens:
        raise ConfigError(
            f"request {number} of the trace has {len(tokens)} tokens but only {len(request.blocks)} blocks"
        )
    tokens[: len(told)] = told
    return tokens
