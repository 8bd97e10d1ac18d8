"""Usage figures and statistics that clients and operators read."""

from __future__ import annotations

import pytest

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
