"""Pins beside running requests: nobody stalls, nothing hangs, and what fails leaves nothing pinned or held."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from looseleaf.core.config import LayerGroup
from looseleaf.engine.config import EngineConfig
from looseleaf.engine.request import FinishReason
from looseleaf.errors import OutOfBlocks, PinQuotaExceeded, ResizeRefused, UnknownPin, UnknownRequest
from looseleaf.testing.clock import ManualClock
from looseleaf.testing.engine_kit import EngineKit
from looseleaf.testing.engine_kit import sample_prompt as prompt_of

FULL = LayerGroup("full")
WINDOW = LayerGroup("window", window_tokens=16, num_lanes=2)
MODELS = {"full": (FULL,), "full+window": (FULL, WINDOW), "window": (WINDOW,)}
NUM_ROWS = 120


def num_lanes(groups):
    return sum(group.num_lanes for group in groups)


def kit_with_pins(groups, share, **settings):
    """A pool of 120 rows of blocks of 4 tokens, with hard pins on as many documents as make that share of it."""
    config = EngineConfig(max_running_requests=8, max_step_tokens=64)
    kit = EngineKit(NUM_ROWS * num_lanes(groups), 4, groups=groups, config=config, **settings)
    number = 0
    while number < 500 and kit.cache.stats().hard_pinned_blocks < share * kit.cache.plan.num_blocks:
        tokens = prompt_of(25, seed=1000 + number)
        kit.add(f"doc{number}", tokens, 0)
        kit.run()
        kit.cache.pin(tokens, partial=True, owner="docs")
        number += 1
    return kit


def free_rows(kit, groups):
    stats = kit.cache.stats()
    return (stats.num_blocks - stats.hard_pinned_blocks) // num_lanes(groups)


def run_and_count_waits(kit):
    """Steps until nothing is left; the most steps in a row that a request held nothing."""
    waits, longest = Counter(), 0
    while kit.engine.has_work:
        kit.step()
        waiting = [name for name, one in kit.engine._sequences.items() if one.lease is None]
        waits = Counter({name: waits[name] + 1 for name in waiting})
        longest = max(longest, *waits.values(), 0)
        assert kit.runner.num_steps < 5000
    return longest


def whole(kit):
    """Nothing is held; all is free or cached."""
    stats = kit.cache.stats()
    assert (stats.active_blocks, stats.num_leases) == (0, 0)
    assert stats.free_blocks + stats.cached_blocks == stats.num_blocks


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.94])
def test_nobody_stalls_beside_pins(model, share):
    """[P67] With 30, 60 and 95% of the pool under hard pins, requests that fit into the rest all finish with their cold
    tokens, each after a bounded wait, and no pin loses a token."""
    groups, rng = MODELS[model], random.Random(1)
    kit = kit_with_pins(groups, share)
    held = {pin.id: pin.num_pinned_tokens for pin in kit.cache.pins()}
    rows = free_rows(kit, groups)
    longest = 4 * (rows - 1 if model == "full" else rows * 2 // 3)
    requests = {}
    for number in range(30):
        num_prompt = rng.randint(1, max(1, longest - 6))
        head = prompt_of(24, seed=1000)[: rng.choice((0, 24))]
        prompt = (head + prompt_of(num_prompt, seed=number))[:num_prompt]
        requests[f"r{number}"] = kit.add(f"r{number}", prompt, rng.randint(1, min(6, longest - num_prompt)))
    longest_wait = run_and_count_waits(kit)
    for name, request in requests.items():
        assert kit.reason(name) is FinishReason.LENGTH, kit.last(name).error
        assert kit.tokens(name) == kit.expected(request)
    assert longest_wait < 30 * 8  # all others first, a prefill and its output each
    assert {pin.id: pin.num_pinned_tokens for pin in kit.cache.pins()} == held
    assert kit.runner.mismatches == []
    whole(kit)


@pytest.mark.parametrize("model", MODELS)
def test_what_never_fits_is_a_clear_error(model):
    """[P67] With the whole pool pinned a new request ends with the numbers and the hint, behind it nobody hangs, and
    after an unpin the same request is served."""
    groups = MODELS[model]
    kit = kit_with_pins(groups, 0.9)
    for number in range(30):  # what is left goes block by block
        kit.cache.pin(prompt_of(5, seed=3000 + number), owner="docs", partial=True)
        kit.add(f"rest{number}", prompt_of(5, seed=3000 + number), 0)
    kit.run()
    room = kit.cache.room()
    assert room.num_free_blocks + room.num_evictable_blocks < 5 * num_lanes(groups)
    kit.add("new", prompt_of(20, seed=1), 2)
    kit.add("next", prompt_of(8, seed=2), 2)
    run_and_count_waits(kit)
    error = kit.last("new").error
    assert isinstance(error, OutOfBlocks)
    assert error.pinned == kit.cache.stats().hard_pinned_blocks
    assert "pinned" in str(error)
    assert "release pins" in str(error)
    whole(kit)
    kit.cache.unpin_all(owner="docs")
    request = kit.add("again", prompt_of(20, seed=1), 2)
    kit.run()
    assert kit.tokens("again") == kit.expected(request)


def test_half_of_twenty_blocks():
    """[P67] Budget 50% of 20 blocks: 8 are pinned, 6 more are refused with the numbers or granted in part (2), and
    requests that need 12 blocks together progress in either case; one that needs 12 alone fits beside the 8."""
    kit = EngineKit(20, 4, pin_quota=0.5)
    for name, num_blocks in (("eight", 8), ("six", 6)):
        kit.add(name, prompt_of(4 * num_blocks, seed=num_blocks), 0)
        kit.run()
    kit.cache.pin(request_id="eight")
    with pytest.raises(PinQuotaExceeded) as caught:
        kit.cache.pin(request_id="six")
    assert (caught.value.needed_blocks, caught.value.available_blocks) == (6, 2)
    request = kit.add("twelve", prompt_of(44, seed=3), 4)
    kit.run()
    assert kit.tokens("twelve") == kit.expected(request)
    kit.add("six", prompt_of(24, seed=6), 0)
    kit.run()
    part = kit.cache.pin(request_id="six", partial=True)
    assert (part.num_pinned_tokens, part.num_blocks, part.is_limited) == (8, 2, True)
    requests = {f"r{n}": kit.add(f"r{n}", prompt_of(12, seed=10 + n), 4) for n in range(3)}
    kit.run()
    assert {name: kit.tokens(name) for name in requests} == {n: kit.expected(r) for n, r in requests.items()}


@pytest.mark.parametrize("model", ["window", "full+window"])
def test_a_prefill_alone_takes_smaller_chunks(model):
    """[P67] A prompt whose layers keep windows only fits into what pins leave, chunk by chunk: it takes shorter chunks,
    not an error."""
    groups = MODELS[model]
    kit = kit_with_pins(groups, 0.85)
    num_tokens = 300 if model == "window" else 40
    request = kit.add("long", prompt_of(num_tokens, seed=1), 3)
    kit.run()
    assert kit.reason("long") is FinishReason.LENGTH, kit.last("long").error
    assert kit.tokens("long") == kit.expected(request)
    whole(kit)


def test_pins_made_in_the_middle_of_a_prefill():
    """[P67] Pins that take the pool between two chunks make the next ones shorter; when nothing is left, the prefill
    ends with the numbers, and its memory comes back."""
    kit = kit_with_pins((WINDOW,), 0.3)
    kit.add("long", prompt_of(400, seed=1), 3)
    kit.step()
    start = kit.engine._scheduler.running[0].held.num_committed_tokens
    assert 0 < start < 400
    for number in range(2000, 2060):
        tokens = prompt_of(17, seed=number)
        lease = kit.cache.lease(tokens)
        if lease.try_reserve(17):
            lease.commit(17)
            kit.cache.pin(tokens, owner="late", partial=True)
        lease.release()
    room = kit.cache.room()
    assert room.num_free_blocks + room.num_evictable_blocks < 20
    run_and_count_waits(kit)
    assert kit.reason("long") in (FinishReason.LENGTH, FinishReason.ERROR)
    whole(kit)


@pytest.mark.parametrize("level", ["hard", "soft"])
def test_a_failed_step_leaves_nothing_pinned(level):
    """[P65] A model that fails in the second of three steps: the request's blocks come back, a pin that waits for its
    tokens holds only what was written, and after its unpin the next request has the whole pool."""
    kit = EngineKit(16, 4, config=EngineConfig(max_step_tokens=16, max_running_requests=4))
    prompt = prompt_of(40)
    pin = kit.cache.pin(prompt, level=level)
    kit.add("fails", prompt, 4)
    kit.step()
    kit.runner.fail_next()
    kit.step()
    assert kit.reason("fails") is FinishReason.ERROR
    whole(kit)
    assert kit.cache.pins()[0].num_pinned_tokens == 16  # the first step's
    with pytest.raises(UnknownRequest):
        kit.cache.pin(request_id="never")
    kit.cache.pin(request_id="fails", owner="late")
    kit.cache.unpin(request_id="fails")
    kit.cache.unpin(pin.id)
    assert kit.cache.stats().pinned_blocks == 0
    request = kit.add("next", prompt_of(60, seed=2), 4)  # all 16 blocks
    kit.run()
    assert kit.tokens("next") == kit.expected(request)
    whole(kit)


@pytest.mark.parametrize("stage", ["waiting", "prefill", "decoding", "finished"])
def test_pins_on_an_aborted_request(stage):
    """[P58] A pin by the id of a request that is aborted, at whatever stage, holds what was committed, no more, and an
    unpin gives it all back."""
    kit = EngineKit(32, 4, config=EngineConfig(max_step_tokens=16, max_running_requests=1))
    if stage == "waiting":
        kit.add("other", prompt_of(8, seed=9), 6)
    kit.add("r", prompt_of(40), 6)
    kit.step({"waiting": 1, "prefill": 2, "decoding": 4, "finished": 30}[stage])
    if stage == "waiting":
        with pytest.raises(UnknownRequest):
            kit.cache.pin(request_id="r")
        kit.engine.abort("r")
        kit.run()
        with pytest.raises(UnknownRequest):
            kit.cache.pin(request_id="r")
        return
    pins = [kit.cache.pin(request_id="r", level="hard"), kit.cache.pin(request_id="r", level="soft")]
    held = kit.cache.stats().pinned_blocks
    assert held == pins[0].num_pinned_tokens // 4
    kit.engine.abort("r")
    late = kit.cache.pin(request_id="r")
    kit.run()
    whole(kit)
    assert kit.cache.pins()[0].num_pinned_tokens == pins[0].num_pinned_tokens
    for pin in (*pins, late):
        kit.cache.unpin(pin.id)
    stats = kit.cache.stats()
    assert (stats.pinned_blocks, stats.evictable_blocks) == (0, stats.cached_blocks)


def test_request_ids_are_used_again():
    """A pin by the id of a request belongs to its tokens, not to the next request of that id."""
    kit = EngineKit(32, 4)
    kit.add("r", prompt_of(16, seed=1), 0)
    kit.run()
    first = kit.cache.pin(request_id="r")
    kit.add("r", prompt_of(20, seed=2), 0)
    kit.run()
    second = kit.cache.pin(request_id="r")
    assert (first.num_pinned_tokens, second.num_pinned_tokens) == (16, 20)
    assert kit.cache.unpin(request_id="r").id == second.id
    assert kit.cache.unpin(request_id="r").id == first.id
    with pytest.raises(UnknownPin):
        kit.cache.unpin(request_id="r")


@pytest.mark.parametrize("model", MODELS)
def test_pins_that_expire_in_the_middle_of_a_step(model):
    """[P61] A hard pin on the whole rest of the pool ends while the model runs: the next step has its memory, though
    nobody unpins."""
    clock, groups = ManualClock(), MODELS[model]
    kit = kit_with_pins(groups, 0.5, clock=clock)
    for pin in kit.cache.pins():
        kit.cache.pin(prompt_of(25, seed=1000 + int(pin.id.removeprefix("pin-")) - 1), ttl_seconds=5, partial=True)
    kit.cache.unpin_all(owner="docs")
    assert kit.cache.stats().hard_pinned_blocks >= 0.5 * kit.cache.plan.num_blocks
    execute = kit.runner.execute

    def execute_slowly(batch):
        output = execute(batch)
        clock.advance(2)
        return output

    kit.runner.execute = execute_slowly
    names = [f"r{number}" for number in range(6)]
    requests = {name: kit.add(name, prompt_of(60, seed=n), 8) for n, name in enumerate(names)}
    kit.run()
    assert {name: kit.tokens(name) for name in names} == {name: kit.expected(requests[name]) for name in names}
    stats = kit.cache.stats()
    assert (stats.num_pins, stats.pinned_blocks) == (0, 0)
    assert stats.num_expired_pins
    whole(kit)


def test_a_pool_with_pins_is_resized():
    """A pool shrinks down to what hard pins and their quota allow, no further, while requests run; no pinned token is
    lost, and what is generated is the cold run's."""
    kit = kit_with_pins((FULL,), 0.3)
    requests = {f"r{n}": kit.add(f"r{n}", prompt_of(30, seed=n), 30) for n in range(6)}
    kit.step(3)
    held = {pin.id: pin.num_pinned_tokens for pin in kit.cache.pins()}
    refused, done = kit.engine.resize(20), kit.engine.resize(80)
    kit.step(2)
    assert isinstance(refused.exception(timeout=0), ResizeRefused)
    assert done.result(timeout=0).num_blocks == 80
    kit.run()
    assert {name: kit.tokens(name) for name in requests} == {n: kit.expected(r) for n, r in requests.items()}
    assert {pin.id: pin.num_pinned_tokens for pin in kit.cache.pins()} == held
    for number in range(len(held)):
        tokens = prompt_of(25, seed=1000 + number)
        assert kit.cache.match(tokens).num_tokens == 24
    whole(kit)
