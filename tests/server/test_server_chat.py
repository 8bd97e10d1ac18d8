"""`/v1/chat/completions`, as the official client sees it."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


async def test_chat_answers(server):
    """An answer has the assistant's role, a reason to end, usage and an id that begins with chatcmpl-."""
    answer = await server.openai.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=6)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert len(answer.choices[0].message.content) == 6
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(server.tokenizer.render_chat(MESSAGES))


async def test_the_template_says_where_a_turn_ends(server, monkeypatch):
    """Where a template marks turns by text, a chat answer ends there; with `ignore_eos` it goes on."""
    body = {"model": "fake", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    whole = (await server.openai.chat.completions.create(**body)).choices[0].message.content
    mark = whole[3:5]
    monkeypatch.setattr(type(server.tokenizer), "chat_stops", (mark,))
    cut = (await server.openai.chat.completions.create(**body)).choices[0]
    assert (cut.message.content, cut.finish_reason) == (whole[: whole.index(mark)], "stop")
    free = (await server.openai.chat.completions.create(**body, extra_body={"ignore_eos": True})).choices[0]
    assert free.message.content == whole


async def test_stream_begins_with_the_role(server):
    """The first event of each choice carries the role and no text, the last a reason to end; the texts joined equal
    the answer."""
    body = {"model": "fake", "messages": MESSAGES, "max_tokens": 6, "temperature": 0, "n": 2}
    plain = await server.openai.chat.completions.create(**body)
    chunks = [c async for c in await server.openai.chat.completions.create(**body, stream=True)]
    for index in (0, 1):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert mine[0].delta.content == ""
        assert all(choice.delta.role is None for choice in mine[1:])
        assert mine[-1].finish_reason == "length"
        assert [choice.finish_reason for choice in mine[:-1]] == [None] * (len(mine) - 1)
        text = "".join(choice.delta.content or "" for choice in mine)
        assert text == plain.choices[index].message.content


async def test_parts_of_text_are_joined(server):
    """A list of text parts reads as the parts joined by a newline."""
    one = await server.post("/v1/cache/match", {"messages": [{"role": "user", "content": "a\nb"}]})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    two = await server.post("/v1/cache/match", {"messages": [{"role": "user", "content": parts}]})
    assert one["num_prompt_tokens"] == two["num_prompt_tokens"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_both_names_of_the_limit(server, name):
    """`max_tokens` and `max_completion_tokens` mean the same."""
    answer = await server.post("/v1/chat/completions", {"messages": MESSAGES, name: 5})
    assert answer["usage"]["completion_tokens"] == 5


async def test_default_limit_is_what_is_left(make_server):
    """Without a limit an answer may fill the model's length, up to the server's own limit."""
    server = await make_server(max_model_tokens=100)
    answer = await server.post("/v1/chat/completions", {"messages": MESSAGES})
    assert answer["usage"]["total_tokens"] == 100
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_chat(server, stream):
    """With `logprobs` each token comes with its bytes, value and `top_logprobs` alternatives; joined they are the
    text."""
    body = {"model": "fake", "messages": MESSAGES, "max_tokens": 5, "logprobs": True, "top_logprobs": 3}
    if stream:
        chunks = [c async for c in await server.openai.chat.completions.create(**body, stream=True)]
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        entries = [entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
    else:
        choice = (await server.openai.chat.completions.create(**body)).choices[0]
        text, entries = choice.message.content, choice.logprobs.content
    assert len(entries) == 5
    assert "".join(entry.token for entry in entries) == text
    assert b"".join(bytes(entry.bytes) for entry in entries) == text.encode()
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    bare = await server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, "logprobs": True})
    assert all(entry["top_logprobs"] == [] for entry in bare["choices"][0]["logprobs"]["content"])


async def test_a_conversation_reuses_its_history(server):
    """The second turn of a conversation hits on the first turn and on the answer it got."""
    turns = [{"role": "user", "content": "tell me a story about binders, please, and make it long"}]
    first = await server.post("/v1/chat/completions", {"messages": turns, "max_tokens": 60})
    turns += [first["choices"][0]["message"], {"role": "user", "content": "go on"}]
    second = await server.post("/v1/chat/completions", {"messages": turns, "max_tokens": 4})
    before = first["usage"]["total_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= before - 16


async def test_models(server):
    """The served model is listed with its length and found by name."""
    listed = await server.openai.models.list()
    assert [model.id for model in listed.data] == ["fake"]
    assert listed.data[0].max_model_len == 1024
    assert (await server.openai.models.retrieve("fake")).id == "fake"
