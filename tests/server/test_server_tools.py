"""Tools in chat requests, and token ids in and out."""

from __future__ import annotations

import pytest

from looseleaf.errors import RequestError
from looseleaf.testing.fake_tokenizer import FakeTokenizer

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
ASK = {"role": "user", "content": "what does the weather do today, and tomorrow?"}
TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"day": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "rain"}


def called(call: object) -> dict:
    """A conversation in which the assistant made a call."""
    return {"messages": [ASK, {"role": "assistant", "tool_calls": [call]}]}


class DeafTokenizer(FakeTokenizer):
    """A template that knows neither tools nor calls, and no other roles than two."""

    def render_chat(self, messages, *, tools=(), add_generation_prompt=True):
        if any(message["role"] not in ("user", "assistant") for message in messages):
            raise RequestError("the chat template refuses these messages: only user and assistant")
        plain = [{"role": message["role"], "content": message["content"]} for message in messages]
        return super().render_chat(plain, add_generation_prompt=add_generation_prompt)


async def prompt_of(server, body) -> str:
    """What the model saw."""
    answer = await server.post(CHAT, {"max_tokens": 1, "return_token_ids": True, **body})
    return server.tokenizer.decode(answer["prompt_token_ids"])


async def test_tools_and_calls_reach_the_template(server):
    """Tools as they were written, calls with their arguments as an object, and results are rendered by the template; so
    they are in the official client."""
    messages = [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT]
    text = await prompt_of(server, {"messages": messages, "tools": [TOOL], "tool_choice": "auto"})
    assert '"name": "look", "description": "d"' in text
    assert '"arguments": {"day": 1}' in text
    assert text.endswith("tool: rain\nassistant: ")
    answer = await server.openai.chat.completions.create(
        model="fake", messages=messages, tools=[TOOL], tool_choice="none", max_tokens=3, parallel_tool_calls=False
    )
    assert len(answer.choices[0].message.content) == 3
    for arguments in ("", {}, {"day": 1}):
        call = {**CALL, "function": {"name": "look", "arguments": arguments}}
        text = await prompt_of(server, {"messages": [ASK, {"role": "assistant", "tool_calls": [call]}, RESULT]})
        assert f'"arguments": {{{"" if not arguments else chr(34) + "day" + chr(34) + ": 1"}}}' in text


async def test_tools_make_another_prompt(server):
    """With other tools, or none, a conversation begins otherwise: pins, warming and matching take them too."""
    body = {"messages": [ASK], "tools": [TOOL]}
    await server.post("/v1/cache/warm", body)
    with_tools = await server.post("/v1/cache/match", body)
    without = await server.post("/v1/cache/match", {"messages": [ASK]})
    assert with_tools["num_cached_tokens"] > 100
    assert without["num_cached_tokens"] == 0
    assert (await server.post("/v1/pins", {**body, "level": "soft"}))["num_pinned_tokens"] > 100


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tools": "look"}, "tools"),
        ({"tools": [{"type": "web"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}}, "tool_choice"),
        ({"functions": [{"name": "look"}]}, "functions"),
        (called({"function": {"name": "look", "arguments": "{"}}), "messages"),
        (called({"function": {"name": "look", "arguments": "7"}}), "messages"),
        (called({"function": {"arguments": "{}"}}), "messages"),
        (called("look"), "messages"),
        ({"messages": [ASK, {"role": "assistant", "tool_calls": {"look": 1}}]}, "messages"),
    ],
)  # fmt: skip
async def test_what_is_no_tool_is_refused(server, extra, param):
    """Tools and calls that are none, and choices that cannot be enforced, are 400 with their field; nothing runs."""
    error = (await server.post(CHAT, {"messages": [ASK], "max_tokens": 1, **extra}, 400))["error"]
    assert error["param"].split(".")[0] == param
    assert server.runner.num_steps == 0


