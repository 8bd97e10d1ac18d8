"""Laws of explanations and figures: every hit and miss has a reason, and counters tell the truth."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest

from looseleaf import CacheConfig, CacheManager, Explanation, LayerGroup, RequestError, UnknownRequest
from looseleaf.core.namespaces import NamespaceLayer
from looseleaf.testing.clock import ManualClock
from tests.core.conftest import MakeCache, run, start, tokens


def why(cache: object, prompt: list[int], **how: object) -> Explanation:
    run(cache, prompt, "asked", **how)  # type: ignore[arg-type]
    return cache.explain(request_id="asked")  # type: ignore[attr-defined, no-any-return]


def test_reasons(make: MakeCache, clock: ManualClock) -> None:
    """Each kind of hit and miss is told apart, with numbers."""
    cache = make(16, pin_quota=1.0)
    prompt = tokens(1, 13)
    found = why(cache, prompt)
    assert (found.reason, found.num_prompt_tokens, found.num_cached_tokens, found.first_missed_token) == (
        "never_seen",
        13,
        0,
        0,
    )
    found = why(cache, prompt)
    assert (found.reason, found.num_cached_tokens, found.first_missed_token) == ("full_hit", 12, None)
    found = why(cache, prompt[:10] + tokens(3, 4))
    assert (found.reason, found.num_cached_tokens, found.first_missed_token) == ("diverged", 8, 10)
    assert "differs from what is stored at token 10" in found.message
    found = why(cache, tokens(1, 4))
    assert (found.reason, found.num_cached_tokens) == ("below_one_block", 0)
    found = why(cache, prompt, namespace="tenant-a")
    assert (found.reason, found.first_missed_token) == ("other_namespace", 0)
    found = why(cache, prompt, reuse=False)
    assert (found.reason, found.num_cached_tokens) == ("skipped", 0)
    found = why(cache, prompt[:12] + tokens(1, 20)[12:])
    assert (found.reason, found.num_cached_tokens, found.first_missed_token) == ("never_seen", 12, 12)


def test_another_namespace_outweighs_a_common_first_token(make: MakeCache) -> None:
    """A prompt that is stored elsewhere is told so, also where all prompts begin with the same token."""
    cache = make(16)
    run(cache, [1, *tokens(5, 8)], namespace="a")
    run(cache, [1, *tokens(8, 8)], namespace="b")
    assert why(cache, [1, *tokens(5, 8)], namespace="b").reason == "other_namespace"


def test_evicted_and_cleared_are_remembered(make: MakeCache, clock: ManualClock) -> None:
    """A miss on what was there once says when it went, and why."""
    cache = make(8)
    prompt = tokens(1, 17)
    run(cache, prompt)
    run(cache, tokens(2, 25))
    clock.advance(42)
    found = why(cache, prompt)
    assert (found.reason, found.first_missed_token) == ("evicted", 4)
    assert "the block at token 4 was evicted 42.0 s ago" in found.message
    cache.clear()
    found = why(cache, prompt)
    assert (found.reason, found.first_missed_token) == ("cleared", 0)
    assert why(cache, prompt).reason == "full_hit"


def test_explanations_of_live_and_unknown_requests(make: MakeCache) -> None:
    """A live request can be explained; an unknown one is an error."""
    cache = make(8)
    with cache.lease(tokens(1, 9), "live") as lease:
        assert cache.explain("live") == lease.explanation
    with pytest.raises(UnknownRequest):
        cache.explain("nobody")


def test_hit_rate_counts_each_request_once(make: MakeCache) -> None:
    """[M121, M122, M125, M130] Look-ups count once, with the whole prompt; match, fork, decode steps, bypassing and
    resumed requests don't."""
    cache = make(32, block_tokens=16)
    prompt = tokens(1, 32)
    run(cache, prompt, reuse=False)
    assert cache.stats().query_tokens == 0
    run(cache, prompt)
    cache.match(prompt)
    with start(cache, prompt) as lease:
        for _ in range(100):
            cache.append_many([lease], [1])
            cache.commit_many([lease])
        lease.fork("child").release()
        stats = cache.stats()
        assert (stats.num_lookups, stats.query_tokens, stats.hit_tokens, stats.hit_rate) == (2, 64, 16, 0.25)
    run(cache, prompt, count_lookup=False)
    assert cache.stats().hit_tokens == 16


