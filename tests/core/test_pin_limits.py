"""Pins at the edges: lives that cut each other, values that can't be, and what must not change then."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest

from looseleaf import LifecycleError, RequestError
from looseleaf.testing.clock import ManualClock
from tests.core.conftest import MakeCache, run, tokens


def test_the_longest_life_cuts_the_time_to_live(make: MakeCache, clock: ManualClock) -> None:
    """A pin whose longest life is shorter than its time to live ends when the longest life does."""
    cache = make(8, pin_quota=1.0)
    run(cache, tokens(1, 16), "doc")
    pin = cache.pin(request_id="doc", ttl_seconds=100, max_ttl_seconds=10)
    assert pin.expires_at == 10
    clock.advance(10)
    assert cache.pins() == []
    assert cache.stats().num_expired_pins == 1


@pytest.mark.parametrize("name", ["ttl_seconds", "max_ttl_seconds"])
@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), -float("inf"), 0, 0.0, -1, True, False, "5", [], 10**400],
    ids=lambda value: repr(value)[:9],
)
def test_lives_that_can_not_be(make: MakeCache, name: str, value: object) -> None:
    """A life must be a positive number of seconds, a finite one, and no truth value; else nothing is pinned."""
    cache = make(8, pin_quota=1.0)
    before = cache.stats()
    with pytest.raises(RequestError, match=name):
        cache.pin(tokens(1, 8), **{name: value})  # type: ignore[arg-type]
    assert cache.stats() == before


@pytest.mark.parametrize(
    "how",
    [
        {"priority": True},
        {"priority": 2**31},
        {"priority": 1.5},
        {"last_token": True},
        {"last_token": 1.0},
        {"last_token": -3},
        {"level": ["hard"]},
        {"part": []},
        {"cache_type": {}},
        {"owner": None},
        {"owner": ["me"]},
        {"labels": 5},
        {"labels": ["ab"]},
        {"labels": {1: "a"}},
        {"labels": {"a": 1}},
        {"labels": {"a": []}},
    ],
    ids=str,
)
def test_arguments_that_can_not_be(make: MakeCache, how: dict[str, object]) -> None:
    """Every argument of a pin has a type; one of another is refused with the name of the argument, and nothing is
    pinned."""
    cache = make(8, pin_quota=1.0)
    before = cache.stats()
    with pytest.raises(RequestError, match=next(iter(how))):
        cache.pin(tokens(1, 8), **how)  # type: ignore[arg-type]
    assert cache.stats() == before


@pytest.mark.parametrize("name", ["x", 5, [], {}], ids=str)
def test_names_that_are_no_strings(make: MakeCache, name: object) -> None:
    """A namespace, a request and a pin are named by strings; others are refused, unhashable ones too."""
    cache = make(8, pin_quota=1.0)
    is_name = isinstance(name, str)
    before = cache.stats()
    for call in (
        lambda: cache.pin(request_id=name),  # type: ignore[arg-type]
        lambda: cache.unpin(name),  # type: ignore[arg-type]
        lambda: cache.unpin(request_id=name),  # type: ignore[arg-type]
    ):
        with pytest.raises(LifecycleError if is_name else RequestError):
            call()
    if not is_name:
        with pytest.raises(RequestError, match="namespace"):
            cache.pin(tokens(1, 8), namespace=name)  # type: ignore[arg-type]
    assert cache.unpin_all(owner=name) == []  # type: ignore[arg-type]
    assert cache.stats() == before


def test_labels_are_the_callers_no_more(make: MakeCache) -> None:
    """Ten thousand labels are kept as they were at the call; who changes those of a snapshot changes no pin."""
    cache = make(8, pin_quota=1.0)
    labels = {str(number): "x" for number in range(10_000)}
    cache.pin(tokens(1, 8), labels=labels)
    labels["0"] = "changed"
    kept = cache.pins()[0].labels
    assert (len(kept), kept["0"]) == (10_000, "x")
    kept["0"] = "changed"  # type: ignore[index]
    assert cache.pins()[0].labels["0"] == "x"


def test_a_snapshot_can_be_sent(make: MakeCache) -> None:
    """A snapshot is plain data: it can be made a dictionary, and JSON of that, and be pickled."""
    cache = make(8, pin_quota=1.0)
    pin = cache.pin(tokens(1, 8), labels={"team": "a"}, ttl_seconds=5)
    assert json.loads(json.dumps(dataclasses.asdict(pin)))["labels"] == {"team": "a"}
    assert pickle.loads(pickle.dumps(pin)) == pin
    cache.unpin(pin.id)
    assert dataclasses.asdict(cache.past_pins()[0])["pin"]["labels"] == {"team": "a"}
