"""Samples: several answers to one prompt, computed once, each with the tokens of a run of its own."""

from __future__ import annotations

import random

import pytest

from looseleaf.engine.config import EngineConfig
from looseleaf.engine.request import FinishReason, GenerationRequest
from looseleaf.engine.sampling import SamplingParams
from looseleaf.errors import DuplicateRequest, InvalidTokens, PromptTooLong, RequestError
from looseleaf.testing.engine_kit import EngineKit
from looseleaf.testing.engine_kit import sample_prompt as prompt_of

NAMES = ["s0", "s1", "s2", "s3"]


def check(kit, requests):
    for request in requests:
        assert kit.reason(request.request_id) is FinishReason.LENGTH
        assert kit.tokens(request.request_id) == kit.expected(request)
    assert kit.runner.mismatches == []
    assert kit.cache.stats().active_blocks == 0


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 16, 17, 18, 19])
@pytest.mark.parametrize("budget", [5, 64])
def test_samples_share_one_prefill(num_tokens, budget):
    """[P10] At every offset in a block: the prompt is computed once, each sample gets its own tokens, partial tails are
    copied, and whole blocks are held once."""
    kit = EngineKit(num_blocks=64, config=EngineConfig(max_step_tokens=budget))
    requests = kit.add_samples(NAMES, prompt_of(num_tokens), 6, temperature=1.0, seed=3)
    while kit.engine.num_running < 4:
        kit.step()
    assert kit.runner.num_computed_tokens == num_tokens
    num_own_blocks = 4 if num_tokens % 4 else 1  # a tail each, or only the lead has room for its next token yet
    assert kit.cache.stats().active_blocks == num_tokens // 4 + num_own_blocks
    kit.run()
    check(kit, requests)
    assert len({tuple(kit.tokens(name)) for name in NAMES}) == 4
    assert kit.runner.num_computed_tokens == num_tokens + 4 * 5
    assert kit.runner.num_copied_blocks == (3 if num_tokens % 4 else 0)
    assert [fork["num_tokens"] for fork in kit.observer.named("on_fork")] == [num_tokens] * 3
    assert kit.cache.stats().num_lookups == 1


def test_parameters_of_their_own():
    """Lengths, seeds and ends differ from sample to sample; one of no tokens is a request by itself."""
    kit = EngineKit(num_blocks=64)
    requests = [
        GenerationRequest(f"s{i}", prompt_of(10), SamplingParams(max_tokens=i, temperature=i / 4, seed=i))
        for i in range(6)
    ]
    kit.engine.add_samples(requests)
    kit.run()
    check(kit, requests)
    assert [kit.last(f"s{i}").usage.num_output_tokens for i in range(6)] == list(range(6))


@pytest.mark.parametrize("reuse", [True, False])
def test_warm_samples(reuse):
    """A prompt that is cached is not computed for samples either; without reuse it is, once, and nothing is stored."""
    kit = EngineKit(num_blocks=64)
    kit.add("before", prompt_of(18), 0)
    kit.run()
    before = kit.runner.num_computed_tokens
    requests = kit.add_samples(NAMES, prompt_of(18), 2, reuse=reuse)
    kit.run()
    check(kit, requests)
    assert kit.runner.num_computed_tokens - before == (2 if reuse else 18) + 4


def test_all_or_none():
    """Refused samples leave nothing behind: other prompts, too long, an id taken or given twice, no request at all."""
    kit = EngineKit(num_blocks=8)
    kit.add("taken", prompt_of(3), 1)
    greedy = SamplingParams(max_tokens=1, temperature=0.0)

    def request(name, prompt=(1, 2), params=greedy, **settings):
        return GenerationRequest(name, list(prompt), params, **settings)

    for requests, error in (
        ([], RequestError),
        ([request("a"), request("b", (1, 3))], RequestError),
        ([request("a"), request("b", namespace="x")], RequestError),
        ([request("a"), request("b", reuse=False)], RequestError),
        ([request("a"), request("a")], DuplicateRequest),
        ([request("a"), request("taken")], DuplicateRequest),
        ([request("a", (1, 300)), request("b", (1, 300))], InvalidTokens),
        ([request("a", range(32), SamplingParams(max_tokens=0)), request("b", range(32))], PromptTooLong),
    ):
        with pytest.raises(error):
            kit.engine.add_samples(requests)
        assert kit.engine.request_ids == ["taken"]
        assert (kit.engine.num_running, kit.engine.num_waiting) == (0, 1)
    kit.run()
    assert kit.reason("taken") is FinishReason.LENGTH


@pytest.mark.parametrize("num_aborted", [1, 2, 3, 4])
@pytest.mark.parametrize("after", [0, 1, 2, "computing"])
def test_the_next_takes_the_place_of_an_aborted_lead(num_aborted, after):
    """Leads aborted before, during and after the first chunks, up to all of them: the rest have their tokens, and what
    was committed is not computed again."""
    kit = EngineKit(num_blocks=64, config=EngineConfig(max_step_tokens=8))
    requests = kit.add_samples(NAMES, prompt_of(22), 5, temperature=1.0, seed=1)
    execute = kit.runner.execute

    def abort(batch=None):
        for name in NAMES[:num_aborted]:
            assert kit.engine.abort(name)
        kit.runner.execute = execute
        return execute(batch) if batch else None

    if after == "computing":  # the step that draws all first tokens
        kit.step(2)
        kit.runner.execute = abort
    else:
        kit.step(after)
        abort()
    kit.run()
    for name in NAMES[:num_aborted]:
        assert kit.reason(name) is FinishReason.ABORT
        assert kit.tokens(name) == []
    check(kit, requests[num_aborted:])