@pytest.mark.parametrize(("block_tokens", "hits", "below"), [(256, 0, 240), (16, 240, 0)])
def test_shared_but_below_a_block(make: MakeCache, block_tokens: int, hits: int, below: int) -> None:
    """[M131] A shared part shorter than a block shows in a figure of its own, not as "nothing shared"."""
    cache = make(64, block_tokens=block_tokens)
    run(cache, tokens(1, 240) + tokens(2, 300))
    run(cache, tokens(1, 240) + tokens(3, 300))
    stats = cache.stats()
    assert (stats.hit_tokens, stats.below_block_tokens) == (hits, below)


def test_a_resumed_request_keeps_its_reason(make: MakeCache) -> None:
    """[M122] A preempted request that comes back is explained by its first look-up, not by what it left itself."""
    cache = make(32)
    prompt = tokens(1, 17)
    run(cache, prompt, "asked")
    with start(cache, [*prompt, 5, 6], "asked", count_lookup=False) as lease:
        assert lease.num_cached_tokens == 16
        assert cache.explain("asked").reason == "never_seen"
    assert cache.explain("asked").num_cached_tokens == 0


def test_misspelt_template_is_located(make: MakeCache) -> None:
    """[R43] An old turn that is rendered differently misses from there on, and the explanation names the position."""
    cache = make(64)
    turn = tokens(1, 20)
    run(cache, [*turn, 77, *tokens(2, 10)])
    found = why(cache, turn + tokens(2, 10) + tokens(3, 9))
    assert (found.reason, found.num_cached_tokens, found.first_missed_token) == ("diverged", 20, 20)
    assert found.stored_tokens == (77, *tokens(2, 7))
    assert found.asked_tokens == tuple(tokens(2, 8))


