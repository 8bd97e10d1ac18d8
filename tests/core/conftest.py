"""Small caches and the two moves that most tests make."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from looseleaf import CacheConfig, CacheManager, Lease
from looseleaf.testing.clock import ManualClock

MakeCache = Callable[..., CacheManager]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def make(clock: ManualClock) -> Iterator[MakeCache]:
    """Makes caches by their number of blocks; at the end all of them must be whole."""
    made: list[CacheManager] = []

    def make_cache(
        num_blocks: int = 32, block_tokens: int = 4, blocks_per_page: int = 1, **settings: object
    ) -> CacheManager:
        settings.setdefault("policy", "lru")  # an order that tests can foretell
        config = CacheConfig(
            num_pages=num_blocks // blocks_per_page,
            page_tokens=block_tokens * blocks_per_page,
            block_tokens=block_tokens,
            **settings,  # type: ignore[arg-type]
        )
        made.append(CacheManager(config, clock=clock))
        return made[-1]

    yield make_cache
    for cache in made:
        cache.check_integrity()


def run(cache: CacheManager, prompt: list[int], request_id: str | None = None, output: int = 0, **how: object) -> int:
    """Serve a prompt and `output` generated tokens to the end; how many tokens were cached."""
    with start(cache, prompt, request_id, **how) as lease:
        for number in range(output):
            cache.append_many([lease], [1000 + number])
            cache.commit_many([lease])
        return lease.num_cached_tokens


def start(cache: CacheManager, prompt: list[int], request_id: str | None = None, **how: object) -> Lease:
    """Prefill a prompt and keep its lease."""
    lease = cache.lease(prompt, request_id, **how)  # type: ignore[arg-type]
    lease.reserve(len(prompt))
    lease.commit(len(prompt))
    return lease


def tokens(first: int, count: int) -> list[int]:
    """`count` tokens that no other `first` shares."""
    return [first * 10_000 + number for number in range(count)]
