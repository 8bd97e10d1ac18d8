"""What each policy hits on a small trace, exactly, and that none hits more than is possible."""

from __future__ import annotations

from collections import defaultdict
from functools import cache

import pytest

from looseleaf.core.eviction import BUILT_IN
from looseleaf.lab.replay import replay_instant
from looseleaf.lab.traces import Trace, TraceRequest

BLOCK_TOKENS = 16
CAPACITIES = (30, 60, 150)


@cache
def small_trace(seed: int = 5) -> Trace:
    """400 requests: conversations that grow turn by turn behind one of three instructions, others, repetitions."""
    state = seed

    def draw(count: int) -> int:
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (state >> 33) % count

    paths: list[tuple[int, ...]] = []
    num_blocks = 0

    def fresh(count: int) -> tuple[int, ...]:
        nonlocal num_blocks
        num_blocks += count
        return tuple(range(num_blocks - count, num_blocks))

    instructions = [fresh(5 + 2 * number) for number in range(3)]
    live: list[tuple[int, ...]] = []
    for _ in range(400):
        kind = draw(10)
        if kind < 2:
            path = fresh(10 + draw(20))
        elif kind < 5 or not live:
            path = instructions[draw(3)] + fresh(1 + draw(6))
            live.append(path)
        elif kind == 5:
            path = paths[-1 - draw(min(40, len(paths)))]
        else:
            turn = draw(len(live))
            path = live[turn] = live[turn] + fresh(1 + draw(4))
            if draw(4) == 0:
                del live[turn]
        paths.append(path)
        live = live[-8:]
    requests = (TraceRequest(3.0 * number, BLOCK_TOKENS * len(path), 50, path) for number, path in enumerate(paths))
    return Trace("small", BLOCK_TOKENS, tuple(requests))


def hit_blocks(capacity: int, policy: str) -> int:
    return replay_instant(small_trace(), capacity, policy).hit_tokens // BLOCK_TOKENS


@cache
def most_hit_blocks(trace: Trace, capacity: int) -> int:
    """Belady's optimum by blocks: what is used again latest goes first, the deepest of a prompt before the others."""
    uses: dict[int, list[int]] = defaultdict(list)
    for number, request in reversed(list(enumerate(trace.requests))):
        for block in request.blocks:
            uses[block].append(number)
    stored: set[int] = set()
    num_hits = 0
    for request in trace.requests:
        num_found = 0
        while num_found < len(request.blocks) and request.blocks[num_found] in stored:
            num_found += 1
        num_hits += num_found
        own = request.blocks[:capacity]
        for block in request.blocks:
            uses[block].pop()
        depth = {block: index for index, block in enumerate(own)}
        stored |= depth.keys()
        others = sorted(stored - depth.keys(), key=lambda block: (uses[block][-1] if uses[block] else 10**9, block))
        for block in others[max(0, len(others) - (len(stored) - capacity)) :]:
            stored.remove(block)
    return num_hits


GOLDEN = {
    "lru": (1703, 2566, 3339),
    "fifo": (1703, 2575, 3342),
    "lfu": (1982, 2786, 2907),
    "lfuda": (1949, 2899, 3302),
    "slru": (1982, 2825, 3036),
    "sieve": (1881, 2838, 3087),
    "s3fifo": (1950, 2846, 3216),
    "wtinylfu": (1982, 2825, 3035),
    "cost": (1954, 2890, 3298),
}
"""Hit blocks by capacity."""


@pytest.mark.parametrize("policy", GOLDEN)
def test_hits_are_exactly_these(policy: str) -> None:
    """A policy that gives other victims than before is seen."""
    assert tuple(hit_blocks(capacity, policy) for capacity in CAPACITIES) == GOLDEN[policy]


@pytest.mark.parametrize("policy", BUILT_IN)
def test_nothing_beats_the_optimum(policy: str) -> None:
    """No policy hits more than one that knows the future, and none less in a cache that has room for all."""
    trace = small_trace()
    for capacity in CAPACITIES:
        assert 0 < hit_blocks(capacity, policy) <= most_hit_blocks(trace, capacity)
    assert hit_blocks(trace.num_unique_blocks, policy) == most_hit_blocks(trace, trace.num_unique_blocks)
