"""Decode steps of many leases: what `commit_many` leaves for later is there for whoever looks."""

from __future__ import annotations

import random

import numpy as np
import pytest

from looseleaf import CacheConfig, CacheManager, Lease, OutOfBlocks
from looseleaf.core import events

BLOCK = 4


def cache_of(num_pages: int, policy: str, *, tells_at_once: bool = False) -> CacheManager:
    """`tells_at_once`: somebody listens to stored blocks, so nothing can be left for later."""
    config = CacheConfig(
        num_pages=num_pages, page_tokens=4 * BLOCK, block_tokens=BLOCK, policy=policy, pin_quota=0.5, reserve_pages=1
    )
    heard: list[events.CacheEvent] = []
    return CacheManager(config, clock=lambda: 0.0, on_event=heard.append if tells_at_once else None)


def step(cache: CacheManager, leases: list[Lease], tokens: list[int]) -> None:
    cache.append_many(leases, np.array(tokens, dtype=np.int32))
    cache.commit_many(leases)


def tried_step(cache: CacheManager, leases: list[Lease], tokens: list[int]) -> str:
    """What became of a step."""
    try:
        step(cache, leases, tokens)
    except OutOfBlocks as error:
        return f"{error.needed} {error.free} {error.evictable}"
    return "done"


def tried_fork(lease: Lease, name: str) -> Lease | None:
    """The fork, None if there is no block for it."""
    try:
        return lease.fork(name)
    except OutOfBlocks:
        return None


def running(cache: CacheManager, prompt: list[int], name: str, steps: int) -> Lease:
    """A lease that has committed its prompt and decoded some tokens alone."""
    lease = cache.lease(prompt, name)
    lease.reserve(len(prompt))
    lease.commit(len(prompt))
    for token in range(steps):
        step(cache, [lease], [100 + token])
    return lease


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_what_was_decoded_can_be_matched_at_once(policy: str) -> None:
    """A running request's committed blocks are found by a look-up, a pin and a fork right after the step."""
    cache = cache_of(16, policy)
    lease = running(cache, list(range(1, 9)), "a", 3 * BLOCK)
    tokens = lease.token_ids.tolist()
    assert cache.match([*tokens, 7]).num_tokens == 5 * BLOCK
    step(cache, [lease], [1])
    for token in range(2 * BLOCK):
        step(cache, [lease], [200 + token])
    assert cache.pin(request_id="a").num_pinned_tokens == 7 * BLOCK
    for token in range(2 * BLOCK):
        step(cache, [lease], [300 + token])
    child = lease.fork("b")
    assert child.block_table[:9].tolist() == lease.block_table[:9].tolist()
    cache.check_integrity()


def test_stats_count_what_was_decoded() -> None:
    """Stored tokens are counted though nobody has looked anything up since."""
    cache = cache_of(16, "lru")
    lease = running(cache, [1, 2, 3, 4], "a", 0)
    for token in range(8):
        step(cache, [lease], [token])
    assert sum(usage.stored_blocks for usage in cache.namespace_usage()) == 3
    lease.release()
    assert cache.stats().cached_blocks == 3


class Twins:
    """The same calls on a cache that may leave something for later and on one that may not; answers must be equal."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        policy = self.rng.choice(["lru", "adaptive", "cost", "s3fifo"])
        num_pages = self.rng.choice([6, 12, 40])
        self.caches = cache_of(num_pages, policy), cache_of(num_pages, policy, tells_at_once=True)
        self.live: dict[str, tuple[Lease, Lease]] = {}
        self.pins: list[tuple[str, str]] = []
        self.num_made = 0
        self.prefixes = [[self.rng.randrange(3) for _ in range(24)] for _ in range(3)]

    def prompt(self) -> list[int]:
        prefix = self.rng.choice(self.prefixes)[: self.rng.randrange(1, 24)]
        return prefix + [self.rng.randrange(3) for _ in range(self.rng.randrange(6))]

    def open(self) -> None:
        self.num_made += 1
        name, prompt = f"r{self.num_made}", self.prompt()
        pair = tuple(cache.lease(prompt, name) for cache in self.caches)
        self.live[name] = pair
        assert pair[0].num_cached_tokens == pair[1].num_cached_tokens
        assert pair[0].explanation == pair[1].explanation
        fits = [lease.try_reserve(len(prompt)) for lease in pair]
        assert fits[0] == fits[1]
        if fits[0]:
            for lease in pair:
                lease.commit(len(prompt))
        else:
            self.release(name)

    def decode(self) -> None:
        names = [name for name in self.live if self.rng.random() < 0.7]
        tokens = [self.rng.randrange(3) for _ in names]
        leases = [[self.live[name][number] for name in names] for number in range(2)]
        first, second = (tried_step(cache, few, tokens) for cache, few in zip(self.caches, leases, strict=True))
        assert first == second

    def release(self, name: str) -> None:
        for lease in self.live.pop(name):
            lease.release()

    def fork(self, name: str) -> None:
        self.num_made += 1
        first, second = (tried_fork(lease, f"r{self.num_made}") for lease in self.live[name])
        assert (first is None) == (second is None)
        if first is not None and second is not None:
            self.live[f"r{self.num_made}"] = (first, second)

    def append(self, name: str) -> None:
        count = self.rng.randrange(1, 9)
        tokens = [self.rng.randrange(3) for _ in range(count)]
        for lease in self.live[name]:
            lease.append(tokens)
            if lease.try_reserve(lease.num_tokens):
                lease.commit(lease.num_tokens)
            else:
                lease.truncate(lease.num_committed_tokens)

    def pin(self, name: str) -> None:
        first, second = (cache.pin(request_id=name, level="soft") for cache in self.caches)
        assert first.num_pinned_tokens == second.num_pinned_tokens
        self.pins.append((first.id, second.id))

    def unpin(self) -> None:
        for cache, pin_id in zip(self.caches, self.pins.pop(), strict=True):
            cache.unpin(pin_id)

    def one(self) -> None:
        names, roll = list(self.live), self.rng.random()
        if not names or roll < 0.15:
            self.open()
        elif roll < 0.75:
            self.decode()
        elif roll < 0.83:
            self.release(self.rng.choice(names))
        elif roll < 0.88:
            self.fork(self.rng.choice(names))
        elif roll < 0.92:
            self.append(self.rng.choice(names))
        elif roll < 0.94:
            self.pin(self.rng.choice(names))
        elif roll < 0.96 and self.pins:
            self.unpin()
        elif roll < 0.97:
            assert len({str(cache.clear()) for cache in self.caches}) == 1
        else:
            prompt = self.prompt()
            assert len({cache.match(prompt).num_tokens for cache in self.caches}) == 1
        for first, second in self.live.values():
            assert first.block_table.tolist() == second.block_table.tolist()
            assert first.num_committed_tokens == second.num_committed_tokens


@pytest.mark.parametrize("seed", range(40))
def test_later_is_as_good_as_at_once(seed: int) -> None:
    """Whatever is called between, a cache that stores a decode's blocks later answers like one that stores them at
    once, block ids, evictions and explanations included."""
    twins = Twins(seed)
    for number in range(300):
        twins.one()
        if number % 60 == 59:
            assert twins.caches[0].stats() == twins.caches[1].stats()
            for cache in twins.caches:
                cache.check_integrity()
