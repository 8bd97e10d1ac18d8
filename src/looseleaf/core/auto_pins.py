"""Pins that the cache makes by itself: prefixes that keep coming back after the eviction order has given them up.

    evicted ── came back ── evicted ── came back ──► pinned ──── used after longer than it would have stayed ──► stays
                                                        └─────── not, or others come back just too late ───────► lapses

A least-recently-used order keeps what is used more often than memory turns over. What it loses again and again is what
is used *regularly but more rarely*; a pin is worth its memory there, and only there. So the worth of a prefix is
learned from its returns after eviction (or, once it is pinned, after a pause that it would not have survived), counted
with decay: returns per logical time and block. It is compared with what the next victims are worth, which is how often
blocks return soon after their eviction: they are what a pin costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from looseleaf.core.auto_pin_config import AutoPinConfig, AutoPinRule
from looseleaf.core.forgotten import EvictedRun
from looseleaf.core.tokens import TOKEN_BYTES
from looseleaf.core.tree import Match, Node
from looseleaf.ids import Float64Array, Int64Array, Namespace

MIN_RETURNS = 2
"""Returns before anything is pinned: once is no habit."""

MEMORY_FACTOR = 8.0
"""Returns are forgotten over so many times the age at which blocks are evicted now."""

HYSTERESIS = 2.0
"""A prefix must be worth so many times what victims are worth to be pinned, and lapses when it is worth no more than
they are."""

REVIEW_LOOKUPS = 32
"""Look-ups between two reviews of all automatic pins."""


@dataclass
class AutoPinFigures:
    """What automatic pinning did. `num_made`, `num_lapsed`: pins. `gained_blocks`: pinned blocks reused after a pause
    that they would not have survived. `missed_blocks`: others that came back so soon after their eviction that the
    pinned memory would have kept them. Both with decay."""

    num_made: int = 0
    num_lapsed: int = 0
    gained_blocks: float = 0.0
    missed_blocks: float = 0.0


class Heat:
    """Returns of blocks by chain key, with decay: a fixed direct-mapped table, as for forgotten blocks."""

    def __init__(self, num_entries: int) -> None:
        self._shift = 64 - (num_entries.bit_length() - 1)
        self._keys = np.zeros(num_entries, dtype=np.int64)
        self._returns = np.zeros(num_entries, dtype=np.float64)
        self._counts = np.zeros(num_entries, dtype=np.int64)
        self._ticks = np.zeros(num_entries, dtype=np.int64)

    def add(self, keys: Int64Array, tick: int, memory_ticks: float) -> None:
        """One more return of each of `keys` [n]."""
        places = self._places(keys)
        known = self._keys[places] == keys
        decay = np.exp((self._ticks[places] - tick) / memory_ticks)
        self._returns[places] = np.where(known, self._returns[places] * decay, 0.0) + 1.0
        self._counts[places] = np.where(known, self._counts[places], 0) + 1
        self._keys[places] = keys
        self._ticks[places] = tick

    def rates(self, keys: Int64Array, tick: int, memory_ticks: float) -> Float64Array:
        """Returns per tick of each of `keys` [n]; 0 for what returned less than `MIN_RETURNS` times."""
        places = self._places(keys)
        counts = (self._keys[places] == keys) & (self._counts[places] >= MIN_RETURNS)
        decay = np.exp((self._ticks[places] - tick) / memory_ticks)
        rates: Float64Array = np.where(counts, self._returns[places] * decay / memory_ticks, 0.0)
        return rates

    def _places(self, keys: Int64Array) -> Int64Array:
        mixed = keys.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        places: Int64Array = (mixed >> np.uint64(self._shift)).astype(np.int64)
        return places


@dataclass
class _AutoPin:
    pin_id: str
    last_key: int
    num_blocks: int


class AutoPinner:
    """Learns from look-ups and evictions, and makes and ends automatic pins. Used under the manager's lock.

    `pin(namespace, data)` makes a soft pin of the lowest priority and gives its id; `unpin(pin_id)` ends one, if it is
    still there; `pinned_share()` is the share of all blocks that soft pins hold.
    """

    def __init__(
        self,
        config: AutoPinConfig,
        block_tokens: int,
        num_entries: int,
        pin: Callable[[Namespace, bytes], str],
        unpin: Callable[[str], None],
        pinned_share: Callable[[], float],
    ) -> None:
        self.config = config
        self._block_tokens = block_tokens
        self._pinned_share = pinned_share
        self.figures = AutoPinFigures()
        self.would_pin: dict[int, int] = {}  # dry run: tokens by chain key of the last block
        self._pin = pin
        self._unpin = unpin
        self._heat = Heat(num_entries)
        self._pins: dict[int, _AutoPin] = {}
        self._age_ticks = 0.0  # mean age of blocks at their eviction
        self._num_evicted = 0.0
        self._num_returned = 0.0
        self._caution = 1.0
        self._num_lookups = 0
        self._rates: dict[int, tuple[float, float]] = {}

    # --- what it learns from --------------------------------------------------------------------------------------

    def on_evicted(self, num_blocks: int, age_ticks: int) -> None:
        """Blocks were evicted, `age_ticks` after their last use."""
        self._num_evicted += num_blocks
        weight = min(1.0, 0.01 * num_blocks) if self._age_ticks else 1.0
        self._age_ticks += (max(1, age_ticks) - self._age_ticks) * weight

    def before_hold(self, match: Match, keys_of: Callable[[Node], Int64Array], tick: int) -> None:
        """A look-up is about to hold this path: pinned parts that would have been gone by now are returns."""
        if not self._pins or not self._age_ticks:
            return
        survived_ticks = self._age_ticks / (1.0 - min(self._pinned_share(), 0.99))
        for node in match.node.path():
            if node.soft_priorities and tick - node.last_tick > survived_ticks:
                self._heat.add(keys_of(node), tick, self._memory_ticks)
                self.figures.gained_blocks += node.num_blocks

    def on_return(self, namespace: Namespace, data: bytes, run: EvictedRun, tick: int, now_seconds: float) -> None:
        """A look-up of packed tokens `data` found the blocks of `run` evicted."""
        ages, share = tick - run.ticks, min(self._pinned_share(), 0.99)
        is_soon = ages <= self._age_ticks * share / (1.0 - share)  # the pinned memory would have kept these
        self._num_returned += int(np.count_nonzero(ages <= self._age_ticks))
        self.figures.missed_blocks += int(np.count_nonzero(is_soon))
        self._heat.add(run.keys[~is_soon], tick, self._memory_ticks)
        self._consider(namespace, data, run, tick, now_seconds)

    def on_lookup(self, tick: int) -> None:
        """A look-up is done."""
        self._num_lookups += 1
        if self._num_lookups % REVIEW_LOOKUPS == 0:
            self._review(tick)

    @property
    def _memory_ticks(self) -> float:
        return MEMORY_FACTOR * max(1.0, self._age_ticks)

    @property
    def victim_rate(self) -> float:
        """Returns per tick of a block that was just evicted."""
        return self._num_returned / (self._num_evicted * self._age_ticks) if self._num_evicted else 0.0

    # --- what it does ---------------------------------------------------------------------------------------------

    def _consider(self, namespace: Namespace, data: bytes, run: EvictedRun, tick: int, now_seconds: float) -> None:
        """Pin the longest part of what came back that is worth it and that the rule allows."""
        rule = self.config.rule_of(namespace)
        if rule is None:
            return
        rates = self._heat.rates(run.keys, tick, self._memory_ticks)
        is_worth = rates > HYSTERESIS * self._caution * self.victim_rate
        num_worth = len(rates) if is_worth.all() else int(is_worth.argmin())
        if num_worth == 0:
            return
        num_blocks, key = run.first_block + num_worth, int(run.keys[num_worth - 1])
        num_tokens = num_blocks * self._block_tokens
        is_long = rule.min_tokens is not None and num_tokens > rule.min_tokens
        if not is_long and not self._is_frequent(key, rule, now_seconds):
            return
        if key in self._pins or key in self.would_pin:
            return
        self.figures.num_made += 1
        if self.config.dry_run:
            self.would_pin[key] = num_tokens
            return
        pin_id = self._pin(namespace, data[: num_tokens * TOKEN_BYTES])
        self._pins[key] = _AutoPin(pin_id, key, num_blocks)

    def _is_frequent(self, key: int, rule: AutoPinRule, now_seconds: float) -> bool:
        """True if a prefix is asked for more often than its rule says, over the rate window."""
        if rule.min_requests_per_second is None:
            return False
        window = self.config.rate_window_seconds
        rate, at_seconds = self._rates.pop(key, (0.0, now_seconds))
        rate = rate * math.exp((at_seconds - now_seconds) / window) + 1.0 / window
        self._rates[key] = (rate, now_seconds)
        if len(self._rates) > 4096:
            del self._rates[next(iter(self._rates))]
        return rate > rule.min_requests_per_second

    def _review(self, tick: int) -> None:
        """End pins that do not pay any more; be more cautious while all together cost more than they give."""
        self._num_evicted *= 0.98
        self._num_returned *= 0.98
        self.figures.gained_blocks *= 0.98
        self.figures.missed_blocks *= 0.98
        if not self._pins:
            self._caution = max(1.0, self._caution * 0.98)
            return
        pins = list(self._pins.values())
        rates = self._heat.rates(np.array([pin.last_key for pin in pins]), tick, self._memory_ticks)
        loses = self.figures.missed_blocks > self.figures.gained_blocks
        self._caution = min(64.0, self._caution * 1.5) if loses else max(1.0, self._caution * 0.98)
        worst = rates.min()
        for pin, rate in zip(pins, rates.tolist(), strict=True):
            if rate < self._caution * self.victim_rate or (loses and rate == worst):
                self._end(pin)

    def _end(self, pin: _AutoPin) -> None:
        self.figures.num_lapsed += 1
        del self._pins[pin.last_key]
        self._unpin(pin.pin_id)
