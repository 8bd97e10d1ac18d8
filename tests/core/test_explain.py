"""Laws of explanations and figures: every hit and miss has a reason, and counters tell the truth."""

from __future__ import annotations

import pytest

from looseleaf import Explanation, UnknownRequest
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
