"""Reuse seen from the engine: what is found, what is computed, what is counted."""

from __future__ import annotations

import pytest

from looseleaf.engine.config import EngineConfig
from looseleaf.engine.request import FinishReason
from looseleaf.testing.engine_kit import EngineKit
from looseleaf.testing.engine_kit import sample_prompt as prompt_of


@pytest.mark.parametrize("num_shared", [0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 29, 30])
@pytest.mark.parametrize("budget", [3, 8, 64])
def test_warm_tokens_equal_cold_ones(num_shared, budget):
    """At every boundary B-1, B, B+1 a warm request gives the cold tokens, and finds all whole blocks it may."""
    kit = EngineKit(config=EngineConfig(max_step_tokens=budget))
    shared = prompt_of(num_shared)
    if shared:
        kit.add("first", shared, 6)
        kit.run()
    request = kit.add("second", shared + prompt_of(30 - num_shared, seed=9), 6)
    kit.run()
    assert kit.tokens("second") == kit.expected(request)
    assert kit.last("second").usage.num_cached_tokens == min(num_shared, 29) // 4 * 4


def test_aligned_full_hit():
    """[R26] A prompt of three whole blocks sent three times hits the same two; what goes on from it hits all."""
    kit = EngineKit(block_tokens=16, num_blocks=16)
    prompt = prompt_of(48)
    for name in "abc":
        request = kit.add(name, prompt, 3)
        kit.run()
        assert kit.tokens(name) == kit.expected(request)
    assert [kit.last(name).usage.num_cached_tokens for name in "abc"] == [0, 32, 32]
    longer = prompt + prompt_of(16, seed=4)
    for name, cached in (("d", 48), ("e", 48)):
        request = kit.add(name, longer, 3)
        kit.run()
        assert kit.tokens(name) == kit.expected(request)
        assert kit.last(name).usage.num_cached_tokens == cached
    assert kit.cache.match([*longer, 1]).num_tokens == 64


@pytest.mark.parametrize("num_tokens", [1, 8, 31, 32, 33])
def test_one_token_is_always_computed(num_tokens):
    """[R25] However much of a prompt is cached, its last token at least is computed; the tokens are the cold ones."""
    kit = EngineKit(block_tokens=8)
    kit.add("longer", prompt_of(num_tokens) + prompt_of(8, seed=1), 0)
    kit.run()
    before = kit.runner.num_computed_tokens
    request = kit.add("a", prompt_of(num_tokens), 1)
    kit.run()
    num_computed = kit.runner.num_computed_tokens - before
    assert num_computed == num_tokens - (num_tokens - 1) // 8 * 8 >= 1
    assert kit.tokens("a") == kit.expected(request)


@pytest.mark.parametrize("budget", [8, 4096])
@pytest.mark.parametrize("num_hit", [0, 12, 28])
@pytest.mark.parametrize("mixed", [False, True])
def test_hits_with_and_without_chunks(budget, num_hit, mixed):
    """[R28] Chunked or not, hit nothing, a part or all but the last block, alone or mixed: the cold tokens."""
    kit = EngineKit(num_blocks=64, config=EngineConfig(max_step_tokens=budget))
    prompt = prompt_of(30)
    if num_hit:
        kit.add("before", prompt[: num_hit + 1], 0)
        kit.run()
    others = [kit.add(f"other{i}", prompt_of(11 + i, seed=i + 3), 9) for i in range(3)] if mixed else []
    kit.step(2)
    request = kit.add("a", prompt, 7)
    kit.run()
    assert kit.last("a").usage.num_cached_tokens == num_hit
    for each in [request, *others]:
        assert kit.tokens(each.request_id) == kit.expected(each)


