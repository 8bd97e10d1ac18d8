"""Pins that the cache makes by itself: prefixes with a habit that is worth more than what eviction takes next.

A look-up tells which prefixes are used again, and when (`Habits`); evictions, and uses shortly before they would have
come, tell how long blocks live without use and what the next victims are worth (`Pressure`). A prefix that its rule
allows is pinned if the uses that the pin would save, by block and second, are worth `HYSTERESIS` times the victims, and
lapses when they are worth less than these.

What pins gain, and what others lose since pins take their place, is measured. Pins are tried on paper first: the uses
that they would have saved against those that would have been lost in a smaller cache. They become real once they gain,
and go back to paper when they lose; each time that happens they must gain four times as much on paper before the next
try.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from looseleaf.core.auto_pin_config import AutoPinConfig, AutoPinRule
from looseleaf.core.forgotten import EvictedRun
from looseleaf.core.habits import Habit, Habits
from looseleaf.core.namespaces import Tenancy
from looseleaf.core.pin_record import AUTOMATIC
from looseleaf.core.pins import PinBook
from looseleaf.core.pressure import Pressure
from looseleaf.core.tokens import TOKEN_BYTES
from looseleaf.core.tree import ABSENT, Node
from looseleaf.ids import Int64Array, Namespace

MIN_USES = 3
"""Uses before a prefix is pinned: coming back once is no habit."""

HYSTERESIS = 2.0
MAX_PINS = 1024

TRIAL_SHARE = 1 / 64
"""Pins become real when they have gained so many blocks on paper, as a share of the pool, and go back to paper when
they have lost as many."""

MAX_TRIALS = 1024
"""Most times that share which they must gain on paper, when trials have failed."""

REVIEWED_PINS = 8
"""Automatic pins that are reviewed at each look-up, on average; all at once, when it is time."""

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


@dataclass
class _AutoPin:
    """`pin_id`: empty while it is on paper. `num_own_blocks`: those behind the next shorter pin."""

    pin_id: str
    num_own_blocks: int


@dataclass(frozen=True)
class AutoPinReport:
    """What automatic pinning does.

    `dry_run`: pins stay on paper. `is_paused`: they are on paper since they have not gained enough there yet.
    `num_made`, `num_lapsed`: pins ever made, and ended since they paid no more. `gained_tokens`: found thanks to pins
    (dry run: that would have been), where plain eviction would have lost them. `lost_tokens`: estimate of what others
    would have found in the memory that pins held. `victim_worth`: tokens that the next victims save, by block and
    second. `age_seconds`: how long blocks live without use, None before the first eviction.
    """

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
    """What a look-up of a prompt, stored as `tenancy` says, found. The nodes of `path` hold the hit, they end at the
    chain keys `path_keys` and were last used at `path_used_at`; `rest_keys` [n] are those of the whole blocks behind
    it, the first of which `run` finds evicted; the first `num_known_blocks` of the prompt are stored, but perhaps not
    in all groups. `data`: the prompt's tokens, packed."""

    tenancy: Tenancy
    data: bytes
    path: Sequence[Node]
    path_keys: Sequence[int]
    path_used_at: Sequence[float]
    rest_keys: Int64Array
    run: EvictedRun
    num_known_blocks: int
    at_seconds: float


