"""How regularly prefixes are used, learned with decay from their uses, whether they are cached at the time or not."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from dataclasses import dataclass

from looseleaf.ids import Namespace

MAX_HABITS = 16_384
"""Prefixes of which habits are kept; the one used longest ago goes."""

MAX_FIRST_USES = 65_536
"""Prefixes used once that are remembered; the oldest goes."""

MAX_CLASS = 5
"""Habits are classed by the power of two of their uses: 1, 2, 4, 8, 16 and more."""

HALVED_AT = 4096
"""Counts of a class are halved when they reach this."""

MAX_AVERAGED_USES = 16
"""Averages run over so many uses, older ones fade."""


@dataclass
class Habit:
    """One prefix of `num_blocks` blocks.

    `gap_seconds`: between its uses on average; `longest_gap_seconds`: at most, with decay. `lost_share`: share of its
    uses that came when it would have been evicted without a pin. `rate`: uses per second over the rate window.
    `is_frequent`: its rate is high enough for its rule. `is_awaited`: it will be judged when its patience ends.
    """

    namespace: Namespace
    num_blocks: int
    last_used_at: float
    num_uses: int = 1
    gap_seconds: float = 0.0
    longest_gap_seconds: float = 0.0
    lost_share: float = 0.0
    rate: float = 0.0
    is_frequent: bool = False
    is_awaited: bool = False

    @property
    def patience_seconds(self) -> float:
        """What was not used for so long has probably had its last use."""
        return max(3.0 * self.gap_seconds, 1.5 * self.longest_gap_seconds)

    @property
    def use_class(self) -> int:
        """Its class among all habits."""
        return min(self.num_uses.bit_length(), MAX_CLASS)


class Habits:
    """The habits of prefixes by chain key. Bounded in memory; O(1) for each use."""

    def __init__(self) -> None:
        self.by_key: OrderedDict[int, Habit] = OrderedDict()
        self._first_uses: OrderedDict[int, float] = OrderedDict()
        self._num_judged = [0.0] * (MAX_CLASS + 1)
        self._num_used_again = [0.0] * (MAX_CLASS + 1)
        self._deadlines: list[tuple[float, int, int]] = []  # end of patience, key, class; one for each habit

    def knows(self, key: int) -> bool:
        """True if this prefix was used before, as far as that is remembered."""
        return key in self.by_key or key in self._first_uses

    def use_first(self, key: int, now_seconds: float) -> None:
        """A prefix is used that is not known yet."""
        self._first_uses[key] = now_seconds
        if len(self._first_uses) > MAX_FIRST_USES:
            self._first_uses.popitem(last=False)

    def use_again(
        self,
        key: int,
        namespace: Namespace,
        num_blocks: int,
        last_used_at: float,
        was_lost: bool,
        now_seconds: float,
        window_seconds: float,
    ) -> Habit:
        """A prefix is used again. `last_used_at`: when it was before, if nothing better is known; `was_lost`: it would
        have been evicted since, without a pin; `window_seconds`: over which its rate is taken."""
        last_used_at = self._first_uses.pop(key, last_used_at)
        habit = self.by_key.get(key)
        if habit is None:
            habit = self.by_key[key] = Habit(namespace, num_blocks, last_used_at)
            if len(self.by_key) > MAX_HABITS:
                self.by_key.popitem(last=False)
        else:
            self.by_key.move_to_end(key)
        gap = max(0.0, now_seconds - habit.last_used_at)
        self._give_up(now_seconds)
        if habit.num_uses > 1 and gap <= habit.patience_seconds:
            self._judge(habit.use_class, was_used_again=True)
        weight = 1.0 / min(habit.num_uses, MAX_AVERAGED_USES)
        habit.gap_seconds += (gap - habit.gap_seconds) * weight
        habit.lost_share += (was_lost - habit.lost_share) * weight
        habit.longest_gap_seconds = max(gap, 0.9 * habit.longest_gap_seconds)
        habit.rate = habit.rate * math.exp(-gap / window_seconds) + 1.0 / window_seconds
        habit.num_uses += 1
        habit.last_used_at = now_seconds
        if not habit.is_awaited:
            self._await(key, habit)
        return habit

    def _await(self, key: int, habit: Habit) -> None:
        habit.is_awaited = True
        heapq.heappush(self._deadlines, (habit.last_used_at + habit.patience_seconds, key, habit.use_class))

    def _give_up(self, now_seconds: float) -> None:
        """Judge habits whose patience has ended without a further use."""
        while self._deadlines and self._deadlines[0][0] < now_seconds:
            _, key, kind = heapq.heappop(self._deadlines)
            habit = self.by_key.get(key)
            if habit is not None:
                habit.is_awaited = False
                if habit.last_used_at + habit.patience_seconds >= now_seconds:
                    self._await(key, habit)  # it was used since
                    continue
                kind = habit.use_class
            self._judge(kind, was_used_again=False)

    def _judge(self, kind: int, *, was_used_again: bool) -> None:
        self._num_judged[kind] += 1
        self._num_used_again[kind] += was_used_again
        if self._num_judged[kind] > HALVED_AT:
            self._num_judged[kind] /= 2
            self._num_used_again[kind] /= 2

    def worth(self, habit: Habit, age_seconds: float, now_seconds: float) -> float:
        """Uses that a pin would save for each second that it keeps a block which eviction, after `age_seconds` without
        use, would have taken; 0 when its patience is over.

        The pin keeps it until the next use, or until the patience ends if there is none; how likely there is one is
        what habits of its class have shown. Gaps are taken as exponential, unless more uses were lost than that says.
        """
        if now_seconds - habit.last_used_at > habit.patience_seconds:
            return 0.0
        kind = habit.use_class
        again = (self._num_used_again[kind] + 1.0) / (self._num_judged[kind] + 2.0)
        gap = max(habit.gap_seconds, 1e-6)
        lost = max(math.exp(-age_seconds / gap), habit.lost_share)
        kept = again * gap * lost + (1.0 - again) * max(0.0, habit.patience_seconds - age_seconds)
        return again * lost / kept if kept > 0.0 else 0.0
