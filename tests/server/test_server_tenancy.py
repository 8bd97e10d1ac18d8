"""Namespaces: salts and keys never share, and nobody sees another's requests and pins."""

from __future__ import annotations

import pytest

from looseleaf.core.namespaces import namespace_of
from looseleaf.errors import ConfigError
from looseleaf.server import ApiKey, ServerSettings
from looseleaf.server.auth import Caller, shown_name

pytestmark = pytest.mark.anyio

TEXT = "the same prompt of several blocks, sent by different people"
COMPLETIONS = "/v1/completions"


def test_divisions_of_a_key_belong_to_it_alone():
    """[T134] A namespace belongs to a key if it is the key's own or a division of it, whatever strings the salts are.
    How the parts are told apart is tested in tests/core/test_namespaces.py."""
    caller = Caller("a", key_namespace="a", is_admin=False)
    assert all(caller.may_see(caller.namespace(salt)) for salt in (None, "", "b"))
    for key, salt in (("ab", None), (None, "a"), (None, None), (None, 'tenant="a"/'), ("", "a")):
        assert not caller.may_see(Caller("", key_namespace=key, is_admin=False).namespace(salt))


def test_a_salt_is_never_shown():
    """What anybody may be told of a namespace names the key, and of a salt only a digest, the same for the same
    salt."""
    assert shown_name("") == "default"
    assert shown_name(namespace_of(tenant="a")) == "tenant=a"
    for salt in ("s3cret", 's3cret"', "/salt=s3cret", "\\s3cret"):
        for key in (None, "k", 'k"/salt="', "\\"):
            name = shown_name(namespace_of(tenant=key, salt=salt))
            assert "s3cret" not in name
            assert "salt#" in name
            assert name == shown_name(namespace_of(tenant=key, salt=salt))
    assert shown_name("what a library user calls s3cret") == shown_name("what a library user calls s3cret") != "s3cret"