def test_both_sides_of_a_divergence(make: MakeCache) -> None:
    """Of what differs up to 8 tokens are told on each side, from where it differs on: of what is nearest, the newest
    of those that are alike; nothing where nothing differs."""
    cache = make(64)
    head = tokens(1, 8)
    run(cache, [*head, 5, 6, 7, *tokens(2, 5)])
    run(cache, [*head, 5, 6, 8, *tokens(3, 5)])
    run(cache, [*head, *tokens(4, 8)])
    found = why(cache, [*head, 5, 6, 9, 10, 11])
    assert (found.first_missed_token, found.num_shared_tokens) == (10, 10)
    assert (found.stored_tokens, found.asked_tokens) == ((8, *tokens(3, 5)), (9, 10, 11))
    found = why(cache, [*head, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert (found.first_missed_token, found.stored_tokens) == (8, (5, 6, 9, 10))
    assert found.asked_tokens == (1, 2, 3, 4, 5, 6, 7, 8)
    found = why(cache, [*head[:3], 1, 2])
    assert (found.reason, found.stored_tokens[:2], found.asked_tokens) == ("below_one_block", tuple(head[3:5]), (1, 2))
    for prompt in (head, tokens(9, 9), [*head, 5, 6, 7, *tokens(2, 5), *tokens(9, 9)]):
        found = why(cache, prompt)
        assert (found.stored_tokens, found.asked_tokens) == ((), ())


def test_nothing_of_another_namespace_is_told(make: MakeCache) -> None:
    """What another namespace stores is never told, also where its beginning is shared."""
    cache = make(64)
    layers = [NamespaceLayer("", 8)]
    run(cache, [*tokens(1, 8), *tokens(2, 8)], namespace="a", layers=layers)
    found = why(cache, [*tokens(1, 8), *tokens(2, 6), 1, 2, 3], namespace="b", layers=layers)
    assert (found.reason, found.num_shared_tokens, found.stored_tokens) == ("other_namespace", 8, ())
    found = why(cache, [*tokens(1, 8), *tokens(2, 2), 1, 2, 3], namespace="c", layers=layers)
    assert (found.reason, found.num_shared_tokens, found.stored_tokens) == ("never_seen", 8, ())


def test_the_pressure_of_an_eviction(make: MakeCache, clock: ManualClock) -> None:
    """An eviction is told with its age at the look-up, the policy that chose it and the blocks evicted since; later
    questions get the same answer."""
    cache = make(16, policy="fifo")
    prompt = tokens(1, 17)
    run(cache, prompt)
    for number in (2, 3, 4):
        run(cache, tokens(number, 24))
    clock.advance(5)
    found = why(cache, prompt)
    clock.advance(5)
    assert cache.explain("asked") == found
    assert (found.reason, found.policy, found.evicted_seconds_ago, found.num_evicted_tokens) == (
        "evicted",
        "fifo",
        5,
        16,
    )
    assert found.pressure == 2  # 16 blocks, 4 + 6 + 6 + 6 stored: its own 4 went, then 2
    assert (
        found.message
        == "0 of 17 tokens reused: the block at token 0 was evicted 5.0 s ago by policy 'fifo', and 2 blocks since."
    )
    found = why(cache, tokens(9, 9))
    assert (found.policy, found.pressure, found.evicted_seconds_ago) == ("", None, None)


def test_sessions_and_rungs_are_told(make: MakeCache) -> None:
    """An explanation names the request's session and the rung of what was found, of forks and skipped ones too."""
    cache = make(32)
    run(cache, tokens(1, 9), session="s")
    with cache.lease(tokens(1, 12), session="s") as lease:
        assert lease.session == "s"
        assert lease.explanation.by_rung == {"exact": 8}
        child = lease.fork()
        assert (child.explanation.session, child.explanation.by_rung) == ("s", {"exact": 8})
        assert "from which it was forked" in child.explanation.message
        child.release()
    found = why(cache, tokens(1, 9), session="s", reuse=False)
    assert (found.session, found.by_rung) == ("s", {"exact": 0})
    assert why(cache, tokens(1, 9)).session is None


def test_a_window_is_named(make: MakeCache) -> None:
    """A look-up that a window has cut names the group and what is known beyond."""
    cache = make(64, groups=(LayerGroup("full"), LayerGroup("window", window_tokens=8, name="narrow")))
    run(cache, tokens(1, 32))
    with cache.lease([1], reuse=False) as lease:
        lease.reserve((cache.stats().free_blocks + 4) // 2 * 4)
    found = why(cache, [*tokens(1, 20), *tokens(2, 9)])
    assert (found.reason, found.num_cached_tokens, found.num_shared_tokens, found.num_evicted_tokens) == (
        "window_cut",
        8,
        20,
        0,
    )
    assert "20 tokens of it are stored, but group 'narrow' has let go of what lies before token 20" in found.message


# --- what is stored ------------------------------------------------------------------------------------------------


def test_inspect(make: MakeCache, clock: ManualClock) -> None:
    """A prompt is told run by run: uses, age, holders, pins, the queue in which it waits, and the policy's figures."""
    cache = make(32, policy="lfu", pin_quota=1.0)
    system = tokens(1, 8)
    run(cache, [*system, *tokens(2, 8)], "r", session="s")
    clock.advance(3)
    lease = start(cache, [*system, *tokens(3, 4)])
    cache.pin(system)
    upper, lower = cache.inspect([*system, *tokens(2, 5)])
    assert (upper.first_token, upper.num_tokens, upper.num_uses, upper.num_holders) == (0, 8, 2, 1)
    assert (upper.last_used_seconds_ago, upper.num_pins, upper.queue, upper.session) == (0, 1, "", None)
    assert (lower.first_token, lower.num_tokens, lower.num_uses, lower.num_holders) == (8, 4, 1, 0)
    assert (lower.last_used_seconds_ago, lower.num_pins, lower.queue, lower.session) == (3, 0, "unpinned", "s")
    assert lower.policy == cache._store.victims.policy.describe(next(iter(cache._store.victims.offered("unpinned"))), 3)
    assert lower.policy
    lease.release()
    cache.end_session("s")
    assert [part.queue for part in cache.inspect(request_id="r")] == ["", "expendable"]
    assert cache.inspect(request_id="r")[1].num_tokens == 8


def test_inspect_what_is_not_there(make: MakeCache) -> None:
    """What is not stored has no parts, an unknown namespace comes into being by no question, a wrong one is refused."""
    cache = make(16)
    assert cache.inspect(tokens(1, 9), namespace="a") == []
    assert cache.stats().num_namespaces == 0
    run(cache, tokens(1, 9))
    assert cache.inspect([1, *tokens(1, 9)]) == []
    with pytest.raises(UnknownRequest):
        cache.inspect(request_id="nobody")
    for wrong in ({}, {"prompt": [1], "request_id": "r"}):
        with pytest.raises(RequestError, match="one of both"):
            cache.inspect(**wrong)  # type: ignore[arg-type]


def test_inspect_changes_nothing(make: MakeCache) -> None:
    """A question is no use: the order of eviction stays."""
    cache = make(4)
    run(cache, tokens(1, 8))
    run(cache, tokens(2, 8))
    stats = cache.stats()
    assert len(cache.inspect(tokens(1, 8))) == 1
    assert cache.stats() == stats
    run(cache, tokens(3, 8))
    assert [cache.match([*tokens(number, 8), 1]).num_tokens for number in (1, 2, 3)] == [0, 8, 8]


def test_ten_thousand_explanations_take_little_memory() -> None:
    """What is kept of a finished request, besides its tokens, stays below a KB, also for the longest explanation."""
    cache = CacheManager(CacheConfig(num_pages=64, page_tokens=4, block_tokens=4, num_known_requests=1000))
    head = tokens(1, 8)
    run(cache, [*head, *tokens(2, 8)])

    def ask(number: int) -> None:
        cache.lease([*head, *tokens(3 + number, 8)], f"request-{number:04d}", session="session").release()

    tracemalloc.start()
    for number in range(1000):
        ask(number)
    full = tracemalloc.get_traced_memory()[0]
    for number in range(1000, 3000):
        ask(number)
    more = tracemalloc.get_traced_memory()[0] - full
    tracemalloc.stop()
    assert cache.explain("request-2999").reason == "diverged"
    assert full / 1000 < 1024, full / 1000
    assert more < 150_000  # nothing is kept of the others


def test_the_nearest_continuation_whatever_came_and_went(make: MakeCache) -> None:
    """Which stored continuations begin like a block is the same as a look at each of the newest 32 would find, while
    others are stored behind the same run and evicted."""
    rng = random.Random(1)
    cache = make(120)
    tree, num_found = cache._store.tree, 0
    for _ in range(1000):
        prompt = [rng.choice((1, 2))] * 8 + [rng.randrange(60) for _ in range(5)]
        with start(cache, prompt) as lease:
            assert lease.num_committed_tokens == len(prompt)
        for node in (*tree.nodes.values(), *tree.roots.values())[-3:]:
            token = np.int32(rng.randrange(60)).tobytes()
            newest = list(reversed(node.children))[:32]
            expected = [block for block in newest if block.startswith(token)]
            assert tree.newest_alike(node, "", token) == expected
            num_found += len(expected)
    assert num_found > 20
