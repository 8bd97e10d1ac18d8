"""Laws of eviction policies: the contract, for each that is built in, and that the kit sees who breaks it."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pytest
from hypothesis import Phase, settings

from looseleaf.core.eviction import BUILT_IN, StoredRun, Use
from looseleaf.core.eviction.lru import LRUPolicy
from looseleaf.core.eviction.queues import QueuePolicy
from looseleaf.core.eviction.s3fifo import S3FIFOPolicy
from looseleaf.core.eviction.slru import SLRUPolicy
from looseleaf.testing import check_policy


@pytest.mark.parametrize("name", BUILT_IN)
def test_contract(name: str) -> None:
    """[E48, E55] Victims are offered ones, cuts keep counters right, nothing leaks or scans; alone and in a cache."""
    check_policy(BUILT_IN[name], num_examples=12)


class ReturnsWithdrawn(LRUPolicy):
    def withdraw(self, node_id: int) -> None:
        pass


class ForgetsOffers(LRUPolicy):
    def split(self, node_id: int, upper_id: int, num_upper_blocks: int) -> None:
        super().split(node_id, upper_id, num_upper_blocks)
        super().withdraw(node_id)


class ForgetsSplits(LRUPolicy):
    def split(self, node_id: int, upper_id: int, num_upper_blocks: int) -> None:
        pass


class LeaksIds(LRUPolicy):
    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.ever_stored: set[int] = set()

    def insert(self, node_id: int, run: StoredRun, use: Use) -> None:
        super().insert(node_id, run, use)
        self.ever_stored.add(node_id)


class LeaksKeys(S3FIFOPolicy):
    def _bound_ghost(self) -> None:
        pass


class ShallowFirst(LRUPolicy):
    def key(self, node_id: int, depth_blocks: int) -> tuple[float, ...]:
        return (self._last_used[node_id], depth_blocks)


class Scans(LRUPolicy):
    def victim(self) -> int | None:
        oldest = None
        for node_id in self._heap.offered():
            if oldest is None or self._heap.key(node_id) < self._heap.key(oldest):
                oldest = node_id
        return oldest


class ScansInC(LRUPolicy):
    def victim(self) -> int | None:
        return min(self._heap.offered(), key=self._heap._live.__getitem__, default=None)


class ReadsTheClock(LRUPolicy):
    def hit(self, node_ids: Sequence[int], use: Use) -> None:
        super().hit(node_ids, Use(use.tick, time.monotonic(), use.request))


class Rolls(LRUPolicy):
    def victim(self) -> int | None:
        return random.choice([*self._heap.offered(), None]) if random.random() < 0.2 else super().victim()


class ForgetsSizes(SLRUPolicy):
    """Believes that a shortened run is gone."""

    def shorten(self, node_id: int, num_blocks: int, key: int) -> None:
        super().shorten(node_id, num_blocks, key)
        self.withdraw(node_id)


class LosesItsPlace(LRUPolicy):
    """Being offered is a use."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.num_offers = 0

    def key(self, node_id: int, depth_blocks: int) -> tuple[float, ...]:
        self.num_offers += 1
        return (self.num_offers // 8, -depth_blocks)


class TakesTheList(LRUPolicy):
    def release(self, node_ids: Sequence[int], use: Use, num_output_tokens: int) -> None:
        super().release(node_ids, use, num_output_tokens)
        assert isinstance(node_ids, list)
        node_ids.clear()


class Vague(LRUPolicy):
    def describe(self, node_id: int, seconds: float) -> Mapping[str, float | str]:
        return {"yield": float("nan")}


class TellsTooMuch(LRUPolicy):
    def offered(self) -> Iterable[int]:
        return self._last_used.keys()


BROKEN: list[tuple[type[LRUPolicy | QueuePolicy], str]] = [
    (ReturnsWithdrawn, "is not offered"),
    (ForgetsOffers, "offered"),
    (ForgetsSplits, "KeyError"),
    (LeaksIds, "grows without bound"),
    (LeaksKeys, "grows without bound"),
    (ShallowFirst, "of equal runs the deepest"),
    (Scans, "lines of Python"),
    (ScansInC, "must not scan"),
    (ReadsTheClock, "reads a clock"),
    (Rolls, "deepest|no victim|deterministic"),
    (ForgetsSizes, "offered"),
    (LosesItsPlace, "lost its place"),
    (TakesTheList, "changed the lists"),
    (Vague, "must be a finite number"),
    (TellsTooMuch, "offered"),
]


@pytest.fixture
def no_shrinking() -> Iterator[None]:
    """Failing examples are taken as they are found, the same ones each time."""
    before = settings.get_current_profile_name()
    settings.register_profile("no-shrinking", phases=[Phase.generate], derandomize=True)
    settings.load_profile("no-shrinking")
    yield
    settings.load_profile(before)


@pytest.mark.usefixtures("no_shrinking")
@pytest.mark.parametrize(("policy", "law"), BROKEN, ids=[policy.__name__ for policy, _ in BROKEN])
def test_the_kit_sees_who_breaks_the_contract(policy: type[LRUPolicy | QueuePolicy], law: str) -> None:
    """A policy that answers what was withdrawn, leaks, scans, … does not pass, and the message names the law."""
    with pytest.raises((AssertionError, KeyError)) as caught:
        check_policy(policy, num_examples=30)
    assert re.search(law, repr(caught.value))


@pytest.mark.parametrize("method", ["shorten", "offered", "describe"])
def test_the_kit_sees_what_is_missing(method: str) -> None:
    """A method of the contract that a policy lacks is named."""
    with pytest.raises(AssertionError, match=rf"no method {method}\(\)"):
        check_policy(type("Half", (LRUPolicy,), {method: None}), num_examples=1)


@pytest.mark.heavy
@pytest.mark.parametrize("name", BUILT_IN)
def test_contract_at_length(name: str) -> None:
    """[E48, E55] The same by 100,000 calls on its own and 20,000 in a cache."""
    check_policy(BUILT_IN[name], num_examples=2000)
