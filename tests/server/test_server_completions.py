"""`/v1/completions`, as the official client sees it."""

from __future__ import annotations

import pytest

from looseleaf.engine.sampling import SamplingParams

pytestmark = pytest.mark.anyio


async def test_text_is_continued_as_the_model_would_alone(server):
    """A greedy completion is the text of the tokens that a cold run alone generates."""
    prompt = server.tokenizer.encode("the quick brown fox")
    expected = server.runner.expected_tokens(prompt, 12, SamplingParams(max_tokens=12, temperature=0))
    answer = await server.openai.completions.create(
        model="fake", prompt="the quick brown fox", max_tokens=12, temperature=0
    )
    assert answer.choices[0].text == server.tokenizer.decode(expected)
    assert answer.choices[0].finish_reason == "length"
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (20, 12, 32)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "num_prompts"), [("ab", 1), (["ab", "cd"], 2), ([1, 2, 3], 1), ([[1, 2], [3, 4], [5]], 3)]
)
async def test_all_forms_of_prompts(server, prompt, num_prompts, stream):
    """A text, texts, tokens and lists of tokens all work; choice c of prompt p has index p * n + c, and each gets a
    reason to end."""
    body = {"model": "fake", "prompt": prompt, "n": 2, "max_tokens": 3, "temperature": 0}
    if stream:
        texts = {}
        reasons = {}
        async for chunk in await server.openai.completions.create(**body, stream=True):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
    else:
        answer = await server.openai.completions.create(**body)
        assert [choice.index for choice in answer.choices] == list(range(2 * num_prompts))
        texts = {choice.index: choice.text for choice in answer.choices}
        reasons = {choice.index: choice.finish_reason for choice in answer.choices}
    assert sorted(texts) == list(range(2 * num_prompts))
    assert set(reasons.values()) == {"length"}
    tokens = {
        str: [server.tokenizer.encode(prompt)] if isinstance(prompt, str) else None,
        list: prompt if isinstance(prompt, list) else None,
    }[type(prompt)]
    if tokens and isinstance(tokens[0], str):
        tokens = [server.tokenizer.encode(text) for text in tokens]
    if isinstance(tokens[0], int):
        tokens = [tokens]
    for index, text in texts.items():
        expected = server.runner.expected_tokens(tokens[index // 2], 3, SamplingParams(max_tokens=3, temperature=0))
        assert text == server.tokenizer.decode(expected)


async def test_max_tokens_0_is_a_prefill(server):
    """`max_tokens: 0` computes and caches the prompt and generates nothing; the same prompt then hits."""
    answer = await server.openai.completions.create(model="fake", prompt="x" * 64, max_tokens=0)
    assert answer.choices[0].text == ""
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (65, 0)
    again = await server.openai.completions.create(model="fake", prompt="x" * 64, max_tokens=0)
    assert again.usage.prompt_tokens_details.cached_tokens == 64


async def test_default_is_16_tokens(server):
    """Without `max_tokens` a completion has 16 tokens."""
    answer = await server.openai.completions.create(model="fake", prompt="abc")
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize("prompt", ["hello", [104, 105]])
async def test_echo_puts_the_prompt_first(server, prompt):
    """`echo` gives prompt and continuation, streamed or not."""
    body = {"model": "fake", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    plain = (await server.openai.completions.create(**body)).choices[0].text
    start = prompt if isinstance(prompt, str) else "hi"
    echoed = (await server.openai.completions.create(**body, echo=True)).choices[0].text
    assert echoed == start + plain
    chunks = [c async for c in await server.openai.completions.create(**body, echo=True, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == start + plain


async def test_seed_repeats_and_choices_differ(server):
    """The same seed gives the same text; choices of one request differ from each other."""
    body = {"model": "fake", "prompt": "abc", "n": 2, "max_tokens": 12, "temperature": 1.0, "seed": 7}
    first = await server.openai.completions.create(**body)
    second = await server.openai.completions.create(**body)
    assert [c.text for c in first.choices] == [c.text for c in second.choices]
    assert first.choices[0].text != first.choices[1].text


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_completions(server, stream):
    """Each token has a log-probability, alternatives and the offset at which its text begins in the choice."""
    body = {"model": "fake", "prompt": "abc", "max_tokens": 5, "temperature": 0, "logprobs": 2}
    if stream:
        chunks = [chunk async for chunk in await server.openai.completions.create(**body, stream=True)]
        text = "".join(chunk.choices[0].text for chunk in chunks)
        parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
        tokens = [token for part in parts for token in part.tokens]
        offsets = [offset for part in parts for offset in part.text_offset]
        tops = [top for part in parts for top in part.top_logprobs]
    else:
        choice = (await server.openai.completions.create(**body)).choices[0]
        text, tokens = choice.text, choice.logprobs.tokens
        offsets, tops = choice.logprobs.text_offset, choice.logprobs.top_logprobs
    assert "".join(tokens) == text
    assert len(text) == 5
    assert offsets == [0, 1, 2, 3, 4]
    assert all(len(top) == 2 for top in tops)


async def test_stream_ends_with_usage_only_if_asked(server):
    """With `include_usage` every event has `usage`, null but in the last, which has no choices; without it none
    has."""
    body = {"prompt": "abc", "max_tokens": 3}
    events = await server.events("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 3
    assert all(event["usage"] is None for event in events[:-1])
    assert all("usage" not in event for event in await server.events("/v1/completions", body))


async def test_request_id_comes_from_body_or_header(server):
    """The client's id is the answer's id and the engine's: in the body, or in X-Request-Id; several choices get id-0,
    id-1."""
    named = await server.post("/v1/completions", {"prompt": "abc", "request_id": "mine", "max_tokens": 1})
    assert named["id"] == "mine"
    await server.get("/v1/requests/mine/cache")
    by_header = await server.post("/v1/completions", {"prompt": "abc", "max_tokens": 1}, **{"X-Request-Id": "h/1"})
    assert by_header["id"] == "h/1"
    assert (await server.get("/v1/requests/h/1/cache"))["request_id"] == "h/1"
    several = await server.post("/v1/completions", {"prompt": "abc", "request_id": "two", "n": 2, "max_tokens": 1})
    assert several["id"] == "two"
    assert (await server.get("/v1/requests/two/cache"))["request_id"] == "two-0"
    await server.get("/v1/requests/two-1/cache")


async def test_extra_fields_reach_the_sampler(server):
    """`top_k` 1 is greedy whatever the temperature; -1 and 0 mean no limit; `ignore_eos` goes through."""
    greedy = await server.post("/v1/completions", {"prompt": "abc", "max_tokens": 8, "temperature": 0})
    top_1 = await server.post("/v1/completions", {"prompt": "abc", "max_tokens": 8, "temperature": 5, "top_k": 1})
    assert top_1["choices"][0]["text"] == greedy["choices"][0]["text"]
    await server.post("/v1/completions", {"prompt": "abc", "max_tokens": 2, "top_k": -1, "repetition_penalty": 1.1})


async def test_end_token_ends_unless_ignored(make_server):
    """The model's end token gives `stop`; with `ignore_eos` the answer goes on to its limit."""
    server = await make_server(eos_every=4)
    body = {"prompt": "abc", "max_tokens": 100, "temperature": 0}
    ended = await server.post("/v1/completions", body)
    assert ended["choices"][0]["finish_reason"] == "stop"
    on = await server.post("/v1/completions", {**body, "ignore_eos": True})
    assert on["choices"][0]["finish_reason"] == "length"
    assert on["usage"]["completion_tokens"] == 100