async def cached(server, key: str | None = None, **extra) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"prompt": TEXT, "max_tokens": 1, **extra}
    answer = await server.post(COMPLETIONS, body, **headers)
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_salts_never_share(server):
    """[T134] Requests of different salts, or with and without one, never hit each other; those of the same salt do. In
    chat too."""
    whole = len(TEXT) // 16 * 16
    for salt in ({}, {"cache_salt": ""}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a "}):
        assert await cached(server, **salt) == 0
        assert await cached(server, **salt) == whole
    body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1}
    for salt in ("a", "b"):
        usage = (await server.post("/v1/chat/completions", {**body, "cache_salt": salt}))["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0


async def test_prompt_cache_key_changes_nothing(server):
    """`prompt_cache_key` is a label: requests share across it."""
    await cached(server, prompt_cache_key="one")
    assert await cached(server, prompt_cache_key="two") == len(TEXT) // 16 * 16


async def test_pins_match_and_warm_follow_the_salt(server):
    """The cache routes take the salt as the requests do."""
    await server.post("/v1/cache/warm", {"text": TEXT, "cache_salt": "a"})
    assert (await server.post("/v1/cache/match", {"text": TEXT}))["num_cached_tokens"] == 0
    assert (await server.post("/v1/cache/match", {"text": TEXT, "cache_salt": "a"}))["num_cached_tokens"] > 0
    assert (await server.post("/v1/pins", {"text": TEXT}))["num_pinned_tokens"] == 0
    assert (await server.post("/v1/pins", {"text": TEXT, "cache_salt": "a"}))["num_pinned_tokens"] > 0


KEYS = ServerSettings(admin_key="root", api_keys=(ApiKey("k1", "one", "first"), ApiKey("k2", "two", "second")))


def as_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_keys_are_needed_where_they_are_set(make_server):
    """With API keys every /v1 route is 401 without a right one; health, metrics and the dashboard stay open."""
    server = await make_server(settings=KEYS)
    for path in ("/v1/models", "/v1/pins", "/v1/cache/stats", "/v1/requests/x/cache"):
        for headers in ({}, as_key("k3"), {"Authorization": "k1"}, as_key("")):
            response = await server.http.get(path, headers=headers)
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "invalid_api_key"
    for path, body in ((COMPLETIONS, {"prompt": "a"}), ("/v1/cache/match", {"text": "a"}), ("/v1/cache/clear", {})):
        await server.post(path, body, 401)
    await server.get("/v1/models", **as_key("k1"))
    for path in ("/health", "/metrics", "/dashboard"):
        assert (await server.http.get(path)).status_code == 200


async def test_a_keys_namespace_comes_before_the_salt(make_server):
    """Two keys never share, with the same salt or without; a salt divides a key's namespace further."""
    server = await make_server(settings=KEYS)
    for key in ("k1", "k2"):
        for salt in ({}, {"cache_salt": "s"}, {"cache_salt": "one"}):
            assert await cached(server, key, **salt) == 0
            assert await cached(server, key, **salt) > 0


async def test_admin_routes_need_the_admin_key(make_server):
    """Where an admin key is set, pins, warming and clearing are 403 for others; looking is not."""
    for settings in (KEYS, ServerSettings(admin_key="root")):
        server = await make_server(settings=settings)
        headers = as_key("k1")
        for path, body in (("/v1/pins", {"text": TEXT}), ("/v1/cache/warm", {"text": TEXT}), ("/v1/cache/clear", {})):
            error = (await server.post(path, body, 403, **headers))["error"]
            assert error["code"] == "admin_key_required"
            await server.post(path, body, 200, **as_key("root"))
        pin = (await server.get("/v1/pins", **as_key("root")))["data"][0]
        assert (await server.http.delete(f"/v1/pins/{pin['id']}", headers=headers)).status_code == 403
        assert (await server.http.delete(f"/v1/pins/{pin['id']}", headers=as_key("root"))).status_code == 200
        await server.post("/v1/cache/match", {"text": TEXT}, **headers)


async def test_a_client_sees_only_its_own(make_server):
    """One key's requests and pins do not exist for another key: no explanation, no pin of them, not in the list, not
    to delete; a clear reaches the caller's namespace only."""
    keys = ServerSettings(api_keys=KEYS.api_keys)
    server = await make_server(settings=keys)
    body = {"prompt": TEXT, "max_tokens": 1, "request_id": "r"}
    await server.post(COMPLETIONS, body, **as_key("k1"))
    await server.get("/v1/requests/r/cache", **as_key("k1"))
    await server.get("/v1/requests/r/cache", 404, **as_key("k2"))
    await server.post("/v1/pins", {"request_id": "r"}, 404, **as_key("k2"))
    pin = await server.post("/v1/pins", {"request_id": "r"}, **as_key("k1"))
    assert pin["owner"] == "first"
    assert (await server.get("/v1/pins", **as_key("k2")))["data"] == []
    for path in (f"/v1/pins/{pin['id']}", "/v1/pins?request_id=r"):
        assert (await server.http.delete(path, headers=as_key("k2"))).status_code == 404
    await server.post("/v1/cache/clear", {"include_pins": True}, **as_key("k2"))
    assert (await server.get("/v1/pins", **as_key("k1")))["data"] == [pin]
    await server.post(COMPLETIONS, body, **as_key("k2"))  # the same id, later, of another client
    assert (await server.http.delete("/v1/pins?request_id=r", headers=as_key("k2"))).status_code == 404
    assert (await server.http.delete("/v1/pins?request_id=r", headers=as_key("k1"))).status_code == 200


async def test_explanations_do_not_tell_of_others(make_server):
    """That another client has sent the same text is told to an operator, not to a client: it would make prompts
    guessable."""
    for settings, expected in ((None, "other_namespace"), (KEYS, "never_seen")):
        server = await make_server(settings=settings)
        await cached(server, "k1", cache_salt="a")
        await cached(server, "k2", cache_salt="b", request_id="probe")
        answer = await server.get("/v1/requests/probe/cache", **as_key("k2"))
        assert answer["reason"] == expected
        assert ("another" in answer["message"]) == (expected == "other_namespace")


@pytest.mark.parametrize(
    "keys",
    [
        {"admin_key": ""},
        {"api_keys": (ApiKey("a", "x", "n"), ApiKey("a", "y", "m"))},
        {"admin_key": "a", "api_keys": (ApiKey("a", "x", "n"),)},
        {"max_choices": 0},
    ],
)
def test_settings_that_open_doors_by_mistake_are_refused(keys):
    """Empty keys, keys given twice and limits below 1 are configuration errors."""
    with pytest.raises(ConfigError):
        ServerSettings(**keys)
