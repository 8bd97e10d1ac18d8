"""How long things stay away before they are used again, learned by class, and what holding them therefore yields."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from looseleaf.ids import Float64Array

STEP_ENDS_SECONDS = tuple(float(2**step) for step in range(14))
"""Ages advance in steps: 0–1 s, 1–2 s, 2–4 s, …, and one without an end."""

NUM_STEPS = len(STEP_ENDS_SECONDS) + 1
PRIOR_HAZARD = 0.1
PSEUDO_RUNS = 8.0
HALF_LIFE_REQUESTS = 1000
LEANS_ON = (1, 2, 2)
"""Which of `RunClass.contexts` each of its last three leans on."""

_MAX_WEIGHT = 1e60

_DURATIONS = np.diff(np.array([0.0, *STEP_ENDS_SECONDS, 2.0 * STEP_ENDS_SECONDS[-1]]))
_STEP_SECONDS: list[float] = _DURATIONS.tolist()


def step_of(age_seconds: float) -> int:
    """The step in which something of that age is."""
    return bisect_right(STEP_ENDS_SECONDS, age_seconds)


class RunClass(NamedTuple):  # looked up by value at the end of each request: as a dataclass that takes twice as long
    """What is known of a run when its request ends; every figure is a power-of-two bucket.

    uses: 0 for a padded last block, 1 used once, 2 for 2–3 times, 3 for 4–15, 4 for more. output: tokens of the answer.
    gap: seconds since the conversation was last used, -1 for a new one. turns: its requests so far. new: blocks of the
    request that nobody had used before.
    """

    uses: int
    output: int
    gap: int
    turns: int
    new: int

    def contexts(self) -> tuple[tuple[int, ...], ...]:
        """Under which names its behaviour is counted: one of all, two more special, and three that are the most special
        and lean on those of `LEANS_ON`."""
        uses, output, gap = self.uses, self.output, self.gap >> 1
        return (
            (uses,),
            (uses, 0, gap),
            (uses, 1, output),
            (uses, 0, gap, output),
            (uses, 1, output, 0, self.turns),
            (uses, 1, output, 1, self.new),
        )

    def describe(self) -> str:
        """For people."""
        uses = ("a padded block", "used once", "used 2-3 times", "used 4-15 times", "used 16 times or more")[self.uses]
        gap = "new conversation" if self.gap < 0 else f"gap {_span(self.gap)} s"
        return f"{uses}, {gap}, turns {_span(self.turns)}, output {_span(self.output)}, new blocks {_span(self.new)}"


class HoldingTable:
    """Per context and step: how many runs got that far unused, and the share of them that was used within it.

    The hazard of a class is the mean over its three special contexts of used / reached, each leaning on a more general
    context with `PSEUDO_RUNS` runs, and the most general on `PRIOR_HAZARD`: a class nobody has seen behaves like its
    relatives, and with no data at all a run is worth the less the longer it has waited. Counts halve every
    `HALF_LIFE_REQUESTS` requests.

    The yield of holding a run from step a on is the largest, over stopping steps T, of P(used by T) / E[seconds held]:
    a Gittins index (Gittins, J. R. Stat. Soc. B 1979; EVA, Beckmann and Sanchez, HPCA 2017, is a kin of it).
    """

    def __init__(self) -> None:
        self._contexts: dict[tuple[int, ...], int] = {}
        self._reached: list[list[float]] = []
        self._used: list[list[float]] = []
        self._classes: dict[RunClass, int] = {}
        self.classes: list[RunClass] = []
        self._rows: list[tuple[int, ...]] = []
        self._counts: list[tuple[tuple[list[float], list[float]], ...]] = []  # reached and used of a class's contexts
        self._weight = 1.0  # of what is counted now; growing it fades all that was counted before

    def class_id(self, run_class: RunClass) -> int:
        """A small number for a class."""
        class_id = self._classes.get(run_class)
        if class_id is None:
            class_id = self._classes[run_class] = len(self._rows)
            self.classes.append(run_class)
            rows = tuple(map(self._context, run_class.contexts()))
            self._rows.append(rows)
            self._counts.append(tuple((self._reached[row], self._used[row]) for row in rows))
        return class_id

    def _context(self, name: tuple[int, ...]) -> int:
        number = self._contexts.get(name)
        if number is None:
            number = self._contexts[name] = len(self._reached)
            self._reached.append([0.0] * NUM_STEPS)
            self._used.append([0.0] * NUM_STEPS)
        return number

    def reach(self, class_id: int, step: int, share: float) -> None:
        """The unused `share` of a run of that class has got to a step."""
        share *= self._weight
        for counts in self._counts[class_id]:
            counts[0][step] += share

    def use(self, class_id: int, step: int, share: float) -> None:
        """A share of a run of that class is used within a step."""
        share *= self._weight
        for _, used in self._counts[class_id]:
            used[step] += share

    def fade(self, num_requests: int) -> None:
        """So many requests have passed. O(1), but for a rescaling in hundreds of thousands."""
        self._weight *= 2.0 ** (num_requests / HALF_LIFE_REQUESTS)
        if self._weight > _MAX_WEIGHT:
            for row in (*self._reached, *self._used):
                row[:] = [value / self._weight for value in row]
            self._weight = 1.0

    def hazards(self, class_ids: Sequence[int]) -> Float64Array:
        """Chance that a run which has got to a step unused is used within it: [num_classes, NUM_STEPS]."""
        rows = np.array([self._rows[class_id] for class_id in class_ids], dtype=np.int64)
        numbers, places = np.unique(rows, return_inverse=True)
        lean = PSEUDO_RUNS * self._weight
        used = np.array([self._used[number] for number in numbers])[places.reshape(rows.shape)]
        reached = np.array([self._reached[number] for number in numbers])[places.reshape(rows.shape)] + lean
        general = (used[:, 0] + lean * PRIOR_HAZARD) / reached[:, 0]
        middle = (used[:, 1:3] + lean * general[:, None]) / reached[:, 1:3]
        special = (used[:, 3:] + lean * middle[:, np.array(LEANS_ON) - 1]) / reached[:, 3:]
        hazards: Float64Array = np.clip(special.mean(axis=1), 0.0, 0.999)
        return hazards

    def yields_of(self, class_id: int) -> list[float]:
        """`yields` of one class: [NUM_STEPS]. For one, arrays cost more than they save."""
        (of_all, *middle), special = self._counts[class_id][:3], self._counts[class_id][3:]
        lean = PSEUDO_RUNS * self._weight
        reach = 1.0
        uses, seconds = [0.0], [0.0]
        for step, duration in enumerate(_STEP_SECONDS):
            leaned = [lean * (of_all[1][step] + lean * PRIOR_HAZARD) / (of_all[0][step] + lean)]
            for reached, used in middle:
                leaned.append(lean * (used[step] + leaned[0]) / (reached[step] + lean))
            total = 0.0
            for (reached, used), parent in zip(special, LEANS_ON, strict=True):
                total += (used[step] + leaned[parent]) / (reached[step] + lean)
            hazard = min(total / len(special), 0.999)
            uses.append(uses[-1] + reach * hazard)
            seconds.append(seconds[-1] + reach * duration * (1.0 - hazard / 2.0))
            reach *= 1.0 - hazard
        return [
            max(
                (
                    (uses[stop] - uses[step]) / (seconds[stop] - seconds[step])
                    for stop in range(step + 1, NUM_STEPS + 1)
                    if seconds[stop] > seconds[step]
                ),
                default=0.0,  # so few get there that no time is left to tell apart
            )
            for step in range(NUM_STEPS)
        ]

    def yields(self, class_ids: Sequence[int]) -> Float64Array:
        """Uses per second and block of holding a run from each step on: [num_classes, NUM_STEPS].

        With c the chance to reach a step, P(used in steps a to T) and E[seconds held] both are differences of running
        sums over c, divided by c at a, which cancels.
        """
        hazards = self.hazards(class_ids)
        reach = np.ones((len(hazards), NUM_STEPS))
        np.cumprod(1.0 - hazards[:, :-1], axis=1, out=reach[:, 1:])
        uses = _running_sum(reach * hazards)
        seconds = _running_sum(reach * _DURATIONS * (1.0 - hazards / 2.0))
        gained = uses[:, None, 1:] - uses[:, :-1, None]  # [class, from step a, to step T]
        held = seconds[:, None, 1:] - seconds[:, :-1, None]
        rates = np.divide(gained, held, out=np.zeros_like(gained), where=held > 0)
        best: Float64Array = rates.max(axis=2)
        return best


def _running_sum(values: Float64Array) -> Float64Array:
    sums: Float64Array = np.zeros((len(values), NUM_STEPS + 1))
    np.cumsum(values, axis=1, out=sums[:, 1:])
    return sums


def _span(bucket: int) -> str:
    """The numbers of a power-of-two bucket."""
    if bucket <= 1:
        return str(bucket)
    return f"{2 ** (bucket - 1)}-{2**bucket - 1}"
