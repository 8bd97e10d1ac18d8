"""Preemption by recompute: who gives way, what comes back, what is counted."""

from __future__ import annotations

import pytest

from looseleaf.engine.config import EngineConfig
from looseleaf.engine.request import FinishReason
from looseleaf.testing.engine_kit import EngineKit
from looseleaf.testing.engine_kit import sample_prompt as prompt_of


def preempt_now(kit, request_id):
    """Take the blocks of a running request as the scheduler does."""
    scheduler = kit.engine._scheduler
    assert scheduler.running[-1].request_id == request_id
    assert len(scheduler.running) > 1
    scheduler._make_room(None)


def test_tight_pool_gives_the_same_tokens():
    """Requests that together need three times the pool preempt each other and still give the cold tokens."""
    kit = EngineKit(num_blocks=16, config=EngineConfig(max_step_tokens=16))
    requests = [kit.add(f"r{i}", prompt_of(5 + 3 * i, seed=i), 24) for i in range(6)]
    kit.run(max_steps=2000)
    assert kit.observer.named("on_preempt")
    for request in requests:
        assert kit.tokens(request.request_id) == kit.expected(request)
        assert kit.last(request.request_id).usage.num_output_tokens == 24


def test_latest_arrival_gives_way_and_keeps_its_place():
    """The victim is the latest arrival; it comes back before those that arrived after it."""
    kit = EngineKit(num_blocks=8)
    for i in range(4):
        kit.add(f"r{i}", prompt_of(7, seed=i), 20)
    finished = []
    while kit.engine.has_work:
        finished += [delta.request_id for delta in kit.step() if delta.finish_reason]
        running = [sequence.request_id for sequence in kit.engine._scheduler.running]
        waiting = [sequence.request_id for sequence in kit.engine._scheduler.waiting]
        assert running + waiting == sorted(running + waiting)
    assert finished == ["r0", "r1", "r2", "r3"]


@pytest.mark.parametrize("at", [1, 7, 15, 29])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.1}])
def test_resumed_output_is_whole(at, params):
    """[R47] [P23] Preempted at output 7, 15, 29 of 30: the deltas together are the whole text, no gap, no repeat."""
    kit = EngineKit(num_blocks=64)
    first = kit.add("first", prompt_of(6, seed=1), 40)
    request = kit.add("a", prompt_of(10), 30, **params)
    while kit.engine._scheduler.running[-1:] == [] or kit.engine._scheduler.running[-1].num_output_tokens < at:
        kit.step()
    preempt_now(kit, "a")
    kit.cache.check_integrity()
    kit.run()
    assert kit.tokens("a") == kit.expected(request)
    assert kit.tokens("first") == kit.expected(first)
    assert kit.text("a") == kit.tokenizer.decode(kit.expected(request))
    assert len(kit.observer.named("on_first_token")) == 2


def test_resume_is_one_prefill_of_prompt_and_output():
    """[P23] Prompt 3, 40 tokens generated, preempted: it resumes as a prefill of 43 tokens, the next position is 43."""
    kit = EngineKit(num_blocks=64, config=EngineConfig(reuse=False))
    kit.add("first", prompt_of(6, seed=1), 60)
    request = kit.add("a", prompt_of(3), 50)
    while len(kit.tokens("a")) < 40:
        kit.step()
    num_generated = kit.engine._scheduler.running[-1].num_output_tokens
    preempt_now(kit, "a")
    batches = []
    execute = kit.runner.execute
    kit.runner.execute = lambda batch: batches.append(batch) or execute(batch)
    kit.step(2)
    row = batches[0].request_ids.index("a")
    assert batches[0].query_starts[row + 1] - batches[0].query_starts[row] == 3 + num_generated
    assert batches[0].num_context_tokens[row] == 0
    last = batches[1].query_starts[batches[1].request_ids.index("a")]
    assert batches[1].positions[last] == 3 + num_generated
    kit.run()
    assert kit.tokens("a") == kit.expected(request)


