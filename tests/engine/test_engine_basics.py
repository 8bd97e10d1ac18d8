"""The engine with one or a few requests: tokens, ends, limits, refusals."""

from __future__ import annotations

import pytest

from looseleaf.engine.config import EngineConfig
from looseleaf.engine.request import FinishReason
from looseleaf.errors import DuplicateRequest, InvalidTokens, OutOfBlocks, PromptTooLong
from looseleaf.testing.engine_kit import EngineKit
from looseleaf.testing.engine_kit import sample_prompt as prompt_of


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 30])
@pytest.mark.parametrize("budget", [1, 4, 8, 64])
def test_cold_tokens(num_tokens, budget):
    """Whatever the chunking, the tokens are those of a plain run."""
    kit = EngineKit(config=EngineConfig(max_step_tokens=budget))
    request = kit.add("a", prompt_of(num_tokens), 9)
    kit.run()
    assert kit.tokens("a") == kit.expected(request)
    assert kit.reason("a") is FinishReason.LENGTH
    assert kit.last("a").usage.num_output_tokens == 9
    assert kit.runner.mismatches == []


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0, "seed": 3},
        {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.2},
        {"presence_penalty": 0.5},
        {"temperature": 0.7, "top_k": 1},
    ],
)
def test_sampling_settings_reach_the_model(params):
    """Seeds and penalties give the same tokens as a plain run, cold, warm and beside another request."""
    kit = EngineKit(config=EngineConfig(max_step_tokens=6))
    for name in "abc":
        kit.add(f"other-{name}", prompt_of(9, seed=5), 5)
        request = kit.add(name, prompt_of(13), 12, **params)
        kit.run()
        assert kit.tokens(name) == kit.expected(request)


def test_unseeded_requests_differ():
    """A request without a seed gets one of its own when it is added."""
    kit = EngineKit()
    for name in "ab":
        kit.add(name, prompt_of(9), 16, temperature=1.0)
    kit.run()
    assert kit.tokens("a") != kit.tokens("b")


@pytest.mark.parametrize(("num_tokens", "num_output"), [(13, 3), (14, 2), (15, 1)])
def test_context_limit(num_tokens, num_output):
    """[P13] At the limit of 16 a request ends with "length"; nothing is ever computed at position 16."""
    kit = EngineKit(max_model_tokens=16)
    request = kit.add("a", prompt_of(num_tokens), 8)
    kit.run()
    assert kit.tokens("a") == kit.expected(request, num_output)
    assert kit.reason("a") is FinishReason.LENGTH


@pytest.mark.parametrize("num_tokens", [16, 17])
def test_prompt_at_the_limit_is_refused(num_tokens):
    """[P13] A prompt that leaves no room for one token is refused at once, with the numbers."""
    kit = EngineKit(max_model_tokens=16)
    with pytest.raises(PromptTooLong, match="16") as caught:
        kit.add("a", prompt_of(num_tokens), 3)
    assert (caught.value.num_prompt_tokens, caught.value.limit_tokens) == (num_tokens, 15)
    assert not kit.engine.has_work


@pytest.mark.parametrize(
    ("settings", "limit", "word"),
    [
        ({"max_model_tokens": 20}, 20, "model"),
        ({"config": EngineConfig(max_model_tokens=24)}, 24, "max_model_tokens"),
        ({"num_blocks": 5}, 20, "KV memory"),
    ],
)
def test_limit_is_the_least(settings, limit, word):
    """The limit is the least of model, configuration and pool, and the message says which."""
    kit = EngineKit(**settings)
    assert kit.engine.max_model_tokens == limit
    kit.add("fits", prompt_of(limit - 1), 1)
    kit.run()
    assert kit.reason("fits") is FinishReason.LENGTH
    with pytest.raises(PromptTooLong, match=word):
        kit.add("long", prompt_of(limit), 1)
    kit.add("prefill", prompt_of(limit), 0)
    kit.run()
    assert kit.reason("prefill") is FinishReason.LENGTH


def test_refused_prompt_blocks_nobody():
    """A prompt that can never fit does not stand in the way of those behind it."""
    kit = EngineKit(num_blocks=4)
    with pytest.raises(PromptTooLong):
        kit.add("long", prompt_of(40))
    request = kit.add("a", prompt_of(5), 4)
    kit.run()
    assert kit.tokens("a") == kit.expected(request)


