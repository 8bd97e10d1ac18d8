"""`/v1/cache` and `/v1/requests`: look-up, warming, clearing, statistics, explanations."""

from __future__ import annotations

import asyncio
from dataclasses import fields

import pytest

from looseleaf.core.reports import Fragmentation
from looseleaf.core.stats import CacheStats

pytestmark = pytest.mark.anyio

TEXT = "a prompt of several blocks that will be looked up, warmed and cleared"
MESSAGES = [
    {"role": "system", "content": "you answer in the fewest words that do"},
    {"role": "user", "content": "hello"},
]


async def test_match_says_what_a_request_would_hit(server):
    """`match` gives exactly the cached tokens that the same completion then reports, and changes nothing."""
    assert (await server.post("/v1/cache/match", {"text": TEXT}))["num_cached_tokens"] == 0
    await server.post("/v1/completions", {"prompt": TEXT, "max_tokens": 1})
    before = server.cache.stats()
    for body in ({"text": TEXT}, {"tokens": server.tokenizer.encode(TEXT)}):
        match = await server.post("/v1/cache/match", body)
        assert match["num_prompt_tokens"] == len(TEXT) + 1
        assert match["by_rung"] == {"exact": match["num_cached_tokens"]}
    assert server.cache.stats() == before
    answer = await server.post("/v1/completions", {"prompt": TEXT, "max_tokens": 1})
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == match["num_cached_tokens"] > 0