def test_no_resume_while_it_does_not_fit():
    """[P20] While A holds the blocks that B needs, B is resumed at most once; at most its own tokens are recomputed."""
    kit = EngineKit(num_blocks=8, block_tokens=16, config=EngineConfig(max_step_tokens=32, reuse=False))
    first = kit.add("a", prompt_of(45, seed=1), 60)
    second = kit.add("b", prompt_of(58, seed=2), 30)
    while not kit.observer.named("on_preempt"):
        kit.step()
    before = kit.runner.num_computed_tokens
    num_steps = 0
    while kit.reason("a") is None:
        kit.step()
        num_steps += 1
    assert num_steps > 10
    assert kit.runner.num_computed_tokens - before - num_steps <= 80
    assert len(kit.observer.named("on_preempt")) <= 2
    kit.run()
    for request in (first, second):
        assert kit.tokens(request.request_id) == kit.expected(request)


def test_a_waiting_request_owns_nothing():
    """[P21] A request that matches but can't be admitted holds no block and changes nobody; later it is admitted."""
    kit = EngineKit(num_blocks=6)
    kit.add("seed", prompt_of(5, seed=7), 0)
    kit.run()
    running = kit.add("a", prompt_of(16, seed=1), 3)
    kit.step()
    before = kit.cache.stats()
    request = kit.add("b", prompt_of(4, seed=7) + prompt_of(4, seed=8), 2)
    kit.step()
    after = kit.cache.stats()
    assert (after.num_leases, after.active_blocks, after.cached_blocks) == (
        1,
        before.active_blocks,
        before.cached_blocks,
    )
    assert kit.engine.num_waiting == 1
    kit.run()
    for each in (running, request):
        assert kit.tokens(each.request_id) == kit.expected(each)


def test_preempted_requests_own_nothing():
    """[P24] After a preemption nothing is held for the victim, and its abort while it waits is clean."""
    kit = EngineKit(num_blocks=16)
    kit.add("a", prompt_of(10, seed=1), 20)
    kit.add("b", prompt_of(10, seed=2), 20)
    kit.step(3)
    preempt_now(kit, "b")
    assert kit.cache.stats().num_leases == 1
    assert kit.engine.abort("b")
    kit.step()
    assert kit.reason("b") is FinishReason.ABORT
    kit.run()
    assert kit.cache.stats().active_blocks == 0


def test_recomputed_tokens_are_no_hits():
    """[M121] Unique prompts, each preempted once: the hit rate stays 0 although their own blocks are found again."""
    kit = EngineKit(num_blocks=128)
    for i in range(10):
        kit.add(f"r{i}", prompt_of(20, seed=i), 12)
    kit.step(4)
    for i in reversed(range(1, 10)):
        preempt_now(kit, f"r{i}")
    kit.run()
    stats = kit.cache.stats()
    assert len(kit.observer.named("on_preempt")) == 9
    assert (stats.hit_tokens, stats.query_tokens) == (0, 200)


def test_cached_tokens_stay_those_of_the_first_admission():
    """[M122] Preempted three times: num_cached_tokens is the first admission's, in every delta."""
    kit = EngineKit(num_blocks=64)
    kit.add("warm", prompt_of(20)[:9], 0)
    kit.run()
    kit.add("first", prompt_of(9, seed=1), 60)
    kit.add("a", prompt_of(20), 40)
    for _ in range(3):
        kit.step(5)
        preempt_now(kit, "a")
    kit.run()
    assert {delta.usage.num_cached_tokens for delta in kit.deltas["a"]} == {8}
    ends = kit.observer.named("on_finish")
    assert [end["num_cached_tokens"] for end in ends if end["num_prompt_tokens"] == 20] == [8]


def test_what_happened_is_told():
    """The observer hears of each step, first token, end and preemption with matching figures."""
    kit = EngineKit(num_blocks=12)
    for i in range(3):
        kit.add(f"r{i}", prompt_of(9, seed=i), 14)
    kit.run()
    steps = kit.observer.named("on_step")
    assert len(steps) == kit.runner.num_steps
    assert sum(step["num_scheduled_tokens"] for step in steps) == kit.runner.num_computed_tokens
    assert all(0 <= step["schedule_seconds"] <= step["seconds"] for step in steps)
    assert len(kit.observer.named("on_first_token")) == 3
    ends = kit.observer.named("on_finish")
    assert [end["reason"] for end in ends] == ["length"] * 3
    assert all(end["num_output_tokens"] == 14 and 0 <= end["queue_seconds"] <= end["seconds"] for end in ends)
    assert all(loss["num_lost_tokens"] >= 9 for loss in kit.observer.named("on_preempt"))
