"""Sessions over HTTP: requests that name their conversation, and its end."""

from __future__ import annotations

import pytest

from looseleaf.server import ApiKey, ServerSettings

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS, SESSIONS = "/v1/chat/completions", "/v1/completions", "/v1/sessions"
TEXT = "the same prompt of several blocks, sent by different people"
KEYS = ServerSettings(admin_key="root", api_keys=(ApiKey("k1", "one", "first"), ApiKey("k2", "two", "second")))


def as_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def complete(server, prompt: str = TEXT, key: str | None = None, **body) -> dict:
    headers = as_key(key) if key else {}
    return await server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 2, **body}, **headers)


async def listed(server, **headers: str) -> list[dict]:
    return (await server.get(SESSIONS, **headers))["data"]


async def test_sessions_are_named_listed_and_ended(make_server, clock):
    """A session named in the body or the header of either door has its turns, gaps and tokens listed; its end says what
    it released, and after it there is none."""
    server = await make_server(clock=clock)
    await complete(server, session_id="s/1")
    clock.seconds += 10
    messages = [{"role": "user", "content": TEXT}]
    await server.post(CHAT, {"messages": messages, "max_tokens": 2}, **{"X-Session-Id": "s/1"})
    clock.seconds += 5
    await complete(server, "x" * 40)
    (session,) = await listed(server)
    assert (session["id"], session["object"], session["namespace"]) == ("s/1", "session", "")
    assert (session["num_turns"], session["mean_gap_seconds"], session["last_used_seconds_ago"]) == (2, 10, 5)
    own_tokens = session["num_tokens"]
    assert own_tokens == server.cache.stats().cached_blocks * 16 - 32
    ended = await server.delete(f"{SESSIONS}/s%2F1")
    assert ended == {"id": "s/1", "object": "session", "deleted": True, "num_released_tokens": own_tokens,
                     "num_kept_tokens": 0}  # fmt: skip
    assert await listed(server) == []
    error = (await server.delete(f"{SESSIONS}/s%2F1", 404))["error"]
    assert error["code"] == "unknown_session"


async def test_what_a_session_releases_goes_first(make_server):
    """After the end of a session, what it alone used is evicted before older things are; what others use too stays."""
    server = await make_server(num_pages=1)  # 16 blocks
    await complete(server, "a" * 66)
    await complete(server, "b" * 66, session_id="s")
    await server.delete(f"{SESSIONS}/s")
    await complete(server, "c" * 150)
    match = [(await server.post("/v1/cache/match", {"text": letter * 66}))["num_cached_tokens"] for letter in "abc"]
    assert match[0] == 64
    assert match[1] < 64
    assert match[2] == 64


async def test_sessions_are_ones_own(make_server):
    """A key sees and ends the sessions of its own namespaces; the same name with another key or salt is another
    session. What is somebody else's is unknown, like what does not exist. Who has the admin key sees and ends all."""
    server = await make_server(settings=KEYS)
    for key, salt in (("k1", None), ("k1", "x"), ("k2", None)):
        await complete(server, key=key, session_id="s", **({"cache_salt": salt} if salt else {}))
    await complete(server, key="k2", session_id="only-two")
    assert [session["id"] for session in await listed(server, **as_key("k1"))] == ["s", "s"]
    assert sorted(session["id"] for session in await listed(server, **as_key("k2"))) == ["only-two", "s"]
    everything = await listed(server, **as_key("root"))
    assert len(everything) == 4
    names = {session["namespace"] for session in everything}
    assert len(names) == 3

    for name in ("only-two", "nobodys"):
        error = (await server.delete(f"{SESSIONS}/{name}", 404, **as_key("k1")))["error"]
        assert error["code"] == "unknown_session"
    foreign = next(session["namespace"] for session in everything if session["id"] == "only-two")
    await server.delete(f"{SESSIONS}/only-two?namespace={foreign}", 400, **as_key("k1"))
    await server.delete(f"{SESSIONS}/s?cache_salt=x", 200, **as_key("k1"))
    assert len(await listed(server, **as_key("k1"))) == 1
    await server.delete(f"{SESSIONS}/only-two?namespace={foreign}", 200, **as_key("root"))
    await server.delete(f"{SESSIONS}/s?namespace={foreign}&cache_salt=x", 400, **as_key("root"))
    assert [session["id"] for session in await listed(server, **as_key("k2"))] == ["s"]
    await server.get(SESSIONS, 401)
    await server.delete(f"{SESSIONS}/s", 401)


async def test_a_salt_is_no_secret_of_its_session_list(make_server):
    """Clients that are no admin do not learn salts from the list."""
    server = await make_server(settings=ServerSettings(admin_key="root"))
    await complete(server, session_id="s", cache_salt="s3cret")
    response = await server.http.get(SESSIONS)
    assert "s3cret" not in response.text
    assert "namespace" not in response.json()["data"][0]
    assert "s3cret" in (await server.http.get(SESSIONS, headers=as_key("root"))).text


async def test_a_request_that_runs_while_its_session_ends(make_server, wire, eventually):
    """The end of a session lets its running request finish; what that holds is counted as kept."""
    server = await make_server(delay_seconds=0.01)
    async with wire(server) as wired:
        reader, writer = await wired.send(COMPLETIONS, {"prompt": TEXT, "max_tokens": 60, "session_id": "s"})
        assert await eventually(lambda: server.cache.stats().num_leases == 1)
        await server.delete(f"{SESSIONS}/s")
        assert b"200" in await reader.readline()
        assert await eventually(lambda: server.is_idle)
        writer.close()


async def test_the_explanation_names_the_session(server):
    """The explanation of a request has its session, and None without one."""
    await complete(server, session_id="s", request_id="a")
    await complete(server, request_id="b")
    assert (await server.get("/v1/requests/a/cache"))["session"] == "s"
    assert (await server.get("/v1/requests/b/cache"))["session"] is None


async def test_a_divergence_shows_both_texts(server):
    """Where a prompt leaves what is stored, the explanation shows both texts from there on."""
    same = "we all begin with these words, every single one of us, "
    await complete(server, same + "and go home early")
    await complete(server, same + "or stay here for long", request_id="b")
    explanation = await server.get("/v1/requests/b/cache")
    assert explanation["reason"] == "diverged"
    assert explanation["first_missed_token"] == len(same) + 1
    assert explanation["diverged_text"] == {"stored": "and go h", "asked": "or stay "}
    await complete(server, "something else entirely that has nothing in common", request_id="c")
    assert (await server.get("/v1/requests/c/cache"))["diverged_text"] is None


async def test_nothing_of_others_shows_at_a_divergence(make_server):
    """What other keys and salts have stored is never shown: for them there is nothing."""
    server = await make_server(settings=KEYS)
    await complete(server, TEXT + "and the secret is 42", key="k1")
    await complete(server, TEXT + "and the secret is 43", key="k1", cache_salt="x")
    for key, salt in (("k2", None), ("k2", "x"), ("k1", "y")):
        body = {"request_id": f"r-{key}-{salt}", **({"cache_salt": salt} if salt else {})}
        await complete(server, TEXT + "or not", key=key, **body)
        response = await server.http.get(f"/v1/requests/{body['request_id']}/cache", headers=as_key(key))
        explanation = response.json()
        assert explanation["reason"] == "never_seen"
        assert explanation["diverged_text"] is None
        assert explanation["stored_tokens"] == []
        assert "secret" not in response.text
