"""Pins that the cache makes by itself: prefixes with a habit that is worth more than what eviction takes next.

A look-up tells which prefixes are used again, and when (`Habits`); evictions and what returns after them tell how long
blocks live without use and what the next victims are worth (`Pressure`). A prefix that its rule allows is pinned if the
uses that the pin would save, by block and second, are worth `HYSTERESIS` times the victims, and lapses when they are
worth less than these. What pins gained, and what others missed since pins took their place, is measured, and while
others miss more, victims count for more (`caution`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from looseleaf.core.auto_pin_config import AutoPinConfig, AutoPinRule
from looseleaf.core.forgotten import EvictedRun
from looseleaf.core.habits import Habit, Habits
from looseleaf.core.pin_record import AUTOMATIC
from looseleaf.core.pins import PinBook
from looseleaf.core.pressure import Pressure
from looseleaf.core.tokens import TOKEN_BYTES
from looseleaf.core.tree import Node
from looseleaf.ids import Int64Array, Namespace

MIN_USES = 3
"""Uses before a prefix is pinned: coming back once is no habit."""

HYSTERESIS = 2.0
MAX_PINS = 1024
MAX_CAUTION = 64.0

REVIEW_LOOKUPS = 8
"""Look-ups between two reviews of all automatic pins."""

GRID_TOKENS = 256
"""New prompts are remembered at multiples of this length, of an eighth of their length when they are long."""

MAX_CANDIDATES = 20
"""Candidates that a report names."""


@dataclass(frozen=True)
class AutoPinCandidate:
    """A prefix that its rule allows. `worth`: tokens that a pin would save, by block and second. `gap_seconds`: between
    its uses, on average."""

    namespace: Namespace
    num_tokens: int
    num_uses: int
    gap_seconds: float
    requests_per_second: float
    worth: float
    is_pinned: bool


@dataclass(frozen=True)
class AutoPinReport:
    """What automatic pinning does. `dry_run`: the pins are only thought of. `is_paused`: pins cost more than they gave,
    and none is made for the time being. `num_made`, `num_lapsed`: pins ever made, and ended since they paid no more.
    `gained_tokens`: found thanks to pins, where plain eviction would have lost them. `lost_tokens`: estimate of what
    others would have found in the memory that pins held. `victim_worth`: tokens that the next victims save, by block
    and second. `age_seconds`: how long blocks live without use, None before the first eviction."""

    is_on: bool
    dry_run: bool
    is_paused: bool
    num_pins: int
    num_pinned_tokens: int
    num_made: int
    num_lapsed: int
    gained_tokens: int
    lost_tokens: int
    victim_worth: float
    age_seconds: float | None
    candidates: tuple[AutoPinCandidate, ...]


NOTHING = AutoPinReport(False, False, False, 0, 0, 0, 0, 0, 0, 0.0, None, ())
"""The report while automatic pinning is off."""


@dataclass(frozen=True)
class LookUp:
    """What a look-up found. The nodes of `path` hold the hit, they end at the chain keys `path_keys` and were last used
    at `path_used_at`; `rest_keys` [n] are those of the whole blocks behind it, the first of which `run` finds
    evicted. `data`: the prompt's tokens, packed."""

    namespace: Namespace
    data: bytes
    path: Sequence[Node]
    path_keys: Sequence[int]
    path_used_at: Sequence[float]
    rest_keys: Int64Array
    run: EvictedRun
    at_seconds: float


