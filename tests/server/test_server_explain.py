"""Explanations over HTTP: of one request, of all misses, of what namespaces use; and what nobody else may see."""

from __future__ import annotations

import asyncio

import pytest

from looseleaf.core.namespaces import namespace_of
from looseleaf.server import ApiKey, ServerSettings

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MISSES, NAMESPACES = "/v1/cache/misses", "/v1/cache/namespaces"
TEXT = "the same prompt of several blocks, sent by different people"
KEYS = ServerSettings(
    admin_key="root", api_keys=(ApiKey("k1", "one", "first"), ApiKey("k2", "two", "second")), shared_salts=("org",)
)


def as_key(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


async def complete(server, prompt: str = TEXT, key: str | None = None, **body) -> dict:
    return await server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 2, **body}, **as_key(key))


async def explained(server, request_id: str, key: str | None = None) -> dict:
    return await server.get(f"/v1/requests/{request_id}/cache", **as_key(key))


async def test_an_eviction_is_explained_with_its_pressure(make_server, clock):
    """Of what was evicted, the explanation says how long ago, by which policy and under what pressure; by which rung
    the rest was found; and the session."""
    server = await make_server(num_pages=1, clock=clock)
    await complete(server, "a" * 100)
    await complete(server, "b" * 230)
    clock.seconds += 42
    await complete(server, "a" * 100, request_id="again", session_id="s")
    explanation = await explained(server, "again")
    assert explanation["reason"] == "evicted"
    assert explanation["evicted_seconds_ago"] == 42
    assert explanation["policy"] == server.cache.config.policy
    assert explanation["pressure"] >= 0
    assert explanation["by_rung"] == {"exact": explanation["num_cached_tokens"]}
    assert explanation["session"] == "s"
    assert "42.0 s ago" in explanation["message"]


async def test_prompts_in_flight_are_a_rung(make_server, eventually):
    """What a request had because another one was computing it just then is told as `in_flight`."""
    server = await make_server(delay_seconds=0.03)
    running = asyncio.ensure_future(complete(server, "x", max_tokens=20))
    assert await eventually(lambda: server.engine.engine.num_running == 1)
    await asyncio.gather(running, *(complete(server, request_id=f"r{number}") for number in range(2)))
    rungs = [(await explained(server, f"r{number}"))["by_rung"] for number in range(2)]
    assert sorted(rung.get("in_flight", 0) for rung in rungs) == [0, 48]


async def test_what_is_stored_of_a_request(make_server):
    """`?stored=true` lists the runs of what a request computed, with what the policy thinks of them; of layers that
    others fill a key sees nothing."""
    server = await make_server(settings=KEYS)
    layers = [{"salt": "org", "num_tokens": 32}]
    await complete(server, key="k1", request_id="r", session_id="s", cache_layers=layers)
    assert "stored" not in await explained(server, "r", "k1")
    path = "/v1/requests/r/cache?stored=true"
    (own,) = (await server.get(path, **as_key("k1")))["stored"]
    assert (own["first_token"], own["num_tokens"], own["namespace"]) == (32, 16, namespace_of(tenant="one"))
    assert own["policy"]
    everything = (await server.get(path, **as_key("root")))["stored"]
    assert [part["namespace"] for part in everything] == [namespace_of(salt="org"), namespace_of(tenant="one")]
    await server.get(path, 404, **as_key("k2"))


async def test_misses_add_up(make_server, clock):
    """The summary's tokens add up to those of the statistics, in all and over time; `since_seconds` takes the last
    ones; a salt those of its namespace."""
    server = await make_server(clock=clock)
    await complete(server)
    await complete(server)
    clock.seconds += 3600
    await complete(server, "something else that nobody has ever said before")
    await complete(server, TEXT, cache_salt="x")
    everything = await server.get(MISSES)
    stats = server.cache.stats()
    assert (everything["query_tokens"], everything["hit_tokens"]) == (stats.query_tokens, stats.hit_tokens)
    assert sum(everything["missed_tokens"].values()) == stats.query_tokens - stats.hit_tokens
    assert everything["num_lookups"] == 4
    assert f"{stats.query_tokens:,} tokens in 4 look-ups" in everything["sentence"]
    assert "buckets" not in everything
    over_time = (await server.get(MISSES + "?buckets=true"))["buckets"]
    assert [bucket["num_lookups"] for bucket in over_time] == [2, 2]
    late = await server.get(MISSES + "?since_seconds=60")
    assert (late["num_lookups"], late["hit_tokens"]) == (2, 0)
    salted = await server.get(MISSES + "?cache_salt=x")
    assert (salted["num_lookups"], salted["query_tokens"]) == (1, len(TEXT) + 1)
    nothing = await server.get(MISSES + "?cache_salt=y")
    assert (nothing["num_lookups"], nothing["sentence"]) == (0, "Nothing was looked up.")