async def test_a_template_without_tools_says_so(make_server):
    """Where the template would not show tools or calls to the model, the request is refused, not answered without them;
    a role that it does not know is refused with its own words. Completions have no tools."""
    server = await make_server(tokenizer=DeafTokenizer())
    calls = {"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}]}
    for body in ({"messages": [ASK], "tools": [TOOL]}, calls):
        error = (await server.post(CHAT, {**body, "max_tokens": 1}, 400))["error"]
        assert error["code"] == "tools_not_shown"
        assert "hint" in error["message"]
    error = (await server.post(CHAT, {"messages": [ASK, RESULT]}, 400))["error"]
    assert "only user and assistant" in error["message"]
    await server.post("/v1/cache/match", {"messages": [ASK], "tools": [TOOL]}, 400)
    await server.post("/v1/cache/match", {"text": "a", "tools": [TOOL]}, 400)
    await server.post("/v1/completions", {"prompt": "a", "tools": [TOOL]}, 400)
    await server.post(CHAT, {"messages": [ASK], "tools": [], "max_tokens": 1})


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_token_ids_on_request(server, path):
    """With `return_token_ids` answers carry the prompt's tokens and those of each choice, whole or as a stream, under
    vLLM's names; without it they do not."""
    is_chat = path == CHAT
    body = {"messages": [ASK]} if is_chat else {"prompt": ["one prompt", "another prompt"]}
    body |= {"max_tokens": 6, "temperature": 0, "n": 2, "stop": "zz"}
    texts = [ASK["content"]] if is_chat else body["prompt"]
    prompts = [server.tokenizer.render_chat([ASK])] if is_chat else [server.tokenizer.encode(text) for text in texts]
    bare = await server.post(path, body)
    assert "token_ids" not in str(bare)
    whole = await server.post(path, {**body, "return_token_ids": True})
    events = await server.events(path, {**body, "return_token_ids": True})
    if is_chat:
        assert whole["prompt_token_ids"] == prompts[0]
        assert [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event] == [prompts[0]]
        assert "prompt_token_ids" in events[0]
    for choice in whole["choices"]:
        text = choice["message"]["content"] if is_chat else choice["text"]
        assert server.tokenizer.decode(choice["token_ids"]) == text != ""
        mine = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        assert [token for c in mine for token in c.get("token_ids", [])] == choice["token_ids"]
        if not is_chat:
            prompt = prompts[choice["index"] // 2]
            assert choice["prompt_token_ids"] == prompt
            assert [c["prompt_token_ids"] for c in mine if "prompt_token_ids" in c] == [prompt]


async def test_a_conversation_by_token_ids(server):
    """A client that keeps token ids sends the very tokens: as a completion's prompt, or for a chat answer as
    `prompt_token_ids`; both hit on all that was computed and answer what the messages would."""
    options = {"max_tokens": 40, "return_token_ids": True, "temperature": 0}
    first = await server.post(CHAT, {"messages": [ASK], **options})
    tokens = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    more = server.tokenizer.encode("\nuser: go on\nassistant: ", add_special_tokens=False)
    known = (len(tokens) - 1) // 16 * 16
    messages = [ASK, first["choices"][0]["message"], {"role": "user", "content": "go on"}]
    by_ids = await server.post(CHAT, {"messages": [], "prompt_token_ids": tokens + more, **options})
    by_text = await server.post(CHAT, {"messages": messages, **options})
    completion = await server.post("/v1/completions", {"prompt": tokens + more, **options})
    assert by_ids["prompt_token_ids"] == by_text["prompt_token_ids"] == tokens + more
    assert by_ids["object"] == "chat.completion"
    assert by_ids["usage"]["prompt_tokens_details"]["cached_tokens"] == known
    texts = [answer["choices"][0]["message"]["content"] for answer in (by_ids, by_text)]
    assert texts == [completion["choices"][0]["text"]] * 2


@pytest.mark.parametrize(
    "body",
    [{}, {"messages": []}, {"messages": [ASK], "prompt_token_ids": [1]}, {"prompt_token_ids": []},
     {"prompt_token_ids": [-1]}, {"prompt_token_ids": [2**31]}, {"prompt_token_ids": ["a"]}, {"prompt_token_ids": 7}],
)  # fmt: skip
async def test_messages_or_tokens(server, body):
    """A chat request has messages or token ids, not both and not neither, and these are token ids."""
    await server.post(CHAT, {"max_tokens": 1, **body}, 400)
    assert server.runner.num_steps == 0
