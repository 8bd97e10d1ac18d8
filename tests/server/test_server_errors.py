"""Everything that goes wrong has the OpenAI error shape."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest

from looseleaf.server import ServerSettings

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]

BAD_BODIES = [
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
    (COMPLETIONS, {"prompt": [[1], "a"]}, "prompt"),
    (COMPLETIONS, {"prompt": [True]}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": "5"}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n"),
    (COMPLETIONS, {"prompt": "a", "n": 129}, "n"),
    (COMPLETIONS, {"prompt": ["a"] * 65, "n": 2}, "n"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 0}, "echo"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
    (COMPLETIONS, {"prompt": "a", "best_of": 1, "n": 2}, "best_of"),
    (COMPLETIONS, {"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
    (COMPLETIONS, {"prompt": "a", "best_of": 129}, "best_of"),
    (COMPLETIONS, {"prompt": "a", "best_of": 0}, "best_of"),
    (CHAT, {"messages": USER, "best_of": 2}, "best_of"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": 5}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "request_id": ""}, "request_id"),
    (COMPLETIONS, {"prompt": "a", "request_id": "a b"}, "request_id"),
    (COMPLETIONS, {"prompt": "a", "prompt_cache_retention": "soon"}, "prompt_cache_retention"),
    (COMPLETIONS, {"prompt": "a", "prompt_cache_retention": -5}, "prompt_cache_retention"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
    (CHAT, {"messages": USER, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_object"}}, "response_format"),
    ("/v1/cache/match", {}, "tokens"),
    ("/v1/cache/match", {"text": "a", "tokens": [1]}, "tokens"),
    ("/v1/cache/match", {"txet": "a"}, "txet"),
    ("/v1/pins", {"text": "a", "level": "firm"}, "level"),
    ("/v1/pins", {"text": "a", "ttl_seconds": 0}, "ttl_seconds"),
    ("/v1/cache/clear", {"all": True}, "all"),
    ("/v1/cache/resize", {}, "num_pages"),
    ("/v1/cache/resize", {"num_pages": 4, "kv_bytes": 4096}, "num_pages"),
    ("/v1/cache/resize", {"num_pages": 0}, "num_pages"),
    ("/v1/cache/resize", {"num_pages": "4"}, "num_pages"),
    ("/v1/cache/resize", {"num_pages": 2**27}, "num_pages"),
    ("/v1/cache/resize", {"kv_bytes": 2**31 * 128}, "kv_bytes"),
    ("/v1/cache/resize", {"num_blocks": 15}, "num_blocks"),
    ("/v1/cache/resize", {"kv_bytes": 2047}, "kv_bytes"),
    ("/v1/cache/resize", {"pages": 4}, "pages"),
]


def check_shape(body: dict, code: str | None = None) -> dict:
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) - {"details"} == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    if code is not None:
        assert error["code"] == code
    return error


@pytest.mark.parametrize(("path", "body", "param"), BAD_BODIES)
async def test_bad_bodies_are_400_with_the_parameter(server, path, body, param):
    """A body that is wrong is 400, never 422, and names the parameter; nothing reaches the engine."""
    error = check_shape(await server.post(path, body, 400))
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert server.cache.stats().num_lookups == 0


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": -1},
        {"top_p": 0},
        {"top_k": -2},
        {"stop": ""},
        {"presence_penalty": 3},
        {"prompt": ""},
        {"prompt": [-1]},
        {"prompt": [260]},
        {"prompt": [2**31]},
        {"prompt": [[1], []]},
    ],
)
async def test_values_that_the_engine_refuses_are_400(server, body):
    """Sampling out of range, empty prompts and tokens outside the vocabulary are 400; other prompts of the request do
    not run on."""
    if "prompt" in body and body["prompt"] == "":
        server.tokenizer.encode = lambda text: []
    check_shape(await server.post(COMPLETIONS, {"prompt": "a", **body}, 400))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe"])
async def test_what_is_no_json_object_is_400(server, content):
    """Bodies that are no JSON object are 400, with the JSON content type or without."""
    for headers in ({"content-type": "application/json"}, {}):
        response = await server.http.post(COMPLETIONS, content=content, headers=headers)
        assert response.status_code == 400, response.text
        check_shape(response.json())


async def test_unknown_routes_methods_and_models(server):
    """An unknown route is 404, a wrong method 405, another model 404 `model_not_found`."""
    check_shape(await server.get("/v2/everything", 404), "unknown_route")
    check_shape(await server.get(COMPLETIONS, 405), "method_not_allowed")
    check_shape(await server.get("/v1/models/gpt", 404), "model_not_found")
    for path, prompt in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER})):
        check_shape(await server.post(path, {"model": "gpt", **prompt}, 404), "model_not_found")
    with pytest.raises(openai.NotFoundError) as caught:
        await server.openai.completions.create(model="gpt", prompt="a")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
async def test_too_long_prompts_are_400_with_the_numbers(server, stream):
    """A prompt that can never fit is 400 `context_length_exceeded` with its length and the limit, also if a stream was
    asked."""
    for path, prompt in (
        (COMPLETIONS, {"prompt": "x" * 2000}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 2000}]}),
        (COMPLETIONS, {"prompt": ["short", "x" * 2000]}),
    ):
        body = {**prompt, "stream": stream, "max_tokens": 1}
        error = check_shape(await server.post(path, body, 400), "context_length_exceeded")
        assert error["details"]["limit_tokens"] == 1024 or error["details"]["limit_tokens"] == 1023
        assert error["details"]["num_prompt_tokens"] > 2000
    with pytest.raises(openai.BadRequestError) as caught:
        await server.openai.completions.create(model="fake", prompt="x" * 2000)
    assert caught.value.code == "context_length_exceeded"


async def test_unknown_requests_and_pins_are_404(server):
    """Requests and pins that do not exist are 404."""
    check_shape(await server.get("/v1/requests/nobody/cache", 404), "unknown_request")
    check_shape(await server.post("/v1/pins", {"request_id": "nobody"}, 404), "unknown_request")
    for path in ("/v1/pins/pin-9", "/v1/pins?request_id=nobody"):
        response = await server.http.delete(path)
        assert response.status_code == 404
        check_shape(response.json(), "unknown_pin")
    assert (await server.http.delete("/v1/pins")).status_code == 400


async def test_a_live_id_cannot_be_taken_twice(make_server, eventually):
    """A second request of a live request's id is 409, and the first goes on."""
    server = await make_server(delay_seconds=0.005)
    body = {"prompt": "abc", "max_tokens": 40, "request_id": "same"}
    first = asyncio.ensure_future(server.post(COMPLETIONS, body))
    assert await eventually(lambda: server.engine.engine.num_running == 1)
    check_shape(await server.post(COMPLETIONS, body, 409), "duplicate_request")
    assert (await first)["usage"]["completion_tokens"] == 40