@pytest.mark.parametrize("victim", NAMES)
def test_a_sample_aborted_between_fork_and_copy(victim):
    """A fork that ends before its tail was copied: the block is somebody else's in the next step already, and neither
    that request nor the other samples read a wrong one."""
    kit = EngineKit(num_blocks=10)
    requests = kit.add_samples(NAMES, prompt_of(6), 6, temperature=1.0, seed=1)
    other = kit.add("other", prompt_of(16, seed=3), 2)
    kit.step()  # forked: 1 + 4 of 10 blocks are held, 3 copies wait; `other` needs 5 and all the head room
    assert len(kit.engine._scheduler.copies) == 3
    held = {name: kit.engine._sequences[name].held.block_table[-1] for name in NAMES}
    kit.engine.abort(victim)
    scheduler = kit.engine._scheduler
    scheduler._num_promised_blocks = lambda: 0
    kit.step()
    del scheduler._num_promised_blocks
    assert held[victim] in kit.engine._sequences["other"].held.block_table
    kit.run()
    check(kit, [request for request in requests if request.request_id != victim])
    assert kit.tokens("other") == kit.expected(other)


@pytest.mark.parametrize("num_blocks", [5, 6, 7, 8, 12])
def test_a_fork_without_a_block_waits(num_blocks):
    """Where there is no block for a fork's tail, the sample waits with its first token known, and it is the same one in
    the end; nobody is asked twice."""
    kit = EngineKit(num_blocks=num_blocks)
    requests = kit.add_samples(NAMES, prompt_of(11), 7, temperature=1.0, seed=1, repetition_penalty=1.1)
    kit.run(max_steps=400)
    check(kit, requests)
    assert len(kit.observer.named("on_first_token")) == 4
    assert kit.cache.stats().num_lookups == 1
    assert [kit.last(name).usage.num_cached_tokens for name in NAMES] == [0, 8, 8, 8]


def test_no_more_forks_than_may_run():
    """Forks count as running requests; those beyond `max_running_requests` wait."""
    kit = EngineKit(num_blocks=64, config=EngineConfig(max_running_requests=2))
    requests = kit.add_samples(NAMES, prompt_of(11), 7)
    most = 0
    while kit.engine.has_work:
        kit.step()
        most = max(most, kit.engine.num_running)
    assert most == 2
    check(kit, requests)


def test_the_next_sample_keeps_the_place_in_the_queue():
    """The lead is aborted while it waits: the next sample is before those that arrived after it."""
    kit = EngineKit(num_blocks=64, config=EngineConfig(max_running_requests=1))
    kit.add("running", prompt_of(5, seed=1), 5)
    kit.step()
    requests = [*kit.add_samples(NAMES, prompt_of(10), 2), kit.add("later", prompt_of(5, seed=2), 2)]
    kit.step()
    kit.engine.abort("s0")
    kit.step()
    assert [sequence.request_id for sequence in kit.engine._scheduler.waiting] == ["s1", "later"]
    assert kit.engine.num_waiting == 4
    kit.run()
    check(kit, requests[1:])


def test_a_failing_step_ends_the_lead_only_before_the_fork():
    """The lead's step fails: it ends with the error, the next sample computes the prompt and all others go on."""
    kit = EngineKit(num_blocks=64)
    requests = kit.add_samples(NAMES, prompt_of(10), 3)
    kit.runner.fail_next()
    kit.run()
    assert kit.reason("s0") is FinishReason.ERROR
    check(kit, requests[1:])


def test_a_lead_that_ends_with_its_first_token():
    """The lead's first token is its end: the others go on from its blocks all the same."""
    kit = EngineKit(num_blocks=64)
    requests = [
        GenerationRequest(name, prompt_of(10), SamplingParams(max_tokens=number, temperature=0.0))
        for name, number in zip(NAMES, (1, 9, 1, 4), strict=True)
    ]
    kit.engine.add_samples(requests)
    kit.run()
    check(kit, requests)


@pytest.mark.parametrize("seed", range(8))
def test_random_samples(seed):
    """Groups of samples over a tight pool, aborted at random: preempted ones come back as ordinary requests, every
    token is that of a run alone."""
    rng = random.Random(seed)
    kit = EngineKit(num_blocks=24, config=EngineConfig(max_step_tokens=rng.choice([6, 16, 64])))
    requests = {}
    for step in range(3000):
        if step < 60 and rng.random() < 0.3:
            names = [f"r{len(requests) + i}" for i in range(rng.randint(1, 5))]
            added = kit.add_samples(
                names,
                prompt_of(rng.randint(1, 30), seed=rng.randint(0, 3)),
                rng.randint(1, 20),
                temperature=1.0,
                seed=3,
            )
            requests |= dict(zip(names, added, strict=True))
        live = kit.engine.request_ids
        if live and rng.random() < 0.1:
            kit.engine.abort(rng.choice(live))
        if step >= 60 and not kit.engine.has_work:
            break
        kit.step()
    assert not kit.engine.has_work
    assert kit.observer.named("on_fork")
    check(kit, [request for name, request in requests.items() if kit.reason(name) is not FinishReason.ABORT])
