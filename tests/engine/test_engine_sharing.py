"""In-flight sharing: prompts that arrive together are computed once; whoever waits goes on by itself."""

from __future__ import annotations

import random

import pytest

from looseleaf.core.config import LayerGroup
from looseleaf.engine.config import EngineConfig
from looseleaf.engine.request import FinishReason
from looseleaf.engine.scheduler import MAX_SET_ASIDE
from looseleaf.errors import OutOfBlocks
from looseleaf.testing.engine_kit import EngineKit
from looseleaf.testing.engine_kit import sample_prompt as prompt_of

SMALL_STEPS = EngineConfig(max_step_tokens=8)


def check_tokens(kit, *requests):
    for request in requests:
        assert kit.tokens(request.request_id) == kit.expected(request)


def test_fifty_equal_prompts_are_computed_once():
    """Fifty equal prompts arrive together: one is computed whole, of each other one only the last block."""
    kit = EngineKit(num_blocks=400)
    requests = [kit.add(f"r{i}", prompt_of(30), 4) for i in range(50)]
    kit.run()
    check_tokens(kit, *requests)
    num_decoded = 50 * 3
    assert kit.runner.num_computed_tokens == 30 + 49 * 2 + num_decoded
    assert [share["num_tokens"] for share in kit.observer.named("on_share")] == [28] * 49
    assert sorted(kit.last(f"r{i}").usage.num_cached_tokens for i in range(50)) == [0] + [28] * 49


def test_without_sharing_each_computes_its_own():
    """`share_in_flight=False`: nobody waits, everything that fits is computed in the first step."""
    kit = EngineKit(num_blocks=400, config=EngineConfig(share_in_flight=False))
    requests = [kit.add(f"r{i}", prompt_of(30), 1) for i in range(5)]
    kit.run()
    check_tokens(kit, *requests)
    assert kit.runner.num_computed_tokens == 5 * 30
    assert kit.observer.named("on_share") == []


def test_a_follower_waits_for_what_it_shares_only():
    """It is admitted as soon as the common blocks are committed, while its leader's long prefill still goes on."""
    kit = EngineKit(num_blocks=64, config=EngineConfig(max_step_tokens=10))
    leader = kit.add("leader", prompt_of(100), 2)
    follower = kit.add("follower", prompt_of(100)[:17] + prompt_of(3, seed=5), 2)
    scheduler, sequence = kit.engine._scheduler, kit.engine._sequences["follower"]
    kit.step()  # 10 tokens of the leader, of which two blocks are stored; 16 are shared
    assert scheduler._sharing.must_wait(sequence, scheduler.running)
    kit.step()
    assert not scheduler._sharing.must_wait(sequence, scheduler.running)
    assert not kit.engine._sequences["leader"].is_decoding
    kit.run()
    assert kit.last("follower").usage.num_cached_tokens == 16
    assert [share["num_tokens"] for share in kit.observer.named("on_share")] == [8]
    assert kit.cache.explain("follower").by_rung == {"exact": 8, "in_flight": 8}
    check_tokens(kit, leader, follower)


def test_others_pass_a_follower():
    """Who waits for blocks in flight holds nobody up: a request behind it that shares nothing is admitted before it."""
    kit = EngineKit(num_blocks=64, config=EngineConfig(max_step_tokens=24))
    leader = kit.add("leader", prompt_of(30), 3)
    follower = kit.add("follower", prompt_of(30), 3)
    kit.step()
    other = kit.add("other", prompt_of(9, seed=3), 3)
    kit.step()
    running = [sequence.request_id for sequence in kit.engine._scheduler.running]
    assert running == ["leader", "other"]
    kit.run()
    check_tokens(kit, leader, follower, other)
    assert kit.last("follower").usage.num_cached_tokens == 28


@pytest.mark.parametrize("end", ["abort", "error", "preempt"])
def test_a_leader_that_leaves_half_way(end):
    """The leader leaves after 16 of 40 tokens: a follower goes on from what is committed, the next waits for it."""
    kit = EngineKit(num_blocks=64, config=SMALL_STEPS)
    others = [kit.add("old", prompt_of(3, seed=9), 60)]
    kit.step()
    kit.add("leader", prompt_of(40), 2)
    kit.step(2)
    followers = [kit.add(f"f{i}", prompt_of(40), 2) for i in range(3)]
    kit.step()
    assert kit.engine.num_running == 2
    before = kit.runner.num_computed_tokens
    num_committed = kit.engine._sequences["leader"].held.num_committed_tokens
    if end == "abort":
        kit.engine.abort("leader")
    elif end == "error":
        kit.runner.fail_next()
        others = []
        before += 8  # the failed step's are not counted
    else:
        scheduler = kit.engine._scheduler
        kit.cache.append_many, append_many = lambda *_: out_of_blocks(kit), kit.cache.append_many
        kit.step()
        kit.cache.append_many = append_many
        assert scheduler.running[0].request_id == "old"
        assert [call["cause"] for call in kit.observer.named("on_preempt")] == ["decode"]
    kit.run()
    check_tokens(kit, *followers, *others)
    assert kit.runner.mismatches == []
    if end == "abort":
        num_prefilled = 40 - num_committed // 4 * 4 + 2 * 4  # the rest once; a last block for two of them
        num_decoded = 57 + 3
        assert kit.runner.num_computed_tokens - before <= num_prefilled + num_decoded


