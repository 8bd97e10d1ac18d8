"""What `HoldingTable` learns from counts, and what it concludes from that."""

from __future__ import annotations

import random

import numpy as np
import pytest

from looseleaf.core.eviction.holding import HALF_LIFE_REQUESTS, NUM_STEPS, STEP_ENDS_SECONDS, HoldingTable, RunClass

SEEN = RunClass(uses=1, output=2, gap=3, turns=1, new=4)


def counted(num_reached: float, num_used: float, step: int = 0, run_class: RunClass = SEEN) -> tuple[HoldingTable, int]:
    """A table that has seen one class in one step."""
    table = HoldingTable()
    class_id = table.class_id(run_class)
    table.reach(class_id, step, num_reached)
    table.use(class_id, step, num_used)
    return table, class_id


def hazard(table: HoldingTable, run_class: RunClass, step: int = 0) -> float:
    return float(table.hazards([table.class_id(run_class)])[0, step])


def expected(num_reached: float, num_used: float) -> float:
    """The hazard of a class all of whose contexts have the same counts: three estimates, each leaning on the last."""
    value = 0.1
    for _ in range(3):
        value = (num_used + 8 * value) / (num_reached + 8)
    return value


def test_nothing_known() -> None:
    """Without data every class has hazard 0.1 at every step, and so a run is worth less the longer it has waited."""
    table = HoldingTable()
    ids = [table.class_id(SEEN), table.class_id(RunClass(4, 9, -1, 3, 0))]
    assert table.hazards(ids) == pytest.approx(np.full((2, NUM_STEPS), 0.1))
    rates = table.yields(ids)
    assert (np.diff(rates[:, 1:]) < 0).all()


def test_same_class_same_number() -> None:
    """A class has one number, however often it is named, and its description by that number."""
    table = HoldingTable()
    first, other = table.class_id(SEEN), table.class_id(RunClass(1, 2, 3, 1, 5))
    assert table.class_id(RunClass(1, 2, 3, 1, 4)) == first != other
    assert table.classes[first] == SEEN


def test_leaning() -> None:
    """Each context leans on its more general one with 8 pseudo-runs, worked out by hand for 2 of 4 runs used.

    All: (2 + 8 * 0.1) / 12 = 7/30; gap and output: (2 + 8 * 7/30) / 12 = 29/90; special: (2 + 8 * 29/90) / 12
    = 103/270.
    """
    table, _ = counted(4, 2)
    assert hazard(table, SEEN) == pytest.approx(103 / 270)
    assert hazard(table, SEEN, step=1) == pytest.approx(0.1)
    stranger = RunClass(1, 9, 8, 3, 9)  # only the number of uses in common
    assert hazard(table, stranger) == pytest.approx(7 / 30)
    same_gap = RunClass(1, 9, 2, 3, 9)  # gaps 2 and 3 are one bucket; one of three special contexts leans on it
    assert hazard(table, same_gap) == pytest.approx((29 / 90 + 7 / 30 + 7 / 30) / 3)
    same_output = RunClass(1, 2, 8, 3, 9)  # two of three lean on it
    assert hazard(table, same_output) == pytest.approx((7 / 30 + 29 / 90 + 29 / 90) / 3)
    same_turns = RunClass(1, 2, 8, 1, 9)  # and of these one is the very same
    assert hazard(table, same_turns) == pytest.approx((7 / 30 + 103 / 270 + 29 / 90) / 3)
    assert hazard(table, RunClass(2, 2, 3, 1, 4)) == pytest.approx(0.1)  # other uses have nothing in common


def test_shares() -> None:
    """Shares of runs add up: halves used twice count as a whole run used."""
    table, class_id = counted(4, 1.5)
    table.use(class_id, 0, 0.5)
    assert hazard(table, SEEN) == pytest.approx(expected(4, 2))


def test_fade() -> None:
    """After 1,000 requests counts weigh half, after 2,000 a quarter; what comes then weighs whole."""
    assert HALF_LIFE_REQUESTS == 1000
    table, class_id = counted(40, 20)
    assert hazard(table, SEEN) == pytest.approx(expected(40, 20))
    for _ in range(10):
        table.fade(100)
    assert hazard(table, SEEN) == pytest.approx(expected(20, 10))
    table.fade(1000)
    assert hazard(table, SEEN) == pytest.approx(expected(10, 5))
    table.reach(class_id, 0, 6.0)
    assert hazard(table, SEEN) == pytest.approx(expected(16, 5))


