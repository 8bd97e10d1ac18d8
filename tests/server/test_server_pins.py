"""Pins by every door: the pins route, requests that ask for one, and what becomes of them under pressure."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest

from looseleaf.core.pin_record import Pin
from looseleaf.server import ServerSettings

pytestmark = pytest.mark.anyio

TEXT = "the policy of this company is that every page has a place and every place has a page, always"
SYSTEM = {"role": "system", "content": TEXT}
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
FIELDS = {field.name for field in dataclasses.fields(Pin)} | {"object"}


async def flood(server, num_prompts: int = 12) -> None:
    """One-off prompts, together several times the pool."""
    for index in range(num_prompts):
        tokens = [10 + index, *([7, 8, 9, 10] * 50)]
        await server.post(COMPLETIONS, {"prompt": tokens, "max_tokens": 1})


def fields_of(header: str) -> dict[str, str]:
    return dict(item.split("=", 1) for item in header.split("; "))


@pytest.mark.parametrize("door", ["request_id", "tokens", "text", "messages"])
async def test_pinned_prompts_survive_a_flood(make_server, door):
    """A prompt pinned by request id, tokens, text or messages is found again, whole, after prompts of several times
    the pool."""
    server = await make_server(num_pages=2, pin_quota=0.5)
    messages = [SYSTEM, {"role": "user", "content": "and now?"}]
    if door == "messages":
        body, path, again = {"messages": [SYSTEM], "wait": True}, CHAT, {"messages": messages}
    elif door == "request_id":
        await server.post(COMPLETIONS, {"prompt": TEXT, "max_tokens": 1, "request_id": "doc"})
        body, path, again = {"request_id": "doc"}, COMPLETIONS, {"prompt": TEXT}
    else:
        tokens = server.tokenizer.encode(TEXT)
        source = {"tokens": tokens} if door == "tokens" else {"text": TEXT}
        body, path, again = {**source, "wait": True}, COMPLETIONS, {"prompt": TEXT}
    pin = await server.post("/v1/pins", {**body, "owner": "ops"})
    assert set(pin) == FIELDS
    assert (pin["object"], pin["owner"], pin["level"], pin["expires_at"]) == ("pin", "ops", "hard", None)
    assert pin["num_pinned_tokens"] == pin["num_tokens"] // 16 * 16 > 64
    await flood(server)
    usage = (await server.post(path, {**again, "max_tokens": 1}))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= min(pin["num_pinned_tokens"], usage["prompt_tokens"] - 16)
    (listed,) = (await server.get("/v1/pins"))["data"]
    assert (listed["id"], listed["num_pinned_tokens"]) == (pin["id"], pin["num_pinned_tokens"])
    assert (pin["num_hits"], pin["served_tokens"], pin["last_used_at"]) == (0, 0, None)
    assert (listed["num_hits"], listed["served_tokens"]) == (1, pin["num_pinned_tokens"])
    assert pin["created_at"] <= listed["last_used_at"] <= time.time() + 1
    assert (await server.http.delete(f"/v1/pins/{pin['id']}")).json() == {
        "id": pin["id"],
        "object": "pin",
        "deleted": True,
    }
    await flood(server)
    usage = (await server.post(path, {**again, "max_tokens": 1}))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_chat_pin_covers_what_chat_requests_begin_with(server):
    """A pin of messages covers exactly the tokens that all conversations beginning with them share, not a generation
    prompt."""
    pin = await server.post("/v1/pins", {"messages": [SYSTEM], "wait": True})
    prompts = [
        server.tokenizer.render_chat([SYSTEM, {"role": "user", "content": text}]) for text in ("what?", "xyz", "7")
    ]
    shared = server.tokenizer.render_chat([SYSTEM], add_generation_prompt=False)
    assert all(prompt[: len(shared)] == shared for prompt in prompts)
    assert pin["num_tokens"] >= len(shared)
    assert all(prompt[: pin["num_tokens"]] == prompts[0][: pin["num_tokens"]] for prompt in prompts)


async def test_unpin_by_request_id(server):
    """The latest pin made by a request id goes with DELETE ?request_id=; a second time it is 404."""
    await server.post(COMPLETIONS, {"prompt": TEXT, "max_tokens": 1, "request_id": "doc"})
    await server.post("/v1/pins", {"request_id": "doc"})
    assert (await server.http.delete("/v1/pins", params={"request_id": "doc"})).status_code == 200
    assert (await server.http.delete("/v1/pins", params={"request_id": "doc"})).status_code == 404
    assert server.cache.stats().pinned_blocks == 0


async def test_over_quota_is_409_with_the_numbers(make_server):
    """A hard pin over the quota is refused with the numbers and disturbs no other; `partial` grants what fits."""
    server = await make_server(num_pages=2, pin_quota=0.25)
    first = await server.post("/v1/pins", {"tokens": [1] * 64, "wait": True})
    body = {"tokens": [2] * 160, "wait": True}
    error = (await server.post("/v1/pins", body, 409))["error"]
    assert error["code"] == "pin_quota_exceeded"
    assert error["type"] == "conflict_error"
    assert error["details"] == {"needed_blocks": 10, "available_blocks": 4, "quota_blocks": 8, "hard_pinned_blocks": 4}
    assert (await server.get("/v1/pins"))["data"] == [first]
    granted = await server.post("/v1/pins", {**body, "partial": True})
    assert (granted["num_tokens"], granted["num_pinned_tokens"]) == (160, 64)


async def test_pins_of_tokens_to_come(server):
    """Without `wait` a pin of an unknown prompt holds nothing yet, and takes effect as the prompt is computed."""
    pin = await server.post("/v1/pins", {"text": TEXT, "level": "soft", "priority": 3, "ttl_seconds": 60})
    assert (pin["level"], pin["num_pinned_tokens"]) == ("soft", 0)
    assert abs(pin["expires_at"] - time.time() - 60) < 5
    await server.post(COMPLETIONS, {"prompt": TEXT, "max_tokens": 1})
    assert (await server.get("/v1/pins"))["data"][0]["num_pinned_tokens"] == len(TEXT) // 16 * 16


async def test_a_live_request_can_be_pinned(make_server, eventually):
    """A request that still runs is pinned by its id: what it has committed at the call."""
    server = await make_server(delay_seconds=0.005)
    body = {"prompt": TEXT, "max_tokens": 40, "request_id": "long_doc_123", "ignore_eos": True}
    running = asyncio.ensure_future(server.post(COMPLETIONS, body))
    assert await eventually(lambda: server.runner.num_steps > 3)
    pin = await server.post("/v1/pins", {"request_id": "long_doc_123"})
    assert pin["num_pinned_tokens"] == pin["num_tokens"] // 16 * 16 >= len(TEXT) // 16 * 16
    await running


async def test_give_a_request_or_a_prompt(server):
    """Both at once is 400."""
    await server.post(COMPLETIONS, {"prompt": TEXT, "max_tokens": 1, "request_id": "doc"})
    await server.post("/v1/pins", {"request_id": "doc", "text": TEXT}, 400)
    assert (await server.get("/v1/pins"))["data"] == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("retention", "seconds"),
    [("24h", 86_400), ("1h", 3600), ("in_memory", 300), ("90s", 90), (45, 45), ("99d", 86_400)],
)
async def test_retention_asks_for_a_pin(server, path, stream, retention, seconds):
    """`prompt_cache_retention` pins the prompt for that long (bounded by the server) and says so in a header, streamed
    or not."""
    prompt = {"prompt": TEXT} if path == COMPLETIONS else {"messages": [SYSTEM, {"role": "user", "content": "?"}]}
    body = {**prompt, "max_tokens": 1, "stream": stream, "prompt_cache_retention": retention}
    response = await server.http.post(path, json=body)
    assert response.status_code == 200
    header = fields_of(response.headers["x-looseleaf-pin"])
    (pin,) = (await server.get("/v1/pins"))["data"]
    assert header["id"] == pin["id"]
    assert header["status"] == ("pending" if stream else "held")
    assert pin["num_pinned_tokens"] == pin["num_tokens"] // 16 * 16 > 0
    assert abs(pin["expires_at"] - pin["created_at"] - seconds) < 1


async def test_asking_again_keeps_one_pin(server):
    """The same wish again renews its pin: there is one, and it expires later than the first."""
    body = {"prompt": TEXT, "max_tokens": 1, "prompt_cache_retention": "1h"}
    for _ in range(3):
        await server.post(COMPLETIONS, body)
        pins = (await server.get("/v1/pins"))["data"]
        assert len(pins) == 1
        last = pins[0]["expires_at"]
        time.sleep(0.005)
    await server.post(COMPLETIONS, body)
    assert (await server.get("/v1/pins"))["data"][0]["expires_at"] > last
    await server.post(COMPLETIONS, {**body, "cache_salt": "other"})
    assert len((await server.get("/v1/pins"))["data"]) == 2


async def test_quota_never_fails_a_request(make_server):
    """A pin that the quota refuses leaves the request alone: it is answered, and the header has the numbers."""
    server = await make_server(num_pages=2, pin_quota=0.1)
    body = {"prompt": TEXT, "max_tokens": 1, "prompt_cache_retention": "1h"}
    await server.post(COMPLETIONS, {**body, "prompt_cache_retention": None})
    for stream in (False, True):
        response = await server.http.post(COMPLETIONS, json={**body, "stream": stream})
        assert response.status_code == 200
        header = fields_of(response.headers["x-looseleaf-pin"])
        assert header == {"status": "refused", "needed_blocks": "5", "available_blocks": "3", "quota_blocks": "3"}
    assert (await server.get("/v1/pins"))["data"] == []


async def test_quota_reached_while_computing_is_said(make_server):
    """A cold prompt longer than the quota is pinned as far as it goes, and the header says `partial`."""
    server = await make_server(num_pages=2, pin_quota=0.1)
    body = {"prompt": TEXT, "max_tokens": 1, "prompt_cache_retention": "1h"}
    response = await server.http.post(COMPLETIONS, json=body)
    header = fields_of(response.headers["x-looseleaf-pin"])
    assert (header["status"], header["num_pinned_tokens"]) == ("partial", "48")


async def test_cache_control_on_a_message_pins_up_to_it(server):
    """A mark on the system message pins up to the end of its text, for its `ttl`."""
    messages = [{**SYSTEM, "cache_control": {"type": "ephemeral", "ttl": "1h"}}, {"role": "user", "content": "one"}]
    response = await server.http.post(CHAT, json={"messages": messages, "max_tokens": 1})
    (pin,) = (await server.get("/v1/pins"))["data"]
    assert fields_of(response.headers["x-looseleaf-pin"])["status"] == "held"
    assert pin["num_tokens"] == len(server.tokenizer.encode(f"system: {TEXT}"))
    assert abs(pin["expires_at"] - pin["created_at"] - 3600) < 1


async def test_cache_control_on_a_part_pins_up_to_its_end(server):
    """A mark on a text part pins up to the end of that part, whatever follows in the same message."""
    parts = [
        {"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "a question"},
    ]
    await server.post(CHAT, {"messages": [{"role": "user", "content": parts}], "max_tokens": 1})
    (pin,) = (await server.get("/v1/pins"))["data"]
    assert pin["num_tokens"] == len(server.tokenizer.encode(f"user: {TEXT}"))
    assert abs(pin["expires_at"] - pin["created_at"] - 300) < 1


async def test_several_marks_make_several_pins(server):
    """Each of up to four marks has its pin; five are 400; the header lists the pins in order."""
    mark = {"cache_control": {"type": "ephemeral"}}
    messages = [{**SYSTEM, **mark}, {"role": "user", "content": "x" * 40, **mark}]
    response = await server.http.post(CHAT, json={"messages": messages, "max_tokens": 1})
    pins = (await server.get("/v1/pins"))["data"]
    assert [fields_of(part)["id"] for part in response.headers["x-looseleaf-pin"].split(", ")] == [
        p["id"] for p in pins
    ]
    assert pins[0]["num_tokens"] < pins[1]["num_tokens"]
    many = [{"role": "user", "content": "x", **mark}] * 5
    await server.post(CHAT, {"messages": many, "max_tokens": 1}, 400)


async def test_a_refused_request_leaves_no_pin(server):
    """A request that the engine refuses leaves no pin of its own, and an older pin of the same wish stays."""
    body = {"prompt": "x" * 2000, "max_tokens": 1, "prompt_cache_retention": "1h"}
    await server.post(COMPLETIONS, body, 400)
    assert (await server.get("/v1/pins"))["data"] == []
    good = {**body, "prompt": TEXT}
    await server.post(COMPLETIONS, good)
    before = (await server.get("/v1/pins"))["data"]
    await server.post(COMPLETIONS, {**good, "prompt": [TEXT, "x" * 2000]}, 400)
    await server.post(COMPLETIONS, {**good, "prompt": [server.tokenizer.encode(TEXT), []]}, 400)
    assert (await server.get("/v1/pins"))["data"] == before


async def test_request_pins_can_be_switched_off(make_server):
    """With `request_pins` off, wishes are checked but not granted."""
    server = await make_server(settings=ServerSettings(request_pins=False))
    body = {"prompt": TEXT, "max_tokens": 1, "prompt_cache_retention": "1h"}
    response = await server.http.post(COMPLETIONS, json=body)
    assert "x-looseleaf-pin" not in response.headers
    assert (await server.get("/v1/pins"))["data"] == []
    await server.post(COMPLETIONS, {**body, "prompt_cache_retention": "soon"}, 400)