class AutoPinner:
    """Makes and ends automatic pins of one cache. Used under the manager's lock.

    `pin(namespace, data)` makes a pin of packed tokens that gives way to all others, and answers with its id.
    """

    def __init__(
        self,
        config: AutoPinConfig,
        block_tokens: int,
        pressure: Pressure,
        book: PinBook,
        pin: Callable[[Namespace, bytes], str],
    ) -> None:
        self.config = config
        self._block_tokens = block_tokens
        self._pressure = pressure
        self._book = book
        self._pin = pin
        self._habits = Habits()
        self._pinned: dict[int, str] = {}  # ids by chain key; empty ids in a dry run
        self._overdue: set[int] = set()  # nodes whose pin lapsed when eviction would have taken them already
        self._idle_blocks = 0  # pinned blocks that eviction would have taken
        self._num_lookups = self._num_made = self._num_lapsed = 0
        self._gained_blocks = self._lost_blocks = 0
        self._recent_gain = 0.0
        self._caution = 1.0

    # --- learning -------------------------------------------------------------------------------------------------

    def on_evicted(self, node: Node, num_blocks: int) -> bool:
        """The last blocks of a node are evicted. False if only a pin had kept them until now."""
        was_overdue = node.id in self._overdue
        if was_overdue and num_blocks == node.num_blocks:
            self._overdue.remove(node.id)
        return not was_overdue

    def on_lookup(self, found: LookUp) -> None:
        """A request has looked its prompt up. O(blocks of the prompt + automatic pins / `REVIEW_LOOKUPS`)."""
        now = found.at_seconds
        num_lost = self._pressure.on_returned(found.run.evicted_counts, self._idle_blocks, now)
        self._weigh(-num_lost)
        used = [*self._uses_of_hit(found), *self._uses_behind(found)]
        rule = self.config.rule_of(found.namespace)
        if rule is not None:
            self._consider(used, rule, found.data, now)
        self._num_lookups += 1
        if self._num_lookups % REVIEW_LOOKUPS == 0:
            self._count_idle()
            self._review(now)

    def _uses_of_hit(self, found: LookUp) -> list[tuple[int, Habit]]:
        """Habits of the prefixes that end with a node of the hit."""
        frontier = self._pressure.frontier(self._idle_blocks)
        used = []
        for node, key, used_at in zip(found.path, found.path_keys, found.path_used_at, strict=True):
            self._overdue.discard(node.id)
            is_lost = used_at < frontier
            if is_lost and AUTOMATIC in node.soft_priorities:
                self._weigh(node.num_blocks)
            used.append((key, self._use_again(key, found, node.end, used_at, is_lost)))
        return used

    def _uses_behind(self, found: LookUp) -> list[tuple[int, Habit]]:
        """Habits of known prefixes that are not cached any more; long new ones are remembered."""
        used = []
        keys = found.rest_keys.tolist()
        start = found.path[-1].end if found.path else 0
        gone_since = min(found.at_seconds, self._pressure.frontier())
        for row, key in enumerate(keys):
            is_end_of_run = row + 1 == len(found.run.keys)
            if is_end_of_run or self._habits.knows(key):
                used.append((key, self._use_again(key, found, start + row + 1, gone_since, True)))
        if self.config.dry_run:
            saved = [habit.num_blocks for key, habit in used if key in self._pinned]
            self._weigh(max(saved, default=start) - start)
        rule = self.config.rule_of(found.namespace)
        if rule is not None and rule.min_tokens is not None:
            for end in _grid(max(start, rule.min_tokens // self._block_tokens), start + len(keys), self._block_tokens):
                key = keys[end - start - 1]
                if not self._habits.knows(key):
                    self._habits.use_first(key, found.at_seconds)
        return used

    def _use_again(self, key: int, found: LookUp, num_blocks: int, used_at: float, is_lost: bool) -> Habit:
        return self._habits.use_again(
            key, found.namespace, num_blocks, used_at, is_lost, found.at_seconds, self.config.rate_window_seconds
        )

    def _weigh(self, num_blocks: int) -> None:
        """So many blocks were found thanks to pins, or, negative, lost to others."""
        self._recent_gain += num_blocks
        if num_blocks > 0:
            self._gained_blocks += num_blocks
        else:
            self._lost_blocks -= num_blocks

    # --- making and ending ----------------------------------------------------------------------------------------

    def _consider(self, used: list[tuple[int, Habit]], rule: AutoPinRule, data: bytes, now: float) -> None:
        """Pin the longest of the prefixes just used that is worth it, unless a pin of it, or of a longer one, is
        there."""
        price = HYSTERESIS * self._caution * self._pressure.price(now)
        for key, habit in reversed(used):
            if key in self._pinned:
                return
            if habit.num_uses < MIN_USES or not self._allows(rule, habit):
                continue
            worth = self._habits.worth(habit, self._age_seconds(now), now)
            if worth > price and self._make_room(habit.num_blocks, worth, now):
                self._num_made += 1
                packed = data[: habit.num_blocks * self._block_tokens * TOKEN_BYTES]
                self._pinned[key] = "" if self.config.dry_run else self._pin(habit.namespace, packed)
                return

    def _allows(self, rule: AutoPinRule, habit: Habit) -> bool:
        least = rule.min_requests_per_second
        habit.is_frequent = least is not None and habit.rate > least / (HYSTERESIS if habit.is_frequent else 1.0)
        is_long = rule.min_tokens is not None and habit.num_blocks * self._block_tokens > rule.min_tokens
        return is_long or habit.is_frequent

    def _make_room(self, num_blocks: int, worth: float, now: float) -> bool:
        """Have `num_blocks` blocks of quota, ending pins that are worth much less."""
        if self.config.dry_run:
            return len(self._pinned) < MAX_PINS
        if self._book.quota_left() >= num_blocks and len(self._pinned) < MAX_PINS:
            return True
        age = self._age_seconds(now)
        worths = {key: self._worth_of(key, age, now) for key in self._pinned}
        for key in sorted(worths, key=worths.__getitem__):
            if worths[key] * HYSTERESIS > worth:
                return False
            self._end(key)
            if self._book.quota_left() >= num_blocks:
                return True
        return False

    def _review(self, now: float) -> None:
        """End pins that do not pay any more; while all together cost more than they give, be more careful."""
        self._recent_gain *= 0.995
        change = 1.1 if self._recent_gain < 0 else 0.995
        self._caution = min(MAX_CAUTION, max(1.0, self._caution * change))
        age, price = self._age_seconds(now), self._caution * self._pressure.price(now)
        for key in list(self._pinned):
            worth = self._worth_of(key, age, now)
            if worth == 0.0 or worth < price:
                self._end(key)

    def _end(self, key: int) -> None:
        self._num_lapsed += 1
        record = self._book.records.get(self._pinned.pop(key))
        if record is None:  # a dry run, or somebody undid it
            return
        frontier = self._pressure.frontier(self._idle_blocks)
        path = record.node.path()
        self._book.remove(record, "lapsed")
        self._overdue.update(node.id for node in path if node.last_used_at < frontier and not node.is_pinned)

    def end_all(self) -> None:
        """End all automatic pins."""
        for key in list(self._pinned):
            self._end(key)

    def _worth_of(self, key: int, age_seconds: float, now: float) -> float:
        habit = self._habits.by_key.get(key)
        return 0.0 if habit is None else self._habits.worth(habit, age_seconds, now)

    def _age_seconds(self, now: float) -> float:
        """How long a block would live without use if nothing were pinned by itself."""
        return now - self._pressure.frontier(self._idle_blocks)

    def _count_idle(self) -> None:
        """Count the blocks that eviction would have taken without automatic pins. O(pinned nodes)."""
        frontier = self._pressure.frontier(self._idle_blocks)
        nodes: dict[int, Node] = {}
        for pin_id in self._pinned.values():
            record = self._book.records.get(pin_id)
            node = None if record is None else record.node
            while node is not None and node.parent is not None and node.id not in nodes:
                nodes[node.id] = node
                node = node.parent
        self._idle_blocks = sum(node.num_blocks for node in nodes.values() if node.last_used_at < frontier)

    # --- telling --------------------------------------------------------------------------------------------------

    def report(self, now: float) -> AutoPinReport:
        """What automatic pinning does at this moment. O(habits)."""
        age = self._age_seconds(now)
        candidates = []
        for key, habit in self._habits.by_key.items():
            rule = self.config.rule_of(habit.namespace)
            if rule is not None and self._allows(rule, habit):
                candidates.append(
                    AutoPinCandidate(
                        habit.namespace,
                        habit.num_blocks * self._block_tokens,
                        habit.num_uses,
                        habit.gap_seconds,
                        habit.rate * math.exp((habit.last_used_at - now) / self.config.rate_window_seconds),
                        self._habits.worth(habit, age, now) * self._block_tokens,
                        key in self._pinned,
                    )
                )
        candidates.sort(key=lambda candidate: (candidate.is_pinned, candidate.worth), reverse=True)
        records = [self._book.records[pin_id] for pin_id in self._pinned.values() if pin_id in self._book.records]
        return AutoPinReport(
            is_on=True,
            dry_run=self.config.dry_run,
            is_paused=self._caution >= MAX_CAUTION,
            num_pins=len(self._pinned),
            num_pinned_tokens=sum(record.node.end for record in records) * self._block_tokens,
            num_made=self._num_made,
            num_lapsed=self._num_lapsed,
            gained_tokens=self._gained_blocks * self._block_tokens,
            lost_tokens=self._lost_blocks * self._block_tokens,
            victim_worth=self._pressure.price(now) * self._block_tokens,
            age_seconds=age if math.isfinite(age) else None,
            candidates=tuple(candidates[:MAX_CANDIDATES]),
        )


def _grid(first: int, last: int, block_tokens: int) -> list[int]:
    """Lengths in blocks, above `first` and up to `last`, at which new prompts are remembered."""
    ends: list[int] = []
    end = first
    while True:
        step = max(1, GRID_TOKENS // block_tokens, 1 << max(0, end.bit_length() - 4))
        end = (end // step + 1) * step
        if end > last:
            return ends
        ends.append(end)
