"""Laws of replay: hits equal a referee's to the token, the optimum bounds them, and waste is that of real packing."""

from __future__ import annotations

import random

import pytest

from looseleaf import CacheConfig, CacheManager, ConfigError, Lease
from looseleaf.lab.capacity import capacity_blocks, parse_bytes
from looseleaf.lab.replay import replay_instant
from looseleaf.lab.timed import RateModel, replay_timed
from looseleaf.lab.traces import Trace, TraceRequest


def conversations(num_requests: int = 300, seed: int = 1) -> Trace:
    """Growing conversations that share beginnings, made here: 16-token blocks, the last one partial."""
    rng = random.Random(seed)
    paths: list[tuple[int, ...]] = [()]
    requests = []
    num_blocks = 0
    for number in range(num_requests):
        base = rng.choice(paths[-12:])
        base = base[: rng.randint(0, len(base))] if rng.random() < 0.3 else base
        fresh = tuple(range(num_blocks, num_blocks + rng.randint(1, 6)))
        num_blocks += len(fresh)
        path = (base + fresh)[:40]
        paths.append(path)
        requests.append(TraceRequest(number * 0.5, len(path) * 16 - rng.randint(0, 15), rng.randint(1, 60), path))
    return Trace("conversations", 16, tuple(requests))


def referee(trace: Trace, capacity: int, policy: str) -> int:
    """Hit tokens of a block-level cache, by the plainest code there is: one set of blocks and a sort per eviction."""
    assert trace.block_tokens is not None
    key: dict[int, tuple[int, ...]] = {}
    count: dict[int, int] = {}
    hits = 0
    for now, request in enumerate(trace.requests):
        found = 0
        while found < len(request.blocks) and request.blocks[found] in key:
            found += 1
        hits += min(found * trace.block_tokens, request.num_input_tokens)
        own = request.blocks[:capacity]
        for depth, block in enumerate(own):
            count[block] = count.get(block, 0) + 1 if block in key else 1
            if policy == "lru" or (policy == "fifo" and block not in key):
                key[block] = (now, -depth)
            elif policy == "lfu":
                key[block] = (count[block], now, -depth)
        while len(key) > capacity:
            parents = {r.blocks[i] for r in trace.requests for i in range(len(r.blocks) - 1) if r.blocks[i + 1] in key}
            candidates = [block for block in key if block not in own and block not in parents]
            del key[min(candidates, key=key.__getitem__)]
    return hits


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu"])
@pytest.mark.parametrize("capacity", [7, 41, 120])
@pytest.mark.parametrize("page_tokens", [8, 16, 256])
def test_hits_equal_a_plain_referee(policy: str, capacity: int, page_tokens: int) -> None:
    """Instant replay through the real cache hits exactly what plain block-level code hits, whatever the page size."""
    trace = conversations(120)
    result = replay_instant(trace, capacity, policy, page_tokens=page_tokens)
    assert result.hit_tokens == referee(trace, capacity, policy)
    assert result.peak_blocks == min(capacity, trace.num_unique_blocks)
    assert result.input_tokens == sum(request.num_input_tokens for request in trace.requests)


def test_more_memory_never_hurts_lru() -> None:
    """LRU is a stack algorithm: hits grow with capacity, up to those of an endless cache."""
    trace = conversations()
    hits = [replay_instant(trace, capacity).hit_tokens for capacity in (1, 10, 50, 100, 400, 2000)]
    assert hits == sorted(hits)
    assert replay_instant(trace, 5000).hit_tokens == hits[-1]
    assert replay_instant(trace, 5000).evicted_blocks == 0


def test_instant_needs_content_and_its_own_blocks() -> None:
    """Lengths alone, or another block size, can't be replayed instantly."""
    lengths = Trace("lengths", None, (TraceRequest(0, 10, 1, ()),))
    with pytest.raises(ConfigError, match="lengths only"):
        replay_instant(lengths, 10)
    with pytest.raises(ConfigError, match="has blocks of 16 tokens, --block-tokens asks for 32"):
        replay_instant(conversations(5), 10, block_tokens=32)


def test_blocks_of_another_size_are_noticed() -> None:
    """A trace whose blocks can't have the size that it was loaded with is refused, not misread."""
    trace = Trace("wrong", 16, (TraceRequest(0, 7500, 1, tuple(range(15))),))
    with pytest.raises(ConfigError, match="7500 tokens in 15 blocks, which are not blocks of 16"):
        replay_instant(trace, 10)


def test_untold_partial_blocks() -> None:
    """A trace may leave partial last blocks out: these tokens are input that never hits, in both modes."""
    requests = tuple(TraceRequest(number * 10.0, 40, 1, (0, 1)) for number in range(3))
    trace = Trace("whole blocks", 16, requests)
    for result in (replay_instant(trace, 10), replay_timed(trace, CacheConfig(num_pages=8))):
        assert (result.input_tokens, result.hit_tokens) == (120, 64)
    with pytest.raises(ConfigError, match="has 48 tokens but only 2 blocks"):
        replay_timed(Trace("short", 16, (TraceRequest(0, 48, 1, (0, 1)),)), CacheConfig(num_pages=8))
    with pytest.raises(ConfigError, match="has 48 tokens in 2 blocks"):
        replay_instant(Trace("short", 16, (TraceRequest(0, 48, 1, (0, 1)),)), 10)


