"""Preemption by recompute: who gives way, what comes back, what is counted."""

from __future__ import annotations

import dataclasses
import random

import pytest

from looseleaf.core.config import LayerGroup
from looseleaf.engine.config import EngineConfig
from looseleaf.engine.plan import StepPlan
from looseleaf.engine.request import FinishReason
from looseleaf.engine.sequence import Sequence
from looseleaf.testing.engine_kit import EngineKit
from looseleaf.testing.engine_kit import sample_prompt as prompt_of

FULL, WINDOW = LayerGroup("full"), LayerGroup("window", window_tokens=12, num_lanes=2)


def preempt_now(kit, request_id):
    """Take the blocks of a running request as the scheduler does when it finds it the cheapest."""
    release_gains = kit.cache.release_gains
    costs = {request_id: 0}
    kit.cache.release_gains = lambda leases: [
        dataclasses.replace(gain, num_blocks=1, num_lost_tokens=costs.get(lease.request_id, 10**9))
        for lease, gain in zip(leases, release_gains(leases), strict=True)
    ]
    victim = kit.engine._scheduler._preempt(StepPlan(), "decode")
    kit.cache.release_gains = release_gains
    assert victim.request_id == request_id


def test_tight_pool_gives_the_same_tokens():
    """Requests that together need three times the pool preempt each other and still give the cold tokens."""
    kit = EngineKit(num_blocks=16, config=EngineConfig(max_step_tokens=16))
    requests = [kit.add(f"r{i}", prompt_of(5 + 3 * i, seed=i), 24) for i in range(6)]
    kit.run(max_steps=2000)
    assert kit.observer.named("on_preempt")
    for request in requests:
        assert kit.tokens(request.request_id) == kit.expected(request)
        assert kit.last(request.request_id).usage.num_output_tokens == 24


def test_queue_and_running_set_stay_in_order_of_arrival():
    """Whoever gives way, the oldest running request never does, and who waits comes back in order of arrival."""
    kit = EngineKit(num_blocks=8)
    for i in range(4):
        kit.add(f"r{i}", prompt_of(7, seed=i), 20)
    finished = []
    while kit.engine.has_work:
        oldest = kit.engine._scheduler.running[:1]
        finished += [delta.request_id for delta in kit.step() if delta.finish_reason]
        for part in (kit.engine._scheduler.running, kit.engine._scheduler.waiting):
            arrivals = [sequence.arrival for sequence in part]
            assert arrivals == sorted(arrivals)
        assert all(sequence.lease is not None or sequence.request_id in finished for sequence in oldest)
    assert finished == ["r0", "r1", "r2", "r3"]


def victims_of(kit):
    """The requests that were preempted, with the tokens that each had and had committed then, as it goes on."""
    found = []
    give_back = Sequence.give_back

    def note(sequence):
        found.append((sequence.request_id, sequence.num_tokens, sequence.held.num_committed_tokens))
        give_back(sequence)

    preempt = kit.engine._scheduler._preempt

    def preempted(plan, cause):
        Sequence.give_back = note
        try:
            return preempt(plan, cause)
        finally:
            Sequence.give_back = give_back

    kit.engine._scheduler._preempt = preempted
    return found


