"""Usage figures and statistics that clients and operators read."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from looseleaf.core.namespaces import namespace_of
from looseleaf.server import ApiKey, ServerSettings
from looseleaf.server.auth import shown_name

pytestmark = pytest.mark.anyio

TEXT = "a long prompt that is sent again and again to see what it says about caching"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def body_for(path: str) -> dict:
    prompt = {"prompt": TEXT} if path == COMPLETIONS else {"messages": [{"role": "user", "content": TEXT}]}
    return {**prompt, "max_tokens": 3, "temperature": 0}


async def cached_tokens(server, path: str, stream: bool) -> int:
    if not stream:
        return (await server.post(path, body_for(path)))["usage"]["prompt_tokens_details"]["cached_tokens"]
    events = await server.events(path, {**body_for(path), "stream_options": {"include_usage": True}})
    return events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_cached_tokens_are_the_same_number_in_every_form(server, path):
    """[M124] Cold 0, not null; warm the same positive number in stream and plain form, below the number of prompt
    tokens."""
    assert await cached_tokens(server, path, stream=False) == 0
    server.cache.clear()
    assert await cached_tokens(server, path, stream=True) == 0
    warm = {await cached_tokens(server, path, stream) for stream in (False, True, False)}
    num_prompt = (await server.post(path, body_for(path)))["usage"]["prompt_tokens"]
    assert warm == {(num_prompt - 1) // 16 * 16}


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 32, 33])
async def test_cached_tokens_stay_below_the_prompt(server, num_tokens):
    """Whole blocks only, and at least one token is computed, at every boundary."""
    body = {"prompt": list(range(num_tokens)), "max_tokens": 1}
    assert (await server.post(COMPLETIONS, body))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = (await server.post(COMPLETIONS, body))["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == (num_tokens - 1) // 16 * 16
    assert again["prompt_tokens"] == num_tokens


async def test_requests_that_skip_the_cache_are_no_lookups(server):
    """[M130] One request that bypasses the cache and one warm one of 32 tokens: 32 tokens looked up, not 64; the
    skipped one says so."""
    tokens = list(range(32))
    skip = {"prompt": tokens, "max_tokens": 1, "reuse": False, "request_id": "skips"}
    await server.post(COMPLETIONS, skip)
    await server.post(COMPLETIONS, {"prompt": tokens, "max_tokens": 1})
    stats = await server.get("/v1/cache/stats")
    assert stats["query_tokens"] == 32
    assert stats["hit_tokens"] == 0
    assert (await server.get("/v1/requests/skips/cache"))["reason"] == "skipped"


async def test_choices_share_one_prompt_in_the_usage(server):
    """A prompt counts once however many choices it has; several prompts add up."""
    usage = (await server.post(COMPLETIONS, {"prompt": [[1] * 20, [2] * 30], "n": 3, "max_tokens": 2}))["usage"]
    assert usage["prompt_tokens"] == 50
    assert usage["completion_tokens"] == 12
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


async def test_prompt_logprobs_are_refused_not_invented(server):
    """[S114] [S115] Positions found in the cache have no logits: prompt log-probabilities are refused, cold and warm
    alike."""
    await server.post(COMPLETIONS, {"prompt": TEXT, "max_tokens": 1})
    for extra in ({"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}):
        error = (await server.post(COMPLETIONS, {"prompt": TEXT, "max_tokens": 1, **extra}, 400))["error"]
        assert error["code"] == "unsupported_parameter"


async def test_generated_logprobs_do_not_depend_on_hits(server):
    """[S115] Log-probabilities of generated tokens are the same cold and warm, and in whichever order prompts came."""
    shared = list(range(32))
    body = {"max_tokens": 4, "temperature": 0, "logprobs": 1}

    async def run(tail: int) -> list[float]:
        answer = await server.post(COMPLETIONS, {**body, "prompt": [*shared, tail]})
        return answer["choices"][0]["logprobs"]["token_logprobs"]

    first = [await run(97), await run(98)]
    server.cache.clear()
    assert [await run(98), await run(97)] == first[::-1]


async def test_metrics_over_http(make_server):
    """/metrics counts what clients did, under both families of names, and the load is 0 again when nothing runs."""
    server = await make_server(vllm_names=True)
    for _ in range(2):
        await server.post(COMPLETIONS, {"prompt": TEXT, "max_tokens": 3})
    await server.post(COMPLETIONS, {"prompt": TEXT, "max_tokens": 0})
    response = await server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    samples = dict(line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#"))
    num_prompt = len(TEXT) + 1
    expected = {
        'looseleaf_finished_requests_total{reason="length"}': 3,
        "looseleaf_query_tokens_total": 3 * num_prompt,
        "looseleaf_hit_tokens_total": 2 * (num_prompt // 16 * 16),
        "looseleaf_prompt_tokens_total": 3 * num_prompt,
        "looseleaf_output_tokens_total": 6,
        "looseleaf_time_to_first_token_seconds_count": 2,
        "looseleaf_running_requests": 0,
        'vllm:prefix_cache_queries_total{engine="0",model_name="fake"}': 3 * num_prompt,
        'vllm:generation_tokens_total{engine="0",model_name="fake"}': 6,
        'vllm:kv_cache_usage_perc{engine="0",model_name="fake"}': 0,
    }
    assert {name: float(samples[name]) for name in expected} == expected
    open_metrics = await server.http.get("/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0"})
    assert open_metrics.text.endswith("# EOF\n")


async def by_namespace(server) -> dict[str, tuple[float, float]]:
    """Query and hit tokens of each namespace, as the metrics tell them."""
    text = (await server.http.get("/metrics")).text
    found: dict[str, list[float]] = {}
    for kind in ("query", "hit"):
        for name, number in re.findall(rf'looseleaf_namespace_{kind}_tokens_total{{namespace="(.*?)"}} (\S+)', text):
            found.setdefault(name, []).append(float(number))
    return {name: tuple(numbers) for name, numbers in found.items()}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_hit_rates_of_namespaces_are_those_of_their_answers(make_server, path):
    """[M124] [M130] Per tenant, query and hit tokens are the sums of what its answers said, streams and plain
    replies alike; bypassed requests count in neither, nor do further choices of a prompt. In all they are the cache's
    own; of salts only a digest is shown."""
    settings = ServerSettings(api_keys=(ApiKey("k1", "one", "first"), ApiKey("k2", "two", "second")))
    server = await make_server(settings=settings)
    text = "tell me a story about binders, please, and make it long"
    prompt = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    expected: dict[str, list[int]] = {}
    for key, salt, stream, extra in itertools.product(("k1", "k2"), (None, "s3cret"), (False, True), ({}, {"n": 2})):
        body = {**prompt, "max_tokens": 2, "cache_salt": salt, "stream": stream, **extra}
        body["stream_options"] = {"include_usage": True}
        response = await server.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})
        answer = json.loads(response.text.split("data: ")[-2]) if stream else response.json()
        name = shown_name(namespace_of(tenant={"k1": "one", "k2": "two"}[key]))
        counts = expected.setdefault(name, [0, 0])
        counts[0] += answer["usage"]["prompt_tokens"]
        counts[1] += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    body = {**prompt, "max_tokens": 2, "reuse": False}
    await server.post(path, body, Authorization="Bearer k1")
    shown = await by_namespace(server)
    assert shown == {name: tuple(counts) for name, counts in expected.items()}
    stats = server.cache.stats()
    assert stats.query_tokens == sum(queried for queried, _ in shown.values())
    assert stats.hit_tokens == sum(found for _, found in shown.values()) > 0
    assert "s3cret" not in (await server.http.get("/metrics")).text
