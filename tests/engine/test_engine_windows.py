"""Models whose layers forget: windows and chunks seen from the engine, by tokens and by blocks held."""

from __future__ import annotations

import pytest

from looseleaf.core.config import CacheConfig, LayerGroup
from looseleaf.core.manager import CacheManager
from looseleaf.engine.config import EngineConfig
from looseleaf.engine.engine import Engine
from looseleaf.engine.request import FinishReason
from looseleaf.errors import ConfigError, PromptTooLong
from looseleaf.testing.engine_kit import EngineKit
from looseleaf.testing.engine_kit import sample_prompt as prompt_of
from looseleaf.testing.fake_runner import FakeRunner
from looseleaf.testing.fake_tokenizer import FakeTokenizer

FULL, WINDOW = LayerGroup("full"), LayerGroup("window", window_tokens=8, num_lanes=2)
CHUNKED = LayerGroup("chunked", chunk_tokens=8)
MODELS = {
    "full+window": (FULL, WINDOW),
    "window": (WINDOW,),
    "chunked": (CHUNKED,),
    "full+chunked": (FULL, CHUNKED),
    "two windows": (LayerGroup("window", window_tokens=8), LayerGroup("window", window_tokens=32, name="wide")),
}


def kit_of(model, num_blocks=96, **settings):
    return EngineKit(num_blocks, groups=MODELS[model], config=EngineConfig(**settings))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 15, 16, 17, 40])
@pytest.mark.parametrize("budget", [3, 64])
def test_cold_and_warm_tokens(model, num_tokens, budget):
    """[H95] [H96] [H104] Prompts up to, exactly at and past the borders of windows and chunks, in chunks of every kind:
    cold and warm give the tokens of a plain run, and the tokens found and those computed make the prompt."""
    kit = kit_of(model, max_step_tokens=budget)
    for name in ("cold", "warm"):
        before = kit.runner.num_computed_tokens
        request = kit.add(name, prompt_of(num_tokens), 12)
        kit.run()
        assert kit.tokens(name) == kit.expected(request)
        num_cached = kit.last(name).usage.num_cached_tokens
        assert kit.runner.num_computed_tokens - before == num_tokens - num_cached + 11
    assert num_cached == (num_tokens - 1) // 4 * 4
    assert kit.runner.mismatches == []


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_shared", [4, 7, 8, 9, 12, 16, 20, 31, 32, 33])
def test_hits_inside_at_and_after_the_window(model, num_shared):
    """[H98] [H99] A prompt that leaves another one's at any point: what is found is what all groups can go on from, and
    the tokens are the cold ones."""
    kit = kit_of(model)
    kit.add("first", prompt_of(36), 8)
    kit.run()
    request = kit.add("second", prompt_of(36)[:num_shared] + prompt_of(9, seed=5), 8)
    kit.run()
    assert kit.tokens("second") == kit.expected(request)
    assert kit.last("second").usage.num_cached_tokens == num_shared // 4 * 4  # nothing was evicted
    assert kit.runner.mismatches == []


@pytest.mark.parametrize("model", ["window", "two windows", "chunked"])
def test_a_long_sequence_holds_its_window_only(model):
    """A sequence of ten times its window never holds more blocks than the plan says, and much less than its length."""
    kit = kit_of(model, num_blocks=64, max_step_tokens=8)
    request = kit.add("a", prompt_of(200), 100)
    most = 0
    while kit.engine.has_work:
        kit.step()
        most = max(most, kit.cache.stats().active_blocks)
    assert kit.tokens("a") == kit.expected(request)
    assert most <= kit.cache.plan.blocks_for(300, 8) < 75


def test_a_window_model_serves_prompts_longer_than_its_pool():
    """Without a full group the pool does not bound the length; chunks are cut so that they fit in it."""
    kit = kit_of("window", num_blocks=12, max_step_tokens=512)
    assert kit.engine.max_model_tokens == kit.runner.info.max_model_tokens
    request = kit.add("a", prompt_of(300), 20)
    kit.run()
    assert kit.tokens("a") == kit.expected(request)


@pytest.mark.parametrize("model", MODELS)
def test_the_limit_fits(model):
    """A request of exactly the limit runs alone to its end; one token more is refused."""
    kit = EngineKit(40, groups=MODELS[model], max_model_tokens=200)
    limit = kit.engine.max_model_tokens
    request = kit.add("a", prompt_of(limit - 5), 50)
    with pytest.raises(PromptTooLong):
        kit.add("b", prompt_of(limit), 1)
    kit.run()
    assert kit.reason("a") is FinishReason.LENGTH
    assert kit.tokens("a") == kit.expected(request, 5)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("budget", [4, 16, 64])