def test_the_cheapest_gives_way():
    """The victim frees most blocks per token to be computed again: one that shares its prompt with another running
    request loses only its last tokens, and its blocks alone come free."""
    kit = EngineKit(num_blocks=24, config=EngineConfig(max_step_tokens=40, share_in_flight=False))
    kit.add("oldest", prompt_of(20, seed=1), 30)
    kit.step()
    kit.add("shared-1", prompt_of(21), 30)
    kit.step()
    kit.add("shared-2", prompt_of(21), 30, temperature=1.0, seed=1)  # holds 5 blocks together with the one above
    kit.add("alone", prompt_of(20, seed=2), 30)
    kit.step(2)
    assert kit.engine.num_running == 4
    found = victims_of(kit)
    while not found:
        kit.step()
    name, _, num_committed = found[0]
    assert name == "shared-2"
    num_lost = num_committed - 20
    told = {"cause": "decode", "num_lost_tokens": num_lost, "num_freed_blocks": -(-num_lost // 4)}
    assert kit.observer.named("on_preempt")[0] == told


def test_who_did_nothing_since_it_came_back_is_spared():
    """[P20] The cheapest has done nothing since its last preemption: the next cheapest gives way instead; if nobody
    has, the cheapest does after all."""
    kit = EngineKit(num_blocks=64)
    for i, num_tokens in enumerate((20, 12, 30)):
        kit.add(f"r{i}", prompt_of(num_tokens, seed=i), 30)
    kit.step(2)
    scheduler = kit.engine._scheduler
    _, cheap, dear = scheduler.running
    cheap.note_preemption()
    assert scheduler._preempt(StepPlan(), "decode") is dear
    kit.step()
    dear.note_preemption()
    cheap.note_preemption()
    assert scheduler._preempt(StepPlan(), "decode") is cheap


def test_nobody_is_admitted_in_a_step_that_preempted():
    """[P20] Even if there seems to be room, who gave way comes back in a later step at the earliest."""
    groups = (LayerGroup("full"), LayerGroup("window", window_tokens=8))  # room is reserved chunk by chunk
    kit = EngineKit(num_blocks=24, groups=groups, config=EngineConfig(reuse=False))
    kit.engine._scheduler._may_fit = lambda *_: True
    requests = [kit.add(f"r{i}", prompt_of(12, seed=i), 24) for i in range(4)]
    while kit.engine.has_work:
        before = {sequence.request_id for sequence in kit.engine._scheduler.running}
        num_preempted = len(kit.observer.named("on_preempt"))
        kit.step()
        if len(kit.observer.named("on_preempt")) > num_preempted:
            assert {sequence.request_id for sequence in kit.engine._scheduler.running} < before
    assert kit.observer.named("on_preempt")
    for request in requests:
        assert kit.tokens(request.request_id) == kit.expected(request)


def test_a_prefill_that_computed_nothing_costs_nothing():
    """A prompt found in the cache and admitted, but not begun, is given up before anybody who has computed."""
    kit = EngineKit(num_blocks=20, config=EngineConfig(max_step_tokens=3))
    kit.add("oldest", prompt_of(8, seed=1), 40)
    kit.add("second", prompt_of(8, seed=2), 40)
    while kit.engine.num_running < 2 or not kit.engine._scheduler.running[1].is_decoding:
        kit.step()
    kit.add("third", prompt_of(17, seed=3), 40)
    kit.engine._scheduler._plan_chunks = lambda plan: None  # it is admitted, and then never gets a turn
    found = victims_of(kit)
    kit.engine._commit = lambda plan: kit.cache.commit_many(plan.decodes.leases)
    while not found:
        kit.engine.step()
    assert found[0][0] == "third"
    assert kit.observer.named("on_preempt")[0]["num_lost_tokens"] == 0


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (WINDOW,)], ids=lambda groups: groups[-1].name)
@pytest.mark.parametrize("seed", range(10))
def test_nobody_is_preempted_twice_without_progress(seed, groups):
    """[P20] Three times what the pool holds, long and short prompts in small chunks: between two preemptions each
    request has got a token or committed more than it had; all finish, in a bounded number of steps."""
    rng = random.Random(seed)
    config = EngineConfig(max_step_tokens=rng.choice([4, 16, 64]), reuse=rng.random() < 0.7)
    num_lanes = sum(group.num_lanes for group in groups)
    kit = EngineKit(num_blocks=rng.choice([12, 24]) * num_lanes, config=config, groups=groups)
    found = victims_of(kit)
    requests = [
        kit.add(f"r{i}", prompt_of(rng.randint(1, 30), seed=rng.randint(0, 4) * (i % 3)), rng.randint(1, 16))
        for i in range(24)
    ]
    num_tokens = sum(len(request.prompt_tokens) + request.params.max_tokens for request in requests)
    kit.run(max_steps=3 * num_tokens)
    before = {}
    for name, known, committed in found:
        if name in before:
            assert known > before[name][0] or committed > before[name][1], f"{name} did nothing in between"
        before[name] = (max(known, before.get(name, (0, 0))[0]), max(committed, before.get(name, (0, 0))[1]))
    for request in requests:
        assert kit.tokens(request.request_id) == kit.expected(request)


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
    lookups = kit.observer.named("on_lookup")
    assert [lookup["num_prompt_tokens"] for lookup in lookups] == [20] * 10
    assert {lookup["num_cached_tokens"] for lookup in lookups} == {0}


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