def test_waste_of_partial_blocks() -> None:
    """Instant replay counts what partial last blocks leave empty."""
    trace = Trace("partial", 16, (TraceRequest(0, 24, 1, (0, 1)),))
    assert replay_instant(trace, 10).waste == pytest.approx(0.25)


def chat_lengths(num_requests: int = 150) -> Trace:
    rng = random.Random(2)
    requests = tuple(
        TraceRequest(number * 0.3, rng.randint(20, 3000), rng.randint(5, 300), ()) for number in range(num_requests)
    )
    return Trace("chat", None, requests)


def test_packed_pages_waste_as_little_as_blocks() -> None:
    """256-token pages of 16-token blocks waste under 1% on chat lengths, where plain 256-token pages waste many times
    that."""
    trace = chat_lengths()
    packed = replay_timed(trace, CacheConfig(num_pages=1024))
    larger = replay_timed(trace, CacheConfig(num_pages=512, page_tokens=512))
    plain = replay_timed(trace, CacheConfig(num_pages=1024, block_tokens=256))
    assert packed.waste < 0.01
    assert packed.waste == pytest.approx(larger.waste)
    assert plain.waste > 5 * packed.waste


def test_timed_replay_under_pressure() -> None:
    """In a pool that is too small requests wait and are preempted, and all of them come through."""
    done: list[int] = []
    result = replay_timed(chat_lengths(60), CacheConfig(num_pages=20), RateModel(), done.append)
    assert done == list(range(1, 61))
    assert result.peak_blocks <= 320
    assert result.evicted_blocks > 0
    assert result.preemptions > 0


def test_peaks_of_held_and_used_memory() -> None:
    """What is held at the peak is whole blocks, what is used is tokens: the difference is at most a block for each
    request that runs."""
    trace = Trace("two", None, tuple(TraceRequest(0.0, length, 8, ()) for length in (100, 200)))
    result = replay_timed(trace, CacheConfig(num_pages=8))
    assert (result.peak_held_tokens, result.peak_used_tokens) == (112 + 208, 107 + 207)  # the last is measured no more
    instant = replay_instant(Trace("one", 16, (TraceRequest(0, 24, 1, (0, 1)),)), 10)
    assert (instant.peak_held_tokens, instant.peak_used_tokens) == (32, 24)


class Tables:
    """A watcher that keeps what it is shown."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int, int]] = []

    def on_finish(self, now: float, cache: CacheManager, lease: Lease) -> None:
        """Note the time, the leases that live, and the length of the table."""
        self.seen.append((now, cache.stats().num_leases, len(lease.block_table)))


def test_watcher_sees_every_request_at_its_end() -> None:
    """A watcher is shown each complete request with its blocks, before they are let go, in order of time."""
    tables = Tables()
    trace = Trace("two", None, (TraceRequest(0.0, 100, 8, ()), TraceRequest(1.0, 40, 3, ())))
    replay_timed(trace, CacheConfig(num_pages=8), watcher=tables)
    assert [(live, blocks) for _, live, blocks in tables.seen] == [(1, 7), (1, 3)]
    assert 0 < tables.seen[0][0] < 1 < tables.seen[1][0]


def test_pages_are_kept_free_between_steps() -> None:
    """Upkeep runs as in an engine: with a reserve, whole pages are free again after every step."""
    free: list[int] = []

    class FreePages:
        def on_finish(self, now: float, cache: CacheManager, lease: Lease) -> None:
            free.append(cache.stats().free_pages)

    trace = Trace("chat", None, tuple(TraceRequest(number * 1.0, 300, 4, ()) for number in range(60)))
    replay_timed(trace, CacheConfig(num_pages=16, reserve_pages=4), watcher=FreePages())
    assert min(free[20:]) >= 2


def test_timed_replay_shares_prefixes() -> None:
    """With content, timed replay hits too; never more than an endless cache."""
    trace = conversations(100)
    result = replay_timed(trace, CacheConfig(num_pages=64))
    assert 0 < result.hit_tokens <= replay_instant(trace, 5000).hit_tokens


@pytest.mark.parametrize(
    ("text", "blocks"), [("5%", 50), ("0.01%", 1), ("388blocks", 388), ("1block", 1), ("2MiB", 64), ("100 KB", 3)]
)
def test_capacities(text: str, blocks: int) -> None:
    """Shares round up, bytes round down."""
    assert capacity_blocks(text, 1000, 32768) == blocks


@pytest.mark.parametrize("text", ["", "5", "0%", "-3%", "0blocks", "10 potatoes", "1B"])
def test_wrong_capacities(text: str) -> None:
    """What is no capacity, or less than a block, is refused."""
    with pytest.raises(ConfigError):
        capacity_blocks(text, 1000, 32768)


def test_bytes() -> None:
    """Binary and decimal units, any case."""
    assert [parse_bytes(text) for text in ("1", "2KiB", "1.5mb", "3 GiB")] == [1, 2048, 1_500_000, 3 * 2**30]
    with pytest.raises(ConfigError, match="without the bytes of a token"):
        capacity_blocks("1GiB", 10, None)


def test_rates_are_positive() -> None:
    """A rate of nothing is refused."""
    with pytest.raises(ConfigError, match="decode_rate is 0"):
        RateModel(decode_rate=0)
