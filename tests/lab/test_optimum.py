"""Laws of the offline optimum: nothing beats it, and brute force over all choices can't either."""

from __future__ import annotations

import itertools
import random

import pytest

from looseleaf import ConfigError
from looseleaf.core.eviction import POLICIES
from looseleaf.lab.optimum import Optimum, gap_closed
from looseleaf.lab.replay import replay_instant
from looseleaf.lab.traces import Trace, TraceRequest


def tiny(rng: random.Random, block_tokens: int = 16) -> Trace:
    """A few short paths over few blocks: the same id is always the same block behind the same prefix."""
    ids: dict[tuple[int, int], int] = {}
    paths: list[tuple[int, ...]] = []
    for _ in range(rng.randint(2, 7)):
        base = paths and rng.random() < 0.7 and rng.choice(paths)
        path = list(base[: rng.randint(0, len(base))]) if base else []
        for _ in range(rng.randint(0 if path else 1, 2)):
            path.append(ids.setdefault((path[-1] if path else -1, rng.randint(0, 2)), len(ids)))
        paths.append(tuple(path[:4]))
    requests = [TraceRequest(number, len(path) * block_tokens, 1, path) for number, path in enumerate(paths)]
    return Trace("tiny", block_tokens, tuple(requests))


def most_hits(trace: Trace, capacity: int) -> int:
    """Most blocks that any choice of victims hits, by trying them all."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for request in trace.requests:
        after: dict[frozenset[int], int] = {}
        own = frozenset(request.blocks[:capacity])
        for state, hits in states.items():
            found = len(list(itertools.takewhile(state.__contains__, request.blocks)))
            others = sorted(state - own)
            for size in range(min(len(others), capacity - len(own)) + 1):
                for kept in itertools.combinations(others, size):
                    kept_state = own | frozenset(kept)
                    after[kept_state] = max(after.get(kept_state, 0), hits + found)
        states = after
    return max(states.values())


def test_no_choice_of_victims_hits_more() -> None:
    """On tiny traces the optimum hits exactly what the best of all choices of victims does."""
    rng = random.Random(3)
    for _ in range(300):
        trace, capacity = tiny(rng), rng.randint(1, 4)
        assert Optimum(trace).replay(capacity).hit_tokens == 16 * most_hits(trace, capacity), (trace, capacity)


@pytest.mark.parametrize("block_tokens", [16, 4])
def test_it_bounds_every_policy(block_tokens: int) -> None:
    """No policy hits more, in whole or in cut blocks, and with room for all every policy hits the same."""
    rng = random.Random(4)
    for _ in range(10):
        trace = tiny(rng)
        optimum = Optimum(trace, block_tokens)
        for capacity in (1, 3, 5, 1000):
            best = optimum.replay(capacity)
            for policy in POLICIES:
                found = replay_instant(trace, capacity, policy, block_tokens=block_tokens)
                assert found.hit_tokens <= best.hit_tokens, policy
                assert found.peak_blocks == best.peak_blocks
                assert (found.waste, found.peak_held_tokens) == (best.waste, best.peak_held_tokens)
                if capacity == 1000:
                    assert found.hit_tokens == best.hit_tokens


def test_partial_blocks_weigh_what_they_have() -> None:
    """A partial last block that is found again counts its tokens; one too long for the cache is kept in part."""
    requests = tuple(TraceRequest(number, 40, 1, (0, 1, 2)) for number in range(2))
    trace = Trace("partial", 16, requests)
    assert [Optimum(trace).replay(capacity).hit_tokens for capacity in (1, 2, 3)] == [16, 32, 40]
    assert [Optimum(trace, 8).replay(capacity).hit_tokens for capacity in (1, 4, 5, 6)] == [8, 32, 40, 40]


def test_what_is_not_used_again_goes_first() -> None:
    """A block that nobody asks for again makes room for one that somebody will, however recent it is."""
    paths = [(0,), (1,), (2,), (0,), (1,)]
    trace = Trace("x", 16, tuple(TraceRequest(at, 16, 1, path) for at, path in enumerate(paths)))
    result = Optimum(trace).replay(2)
    assert (result.policy, result.hit_tokens, result.evicted_blocks) == ("optimum", 16, 2)


def test_lengths_have_no_optimum() -> None:
    """Without blocks there is nothing to choose."""
    with pytest.raises(ConfigError, match="lengths only"):
        Optimum(Trace("lengths", None, (TraceRequest(0, 10, 1, ()),)))


def test_share_of_the_gap() -> None:
    """0 is LRU, 1 the optimum, below 0 worse than LRU; None where there is no gap to speak of."""
    assert gap_closed(0.3, 0.2, 0.4) == pytest.approx(0.5)
    assert gap_closed(0.1, 0.2, 0.4) == pytest.approx(-0.5)
    assert gap_closed(0.2, 0.2, 0.2005) is None