async def test_failures_of_the_model_are_500_and_end_streams_with_an_error(server):
    """A step that fails is 500; in a stream it is an error event before [DONE]; the next request is served."""
    server.runner.fail_next()
    response = await server.http.post(COMPLETIONS, json={"prompt": "abc"})
    assert response.status_code == 500
    check_shape(response.json())
    server.runner.fail_next()
    events = await server.events(CHAT, {"messages": USER})
    check_shape(events[-1])
    server.runner.fail_next()
    with pytest.raises(openai.APIError):
        async for _ in await server.openai.completions.create(model="fake", prompt="a", stream=True):
            pass
    await server.post(COMPLETIONS, {"prompt": "abc"})


async def test_a_bug_is_500_without_its_inner_life(server):
    """An unexpected exception is 500 in the same shape and does not print its message to the client."""

    def broken(*args, **kwargs):
        raise ZeroDivisionError("secret detail")

    server.cache.stats = broken
    transport = httpx.ASGITransport(server.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.get("/v1/cache/stats")
    del server.cache.stats
    assert response.status_code == 500
    assert "secret" not in response.text
    check_shape(response.json(), "internal_error")


async def test_settings_change_the_limits(make_server):
    """`max_choices` and `chat_output_tokens` bound what a request may ask."""
    server = await make_server(settings=ServerSettings(max_choices=2, chat_output_tokens=7))
    check_shape(await server.post(COMPLETIONS, {"prompt": ["a", "b", "c"]}, 400))
    answer = await server.post(CHAT, {"messages": USER})
    assert answer["usage"]["completion_tokens"] == 7


async def test_a_stopped_engine_is_503(server):
    """After the engine was stopped, requests are 503 at once."""
    await asyncio.to_thread(server.engine.stop)
    check_shape(await server.post(COMPLETIONS, {"prompt": "abc"}, 503))
    check_shape(await server.post(CHAT, {"messages": USER, "stream": True}, 503))


async def test_a_dead_engine_is_unhealthy(server, monkeypatch):
    """If the engine's thread died, /health is 503 and says of what."""
    assert (await server.get("/health"))["status"] == "ok"
    monkeypatch.setattr(server.engine, "failure", RuntimeError("no more memory"))
    error = check_shape(await server.get("/health", 503), "engine_dead")
    assert "no more memory" in error["message"]
