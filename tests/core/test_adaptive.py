"""What `adaptive` learns from traffic, what that does to hits, and that its books are right."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from looseleaf import CacheManager, Lease
from looseleaf.core.eviction.adaptive import MEMORY, RECOMPUTE_REQUESTS, AdaptivePolicy
from looseleaf.errors import OutOfBlocks, ResizeRefused
from looseleaf.testing.clock import ManualClock
from tests.core.conftest import MakeCache, run, start, tokens


def policy_of(cache: CacheManager) -> AdaptivePolicy:
    """The policy of a cache, to look at."""
    policy = cache._store.victims.policy
    assert isinstance(policy, AdaptivePolicy)
    return policy


def check_books(cache: CacheManager) -> None:
    """Works everything out anew that the policy keeps count of."""
    policy, tree = policy_of(cache), cache._store.tree
    stored = {node_id: node.num_blocks for node_id, node in tree.nodes.items() if not node.is_root}
    assert {node_id: part.num_blocks for node_id, part in policy._parts.items()} == stored
    num_left: Counter[int] = Counter()
    runs = {run.seq: run for run in policy._runs}
    assert list(runs) == sorted(runs)
    for part in (*policy._parts.values(), *policy._ghosts.values()):
        assert part.num_blocks > 0
        if part.run is not None:
            runs[part.run.seq] = part.run
            num_left[part.run.seq] += part.num_blocks
    runs.update((run.seq, run) for waiting in policy._aging for run in waiting)
    for each in runs.values():
        assert each.num_left == num_left[each.seq] <= each.num_blocks
    counted = {each.seq for each in policy._runs}
    assert counted >= {each.seq for each in runs.values() if each.is_counted and each.num_left}
    assert all(each.is_counted for each in policy._runs)
    assert policy._num_counted_blocks == sum(each.num_left for each in policy._runs)
    assert {key: ghost.run.seq for key, ghost in policy._ghosts.items() if ghost.run} == {
        key: each.seq for each in runs.values() for key in each.ghost_keys
    }
    assert all(policy._parts[node].run is each for each in runs.values() for node in each.offered)
    if policy._num_requests < RECOMPUTE_REQUESTS:  # nothing has faded: a use weighs no more than what it is a share of
        for all_reached, all_used in zip(policy._table._reached, policy._table._used, strict=True):
            for reached, used in zip(all_reached, all_used, strict=True):
                assert used <= reached + 1e-9  # no share of a run is used twice, nor before it got there


# --- what it learns ---------------------------------------------------------------------------------------------------


def returning_conversations(cache: CacheManager, clock: ManualClock, num_rounds: int) -> tuple[int, int]:
    """Ten conversations of 3 blocks that ask again every 60 s, and 30 prompts of 2 blocks between that never return;
    cached tokens of the conversations in the first half of the rounds and in the second."""
    hits = [0, 0]
    for number in range(num_rounds):
        for talk in range(10):
            hits[2 * number // num_rounds] += run(cache, [*tokens(talk, 12), 1])
            for flood in range(3):
                clock.advance(2.0)
                run(cache, tokens(1000 + 1000 * number + 10 * talk + flood, 9))
    return hits[0], hits[1]


def test_conversations_are_kept_and_floods_are_not(make: MakeCache, clock: ManualClock) -> None:
    """What comes back after 60 s is kept though everything of the flood is younger; LRU loses it every time."""
    num_rounds = 40
    asked = 12 * 10 * num_rounds // 2
    _, late = returning_conversations(make(50, policy="adaptive"), clock, num_rounds)
    assert late > 0.95 * asked
    assert returning_conversations(make(50), ManualClock(), num_rounds) == (0, 0)


def test_where_lru_is_right(make: MakeCache, clock: ManualClock) -> None:
    """Where what was used last is used next, and all else never, hits are within 2% of LRU's."""
    hits = {}
    for policy in ("adaptive", "lru"):
        rng = random.Random(7)
        cache, hits[policy], recent = make(40, policy=policy), 0, list(range(12))
        for number in range(800):
            clock.advance(1.0)
            at = min(int(rng.expovariate(0.3)), len(recent) - 1)
            talk = recent.pop(-1 - at) if rng.random() < 0.8 else 100 + number
            recent.append(talk)
            recent = recent[-12:]
            hits[policy] += run(cache, [*tokens(talk, 12), 1])
    assert hits["lru"] > 7_000
    assert hits["adaptive"] > 0.98 * hits["lru"]


