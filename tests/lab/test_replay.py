"""Laws of replay: hits equal a referee's to the token, the optimum bounds them, and waste is that of real packing."""

from __future__ import annotations

import random
from dataclasses import replace

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


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu"])
@pytest.mark.parametrize("block_tokens", [8, 4])
def test_blocks_of_a_trace_can_be_cut(policy: str, block_tokens: int) -> None:
    """A block of the trace may be several blocks of the cache: hits are those of a trace that tells the small ones."""
    trace = conversations(120)
    ratio = 16 // block_tokens
    cut = []
    for request in trace.requests:
        blocks = [block * ratio + part for block in request.blocks for part in range(ratio)]
        num_blocks = -(-request.num_input_tokens // block_tokens)
        cut.append(replace(request, blocks=tuple(blocks[:num_blocks])))
    small = Trace("cut", block_tokens, tuple(cut))
    for capacity in (7 * ratio, 41 * ratio + 1):
        result = replay_instant(trace, capacity, policy, block_tokens=block_tokens)
        assert result.hit_tokens == referee(small, capacity, policy)
        assert result.block_tokens == block_tokens
        assert result == replace(replay_instant(small, capacity, policy), trace=trace.name)


def test_nothing_is_shared_across_namespaces() -> None:
    """A trace's namespaces are those of the cache: blocks of one are never found from another, in both modes."""
    requests = tuple(
        TraceRequest(number * 10.0, 64, 1, tuple(range(4 * place, 4 * place + 4)), namespace=name)
        for number, (place, name) in enumerate([(0, ""), (1, "a"), (0, ""), (1, "a")])
    )
    trace = Trace("tenants", 16, requests)
    same = Trace("same blocks", 16, tuple(replace(request, blocks=(0, 1, 2, 3)) for request in requests))
    for tenants in (trace, same):
        assert replay_instant(tenants, 100).hit_tokens == 128
        assert replay_timed(tenants, CacheConfig(num_pages=8)).hit_tokens == 2 * 48
    alone = Trace("one", 16, tuple(replace(request, namespace="") for request in same.requests))
    assert replay_instant(alone, 100).hit_tokens == 192


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
    for size in (32, 12, 0):
        with pytest.raises(ConfigError, match=f"has blocks of 16 tokens, --block-tokens asks for {size}"):
            replay_instant(conversations(5), 10, block_tokens=size)


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


def test_a_machine_serves_so_many_at_once() -> None:
    """With a limit on running requests the others wait, whatever memory there is; one at a time takes one's memory."""
    trace = Trace("burst", None, tuple(TraceRequest(0.0, 100, 8, ()) for _ in range(6)))
    peaks = [
        replay_timed(trace, CacheConfig(num_pages=8), RateModel(max_running=limit)).peak_held_tokens
        for limit in (1, 2, None)
    ]
    assert peaks == [112, 224, 672]
    with pytest.raises(ConfigError, match="max_running is 0"):
        RateModel(max_running=0)


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