@pytest.mark.parametrize("since", ["0", "-1", "soon", "inf", "nan"])
async def test_a_time_is_a_number_of_seconds(server, since):
    """A time that is none is 400."""
    error = (await server.get(f"{MISSES}?since_seconds={since}", 400))["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "since_seconds")


async def test_misses_are_ones_own(make_server):
    """A key's summary is of its own namespace and says nothing of others: not their names, nor that they have what it
    asked for; that is told as never seen. The admin sees all."""
    server = await make_server(settings=KEYS)
    await complete(server, key="k1")
    await complete(server, key="k1", cache_salt="s3cret")
    await complete(server, key="k2")
    mine = await server.http.get(MISSES + "?buckets=true", headers=as_key("k2"))
    summary = mine.json()
    assert (summary["num_lookups"], summary["by_namespace"]) == (1, {})
    assert summary["requests"] == {"never_seen": 1}
    assert "other_namespace" not in mine.text
    assert "another namespace" not in mine.text
    everything = await server.get(MISSES, **as_key("root"))
    assert everything["requests"] == {"never_seen": 1, "other_namespace": 2}
    assert set(everything["by_namespace"]) == {
        namespace_of(tenant="one"), namespace_of(tenant="one", salt="s3cret"), namespace_of(tenant="two")
    }  # fmt: skip
    await server.get(MISSES, 401)


async def test_what_namespaces_use_is_ones_own(make_server):
    """A key sees what its tenant uses, the admin all, and who is neither nothing."""
    server = await make_server(settings=KEYS)
    for key in ("k1", "k2"):
        await complete(server, key=key)
        await complete(server, key=key, cache_salt="s")
    (mine,) = (await server.get(NAMESPACES, **as_key("k1")))["data"]
    assert (mine["namespace"], mine["num_lookups"], mine["hit_tokens"]) == (namespace_of(tenant="one"), 2, 0)
    assert mine["stored_blocks"] > 0
    assert len((await server.get(NAMESPACES, **as_key("root")))["data"]) == 2
    server = await make_server(settings=ServerSettings(admin_key="root"))
    await complete(server, cache_salt="s3cret")
    assert (await server.get(NAMESPACES))["data"] == []


async def test_texts_are_shown_within_ones_own_namespace_only(make_server):
    """Where a prompt leaves what is stored, a key sees both texts in its own namespace, and not in a layer that others
    fill; who has no key where there is an admin sees its own side only, of drift too. The admin sees all."""
    server = await make_server(settings=KEYS)
    same = "we all begin with these words, every single one of us, "
    await complete(server, same + "and go home early", "k1")
    await complete(server, same + "or stay here for long", "k1", request_id="own")
    assert (await explained(server, "own", "k1"))["diverged_text"] == {"stored": "and go h", "asked": "or stay "}
    layers = [{"salt": "org", "num_tokens": 68}]
    await complete(server, same + "and s3cret things", "k1", cache_layers=layers)
    await complete(server, same + "or stay here for long", "k2", request_id="layer", cache_layers=layers)
    explanation = await explained(server, "layer", "k2")
    assert explanation["reason"] == "diverged"
    assert explanation["diverged_text"] == {"stored": None, "asked": "or stay "}
    assert explanation["stored_tokens"] == []
    assert (await explained(server, "layer", "root"))["diverged_text"]["stored"] == "and s3cr"

    server = await make_server(settings=ServerSettings(admin_key="root"))
    ask = {"role": "user", "content": TEXT}
    first = await server.post(CHAT, {"messages": [ask], "max_tokens": 30})
    answer = first["choices"][0]["message"]["content"]
    edited = [ask, {"role": "assistant", "content": "X"}, ask]
    await server.post(CHAT, {"messages": edited, "max_tokens": 1, "request_id": "r"})
    response = await server.http.get("/v1/requests/r/cache")
    assert answer[:4] not in response.text
    drift = response.json()["drift"]
    assert (drift["cause"], drift["earlier_text"]) == ("message_edited", None)
    assert drift["text_now"].startswith("X")
    assert (await explained(server, "r", "root"))["drift"]["earlier_text"] == answer[:12]