def out_of_blocks(kit):
    """Fail once, as a full pool does."""
    del kit.cache.append_many
    raise OutOfBlocks(1, 0, 0, 0)


def test_namespaces_and_private_requests_never_wait():
    """Another namespace, or reuse switched off on either side: nothing is shared, so nobody waits."""
    kit = EngineKit(num_blocks=200)
    requests = [
        kit.add("a", prompt_of(30), 2, namespace="a"),
        kit.add("b", prompt_of(30), 2, namespace="b"),
        kit.add("private", prompt_of(30), 2, namespace="a", reuse=False),
        kit.add("c", prompt_of(30), 2, namespace="c", reuse=False),
        kit.add("d", prompt_of(30), 2, namespace="c"),
    ]
    kit.step()
    assert kit.engine.num_running == 5
    kit.run()
    check_tokens(kit, *requests)
    assert kit.observer.named("on_share") == []


def test_what_is_cached_already_is_not_waited_for():
    """A follower that finds in the cache what it shares with a leader is admitted at once."""
    kit = EngineKit(num_blocks=64, config=EngineConfig(max_step_tokens=40))
    kit.add("before", prompt_of(20), 0)
    kit.run()
    kit.add("leader", prompt_of(20) + prompt_of(12, seed=1), 2)
    kit.add("follower", prompt_of(20) + prompt_of(12, seed=2), 2)
    kit.step()
    assert kit.engine.num_running == 2


def test_a_clear_does_not_leave_anybody_waiting():
    """After a clear the leader's blocks are not stored any more: past what it shares, nobody waits for it."""
    kit = EngineKit(num_blocks=64, config=SMALL_STEPS)
    leader = kit.add("leader", prompt_of(80), 2)
    follower = kit.add("follower", prompt_of(80)[:16] + prompt_of(8, seed=3), 2)
    scheduler, sequence = kit.engine._scheduler, kit.engine._sequences["follower"]
    kit.step()
    assert scheduler._sharing.must_wait(sequence, scheduler.running)
    kit.cache.clear()
    kit.step(2)
    assert not scheduler.running[0].is_decoding
    assert kit.cache.match(follower.prompt_tokens).num_tokens == 0
    assert not scheduler._sharing.must_wait(sequence, scheduler.running)
    kit.run(max_steps=40)
    check_tokens(kit, leader, follower)


@pytest.mark.parametrize("seed", range(6))
def test_nobody_waits_for_ever(seed):
    """Chains of prompts that share with each other, leaders aborted at random: each request is served, in a bounded
    number of steps."""
    rng = random.Random(seed)
    kit = EngineKit(num_blocks=48, config=EngineConfig(max_step_tokens=rng.choice([16, 24, 48])))
    requests = {}
    for step in range(400):
        if step < 120 and rng.random() < 0.2:
            base = prompt_of(30, seed=rng.randint(0, 200))
            for cut in rng.choices((0, 7, 8, 16, 25, 30), k=4):
                name = f"r{len(requests)}"
                requests[name] = kit.add(name, base[:cut] + prompt_of(30 - cut, seed=rng.randint(201, 203)), 3)
        if rng.random() < 0.1 and kit.engine._scheduler.running:
            kit.engine.abort(rng.choice(kit.engine._scheduler.running).request_id)
        kit.step()
    assert not kit.engine.has_work
    for name, request in requests.items():
        if kit.reason(name) is FinishReason.LENGTH:
            check_tokens(kit, request)
    assert kit.observer.named("on_share")


def test_thousands_that_wait_cost_a_step_nothing():
    """Those who wait for another one's prefill are looked at once, a bounded number in each step, and then only when
    they may go on: no step scans all that wait. All of them are served."""
    kit = slow_leader_kit(max_running_requests=4)
    requests = [kit.add(f"r{i}", prompt_of(100), 1) for i in range(200)]
    looks = []
    must_wait = kit.engine._scheduler._sharing.must_wait
    kit.engine._scheduler._sharing.must_wait = lambda *args: looks.append(args[0].request_id) or must_wait(*args)
    most = 0
    for _ in range(3):  # the leader's prefill takes four
        before = len(looks)
        kit.step()
        most = max(most, len(looks) - before)
    assert kit.engine.num_running == 1
    assert len(looks) == len(set(looks)) > MAX_SET_ASIDE
    assert most <= MAX_SET_ASIDE + 1
    kit.run()
    check_tokens(kit, *requests)
    assert kit.runner.num_computed_tokens == 100 + 199 * 4


def slow_leader_kit(**limits):
    """A pool so small that a prefill takes at most 32 tokens of each step, which leaves room for others to come in."""
    groups = (LayerGroup("full"), LayerGroup("window", window_tokens=8))
    return EngineKit(num_blocks=64, groups=groups, config=EngineConfig(max_step_tokens=200, **limits))


def test_followers_that_are_aborted_leave():
    """Aborting the leader and some of those set aside for it leaves the others to be served, in order of arrival."""
    kit = slow_leader_kit()
    requests = [kit.add(f"r{i}", prompt_of(100), 2) for i in range(6)]
    kit.step(2)
    assert kit.engine._scheduler.waiting == []
    for name in ("r2", "r0", "r4"):
        assert kit.engine.abort(name)
    kit.run()
    check_tokens(kit, *(requests[i] for i in (1, 3, 5)))
    assert [kit.reason(f"r{i}").value for i in (0, 2, 4)] == ["abort"] * 3
    assert kit.engine.num_waiting == kit.engine.num_running == 0
