"""Anything at any moment: the engine's state machine, and long mixed runs."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from looseleaf.core.config import LayerGroup
from looseleaf.engine.config import EngineConfig
from looseleaf.engine.request import FinishReason
from looseleaf.testing.engine_kit import EngineKit
from looseleaf.testing.engine_kit import sample_prompt as prompt_of
from looseleaf.testing.engine_machine import EngineMachine

QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
WINDOW = LayerGroup("window", window_tokens=8, num_lanes=2)
MODELS = {
    "full": (LayerGroup("full"),),
    "full+window": (LayerGroup("full"), WINDOW),
    "window": (WINDOW,),
    "chunked+window": (LayerGroup("chunked", chunk_tokens=8), LayerGroup("window", window_tokens=5)),
}


def run_machine(model, max_examples, num_rules):
    """Run the machine for one of `MODELS`; what happened."""
    machine = type("Machine", (EngineMachine,), {"groups": MODELS[model], "happened": Counter()})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples, stateful_step_count=num_rules, deadline=None, suppress_health_check=QUIET
        ),
    )
    print(f"\n{model}: {dict(machine.happened)}")
    return machine.happened


@pytest.mark.parametrize("model", MODELS)
def test_engine_machine(model):
    """Random adds, samples, steps, aborts, pins, clears, resizes and failures over each kind of model: integrity after
    each rule, the cold tokens at each end."""
    run_machine(model, 7, 30)


@pytest.mark.heavy
@pytest.mark.parametrize("model", MODELS)
def test_engine_machine_long(model):
    """The same for long; forks, preemptions and resizes come about in each kind of model."""
    happened = run_machine(model, 200, 80)
    for what in ("on_fork", "on_preempt", "resize", "refused resize"):
        assert happened[what], f"no {what} came about"


def mixed_run(seed, num_requests, num_blocks):
    """Requests that share prefixes arrive at random; two thirds are aborted at random stages; steps fail at times."""
    rng = random.Random(seed)
    config = EngineConfig(max_running_requests=rng.choice([3, 8, 64]), max_step_tokens=rng.choice([8, 24, 256]))
    kit = EngineKit(num_blocks, rng.choice([1, 4, 16]), config=config, eos_every=rng.choice([0, 40]))
    prompts = [prompt_of(rng.randint(1, 60), seed=i) for i in range(6)]
    requests, aborted, queue = {}, set(), num_requests
    while queue or kit.engine.has_work:
        while queue and rng.random() < 0.4:
            queue -= 1
            prompt = rng.choice(prompts)
            prompt = prompt[: rng.randint(0, len(prompt))] + prompt_of(rng.randint(1, 20), seed=rng.randint(10, 12))
            prompt = prompt[: kit.engine.max_model_tokens - 1]
            params = {"temperature": 1.0, "seed": rng.randint(0, 9)} if rng.random() < 0.5 else {}
            name = f"r{queue}"
            requests[name] = kit.add(name, prompt, rng.randint(1, 40), namespace=rng.choice(["", "x"]), **params)
            if rng.random() < 2 / 3:
                aborted.add(name)
        live = [name for name in aborted if kit.reason(name) is None]
        if live and rng.random() < 0.5:
            kit.engine.abort(rng.choice(live))
        if rng.random() < 0.01:
            kit.runner.fail_next()
        kit.step()
    return kit, requests


def check_mixed_run(kit, requests):
    assert kit.runner.mismatches == []
    assert kit.cache.stats().active_blocks == 0
    for name, request in requests.items():
        tokens = kit.tokens(name)
        num_output = kit.last(name).usage.num_output_tokens
        if kit.reason(name) in (FinishReason.STOP, FinishReason.LENGTH):
            assert tokens == kit.expected(request, num_output)
        else:
            assert tokens == kit.expected(request, 40)[: len(tokens)]


@pytest.mark.parametrize("seed", range(12))
def test_mixed_batches(seed):
    """Cold, warm, preempted, two thirds aborted at random stages, failing steps: every token is the cold one."""
    check_mixed_run(*mixed_run(seed, 40, random.Random(seed).choice([64, 96, 200])))


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(100, 160))
def test_mixed_batches_long(seed):
    """The same with ten times the requests."""
    check_mixed_run(*mixed_run(seed, 400, random.Random(seed).choice([64, 96, 200, 600])))
