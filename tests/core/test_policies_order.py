"""What single policies keep and throw out, and that all of them evict what is needed, of what may go, and no more."""

from __future__ import annotations

import pytest

from looseleaf.core.eviction import BUILT_IN, StoredRun, Use
from looseleaf.core.eviction.cost import CostPolicy
from looseleaf.core.eviction.s3fifo import S3FIFOPolicy
from looseleaf.core.eviction.wtinylfu import CountMinSketch, WTinyLFUPolicy
from looseleaf.testing.policy_driver import PolicyDriver
from tests.core.conftest import MakeCache, run, start, tokens

ALL = pytest.mark.parametrize("policy", BUILT_IN)


def flood(driver: PolicyDriver, num_words: int, first: int = 1000) -> None:
    """Requests of one word each that never come back."""
    for word in range(first, first + num_words):
        driver.serve([word])


@pytest.mark.parametrize("policy", ["slru", "sieve", "s3fifo", "wtinylfu", "lfu", "lfuda", "cost"])
def test_what_is_used_often_outlives_a_flood(policy: str) -> None:
    """LRU and FIFO lose a prompt that four requests shared to 20 that nobody repeats; these policies keep it."""
    for name, num_kept in ((policy, 4), ("lru", 0), ("fifo", 0)):
        driver = PolicyDriver(BUILT_IN[name], 20)
        for _ in range(4):
            driver.serve([1, 2, 3, 4])
        flood(driver, 24)
        assert driver.serve([1, 2, 3, 4]) == num_kept, name


def test_old_counts_are_overtaken() -> None:
    """LFU keeps a prompt for ever that was popular once; with ageing it goes in time."""
    for name, num_kept in (("lfu", 2), ("lfuda", 0), ("cost", 0)):
        driver = PolicyDriver(BUILT_IN[name], 10)
        for _ in range(5):
            driver.serve([1, 2])
        flood(driver, 30)
        assert driver.serve([1, 2]) == 2
        flood(driver, 200, first=2000)
        assert driver.serve([1, 2]) == num_kept, name


def test_the_age_is_the_largest_value_evicted() -> None:
    """LFU with ageing: a value is uses plus the age when they were counted; the age steps when a request ends."""
    driver = PolicyDriver(BUILT_IN["lfuda"], 2)
    for _ in range(3):
        driver.serve([1])
    driver.serve([2])
    driver.serve([3])
    (policy, _), ids = driver.policies, [run.id for run in driver.runs()]
    assert [policy.describe(node, 0.0)["value"] for node in ids] == [3, 1]
    driver.serve([4])
    assert [policy.describe(run.id, 0.0)["value"] for run in driver.runs()] == [3, 2]
    assert policy.describe(driver.runs()[0].id, 0.0)["cache_age_value"] == 1


def test_slru_protects_no_more_than_its_share() -> None:
    """When more was used twice than the protected segment takes, what was used longest ago goes back on probation."""
    driver = PolicyDriver(BUILT_IN["slru"], 10)
    for word in range(10):
        driver.serve([word])
        driver.serve([word])
    queues = [driver.policies[0].describe(run.id, 0.0)["queue"] for run in driver.runs()]
    assert queues == ["probation"] * 2 + ["protected"] * 8


def test_sieve_passes_what_was_used_and_leaves_it_where_it_is() -> None:
    """The hand spares a used run once, and goes on from there, not from the oldest again."""
    driver = PolicyDriver(BUILT_IN["sieve"], 4)
    for word in (1, 2, 3, 4, 2):
        driver.serve([word])
    flood(driver, 1)
    assert [run.words[0] for run in driver.runs()] == [2, 3, 4, 1000]
    flood(driver, 1, first=2000)
    assert [run.words[0] for run in driver.runs()] == [2, 4, 1000, 2000]
    driver.serve([1000])
    flood(driver, 2, first=3000)
    assert [run.words[0] for run in driver.runs()] == [2, 1000, 3000, 3001]


def test_s3fifo_remembers_what_it_threw_out() -> None:
    """What returns while its key is known enters the main queue; what was cleared is known no more."""
    for key, queue in ((77, "main"), (None, "small")):
        policy = S3FIFOPolicy(100)
        policy.insert(1, StoredRun(2, 0, 77), Use(1, 0.0, 1))
        policy.forget(1, key)
        policy.insert(2, StoredRun(2, 0, 77), Use(2, 0.0, 2))
        assert policy.describe(2, 0.0)["queue"] == queue
    policy = S3FIFOPolicy(100)
    policy.insert(1, StoredRun(9, 0, 70), Use(1, 0.0, 1))
    policy.shorten(1, 2, 77)
    policy.insert(2, StoredRun(2, 7, 77), Use(2, 0.0, 2))
    assert policy.describe(2, 0.0)["queue"] == "main"


def test_s3fifo_lets_what_cannot_go_leave_the_small_queue() -> None:
    """Runs with others behind them go on to the main queue, so that a conversation's end is not thrown out first."""
    driver = PolicyDriver(BUILT_IN["s3fifo"], 20)
    conversation: list[int] = []
    for turn in range(8):
        conversation += [turn, turn]
        driver.serve(conversation)
    flood(driver, 8)
    queues = [driver.policies[0].describe(run.id, 0.0)["queue"] for run in driver.runs()]
    assert queues[:7] == ["main"] * 7
    assert driver.serve(conversation) >= 14