def test_wrong_requests_change_nothing():
    """A token outside the vocabulary and a live id are refused; the live request goes on."""
    kit = EngineKit()
    request = kit.add("a", prompt_of(5), 4)
    with pytest.raises(InvalidTokens, match="260"):
        kit.add("b", [260])
    with pytest.raises(DuplicateRequest):
        kit.add("a", [1])
    kit.run()
    assert kit.tokens("a") == kit.expected(request)
    kit.add("a", [1])  # a finished id may come again
    kit.run()


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 9, 30])
def test_prefill_only(num_tokens):
    """max_tokens 0 computes the prompt, gives no token, ends with "length", and its full blocks are cached."""
    kit = EngineKit(config=EngineConfig(max_step_tokens=7))
    kit.add("warm", prompt_of(num_tokens), 0)
    kit.run()
    last = kit.last("warm")
    assert (last.text, last.token_ids, last.finish_reason) == ("", (), FinishReason.LENGTH)
    assert kit.cache.match([*prompt_of(num_tokens), 5]).num_tokens == num_tokens // 4 * 4
    assert kit.cache.stats().active_blocks == 0


def test_end_token():
    """The end token ends a request with "stop", counted but not given out; ignored, it is a token like others."""
    for ignore in (False, True):
        kit = EngineKit()
        kit.runner.script("a", 5, [65, 66, 257, 67, 68])
        kit.add("a", prompt_of(5), 5, ignore_eos=ignore)
        kit.run()
        if ignore:
            assert (kit.text("a"), kit.reason("a")) == ("ABCD", FinishReason.LENGTH)
            assert kit.tokens("a") == [65, 66, 257, 67, 68]
        else:
            assert (kit.text("a"), kit.reason("a")) == ("AB", FinishReason.STOP)
            assert kit.tokens("a") == [65, 66]
            assert kit.last("a").usage.num_output_tokens == 3


@pytest.mark.parametrize(
    ("tokens", "text", "reason"),
    [
        (b"abcDEFGxy", "abc", "stop"),
        (b"abcDEFxyz", "abcDEFxyz", "length"),
        (b"abcdefDEF", "abcdefDEF", "length"),
        (b"DEFG", "", "stop"),
        (b"abDEF\x81", "abDEF", "stop"),
    ],
)
def test_stop_strings_through_the_engine(tokens, text, reason):
    """[S111] Nothing of a stop string is streamed at any moment; what turns out to be none is; the tail is flushed."""
    kit = EngineKit()
    script = [257 if token == 0x81 else token for token in tokens]
    kit.runner.script("a", 5, script)
    kit.add("a", prompt_of(5), len(script), stop=("DEFG",))
    while kit.engine.has_work:
        kit.step()
        assert text.startswith(kit.text("a"))
    assert (kit.text("a"), kit.reason("a")) == (text, reason)


def test_each_delta_agrees_with_itself():
    """[S112] In each chunk of a stream with stop strings and logprobs the tokens make the text, and so in sum."""
    kit = EngineKit()
    script = list("DE€DEFé😀DDEF.".encode())
    kit.runner.script("a", 5, script)
    kit.add("a", prompt_of(5), len(script), stop=("DEFG", "😀😀"), num_logprobs=2)
    kit.run()
    for delta in kit.deltas["a"]:
        assert kit.tokenizer.decode(delta.token_ids) == delta.text
        assert [entry.token_id for entry in delta.logprobs] == list(delta.token_ids)
    assert kit.text("a") == "DE€DEFé😀DDEF."
    assert kit.tokens("a") == script


@pytest.mark.parametrize("end", ["length", "stop", "eos", "abort", "error", "wait-abort"])
@pytest.mark.parametrize("reuse", [True, False])
def test_every_end_frees_everything(end, reuse):
    """[P1] [P7] After 60 requests that end in the same way no block is held; without reuse the pool is as it began."""
    kit = EngineKit(num_blocks=12, config=EngineConfig(reuse=reuse))
    for i in range(60):
        name = f"r{i}"
        if end in ("stop", "eos"):
            kit.runner.script(name, 20, [65, 66, 257 if end == "eos" else 67, 68, 69])
        kit.add(name, prompt_of(20, seed=i), 5, stop=("BC",) if end == "stop" else ())
        if end == "error":
            kit.step()
            kit.runner.fail_next()
        elif end == "abort":
            kit.step(i % 4)
            assert kit.engine.abort(name)
        elif end == "wait-abort":
            assert kit.engine.abort(name)
        kit.run()
        stats = kit.cache.stats()
        assert stats.active_blocks == 0
        assert stats.num_leases == 0
        assert reuse or stats.free_blocks == 12
    assert {kit.reason(f"r{i}").value for i in range(60)} == {{"eos": "stop", "wait-abort": "abort"}.get(end, end)}