def test_rescaling() -> None:
    """Counts outlive the rescaling of their weight, which keeps every ratio and all that comes after it."""
    table, class_id = counted(0, 0)
    table.fade(199_000)
    table.reach(class_id, 0, 40.0)
    table.use(class_id, 0, 20.0)
    heavy = table._weight
    table.fade(1000)
    assert heavy > 1e59
    assert table._weight == 1.0  # it did happen
    assert hazard(table, SEEN) == pytest.approx(expected(20, 10))
    table.reach(class_id, 0, 10.0)
    table.fade(1000)
    assert hazard(table, SEEN) == pytest.approx(expected(15, 5))


def naive_yield(hazards: list[float], step: int) -> float:
    """The best stopping step from `step` on, tried one by one. A run that is used within a step is held for half of
    it."""
    best = 0.0
    for stop in range(step, NUM_STEPS):
        reach, used, held = 1.0, 0.0, 0.0
        for at in range(step, stop + 1):
            begin = STEP_ENDS_SECONDS[at - 1] if at else 0.0
            end = STEP_ENDS_SECONDS[at] if at < len(STEP_ENDS_SECONDS) else 2 * begin
            used += reach * hazards[at]
            held += reach * (hazards[at] * (end - begin) / 2 + (1 - hazards[at]) * (end - begin))
            reach *= 1 - hazards[at]
        best = max(best, used / held)
    return best


@pytest.mark.parametrize("seed", range(5))
def test_yields_are_the_best_of_all_stops(seed: int) -> None:
    """The yield from a step is the largest P(used) / E(seconds held) over all steps at which to stop, for any counts
    and for many classes at once."""
    rng = random.Random(seed)
    table = HoldingTable()
    ids = []
    for _ in range(12):
        class_id = table.class_id(RunClass(*(rng.randrange(4) for _ in range(5))))
        ids.append(class_id)
        for step in range(NUM_STEPS):
            num_reached = rng.choice([0.0, 3.0, 30.0, 300.0])
            table.reach(class_id, step, num_reached)
            table.use(class_id, step, num_reached * rng.choice([0.0, 0.1, rng.random(), 0.8]))
    hazards, rates = table.hazards(ids), table.yields(ids)
    for row, class_id in enumerate(ids):
        naive = [naive_yield(hazards[row].tolist(), step) for step in range(NUM_STEPS)]
        assert rates[row].tolist() == pytest.approx(naive, rel=1e-6)
        assert table.yields([class_id])[0].tolist() == pytest.approx(rates[row].tolist(), rel=1e-9)
        assert table.yields_of(class_id) == pytest.approx(rates[row].tolist(), rel=1e-9)


def test_looking_ahead() -> None:
    """What is used late, between 32 and 64 s, is worth more the nearer that is, and little once it is over; a view
    that counts only the step at hand would see nothing coming."""
    table = HoldingTable()
    class_id = table.class_id(SEEN)
    late = STEP_ENDS_SECONDS.index(64.0)
    for step in range(NUM_STEPS):
        table.reach(class_id, step, 1000.0 if step <= late else 100.0)
    table.use(class_id, late, 900.0)
    rates = table.yields([class_id])[0]
    hazards = table.hazards([class_id])[0]
    assert (np.diff(rates[: late + 1]) > 0).all()
    assert rates[late] > 10 * rates[late + 1]
    assert rates[late - 1] > 10 * hazards[late - 1] / (STEP_ENDS_SECONDS[late - 1] - STEP_ENDS_SECONDS[late - 2])


def test_describe() -> None:
    """A class is told in words and in the numbers of its buckets."""
    assert SEEN.describe() == "used once, gap 4-7 s, turns 1, output 2-3, new blocks 8-15"
    assert RunClass(0, 0, -1, 0, 1).describe().startswith("a padded block, new conversation")


def test_yields_where_nothing_gets_on() -> None:
    """If nearly all is used at once, steps that next to nothing gets to have a yield all the same, none less than 0."""
    table = HoldingTable()
    class_id = table.class_id(SEEN)
    for step in range(NUM_STEPS):
        table.reach(class_id, step, 1e12)
        table.use(class_id, step, 1e12)
    assert table.yields_of(class_id) == pytest.approx(table.yields([class_id])[0].tolist())
    assert min(table.yields_of(class_id)) >= 0.0
