"""Stop strings at the HTTP level: not a character of them leaves, and tokens and text stay together."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"


async def stream(server, script: bytes, request_id: str, **body) -> list[dict]:
    prompt = [1, 2, 3]
    server.runner.script(request_id, len(prompt), list(script))
    asked = {"prompt": prompt, "request_id": request_id, "max_tokens": len(script), **body}
    return [event["choices"][0] for event in await server.events(COMPLETIONS, asked)]


@pytest.mark.parametrize("stop", ["DEFG", ["xyz", "DEFG"]])
async def test_stop_string_over_several_tokens(server, stop):
    """[S111] With stop "DEFG" and a token for each letter, nothing of it is streamed, and the reason is `stop`."""
    choices = await stream(server, b"abcDEFGhij", "r", stop=stop)
    assert "".join(choice["text"] for choice in choices) == "abc"
    assert choices[-1]["finish_reason"] == "stop"


async def test_false_start_is_released(server):
    """[S111] Text held back because it could become the stop string comes out when it does not, also at the very
    end."""
    choices = await stream(server, b"abDEXcdDEF", "r", stop="DEFG")
    assert "".join(choice["text"] for choice in choices) == "abDEXcdDEF"
    assert choices[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("script", [b"abDEXcdDEFGhi", b"abDEXcdDEF", "aßDE€x😀DEFG".encode(), "ab😀".encode()[:-1]])
async def test_tokens_and_text_stay_together(server, script):
    """[S112] In each chunk the joined token texts equal the chunk's text; summed up they equal the plain answer."""
    choices = await stream(server, script, "r", stop="DEFG", logprobs=1)
    for choice in choices:
        tokens = choice["logprobs"]["tokens"] if choice["logprobs"] else []
        assert "".join(tokens) == choice["text"]
    text = "".join(choice["text"] for choice in choices)
    tokens = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
    server.runner.script("plain", 3, list(script))
    plain = await server.post(
        COMPLETIONS,
        {"prompt": [1, 2, 3], "request_id": "plain", "max_tokens": len(script), "stop": "DEFG", "logprobs": 1},
    )
    assert plain["choices"][0]["text"] == text
    assert plain["choices"][0]["logprobs"]["tokens"] == tokens
    assert "".join(tokens) == text


async def test_tokens_and_text_stay_together_in_chat(server):
    """[S112] The same for chat: entries of each chunk join to its content, their bytes to its UTF-8."""
    messages = [{"role": "user", "content": "hi"}]
    num_prompt = len(server.tokenizer.render_chat(messages))
    script = "näDE😀DEFG".encode()
    server.runner.script("c", num_prompt, list(script))
    body = {"messages": messages, "request_id": "c", "max_tokens": 40, "stop": "DEFG", "logprobs": True}
    text = ""
    for event in await server.events("/v1/chat/completions", body):
        choice = event["choices"][0]
        content = choice["delta"].get("content", "")
        entries = choice["logprobs"]["content"] if choice["logprobs"] else []
        assert "".join(entry["token"] for entry in entries) == content
        assert b"".join(bytes(entry["bytes"]) for entry in entries) == content.encode()
        text += content
    assert text == "näDE😀"


async def test_no_chunk_splits_a_character(server):
    """A character of several tokens is streamed whole."""
    choices = await stream(server, "a😀€ß".encode(), "r")
    assert [choice["text"] for choice in choices if choice["text"]] == ["a", "😀", "€", "ß"]