async def test_match_of_messages_is_that_of_the_chat_request(server):
    """A conversation is looked up as the chat request that asks for its answer."""
    await server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1})
    match = await server.post("/v1/cache/match", {"messages": MESSAGES})
    answer = await server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1})
    assert match["num_prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert match["num_cached_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("source", ["text", "tokens", "messages"])
async def test_warm_computes_once(server, source):
    """Warming computes the prompt and generates nothing; the second time all whole blocks are there; a request then
    hits."""
    body = {"text": {"text": TEXT}, "tokens": {"tokens": list(range(50))}, "messages": {"messages": MESSAGES}}[source]
    first = await server.post("/v1/cache/warm", body)
    assert (first["num_cached_tokens"], first["num_computed_tokens"]) == (0, first["num_prompt_tokens"])
    second = await server.post("/v1/cache/warm", body)
    assert second["num_computed_tokens"] == first["num_prompt_tokens"] - second["num_cached_tokens"] <= 16
    assert (await server.post("/v1/cache/match", body))["num_cached_tokens"] == second["num_cached_tokens"]
    assert (await server.get(f"/v1/requests/{first['request_id']}/cache"))["reason"] == "never_seen"


async def test_clear_answers_what_it_did(server):
    """[S118] Three prompts in two namespaces: clearing one forgets exactly its tokens, clearing all the rest; look-ups
    then miss and the counts are those that left the statistics."""
    await server.post("/v1/cache/warm", {"tokens": list(range(32))})
    await server.post("/v1/cache/warm", {"tokens": list(range(100, 148))})
    await server.post("/v1/cache/warm", {"tokens": list(range(64)), "cache_salt": "s"})
    one = await server.post("/v1/cache/clear", {"cache_salt": "s"})
    assert (one["num_cleared_tokens"], one["num_kept_tokens"], one["complete"]) == (64, 0, True)
    assert (await server.post("/v1/cache/match", {"tokens": list(range(65)), "cache_salt": "s"}))[
        "num_cached_tokens"
    ] == 0
    assert (await server.post("/v1/cache/match", {"tokens": list(range(33))}))["num_cached_tokens"] == 32
    rest = await server.post("/v1/cache/clear", {})
    assert (rest["num_cleared_tokens"], rest["complete"]) == (80, True)
    assert (await server.post("/v1/cache/match", {"tokens": list(range(33))}))["num_cached_tokens"] == 0
    stats = await server.get("/v1/cache/stats")
    assert stats["free_blocks"] == stats["num_blocks"]
    assert stats["cleared_tokens"] == 144
    again = await server.http.post("/v1/cache/clear")
    assert again.json()["num_cleared_tokens"] == 0


async def test_clear_while_a_request_runs_says_it_is_not_complete(make_server, eventually):
    """[S117] While a request runs, a clear answers `complete: false` with the tokens that stay; they are never matched
    again and are freed at its end."""
    server = await make_server(delay_seconds=0.005)
    body = {"prompt": TEXT, "max_tokens": 60, "ignore_eos": True}
    await server.post("/v1/cache/warm", {"tokens": list(range(200, 248))})
    running = asyncio.ensure_future(server.post("/v1/completions", body))
    assert await eventually(lambda: server.runner.num_steps > 5)
    during = await server.post("/v1/cache/clear", {})
    assert during["complete"] is False
    assert during["num_cleared_tokens"] == 48
    assert during["num_kept_tokens"] >= 64
    assert (await server.post("/v1/cache/match", {"text": TEXT}))["num_cached_tokens"] == 0
    assert (await running)["usage"]["completion_tokens"] == 60
    assert (await server.post("/v1/cache/match", {"text": TEXT}))["num_cached_tokens"] == 0
    idle = await server.post("/v1/cache/clear", {})
    assert idle["complete"] is True


async def test_clear_spares_pins_unless_told(server):
    """[S117] What is pinned is kept and counted; `include_pins` drops the pins with it."""
    await server.post("/v1/pins", {"tokens": list(range(32)), "wait": True})
    kept = await server.post("/v1/cache/clear", {})
    assert (kept["num_kept_tokens"], kept["complete"]) == (32, False)
    assert (await server.post("/v1/cache/match", {"tokens": list(range(33))}))["num_cached_tokens"] == 32
    gone = await server.post("/v1/cache/clear", {"include_pins": True})
    assert (gone["num_cleared_tokens"], gone["complete"]) == (32, True)
    assert (await server.get("/v1/pins"))["data"] == []


async def test_stats_are_all_fields(server):
    """The statistics route gives every field of `stats()`."""
    stats = await server.get("/v1/cache/stats")
    assert set(stats) == {field.name for field in fields(CacheStats)} | {"object"}


async def test_fragmentation_comes_if_asked_for(server):
    """Statistics with `?fragmentation=true` carry every field of `fragmentation()` under that key; three blocks taken
    of the first page leave its other 13 free there, and a run that long or longer."""
    await server.post("/v1/cache/warm", {"tokens": list(range(48))})
    stats = await server.get("/v1/cache/stats?fragmentation=true")
    cut = stats["fragmentation"]
    assert set(cut) == {field.name for field in fields(Fragmentation)}
    assert (cut["free_pages"], cut["partial_pages"], cut["full_pages"]) == (7, 1, 0)
    assert cut["packing_degree"] == 3 / 16
    assert cut["page_waste"] == 13 / 128
    assert sum(cut["free_runs"].values()) >= 1
    assert [(group["name"], group["held_blocks"], group["cached_blocks"]) for group in cut["groups"]] == [
        ("full", 0, 3)
    ]


async def test_explanations(server):
    """The id that the client saw explains its request: cold, warm, diverged, and after a clear."""
    body = {"prompt": list(range(49)), "max_tokens": 1}

    async def why(**extra) -> dict:
        answer = await server.post("/v1/completions", {**body, **extra})
        return await server.get(f"/v1/requests/{answer['id']}/cache")

    cold = await why()
    assert (cold["reason"], cold["num_prompt_tokens"], cold["num_cached_tokens"]) == ("never_seen", 49, 0)
    warm = await why()
    assert (warm["reason"], warm["num_cached_tokens"]) == ("full_hit", 48)
    other = await why(prompt=[*range(36), *range(100, 120)])
    assert (other["reason"], other["num_cached_tokens"], other["first_missed_token"]) == ("diverged", 32, 36)
    await server.post("/v1/cache/clear", {})
    cleared = await why()
    assert cleared["reason"] == "cleared"
    assert "48" not in str(cleared["num_cached_tokens"])
    assert cleared["message"]


async def test_a_live_request_is_explained(make_server, eventually):
    """The explanation is there while the request still runs."""
    server = await make_server(delay_seconds=0.01)
    body = {"prompt": TEXT, "max_tokens": 30, "request_id": "live"}
    running = asyncio.ensure_future(server.post("/v1/completions", body))
    assert await eventually(lambda: server.engine.engine.num_running == 1)
    assert (await server.get("/v1/requests/live/cache"))["reason"] == "never_seen"
    await running