@pytest.mark.parametrize(("num_cached", "num_computed"), [(4, 26), (12, 18), (24, 6)])
def test_chunks_meet_a_cached_prefix(num_cached, num_computed):
    """[R29] Cached prefix shorter than, inside, beyond the first chunk: just the rest is computed, no token twice."""
    kit = EngineKit(config=EngineConfig(max_step_tokens=8))
    prompt = prompt_of(30)
    kit.add("before", prompt[:num_cached], 0)
    kit.run()
    before = kit.runner.num_computed_tokens
    request = kit.add("a", prompt, 1)
    kit.run()
    assert kit.runner.num_computed_tokens - before == num_computed
    assert kit.tokens("a") == kit.expected(request)  # the runner refuses a chunk of 0 tokens


def test_hits_are_those_of_the_admission():
    """[R34] What is evicted while a request waits is not counted as its hit: it is looked up when it is admitted."""
    kit = EngineKit(num_blocks=10)
    prompt = prompt_of(13)
    kit.add("before", prompt[:12], 0)
    kit.run()
    running = kit.add("running", prompt_of(20, seed=2), 8)  # 6 of the 7 free blocks
    kit.step()
    waiting = kit.add("waiting", prompt, 4)
    assert kit.cache.match(prompt).num_tokens == 12
    hog = kit.cache.lease(prompt_of(4, seed=8), request_id="hog")
    hog.reserve(12)  # takes 3 blocks, of which 2 or more are evicted ones
    num_left = kit.cache.match(prompt).num_tokens
    assert num_left < 12
    hog.release()
    kit.run()
    assert kit.last("waiting").usage.num_cached_tokens <= num_left
    for request in (running, waiting):
        assert kit.tokens(request.request_id) == kit.expected(request)


def test_waiting_does_not_count_look_ups():
    """[M125] [M130] A request counts as one look-up however long it waits; decode steps do not count at all."""
    kit = EngineKit(num_blocks=8)
    kit.add("a", prompt_of(20), 10)
    kit.step()
    kit.add("b", prompt_of(20, seed=1), 10)
    kit.step(4)
    assert kit.cache.stats().query_tokens == 20
    kit.run()
    stats = kit.cache.stats()
    assert (stats.query_tokens, stats.hit_tokens) == (40, 0)


def test_hit_rate_survives_decoding():
    """[M125] After a warm request, 100 decode steps leave the hit rate as it is."""
    kit = EngineKit(num_blocks=64)
    for name in "ab":
        kit.add(name, prompt_of(20), 1)
        kit.run()
    rate = kit.cache.stats().hit_rate
    assert rate == pytest.approx(16 / 40)
    kit.add("c", prompt_of(20, seed=3), 100, reuse=False)
    kit.run()
    assert kit.cache.stats().hit_rate == rate


def test_waiting_does_not_touch_the_eviction_order():
    """A head of the queue that can't be admitted does not make what it would match look used."""
    kit = EngineKit(num_blocks=12)
    old, young = prompt_of(5, seed=1), prompt_of(5, seed=2)
    for name, prompt in (("old", old), ("young", young)):
        kit.add(name, prompt, 0)
        kit.run()
    kit.add("running", prompt_of(37, seed=3), 4)  # 10 blocks: all but the two cached ones
    kit.step()
    kit.add("waiting", old + prompt_of(15, seed=4), 1)  # 6 blocks wanted, one of them matched
    kit.step(2)
    assert kit.engine.num_waiting == 1
    with kit.cache.lease([1], request_id="hog") as hog:
        hog.reserve(1)
        assert kit.cache.match(old).num_tokens == 0
        assert kit.cache.match(young).num_tokens == 4
    kit.run()
    assert kit.reason("waiting") is FinishReason.LENGTH


def test_removed_before_commit_leaves_nothing():
    """[P7] A request that ends before its prompt is computed leaves no block and no hit for an equal one."""
    kit = EngineKit(num_blocks=8)
    kit.add("a", prompt_of(12), 4)
    kit.runner.fail_next()
    kit.step()
    assert kit.reason("a") is FinishReason.ERROR
    assert kit.cache.stats().free_blocks == 8
    request = kit.add("b", prompt_of(12), 4)
    kit.run()
    assert kit.last("b").usage.num_cached_tokens == 0
    assert kit.tokens("b") == kit.expected(request)