def test_what_is_evicted_goes_on_teaching(make: MakeCache, clock: ManualClock) -> None:
    """Everything returns, but only after it was evicted: the table learns that it returns all the same, at the age at
    which it does."""
    cache = make(20, policy="adaptive")
    for number in range(400):
        clock.advance(1.5)
        run(cache, [*tokens(number % 20, 12), 1])  # 60 blocks in turn through 20
    policy = policy_of(cache)
    assert cache.stats().hit_tokens < 0.7 * cache.stats().query_tokens  # most were not there
    step = 5  # 16 to 32 s: all come back after 30
    learned = [policy._table.hazards([number])[0] for number in range(len(policy._table.classes))]
    assert max(row[step] for row in learned) > 0.8
    assert all(row[2] < 0.1 for row in learned)
    check_books(cache)


def test_evicted_uses_are_counted(make: MakeCache, clock: ManualClock) -> None:
    """What comes back after its eviction is stored with one more use than it had, and its run is counted as used
    whole."""
    cache = make(8, policy="adaptive")
    for expected in (1, 2, 3):
        run(cache, [*tokens(1, 16), 1])
        policy = policy_of(cache)
        (part,) = [part for part in policy._parts.values() if part.num_blocks == 4]
        assert part.num_uses == expected
        clock.advance(1.0)
        run(cache, tokens(10 + expected, 32))
        assert not any(part.num_blocks == 4 for part in policy._parts.values())
        check_books(cache)


def test_cleared_runs_teach_nothing(make: MakeCache, clock: ManualClock) -> None:
    """A cleared run leaves no ghost, not of its evicted tail either, and its return is no use."""
    cache = make(16, policy="adaptive")
    run(cache, tokens(1, 48))
    run(cache, tokens(2, 40))  # takes the tail of the first
    policy = policy_of(cache)
    assert [ghost.num_blocks for ghost in policy._ghosts.values()] == [6]
    cache.clear()
    check_books(cache)
    assert not policy._ghosts
    assert policy._num_counted_blocks == 0
    clock.advance(5.0)
    run(cache, tokens(1, 48))
    assert sum(map(sum, policy._table._used)) == 0
    assert [part.num_uses for part in policy._parts.values()] == [1]


def test_new_questions_are_stored_apart(make: MakeCache, clock: ManualClock) -> None:
    """A prompt that comes back after its eviction with a new question is stored as two runs: the part that was there
    before, used twice, and the question."""
    cache = make(10, policy="adaptive")
    run(cache, tokens(1, 16))
    run(cache, tokens(2, 40))
    clock.advance(10.0)
    run(cache, [*tokens(1, 16), *tokens(3, 8)])
    parts = sorted((part.num_uses, part.num_blocks) for part in policy_of(cache)._parts.values() if part.last_used > 0)
    assert parts == [(1, 2), (2, 4)]


def test_padded_blocks_are_a_class_of_their_own(make: MakeCache, clock: ManualClock) -> None:
    """A last block that is not full of tokens is told apart from what is used once, until it is used again."""
    cache = make(8, policy="adaptive")
    prompt = [*tokens(1, 14), 0, 0]
    with cache.lease(prompt) as lease:
        lease.reserve(16)
        lease.commit(12)
        lease.commit(16, is_padded=True)
    policy = policy_of(cache)
    runs = {part.num_blocks: part.run for part in policy._parts.values() if part.run}
    assert {size: policy._table.classes[each.class_id].uses for size, each in runs.items()} == {3: 1, 1: 0}
    assert run(cache, [*prompt, 1]) == 16
    assert {policy._table.classes[part.run.class_id].uses for part in policy._parts.values() if part.run} == {2}


def test_describe(make: MakeCache, clock: ManualClock) -> None:
    """A run tells its class, its age, and what holding it yields; one in use only its uses."""
    cache = make(8, policy="adaptive")
    with start(cache, tokens(1, 9)):
        policy = policy_of(cache)
        (node_id,) = policy._parts
        assert policy.describe(node_id, 0.0) == {"num_uses": 1}
    clock.advance(3.0)
    told = dict(policy.describe(node_id, clock()))
    assert told.pop("class") == "used once, new conversation, turns 0, output 0, new blocks 2-3"
    assert told["yield_per_second"] == pytest.approx(0.1 / (0.9 * 2 + 0.1 * 1))  # at its best if held for this step
    assert {**told, "yield_per_second": 0.0} == {
        "num_uses": 1,
        "age_seconds": 3.0,
        "hazard": pytest.approx(0.1),
        "yield_per_second": 0.0,
    }