def test_wtinylfu_knows_counts_of_what_is_gone() -> None:
    """Uses before an eviction count when a run returns; after a clear they don't."""
    for key, num_uses in ((77, 3), (None, 1)):
        policy = WTinyLFUPolicy(100)
        policy.insert(1, StoredRun(2, 0, 77), Use(1, 0.0, 1))
        policy.hit([1], Use(2, 0.0, 2))
        policy.hit([1], Use(3, 0.0, 3))
        policy.forget(1, key)
        policy.insert(2, StoredRun(2, 0, 77), Use(4, 0.0, 4))
        assert policy.describe(2, 0.0)["num_counted_uses"] == num_uses


def test_wtinylfu_counts_halve() -> None:
    """After ten touched blocks per block of the pool every count is half of what it was, stored or not."""
    policy = WTinyLFUPolicy(10)
    policy.insert(1, StoredRun(2, 0, 77), Use(1, 0.0, 1))
    for tick in range(7):
        policy.hit([1], Use(2 + tick, 0.0, 2))
    policy.missed([5, 5], Use(10, 0.0, 3))
    assert policy.describe(1, 0.0)["num_counted_uses"] == 8
    policy.missed(range(100, 184), Use(11, 0.0, 4))
    assert policy.describe(1, 0.0)["num_counted_uses"] == 4


def test_a_sketch_never_counts_too_little() -> None:
    """Count-min: at least what was added, and exactly that where no keys share cells."""
    sketch = CountMinSketch(4096)
    keys = [number * 0x9E3779B97F4A7C15 % 2**64 - 2**63 for number in range(100)]
    for number in range(3):
        sketch.add(keys[number:])
    assert all(sketch.count(key) >= min(3, number + 1) for number, key in enumerate(keys))
    assert sum(sketch.count(key) for key in keys) == 1 + 2 + 3 * 98
    sketch.raise_to(keys[0], 99)
    assert sketch.count(keys[0]) == 15


def test_what_costs_more_is_kept_longer() -> None:
    """Of two runs with equal uses the one at the end of a long prompt stays: attention makes it dearer."""
    policy = CostPolicy(1000, even_blocks=100.0)
    policy.insert(1, StoredRun(10, 200), Use(1, 0.0, 1))
    policy.insert(2, StoredRun(10, 0), Use(2, 0.0, 2))
    policy.insert(3, StoredRun(10, 210), Use(3, 0.0, 3))
    for node_id, depth in ((1, 210), (2, 10), (3, 220)):
        policy.offer(node_id, depth)
    assert policy.describe(1, 0.0)["value"] == pytest.approx(1 + 205 / 100)
    assert policy.victim() == 2


# --- in a cache, whatever the policy --------------------------------------------------------------------------------


@ALL
def test_no_more_than_needed(make: MakeCache, policy: str) -> None:
    """[E48, E54] Ten leaves of one block: two missing blocks evict two."""
    cache = make(10, policy=policy)
    for number in range(10):
        run(cache, tokens(number, 4))
    with start(cache, tokens(99, 6)):
        assert cache.stats().evicted_tokens == 8
        assert sum(cache.match([*tokens(number, 4), 0]).num_tokens for number in range(10)) == 32


@ALL
def test_a_watermark_with_pins(make: MakeCache, policy: str) -> None:
    """[E54] A full pool of 28 prompts of mixed size, five pinned: one pass frees exactly what is asked, another frees
    nothing, and when all that is left is pinned it ends."""
    cache = make(100, policy=policy, reserve_pages=10, pin_quota=1.0)
    for number in range(28):
        run(cache, tokens(number, 4 * (1 + number % 6)))
        if number % 6 == 5:
            cache.pin(tokens(number, 4 * (1 + number % 6)), owner="test")
    with start(cache, tokens(98, 4 * cache.stats().free_blocks)) as lease:
        assert cache.stats().free_blocks == 0
        cache.maintain()
        assert cache.stats().free_blocks == 10
        cache.maintain()
        assert cache.stats().free_blocks == 10
        lease.reserve(4 * (lease.num_reserved_tokens // 4 + 10 + cache.stats().evictable_blocks))
        assert cache.stats().free_blocks == cache.stats().evictable_blocks == 0
        cache.maintain()
    assert all(cache.match([*tokens(number, 24), 0]).num_tokens == 24 for number in range(5, 28, 6))


@ALL
def test_held_paths_stay(make: MakeCache, policy: str) -> None:
    """[E49, E51] While a lease holds part of a run, what lies behind can go and the rest can't; later all of it can."""
    cache = make(8, policy=policy)
    run(cache, tokens(1, 32))
    lease = cache.lease([*tokens(1, 20), 7])
    assert cache.stats().evictable_blocks == 3
    with start(cache, tokens(2, 12)):
        assert cache.match([*tokens(1, 32), 0]).num_tokens == 20
        assert cache.stats().evictable_blocks == 0
    lease.release()
    assert cache.stats().evictable_blocks == cache.stats().cached_blocks == 8
    run(cache, tokens(3, 32))
    assert cache.match([*tokens(1, 32), 0]).num_tokens == 0


@ALL
def test_a_chain_goes_from_its_end(make: MakeCache, policy: str) -> None:
    """[E52] Runs behind one another go one after the other, each once; the total is their sum."""
    cache = make(12, policy=policy)
    for turn in range(1, 5):
        run(cache, tokens(1, 8 * turn))
    for num_blocks in range(4, 12):
        with start(cache, tokens(2, 4 * num_blocks), reuse=False):
            assert cache.match([*tokens(1, 32), 0]).num_tokens == 4 * (12 - num_blocks)
    assert cache.stats().evicted_tokens == 28