class AutoPinner:
    """Makes and ends automatic pins of one cache. Used under the manager's lock.

    `pin(tenancy, data)` makes a pin of packed tokens that gives way to all others, and answers with its id.
    """

    def __init__(
        self,
        config: AutoPinConfig,
        block_tokens: int,
        num_lanes: int,
        pressure: Pressure,
        book: PinBook,
        pin: Callable[[Tenancy, bytes], str],
    ) -> None:
        self.config = config
        self._block_tokens = block_tokens
        self._pressure = pressure
        self._book = book
        self._num_lanes = num_lanes
        self._pin = pin
        self._habits = Habits()
        self._pinned: dict[int, _AutoPin] = {}  # by chain key
        self._overdue: set[int] = set()  # nodes whose pin lapsed when eviction would have taken them already
        self._idle_blocks = 0  # pinned blocks that eviction would have taken
        self._num_since_review = self._num_made = self._num_lapsed = 0
        self._gained_blocks = self._lost_blocks = 0
        self._is_paper = True
        self._recent_gain = 0.0
        self._mean_event = 0.0
        self._num_trials = 2

    # --- learning -------------------------------------------------------------------------------------------------

    def on_forgotten(self, node: Node, num_blocks: int) -> bool:
        """The last blocks of a node are forgotten. True if only a pin had kept them until now."""
        was_overdue = node.id in self._overdue
        if was_overdue and num_blocks == node.num_blocks:
            self._overdue.remove(node.id)
        return was_overdue

    def on_lookup(self, found: LookUp) -> None:
        """A request has looked its prompt up. O(blocks of the prompt + `REVIEWED_PINS`)."""
        now = found.at_seconds
        sizes = [self._num_blocks_of(node) for node in found.path]
        self._pressure.on_hit(found.path_used_at, sizes, now)
        if self._is_paper:
            self._weigh(-self._pressure.num_near_tail(found.path_used_at, sizes, self._idle_blocks))
        else:
            self._weigh(-self._pressure.num_kept(found.run.evicted_counts, self._idle_blocks))
        used = [*self._uses_of_hit(found, sizes), *self._uses_behind(found)]
        self._consider(used, found, now)
        self._num_since_review += REVIEWED_PINS
        if self._num_since_review >= len(self._pinned):
            self._num_since_review = 0
            self._count_idle()
            self._review(now)

    def _uses_of_hit(self, found: LookUp, sizes: Sequence[int]) -> list[tuple[int, Habit]]:
        """Habits of the prefixes that end with a node of the hit."""
        frontier = self._frontier()
        used = []
        for node, size, key, used_at in zip(found.path, sizes, found.path_keys, found.path_used_at, strict=True):
            self._overdue.discard(node.id)
            is_lost = used_at < frontier
            if is_lost and AUTOMATIC in node.soft_priorities:
                self._weigh(size)
            used.append((key, self._use_again(key, found, node.end, used_at, is_lost)))
        return used

    def _uses_behind(self, found: LookUp) -> list[tuple[int, Habit]]:
        """Habits of known prefixes that are not cached any more; long new ones are remembered."""
        used = []
        keys = found.rest_keys.tolist()
        start = found.path[-1].end if found.path else 0
        frontier = self._pressure.frontier()
        gone_since = frontier if math.isfinite(frontier) else found.at_seconds
        ends = (start + len(found.run.keys), found.num_known_blocks)
        for end, key in enumerate(keys, start + 1):
            if end in ends or self._habits.knows(key):
                used.append((key, self._use_again(key, found, end, gone_since, True)))
        if self._is_paper:
            saved = [habit.num_blocks for key, habit in used if key in self._pinned]
            self._weigh((max(saved, default=start) - start) * self._num_lanes)
        rule = self.config.rule_of(found.tenancy.namespace)
        if rule is not None and rule.min_tokens is not None:
            for end in _grid(max(start, rule.min_tokens // self._block_tokens), start + len(keys), self._block_tokens):
                key = keys[end - start - 1]
                if not self._habits.knows(key):
                    self._habits.use_first(key, found.at_seconds)
        return used

    def _use_again(self, key: int, found: LookUp, num_blocks: int, used_at: float, is_lost: bool) -> Habit:
        return self._habits.use_again(
            key,
            found.tenancy.at(num_blocks - 1),
            num_blocks,
            used_at,
            is_lost,
            found.at_seconds,
            self.config.rate_window_seconds,
        )

    def _weigh(self, num_blocks: int) -> None:
        """So many blocks were found thanks to pins, real or on paper, or, negative, lost to others."""
        if num_blocks:
            self._recent_gain += num_blocks
            self._mean_event += (abs(num_blocks) - self._mean_event) / 16
        if not self._is_paper or self.config.dry_run:
            self._gained_blocks += max(0, num_blocks)
            self._lost_blocks += max(0, -num_blocks)

    def _num_blocks_of(self, node: Node) -> int:
        """Blocks of a node in all lanes."""
        return node.num_blocks if self._num_lanes == 1 else int(np.count_nonzero(node.blocks != ABSENT))

    def _frontier(self) -> float:
        """What was used before this time would be gone if nothing were pinned by itself."""
        return self._pressure.frontier(0 if self._is_paper else self._idle_blocks)

    # --- making and ending ----------------------------------------------------------------------------------------

    def _consider(self, used: list[tuple[int, Habit]], found: LookUp, now: float) -> None:
        """Pin the longest of the prefixes just used that is worth it."""
        price = HYSTERESIS * self._pressure.price(now)
        for row, (key, habit) in reversed(list(enumerate(used))):
            pinned = self._pinned.get(key)
            if pinned is not None and (pinned.pin_id or self._is_paper):
                return
            rule = self.config.rule_of(habit.namespace)
            if rule is None or habit.num_uses < MIN_USES or not self._allows(rule, habit):
                continue
            worth = self._habits.worth(habit, now - self._frontier(), now)
            above = max((other.num_blocks for key, other in used[:row] if key in self._pinned), default=0)
            needed = self._book.marks.num_blocks_at(habit.num_blocks) - self._book.marks.num_blocks_at(above)
            if worth > price and self._make_room(needed, worth, now):
                packed = found.data[: habit.num_blocks * self._block_tokens * TOKEN_BYTES]
                pin_id = "" if self._is_paper else self._pin(found.tenancy.up_to(habit.num_blocks), packed)
                self._num_made += pinned is None
                self._pinned[key] = _AutoPin(pin_id, max(0, needed))
                return

    def _allows(self, rule: AutoPinRule, habit: Habit) -> bool:
        least = rule.min_requests_per_second
        habit.is_frequent = least is not None and habit.rate > least / (HYSTERESIS if habit.is_frequent else 1.0)
        is_long = rule.min_tokens is not None and habit.num_blocks * self._block_tokens > rule.min_tokens
        return is_long or habit.is_frequent

    def _make_room(self, num_blocks: int, worth: float, now: float) -> bool:
        """Have `num_blocks` blocks of quota, ending pins that are worth much less; False, with none ended, if that
        can't be."""
        left, num_left = self._quota_left(), MAX_PINS - len(self._pinned)
        age, ended = now - self._frontier(), []
        if left < num_blocks or num_left < 1:
            worths = {key: self._worth_of(key, age, now) for key in self._pinned}
            for key in sorted(worths, key=worths.__getitem__):
                if worths[key] * HYSTERESIS > worth:
                    return False
                ended.append(key)
                left += self._pinned[key].num_own_blocks
                if left >= num_blocks:
                    break
            else:
                return False
        for key in ended:
            self._end(key)
        return True

    def _quota_left(self) -> int:
        on_paper = sum(pin.num_own_blocks for pin in self._pinned.values()) if self._is_paper else 0
        return max(0, -self._book.quotas.excess(None)) - on_paper

    def _review(self, now: float) -> None:
        """End pins that do not pay any more; make all real, or put all back on paper, when they gain or lose."""
        least = max(TRIAL_SHARE * self._pressure.num_blocks, self._mean_event)
        if self._is_paper:
            self._recent_gain = max(0.0, self._recent_gain)
            if self._recent_gain > self._num_trials * least and not self.config.dry_run:
                self._is_paper, self._recent_gain = False, 0.0
        else:
            self._recent_gain = min(8 * least, self._recent_gain)
            if self._recent_gain < -least:
                self._num_trials = min(MAX_TRIALS, 4 * self._num_trials)
                self.put_on_paper()
        age, price = now - self._frontier(), self._pressure.price(now)
        for key in list(self._pinned):
            worth = self._worth_of(key, age, now)
            if worth == 0.0 or worth < price:
                self._end(key)

    def put_on_paper(self) -> None:
        """No automatic pin is real from now on, until they have gained enough."""
        for pin in self._pinned.values():
            self._undo(pin)
        self._is_paper = True
        self._recent_gain = 0.0

    def _end(self, key: int) -> None:
        self._num_lapsed += 1
        self._undo(self._pinned.pop(key))

    def _undo(self, pin: _AutoPin) -> None:
        record = self._book.records.get(pin.pin_id)
        pin.pin_id = ""
        if record is not None:  # it is real, and nobody else undid it
            frontier, path = self._frontier(), record.node.path()
            self._book.remove(record, "lapsed")
            self._overdue.update(node.id for node in path if node.last_used_at < frontier and not node.is_pinned)

    def _worth_of(self, key: int, age_seconds: float, now: float) -> float:
        habit = self._habits.by_key.get(key)
        return 0.0 if habit is None else self._habits.worth(habit, age_seconds, now)

    def _count_idle(self) -> None:
        """Count the pinned blocks that eviction would have taken, or has taken from pins on paper. O(pinned nodes)."""
        frontier = self._frontier()
        if self._is_paper:
            habits = [(self._habits.by_key.get(key), pin.num_own_blocks) for key, pin in self._pinned.items()]
            self._idle_blocks = sum(num for habit, num in habits if habit is not None and habit.last_used_at < frontier)
            return
        nodes: dict[int, Node] = {}
        for pin in self._pinned.values():
            record = self._book.records.get(pin.pin_id)
            node = None if record is None else record.node
            while node is not None and node.parent is not None and node.id not in nodes:
                nodes[node.id] = node
                node = node.parent
        self._idle_blocks = sum(self._num_blocks_of(node) for node in nodes.values() if node.last_used_at < frontier)

    # --- telling --------------------------------------------------------------------------------------------------

    def report(self, now: float) -> AutoPinReport:
        """What automatic pinning does at this moment. O(habits)."""
        age = now - self._frontier()
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
        records = [self._book.records.get(pin.pin_id) for pin in self._pinned.values()]
        return AutoPinReport(
            is_on=True,
            dry_run=self.config.dry_run,
            is_paused=self._is_paper and not self.config.dry_run,
            num_pins=len(self._pinned),
            num_pinned_tokens=sum(record.node.end for record in records if record is not None) * self._block_tokens,
            num_made=self._num_made,
            num_lapsed=self._num_lapsed,
            gained_tokens=self._gained_blocks * self._block_tokens // self._num_lanes,
            lost_tokens=self._lost_blocks * self._block_tokens // self._num_lanes,
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