def test_gaps_are_never_negative(make: MakeCache, clock: ManualClock) -> None:
    """A request that takes what another stored while it ran continues something of just now, not of a later time."""
    cache = make(16, policy="adaptive")
    first, second = cache.lease(tokens(1, 8)), cache.lease(tokens(1, 8))
    clock.advance(100.0)
    for lease in (first, second):
        lease.reserve(8)
        lease.commit(8)
        lease.release()
        clock.advance(5.0)
    assert [run_class.gap for run_class in policy_of(cache)._table.classes] == [-1, 0]


# --- the books --------------------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """Random use of a cache: conversations with shared heads, answers, forks, preemption, clearing, other sizes."""

    cache: CacheManager
    clock: ManualClock
    rng: random.Random

    def __post_init__(self) -> None:
        self.talks: list[list[int]] = []
        self.leases: list[Lease] = []

    def step(self) -> None:
        """Does one thing."""
        rng = self.rng
        self.clock.advance(rng.choice([0.0, 0.1, 1.0, 7.0, 60.0]))
        act = rng.choices(
            [self.open, self.answer, self.close, self.fork, self.preempt, self.clear, self.resize],
            [10, 12, 9, 1, 2, 0.15, 0.3],
        )[0]
        try:
            act()
        except OutOfBlocks:
            self.close()

    def open(self) -> None:
        """A new conversation over a shared head, or the next turn of one."""
        rng = self.rng
        if rng.random() < 0.5 or not self.talks:
            prompt = [*tokens(rng.randrange(4), rng.randrange(4, 30)), *tokens(rng.randrange(10, 99), rng.randrange(9))]
            self.talks = [*self.talks[-20:], prompt]
        else:
            talk = rng.choice(self.talks)
            prompt = [*talk[: rng.choice([len(talk), rng.randrange(len(talk)) + 1])], *tokens(rng.randrange(99), 6)]
        self.admit(prompt, rng.choice(["", "", "b"]))

    def admit(self, prompt: list[int], namespace: str, count_lookup: bool = True) -> None:
        """Look up and compute."""
        lease = self.cache.lease(prompt, namespace=namespace, count_lookup=count_lookup)
        self.leases.append(lease)
        lease.reserve(len(prompt))
        lease.commit(self.rng.choice([len(prompt), max(lease.num_cached_tokens, self.rng.randrange(len(prompt)))]))
        lease.commit(len(prompt))

    def answer(self) -> None:
        """Some tokens, in place."""
        if self.leases:
            lease = self.rng.choice(self.leases)
            for _ in range(self.rng.randrange(1, 12)):
                self.cache.append_many([lease], [self.rng.randrange(3)])
                self.cache.commit_many([lease])

    def close(self) -> None:
        """One request ends, and its conversation may go on from there."""
        if self.leases:
            lease = self.leases.pop(self.rng.randrange(len(self.leases)))
            self.talks.append(lease.token_ids.tolist())
            lease.release()

    def fork(self) -> None:
        """Two answers to one prompt."""
        if self.leases:
            self.leases.append(self.rng.choice(self.leases).fork())

    def preempt(self) -> None:
        """Memory is taken from a request, which comes back."""
        if self.leases:
            lease = self.leases.pop(self.rng.randrange(len(self.leases)))
            known, namespace = lease.token_ids.tolist(), lease.namespace
            lease.release()
            if self.rng.random() < 0.7:
                self.open()
            self.admit(known, namespace, count_lookup=False)

    def clear(self) -> None:
        """All is forgotten, or a namespace."""
        self.cache.clear(self.rng.choice([None, "b"]))

    def resize(self) -> None:
        """More or less memory."""
        with contextlib.suppress(ResizeRefused):  # too much is held
            self.cache.resize(self.rng.choice([24, 48, 64]))


