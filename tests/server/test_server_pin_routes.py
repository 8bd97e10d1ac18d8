"""`/v1/pins` as a whole: what can be asked, what is answered, who may do it, and what the quota says."""

from __future__ import annotations

import asyncio
import time

import pytest

from looseleaf.server import ApiKey, ServerSettings

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"
TEXT = "a document of some blocks, which is asked about again and again by everybody in the house"
TWO_KEYS = (ApiKey("k1", "one", "first"), ApiKey("k2", "two", "second"))


def as_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def held(tokens: int) -> int:
    return tokens // 16 * 16


async def test_everything_that_can_be_asked_is_answered(make_server, clock):
    """Owner, labels, level, priority and times to live come back as they were asked, times in Unix seconds; a pin may
    come before its tokens, and holds them once they come; the list and the pin's own page agree with it."""
    server = await make_server(clock=clock)
    tokens = server.tokenizer.encode(TEXT)
    asked = {"owner": "ops", "labels": {"team": "a:b", "env": "prod"}, "level": "soft", "priority": 7, "refresh": True}
    pin = await server.post("/v1/pins", {**asked, "tokens": tokens, "ttl_seconds": 60, "max_ttl_seconds": 90})
    assert {name: pin[name] for name in asked} == asked
    assert (pin["object"], pin["num_tokens"], pin["num_pinned_tokens"]) == ("pin", len(tokens), 0)
    assert (pin["num_blocks"], pin["is_limited"], pin["is_automatic"], pin["request_id"]) == (0, False, False, None)
    assert (pin["namespace"], pin["cache_type"], pin["cost_tokens"]) == ("", "kv", 0)
    assert abs(pin["created_at"] - time.time()) < 2
    assert pin["expires_at"] - pin["created_at"] == pytest.approx(60, abs=0.1)
    await server.post(COMPLETIONS, {"prompt": TEXT, "max_tokens": 1})
    now = await server.get(f"/v1/pins/{pin['id']}")
    assert (now["num_pinned_tokens"], now["num_blocks"]) == (held(len(tokens)), len(tokens) // 16)
    assert [one["id"] for one in await server.pins()] == [pin["id"]]
    clock.seconds += 50
    await server.post(COMPLETIONS, {"prompt": TEXT, "max_tokens": 1})  # refreshed, but not beyond 90 seconds
    now = await server.get(f"/v1/pins/{pin['id']}")
    assert now["expires_at"] - now["created_at"] == pytest.approx(90, abs=0.1)
    assert (now["num_hits"], now["served_tokens"]) == (1, held(len(tokens)))
    clock.seconds += 41
    assert await server.pins() == []
    await server.get(f"/v1/pins/{pin['id']}", 404)


@pytest.mark.parametrize("how", [("/v1/pins?wait=true", {}), ("/v1/pins", {"wait": True})])
@pytest.mark.parametrize("source", ["tokens", "text", "messages"])
async def test_waiting_warms_first(server, how, source):
    """With `wait`, in the query or in the body, the answer of a cold prompt says that all its whole blocks are held; a
    second one computes nothing."""
    path, extra = how
    body = {"tokens": list(range(60)), "text": TEXT, "messages": [{"role": "system", "content": TEXT}]}[source]
    pin = await server.post(path, {source: body, **extra})
    assert pin["num_pinned_tokens"] == held(pin["num_tokens"]) > 0
    stored = server.cache.stats().stored_tokens
    again = await server.post(path, {source: body, **extra})
    assert again["id"] != pin["id"]
    assert server.cache.stats().stored_tokens == stored


async def test_a_part_of_a_request(server):
    """Of a finished request all it computed is pinned, or its prompt without the answer, or its first tokens; of a
    prompt, its first tokens, and only those are warmed."""
    prompt = list(range(40))
    body = {"prompt": prompt, "max_tokens": 30, "request_id": "doc", "ignore_eos": True}
    await server.post(COMPLETIONS, body)
    everything = await server.post("/v1/pins", {"request_id": "doc"})
    assert (everything["num_tokens"] > 64, everything["request_id"]) == (True, "doc")
    question = await server.post("/v1/pins", {"request_id": "doc", "part": "prompt"})
    assert (question["num_tokens"], question["num_pinned_tokens"]) == (40, 32)
    first = await server.post("/v1/pins", {"request_id": "doc", "last_token": 17})
    assert (first["num_tokens"], first["num_pinned_tokens"]) == (17, 16)
    other = await server.post("/v1/pins?wait=true", {"tokens": list(range(100, 180)), "last_token": 48})
    assert (other["num_tokens"], other["num_pinned_tokens"]) == (48, 48)
    match = await server.post("/v1/cache/match", {"tokens": list(range(100, 180))})
    assert match["num_cached_tokens"] == 48


@pytest.mark.parametrize(
    "body",
    [
        {}, {"tokens": [1] * 40, "text": "x"}, {"tokens": []}, {"tokens": [-1]}, {"tokens": [1] * 40, "nonsense": 1},
        {"level": "medium"}, {"priority": 2**31}, {"priority": -(2**31)}, {"priority": 1.5}, {"ttl_seconds": 0},
        {"ttl_seconds": -1}, {"ttl_seconds": "5m"}, {"max_ttl_seconds": 0}, {"part": "answer"}, {"last_token": 0},
        {"last_token": 41}, {"labels": {"a": 1}}, {"labels": ["a"]}, {"labels": {str(n): "" for n in range(65)}},
        {"owner": 5}, {"request_id": "doc", "tokens": [1] * 40}, {"request_id": "doc", "cache_salt": "s"},
        {"request_id": "doc", "wait": True}, {"request_id": "doc", "last_token": 1000}, {"wait": "yes"},
    ],
)  # fmt: skip
async def test_bad_input_changes_nothing(server, body):
    """What makes no sense is 400 in the usual shape: nothing is pinned, and nothing is computed either, though a wait
    was asked."""
    await server.post(COMPLETIONS, {"prompt": TEXT, "max_tokens": 1, "request_id": "doc"})
    before = server.cache.stats()
    if body and not {"tokens", "request_id"} & body.keys():
        body = {"tokens": [1] * 40, "wait": True, **body}
    error = (await server.post("/v1/pins", body, 400))["error"]
    assert error["message"]
    assert await server.pins() == []
    assert server.cache.stats() == before


@pytest.mark.parametrize("number", ["Infinity", "NaN", "1e999"])
async def test_times_to_live_are_finite(server, number):
    """A time to live that is no number of seconds is 400 before anything is computed."""
    content = f'{{"tokens": {[1] * 40}, "wait": true, "ttl_seconds": {number}}}'
    response = await server.http.post("/v1/pins", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert server.cache.stats().stored_tokens == 0


async def test_two_pins_need_two_unpins(server):
    """Pins on one prefix are counted: after one is undone the other holds all of it; after both, none. By request id
    the latest goes first; undoing what is gone is 404 and harmless."""
    await server.post(COMPLETIONS, {"prompt": TEXT, "max_tokens": 1, "request_id": "doc"})
    ids = [(await server.post("/v1/pins", {"request_id": "doc"}))["id"] for _ in range(2)]
    assert (await server.delete("/v1/pins?request_id=doc"))["id"] == ids[1]
    assert server.cache.stats().pinned_blocks == (len(TEXT) + 1) // 16
    await server.delete(f"/v1/pins/{ids[1]}", 404)
    await server.delete(f"/v1/pins/{ids[0]}")
    assert server.cache.stats().pinned_blocks == 0
    await server.delete("/v1/pins?request_id=doc", 404)


async def test_lists_by_owner_and_label_and_unpin_by_owner(server):
    """`owner` and `label` (all that are given) choose from the list; DELETE by owner undoes all of that owner and says
    which; without a match the list is empty; both or neither of request_id and owner is 400."""
    for index, (owner, labels) in enumerate([("a", {"x": "1"}), ("b", {"x": "1", "y": "2:3"}), ("a", {"y": "2:3"})]):
        await server.post("/v1/pins", {"tokens": [index] * 32, "owner": owner, "labels": labels})

    async def owners(query: str) -> list[str]:
        return [pin["owner"] for pin in (await server.get(f"/v1/pins?{query}"))["data"]]

    assert await owners("owner=a") == ["a", "a"]
    assert await owners("label=x:1") == ["a", "b"]
    assert await owners("label=x:1&label=y:2:3") == ["b"]
    assert await owners("label=x:1&owner=a") == ["a"]
    assert await owners("label=x") == await owners("owner=c") == []
    for query in ("", "?owner=a&request_id=r"):
        await server.delete(f"/v1/pins{query}", 400)
    gone = await server.delete("/v1/pins?owner=a")
    assert gone["data"] == [{"id": id_, "object": "pin", "deleted": True} for id_ in ("pin-1", "pin-3")]
    assert await owners("") == ["b"]
    assert await server.delete("/v1/pins?owner=a") == {"object": "list", "data": []}


async def test_past_pins(make_server, clock):
    """With `past` the list is of those that ended and those that were refused: how, when, and what they had held."""
    server = await make_server(clock=clock, num_pages=2, pin_quota=0.25)
    kept = await server.post("/v1/pins", {"tokens": [1] * 64, "wait": True, "ttl_seconds": 10})
    await server.post("/v1/pins", {"tokens": [2] * 160, "wait": True, "owner": "greedy"}, 409)
    undone = await server.post("/v1/pins", {"tokens": [3] * 16})
    await server.delete(f"/v1/pins/{undone['id']}")
    clock.seconds += 11
    past = (await server.get("/v1/pins?past=true"))["data"]
    assert [(pin["owner"], pin["end"]) for pin in past] == [
        ("greedy", "refused"), ("anonymous", "unpinned"), ("anonymous", "expired"),
    ]  # fmt: skip
    assert (past[2]["id"], past[2]["num_pinned_tokens"]) == (kept["id"], 64)
    assert past[2]["ended_at"] - past[2]["created_at"] == pytest.approx(11, abs=0.1)
    assert [pin["end"] for pin in (await server.get("/v1/pins?past=true&owner=greedy"))["data"]] == ["refused"]
    assert await server.pins() == []


async def test_a_pin_ends_though_nobody_calls(make_server, clock):
    """[P61] A pin whose holder is gone ends at its time: the next prompt that needs the memory has it, the count of
    expired pins is one, and a late unpin is a harmless 404."""
    server = await make_server(clock=clock, num_pages=2, pin_quota=1.0, max_model_tokens=512)
    pin = await server.post("/v1/pins", {"tokens": [1] * 448, "wait": True, "ttl_seconds": 300})
    assert pin["num_blocks"] == 28
    clock.seconds += 301
    await server.post(COMPLETIONS, {"prompt": [2] * 300, "max_tokens": 1})
    await server.delete(f"/v1/pins/{pin['id']}", 404)
    assert (await server.get("/v1/cache/stats"))["num_expired_pins"] == 1


async def test_leaving_while_waiting(make_server, wire, eventually):
    """A client that leaves while its pin's prompt is warmed ends that: nothing runs, no pin is made."""
    server = await make_server(delay_seconds=0.1)
    async with wire(server) as on_wire:
        for path, wait in (("/v1/pins?wait=true", False), ("/v1/pins", True)):
            _, writer = await on_wire.send(path, {"text": f"{path} " + "w" * 200, "wait": wait})
            assert await eventually(lambda: server.engine.engine.num_running == 1)
            writer.close()
            assert await eventually(lambda: server.is_idle)
            await asyncio.sleep(0.05)
            assert await server.pins() == []
    assert len(server.engine.effective) <= 2


async def test_a_failed_warming_leaves_no_pin(server):
    """If the model fails while a pin's prompt is warmed, the answer is that error, and there is no pin."""
    server.runner.fail_next()
    response = await server.http.post("/v1/pins?wait=true", json={"text": TEXT})
    assert response.status_code == 500
    assert await server.pins() == []
    assert (await server.post("/v1/pins?wait=true", {"text": TEXT}))["num_pinned_tokens"] > 0


# --- quotas -----------------------------------------------------------------------------------------------------------


async def test_quota_at_run_time(make_server):
    """The share can be changed while it runs; soft pins give way, hard ones make it 409 with the numbers and change
    nothing; shares that make no sense are 400."""
    server = await make_server(num_pages=2, pin_quota=0.5)
    assert await server.get("/v1/pins/quota") == {
        "object": "pin_quota", "share": 0.5, "num_blocks": 16, "used": 0, "namespaces": {},
    }  # fmt: skip
    await server.post("/v1/pins", {"tokens": [1] * 64, "wait": True})
    soft = await server.post("/v1/pins", {"tokens": [2] * 160, "wait": True, "level": "soft"})
    assert (await server.get("/v1/pins/quota"))["used"] == 14
    answer = await server.put("/v1/pins/quota", {"share": 0.25})
    assert (answer["share"], answer["num_blocks"], answer["used"]) == (0.25, 8, 8)
    assert (await server.get(f"/v1/pins/{soft['id']}"))["num_pinned_tokens"] == 64
    error = (await server.put("/v1/pins/quota", {"share": 0.1}, 409))["error"]
    assert error["code"] == "pin_quota_exceeded"
    assert (error["details"]["quota_blocks"], error["details"]["hard_pinned_blocks"]) == (3, 4)
    for share in (-0.1, 1.1, "0.5", True, None):
        await server.put("/v1/pins/quota", {"share": share}, 400)
    for more in ({"shares": 1}, {"namespace": "a", "cache_salt": "b"}):
        await server.put("/v1/pins/quota", {"share": 0.3, **more}, 400)
    assert (await server.get("/v1/pins/quota"))["share"] == 0.25
    assert (await server.put("/v1/pins/quota", {"share": 1}))["num_blocks"] == 32


async def test_quota_of_a_namespace(make_server):
    """A namespace may have a quota of its own, named by the salt or as its pins show it: they are refused beyond it,
    others go on."""
    server = await make_server(num_pages=2, pin_quota=1.0)
    answer = await server.put("/v1/pins/quota", {"share": 0.125, "cache_salt": "s"})
    assert answer["namespaces"] == {'salt="s"': {"share": 0.125, "num_blocks": 4, "used": 0}}
    body = {"tokens": [1] * 96, "wait": True}
    error = (await server.post("/v1/pins", {**body, "cache_salt": "s"}, 409))["error"]
    assert (error["details"]["needed_blocks"], error["details"]["available_blocks"]) == (6, 4)
    await server.post("/v1/pins", body)
    await server.put("/v1/pins/quota", {"share": 0.25, "namespace": 'salt="s"'})
    pin = await server.post("/v1/pins", {**body, "cache_salt": "s"})
    assert (pin["namespace"], pin["num_pinned_tokens"]) == ('salt="s"', 96)
    await server.put("/v1/pins/quota", {"share": 0.1, "cache_salt": "s"}, 409)


# --- who may do what --------------------------------------------------------------------------------------------------


async def test_keys_see_and_change_only_their_own_pins(make_server):
    """A key neither sees nor undoes pins of another, live or past, by id, request or owner, nor pins there or sets its
    quota; what belongs to it, salted or not, is its own."""
    server = await make_server(settings=ServerSettings(api_keys=TWO_KEYS))
    one, two = as_key("k1"), as_key("k2")
    pins = [
        await server.post("/v1/pins", {"text": TEXT, "owner": "ops", **salt}, **one)
        for salt in ({}, {"cache_salt": "s"})
    ]
    other = await server.post("/v1/pins", {"text": TEXT, "owner": "ops"}, **two)
    assert [pin["namespace"] for pin in pins] == ['tenant="one"', 'tenant="one"/salt="s"']
    assert [pin["id"] for pin in await server.pins(**one)] == [pin["id"] for pin in pins]
    await server.get(f"/v1/pins/{pins[0]['id']}", **one)
    await server.get(f"/v1/pins/{pins[0]['id']}", 404, **two)
    await server.delete(f"/v1/pins/{pins[0]['id']}", 404, **two)
    assert [one["id"] for one in (await server.delete("/v1/pins?owner=ops", **two))["data"]] == [other["id"]]
    assert len(await server.pins(**one)) == 2
    assert [pin["id"] for pin in (await server.get("/v1/pins?past=true", **two))["data"]] == [other["id"]]
    assert (await server.get("/v1/pins?past=true", **one))["data"] == []
    for namespace in ('tenant="one"', 'tenant="one"/salt="s"', ""):
        await server.put("/v1/pins/quota", {"share": 0.1, "namespace": namespace}, 403, **two)
    await server.put("/v1/pins/quota", {"share": 0.1}, **two)
    await server.put("/v1/pins/quota", {"share": 0.2, "cache_salt": "s"}, **one)
    assert [*(await server.get("/v1/pins/quota", **two))["namespaces"]] == ['tenant="two"']
    assert [*(await server.get("/v1/pins/quota", **one))["namespaces"]] == ['tenant="one"/salt="s"']
    assert server.cache.config.pin_quota == 0.3
    assert len((await server.delete("/v1/pins?owner=ops", **one))["data"]) == 2


async def test_changing_needs_the_admin_key(make_server):
    """Where an admin key is set, quotas and pins are changed with it only; others see the figures, but no salt: that
    would open the namespace."""
    server = await make_server(settings=ServerSettings(admin_key="root"))
    root = as_key("root")
    await server.post("/v1/pins", {"text": TEXT, "cache_salt": "secret"}, **root)
    await server.put("/v1/pins/quota", {"share": 0.2, "cache_salt": "secret"}, **root)
    await server.put("/v1/pins/quota", {"share": 0.25}, **root)
    await server.put("/v1/pins/quota", {"share": 0.9}, 403)
    await server.delete("/v1/pins?owner=admin", 403)
    (pin,) = await server.pins()
    assert "namespace" not in pin
    assert (await server.get("/v1/pins/quota"))["namespaces"] == {}
    assert (await server.get("/v1/pins/quota", **root))["share"] == 0.25
    (pin,) = await server.pins(**root)
    assert (pin["namespace"], pin["owner"]) == ('salt="secret"', "admin")


async def test_a_full_pool_of_pins_is_said_and_hangs_nobody(make_server):
    """[P67] A pin beyond the quota is refused with the numbers, or granted in part with the count; what is left serves
    requests; where all is pinned a request is told so at once, and served once something is unpinned."""
    server = await make_server(num_pages=2, pin_quota=1.0, max_model_tokens=512)
    await server.post("/v1/pins", {"tokens": [1] * 256, "wait": True})
    assert (await server.post(COMPLETIONS, {"prompt": [3] * 190, "max_tokens": 1}))["usage"]["prompt_tokens"] == 190
    last = await server.post("/v1/pins", {"tokens": [2] * 256, "wait": True, "partial": True})
    assert last["num_pinned_tokens"] == 256
    assert (await server.get("/v1/pins/quota"))["used"] == 32
    error = (await asyncio.wait_for(server.http.post(COMPLETIONS, json={"prompt": [3] * 190}), 5)).json()["error"]
    assert "pinned" in error["message"]
    await server.delete(f"/v1/pins/{last['id']}")
    await server.post(COMPLETIONS, {"prompt": [3] * 190, "max_tokens": 1})