def test_reservation_of_the_whole_output():
    """reserve_output takes prompt + max_tokens at admission, so fewer run at once and nothing is preempted."""
    for reserve, most in ((True, 2), (False, 4)):
        kit = EngineKit(num_blocks=16, config=EngineConfig(reserve_output=reserve, reuse=False))
        requests = [kit.add(f"r{i}", prompt_of(8, seed=i), 20) for i in range(4)]
        seen = 0
        while kit.engine.has_work:
            kit.step()
            seen = max(seen, kit.engine.num_running)
        assert seen == most
        assert [kit.tokens(request.request_id) for request in requests] == [kit.expected(r) for r in requests]
        assert bool(kit.observer.named("on_preempt")) == (not reserve)


def test_reuse_off_neither_matches_nor_stores():
    """reuse=False, for one request or for all, finds nothing and leaves nothing."""
    kit = EngineKit()
    kit.add("a", prompt_of(20), 0, reuse=False)
    kit.run()
    kit.add("b", prompt_of(20), 0)
    kit.run()
    kit.add("c", prompt_of(20), 0, reuse=False)
    kit.run()
    assert [kit.last(name).usage.num_cached_tokens for name in "abc"] == [0, 0, 0]
    kit.add("d", prompt_of(20), 0)
    kit.run()
    assert kit.last("d").usage.num_cached_tokens == 16


def test_namespaces_are_apart():
    """The same prompt in another namespace finds nothing, and gets that namespace's tokens."""
    kit = EngineKit()
    first = kit.add("a", prompt_of(20), 4, namespace="x")
    kit.run()
    second = kit.add("b", prompt_of(20), 4, namespace="y")
    kit.run()
    assert kit.last("b").usage.num_cached_tokens == 0
    assert kit.tokens("a") == kit.expected(first)
    assert kit.tokens("b") == kit.expected(second)
    assert kit.tokens("a") != kit.tokens("b")


def test_generated_tokens_are_reused():
    """A prompt that goes on from an earlier answer finds the answer's blocks too."""
    kit = EngineKit()
    request = kit.add("a", prompt_of(6), 12)
    kit.run()
    history = prompt_of(6) + kit.expected(request)  # 18 tokens, the last of which was never computed
    kit.add("b", [*history, 1, 2], 3)
    kit.run()
    assert kit.last("b").usage.num_cached_tokens == 16


def test_explanation_outlives_the_request():
    """After the end, `explain` still knows how much was reused and why."""
    kit = EngineKit()
    for name in "ab":
        kit.add(name, prompt_of(20), 3)
        kit.run()
    assert kit.cache.explain(request_id="a").reason == "never_seen"
    assert kit.cache.explain(request_id="b").num_cached_tokens == 16


def test_pins_hold_the_pool():
    """[P67] When pins hold the memory, a request that can't be admitted fails with the numbers; it does not hang."""
    kit = EngineKit(num_blocks=8)
    kit.add("pinned", prompt_of(24), 0)
    kit.run()
    pin = kit.cache.pin(request_id="pinned", cache_type="kv")
    kit.add("big", prompt_of(16, seed=3), 4)
    small = kit.add("small", prompt_of(4, seed=4), 3)
    kit.run(max_steps=50)
    assert kit.reason("big") is FinishReason.ERROR
    assert isinstance(kit.last("big").error, OutOfBlocks)
    assert kit.cache.stats().num_leases == 0
    assert kit.tokens("small") == kit.expected(small)
    kit.cache.unpin(pin.id)
    again = kit.add("again", prompt_of(16, seed=3), 4)
    kit.run()
    assert kit.tokens("again") == kit.expected(again)


def test_lone_request_beside_pins_ends_with_length():
    """[P67] A request alone that can't grow because pins hold the rest ends with "length" and keeps what it has."""
    kit = EngineKit(num_blocks=8)
    kit.add("pinned", prompt_of(24), 0)
    kit.run()
    kit.cache.pin(request_id="pinned", cache_type="kv")
    request = kit.add("a", prompt_of(3, seed=2), 20)
    kit.run(max_steps=50)
    assert kit.reason("a") is FinishReason.LENGTH
    assert kit.tokens("a") == kit.expected(request, 6)  # 8 places; the sixth token is sampled from the last of them


def test_running_requests_progress_beside_pins():
    """[P67] With half of the pool pinned, requests that need the other half take turns and all finish."""
    kit = EngineKit(num_blocks=20)
    kit.add("pinned", prompt_of(40), 0)
    kit.run()
    kit.cache.pin(request_id="pinned", cache_type="kv")
    requests = [kit.add(f"r{i}", prompt_of(12, seed=i + 2), 12) for i in range(6)]
    kit.run(max_steps=400)
    assert [kit.tokens(r.request_id) for r in requests] == [kit.expected(r) for r in requests]