@pytest.mark.parametrize("seed", range(6))
def test_books_are_right_after_anything(make: MakeCache, clock: ManualClock, seed: int) -> None:
    """After random use, what every run has left, what is counted, and whose ghosts there are equal what parts and
    ghosts say."""
    cache = make(48, policy="adaptive")
    traffic = Traffic(cache, clock, random.Random(seed))
    for number in range(1200):
        traffic.step()
        if number % 10 == 0:
            check_books(cache)
    assert cache.stats().evicted_tokens > 0
    for lease in traffic.leases:
        lease.release()
    check_books(cache)
    assert not policy_of(cache)._open
    assert all(part.run is not None for part in policy_of(cache)._parts.values())


def test_memory_is_bounded(make: MakeCache, clock: ManualClock) -> None:
    """However long the traffic: what is remembered of evicted blocks is at most 8 times the pool, plus a run; so are
    runs; and lists hold nothing that is over for long."""
    cache = make(30, policy="adaptive")
    policy, rng, most = policy_of(cache), random.Random(3), 0
    for number in range(2500):
        clock.advance(rng.expovariate(1.0))
        run(
            cache, [*tokens(rng.randrange(9), rng.randrange(12)), *tokens(100 + number, rng.randrange(1, 40))], output=2
        )
        if number % 20 == 0:
            num_ghost_blocks = sum(ghost.num_blocks for ghost in policy._ghosts.values())
            most = max(most, num_ghost_blocks)
            assert num_ghost_blocks <= policy._num_counted_blocks <= MEMORY * 30 + 30
            assert len(policy._runs) + policy._num_aging <= 2 * (2 * MEMORY * 30 + 30) + 256
    assert most > MEMORY * 30 / 2
    assert policy._num_counted_blocks > 0
    assert sum(map(len, policy._cells.values())) < 1000
    assert len(policy._parts) <= 30
    check_books(cache)


def test_outdated_entries_are_dropped(make: MakeCache) -> None:
    """Runs taken into use and let go again and again do not fill the queue with their past, behind one that waits all
    the while in the same class and step: it has no more entries than were offered, twice, and since the last table."""
    cache = make(64, policy="adaptive")
    for _ in range(20):
        run(cache, [*tokens(0, 16), 1])
    for number in range(1500):
        run(cache, [*tokens(1 + number % 3, 16), 1])
        assert sum(map(len, policy_of(cache)._cells.values())) < 256 + 4 * RECOMPUTE_REQUESTS
    check_books(cache)


def test_what_is_too_old_to_count_is_dropped(make: MakeCache, clock: ManualClock) -> None:
    """A run that is counted no more and evicted later is not waited for."""
    cache = make(10, policy="adaptive")
    held = start(cache, tokens(1, 8))  # stays in use until its first run is long forgotten
    run(cache, tokens(1, 9))
    for number in range(60):
        clock.advance(1.0)
        run(cache, tokens(10 + number, 16))
    check_books(cache)
    held.release()
    for number in range(60):
        run(cache, tokens(100 + number, 16))
    check_books(cache)


# --- the same everywhere ----------------------------------------------------------------------------------------------

REPLAY = """
import random
from looseleaf import CacheConfig, CacheManager
from looseleaf.testing.clock import ManualClock
clock = ManualClock()
cache = CacheManager(CacheConfig(num_pages=40, page_tokens=4, block_tokens=4, policy="adaptive"), clock=clock)
rng = random.Random(11)
hits = []
for number in range(700):
    clock.advance(rng.expovariate(0.5))
    talk = rng.randrange(25)
    prompt = [*range(100 * talk, 100 * talk + rng.randrange(3, 30)), 5000 + rng.randrange(9)]
    with cache.lease(prompt, namespace=rng.choice(["", "tenant"])) as lease:
        lease.reserve(len(prompt))
        lease.commit(len(prompt))
        hits.append(lease.num_cached_tokens)
print(sum(hits), hits[-50:], cache.stats().evicted_tokens)
"""


def test_same_in_every_process() -> None:
    """[hash seeds] A trace has the same hits whatever order Python's sets and dictionaries of strings have."""

    def outputs() -> Iterator[str]:
        for seed in ("0", "77"):
            source = str(Path(sys.modules["looseleaf"].__file__ or "").parents[1])
            env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": source}
            yield subprocess.run(
                [sys.executable, "-c", REPLAY], env=env, capture_output=True, text=True, check=True
            ).stdout

    first, *others = outputs()
    assert int(first.split()[0]) > 0
    assert others == [first]