def test_no_resume_in_circles(model, budget):
    """[P20] With chunked prefill over a tight pool, a preempted request is not resumed with one chunk to be preempted
    again: bounded preemptions and recomputed tokens, cold tokens for all, [P21] and who waits holds nothing."""
    kit = EngineKit(
        8 * sum(group.num_lanes for group in MODELS[model]),
        groups=MODELS[model],
        config=EngineConfig(max_step_tokens=budget, reuse=False),
    )
    limit = kit.engine.max_model_tokens
    requests = [kit.add(f"r{i}", prompt_of(min(20, limit - 8), seed=i), 30) for i in range(6)]
    num_needed = sum(min(limit, len(request.prompt_tokens) + 30) for request in requests)
    while kit.engine.has_work:
        kit.step()
        assert kit.cache.stats().num_leases == kit.engine.num_running
    assert kit.runner.num_computed_tokens < 2.5 * num_needed
    assert len(kit.observer.named("on_preempt")) <= 12
    for request in requests:
        num_output = kit.last(request.request_id).usage.num_output_tokens
        assert kit.tokens(request.request_id) == kit.expected(request, num_output)
        assert num_output == min(30, limit - len(request.prompt_tokens))


def test_a_prefill_without_room_preempts():
    """A next chunk that finds no block takes those of somebody cheaper, told as cause "prefill"; all end well."""
    kit = kit_of("full+window", num_blocks=60, max_step_tokens=24)
    kit.engine._scheduler._may_fit = lambda *_: True  # admitted without a look at what is promised
    requests = [kit.add(f"r{i}", prompt_of(60, seed=i), 10) for i in range(3)]
    kit.run(max_steps=400)
    assert "prefill" in {call["cause"] for call in kit.observer.named("on_preempt")}
    for request in requests:
        assert kit.tokens(request.request_id) == kit.expected(request)


def test_what_is_promised_is_not_given_away():
    """Long prompts reserve chunk by chunk; what they still need is kept for them, so that nobody gives way."""
    kit = kit_of("full+window", num_blocks=80, max_step_tokens=60)
    requests = [kit.add(f"r{i}", prompt_of(150, seed=i), 60) for i in range(3)]
    kit.run(max_steps=800)
    assert kit.observer.named("on_preempt") == []
    for request in requests:
        assert kit.tokens(request.request_id) == kit.expected(request)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_tokens", [3, 8, 9, 18, 33])
def test_samples_of_a_window_model(model, num_tokens):
    """[P11] Forks at every offset: tails are copied in all lanes of all groups, windows are shared."""
    kit = kit_of(model)
    names = ["s0", "s1", "s2"]
    requests = kit.add_samples(names, prompt_of(num_tokens), 14, temperature=1.0, seed=1)
    kit.run()
    for request in requests:
        assert kit.tokens(request.request_id) == kit.expected(request)
    assert kit.runner.num_computed_tokens == num_tokens + 3 * 13
    num_lanes = kit.cache.plan.num_lanes
    assert kit.runner.num_copied_blocks == (2 * num_lanes if num_tokens % 4 else 0)


def test_equal_prompts_are_computed_once():
    """In-flight sharing with windows: five equal prompts of five windows, one of them computed."""
    kit = kit_of("full+window", num_blocks=300, max_step_tokens=16)
    requests = [kit.add(f"r{i}", prompt_of(42), 3) for i in range(5)]
    kit.run()
    for request in requests:
        assert kit.tokens(request.request_id) == kit.expected(request)
    assert kit.runner.num_computed_tokens == 42 + 4 * 2 + 5 * 2


@pytest.mark.parametrize("reserve_output", [False, True])
def test_reserving_the_output_reserves_all(reserve_output):
    """With `reserve_output` windows too have room for everything from the start: no preemption, a lower limit."""
    kit = EngineKit(45, groups=MODELS["full+window"], config=EngineConfig(reserve_output=reserve_output))
    limit = kit.engine.max_model_tokens
    assert limit == (60 if reserve_output else 4 * (45 - 2 * (2 + 1 + 1)))
    request = kit.add("a", prompt_of(20), 200)
    other = kit.add("b", prompt_of(20, seed=1), 10)
    kit.run()
    assert kit.tokens("a") == kit.expected(request, limit - 20)
    assert kit.tokens("b") == kit.expected(other)
    if reserve_output:
        assert kit.observer.named("on_preempt") == []


def test_a_cache_of_another_model_is_refused():
    """Groups or layout of the cache that are not the model's: refused when the engine is made, with both."""
    runner = FakeRunner(8, 4)
    for settings, words in (({"groups": (FULL, WINDOW)}, "window"), ({"layout": "other/1"}, "other/1")):
        cache = CacheManager(CacheConfig(8, 4, 4, **settings))
        with pytest.raises(ConfigError, match=words):
            Engine(cache, runner, FakeTokenizer(), EngineConfig())
    Engine(CacheManager(CacheConfig(8, 4, 4, layout="fake/1")), runner, FakeTokenizer(), EngineConfig())


@pytest.mark.parametrize("model", MODELS)
def test_the_context_limit_ends_instead_of_shifting(model):
    """[H102] [P16] At the limit of its context a request ends with LENGTH; positions are never shifted to make room, so
    every token before it is the cold one, and what it computed still hits."""
    kit = EngineKit(96, groups=MODELS[model], max_model_tokens=40)
    request = kit.add("long", prompt_of(20), 100)
    kit.run()
    assert kit.reason("long") is FinishReason.LENGTH
    assert kit.tokens("long") == kit.expected(request, 20)
    again = kit.add("again", prompt_of(20), 100)
    kit.run()
    assert kit.tokens("again") == kit.expected(again, 20)
    assert kit.last("again").usage.num_cached_tokens == 16
    assert kit.runner.mismatches == []