def test_late_output_of_an_aborted_request_is_dropped():
    """[P24] What the model gives for a request aborted meanwhile is neither committed nor given out."""
    kit = EngineKit(num_blocks=8)
    kit.runner.script("a", 12, [65, 66, 67, 68])
    kit.add("a", prompt_of(12), 4)
    other = kit.add("b", prompt_of(6, seed=1), 4)
    execute = kit.runner.execute

    def abort_meanwhile(batch):
        output = execute(batch)
        assert kit.engine.abort("a")
        assert not kit.engine.abort("a")
        kit.runner.execute = execute
        return output

    kit.runner.execute = abort_meanwhile
    kit.step()
    assert kit.tokens("a") == []
    kit.step()
    assert kit.reason("a") is FinishReason.ABORT
    assert kit.cache.match(prompt_of(12)).num_tokens == 0
    kit.run()
    assert kit.tokens("b") == kit.expected(other)


@pytest.mark.parametrize("end", ["prefill", "last-token", "failure"])
def test_abort_wins_over_an_end_in_the_same_step(end):
    """[S109] An abort that was accepted is how the request ends, once, whatever the running step brings."""
    kit = EngineKit(num_blocks=8)
    kit.add("a", prompt_of(12), 0 if end == "prefill" else 1)
    execute = kit.runner.execute

    def abort_meanwhile(batch):
        assert kit.engine.abort("a")
        if end == "failure":
            raise RuntimeError("boom")
        return execute(batch)

    kit.runner.execute = abort_meanwhile
    assert kit.step() == []
    kit.step()
    assert [delta.finish_reason for delta in kit.deltas["a"]] == [FinishReason.ABORT]
    assert not kit.engine.has_work
    assert not kit.engine.abort("a")


def test_failed_step_hits_only_its_requests():
    """A failing step ends its requests with the error; others go on, and nothing of it was committed."""
    kit = EngineKit(num_blocks=32, config=EngineConfig(max_step_tokens=8))
    kit.add("a", prompt_of(20), 4)
    waiting = kit.add("b", prompt_of(9, seed=1), 4)
    kit.step()
    assert kit.engine.num_running == 1
    kit.runner.fail_next(ValueError("boom"))
    kit.step()
    last = kit.last("a")
    assert last.finish_reason is FinishReason.ERROR
    assert "ValueError: boom" in str(last.error)
    assert isinstance(last.error.__cause__, ValueError)
    assert kit.cache.match([*prompt_of(20), 1]).num_tokens == 8  # the first step's
    kit.run()
    assert kit.tokens("b") == kit.expected(waiting)


@pytest.mark.parametrize("bad", ["short", "negative", "large"])
def test_bad_output_of_a_model_is_an_error(bad):
    """A model that gives the wrong number of tokens, or none of its vocabulary, fails the step and not the engine."""
    kit = EngineKit()
    execute = kit.runner.execute

    def broken(batch):
        output = execute(batch)
        tokens = {"short": output.token_ids[:0], "negative": output.token_ids * 0 - 1}
        return type(output)(tokens.get(bad, output.token_ids * 0 + 260), output.logprobs)

    kit.runner.execute = broken
    kit.add("a", prompt_of(5), 4)
    kit.run()
    assert kit.reason("a") is FinishReason.ERROR
    kit.runner.execute = execute
    request = kit.add("b", prompt_of(5), 4)
    kit.run()
    assert kit.tokens("b") == kit.expected(request)


def test_clear_while_requests_run():
    """A clear in the middle forgets for later requests; running ones are not disturbed."""
    kit = EngineKit()
    request = kit.add("a", prompt_of(13), 12)
    kit.step(4)
    kit.cache.clear()
    kit.run()
    assert kit.tokens("a") == kit.expected(request)
    kit.add("b", prompt_of(13), 1)
    kit.run()
    assert kit.last("b").usage.num_cached_tokens == 0
