"""Pins that ordinary requests ask for: up to where, for how long, how many, and what is left when things go wrong."""

from __future__ import annotations

import asyncio

import pytest

from looseleaf.core.config import CacheConfig
from looseleaf.core.manager import CacheManager
from looseleaf.errors import RequestError
from looseleaf.server import ApiKey, ServerSettings
from looseleaf.server.request_pins import MAX_REQUEST_PINS, PinRequest, RequestPins
from looseleaf.testing.fake_tokenizer import FakeTokenizer

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TEXT = "the terms of this contract are long, and every question about them begins with all of them "
MARK = {"cache_control": {"type": "ephemeral"}}


def fields_of(header: str) -> list[dict[str, str]]:
    return [dict(item.split("=", 1) for item in one.split("; ")) for one in header.split(", ")]


class WordyTokenizer(FakeTokenizer):
    """Writes a good deal after each text, and more where an answer begins; trims texts, as some templates do."""

    def render_chat(self, messages, *, add_generation_prompt=True):
        text = "".join(f"<{one['role']}>{one['content'].strip()}<end of what was said><and a rule>" for one in messages)
        return self.encode(text + ("<assistant><now think well><answer>" if add_generation_prompt else ""))


@pytest.mark.parametrize("length", [63, 64, 65, 79, 80])
@pytest.mark.parametrize("place", ["part", "message", "last part", "last message"])
async def test_a_mark_pins_exactly_to_the_end_of_its_text(make_server, place, length):
    """However much the template writes after a marked text, the pin ends with that text, in whole blocks: at a block's
    boundary, before and after it."""
    server = await make_server(tokenizer=WordyTokenizer())
    head = len(server.tokenizer.encode("<user>"))
    text = (TEXT * 2)[: length - head - 1] + "."
    marked, plain = {"type": "text", "text": text, **MARK}, {"type": "text", "text": "what does it say?"}
    if place == "part":
        messages = [{"role": "user", "content": [marked, plain]}]
    elif place == "last part":
        messages = [{"role": "user", "content": [marked]}, {"role": "assistant", "content": "well"}]
    else:
        messages = [{"role": "user", "content": text, **MARK}, {"role": "assistant", "content": "well"}]
    if place.startswith("last"):
        messages = messages[:1]
    await server.post(CHAT, {"messages": messages, "max_tokens": 1})
    (pin,) = await server.pins()
    assert (pin["num_tokens"], pin["num_pinned_tokens"]) == (length, length // 16 * 16)


async def test_a_template_that_refuses_a_shorter_conversation_fails_nobody(make_server):
    """A mark where the template lets no conversation end is granted all the same."""

    class Strict(WordyTokenizer):
        def render_chat(self, messages, *, add_generation_prompt=True):
            if [one["role"] for one in messages] not in (["system", "user"], ["system", "user", "user"]):
                raise RequestError("only whole conversations")
            return super().render_chat(messages, add_generation_prompt=add_generation_prompt)

    server = await make_server(tokenizer=Strict())
    messages = [{"role": "system", "content": "s" * 70, **MARK}, {"role": "user", "content": "u"}]
    await server.post(CHAT, {"messages": [*messages, {"role": "user", "content": "v"}], "max_tokens": 1})
    (pin,) = await server.pins()
    assert pin["num_tokens"] == len(server.tokenizer.encode("<system>" + "s" * 70))


@pytest.mark.parametrize("content", [None, "", []])
async def test_a_mark_on_a_message_without_text(server, content):
    """A message without a text may carry a mark: what stays the same up to there is pinned."""
    messages = [{"role": "system", "content": TEXT}, {"role": "assistant", "content": content, **MARK}]
    await server.post(CHAT, {"messages": [*messages, {"role": "user", "content": "go on"}], "max_tokens": 1})
    (pin,) = await server.pins()
    assert pin["num_tokens"] >= len(server.tokenizer.encode(f"system: {TEXT}"))


@pytest.mark.parametrize("stream", [False, True])
async def test_several_marks(server, stream):
    """Each mark has its own pin, nested ones too, each with its own time to live; where two ask for the same tokens
    there is one, of the longer. Blocks count once."""
    part = {"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    messages = [
        {"role": "system", "content": [part], "cache_control": {"type": "ephemeral", "ttl": "90s"}},
        {"role": "user", "content": [{"type": "text", "text": TEXT, **MARK}, {"type": "text", "text": "why?"}]},
    ]
    response = await server.http.post(CHAT, json={"messages": messages, "max_tokens": 1, "stream": stream})
    short, long = await server.pins()
    assert [one["id"] for one in fields_of(response.headers["x-looseleaf-pin"])] == [short["id"], long["id"]]
    assert short["expires_at"] - short["created_at"] == pytest.approx(90, abs=1)
    assert long["expires_at"] - long["created_at"] == pytest.approx(300, abs=1)
    assert server.cache.stats().pinned_blocks == long["num_tokens"] // 16


@pytest.mark.parametrize(
    "mark",
    [{"type": "eternal"}, {}, {"type": "ephemeral", "ttl": "soon"}, {"type": "ephemeral", "ttl": 0},
     {"type": "ephemeral", "ttl": "-1h"}, "ephemeral", {"type": "ephemeral", "ttl": ["1h"]}],
)  # fmt: skip
async def test_marks_that_make_no_sense_are_400(server, mark):
    """A mark of another type or without a sensible time to live is 400 and pins nothing, on a message and on a part."""
    for message in (
        {"role": "user", "content": TEXT, "cache_control": mark},
        {"role": "user", "content": [{"type": "text", "text": TEXT, "cache_control": mark}]},
    ):
        await server.post(CHAT, {"messages": [message], "max_tokens": 1}, 400)
    assert await server.pins() == []
    assert server.cache.stats().stored_tokens == 0


async def test_five_marks_are_400_and_change_nothing(server):
    """More marks than four are 400 before anything is computed or pinned."""
    messages = [{"role": "user", "content": TEXT, **MARK}] * 5
    await server.post(CHAT, {"messages": messages, "max_tokens": 1}, 400)
    assert (await server.pins(), server.cache.stats().stored_tokens) == ([], 0)


@pytest.mark.parametrize("retention", ["forever", "24", "7x", 0, -5, True, [], {}])
async def test_retentions_that_are_unknown_are_400(server, retention):
    """What is no retention is 400 and pins nothing; a plain number is seconds."""
    body = {"prompt": TEXT, "max_tokens": 1, "prompt_cache_retention": retention}
    if retention == "24":
        await server.post(COMPLETIONS, body)
        return
    await server.post(COMPLETIONS, body, 400)
    assert (await server.pins(), server.cache.stats().stored_tokens) == ([], 0)


async def test_the_official_client_asks_for_pins(server):
    """`prompt_cache_key` and `prompt_cache_retention` of the official client: the pin carries the key as a label and is
    found by it; the answer's header names the pin."""
    raw = await server.openai.chat.completions.with_raw_response.create(
        model="fake",
        messages=[{"role": "user", "content": TEXT}],
        max_tokens=1,
        prompt_cache_key="tenant-7",
        extra_body={"prompt_cache_retention": "24h"},
    )
    (pin,) = (await server.get("/v1/pins?label=prompt_cache_key:tenant-7"))["data"]
    assert pin["labels"] == {"prompt_cache_key": "tenant-7"}
    assert pin["expires_at"] - pin["created_at"] == pytest.approx(86_400, abs=1)
    (said,) = fields_of(raw.headers["x-looseleaf-pin"])
    assert (said["status"], said["id"]) == ("held", pin["id"])
    assert int(said["num_pinned_tokens"]) == pin["num_pinned_tokens"] == pin["num_tokens"] // 16 * 16


@pytest.mark.parametrize(("retention", "seconds"), [("in_memory", 300), ("in-memory", 300), ("24h", 86_400)])
async def test_use_keeps_a_pin_and_idleness_ends_it(make_server, clock, retention, seconds):
    """A pin lives until its time after the last request that begins with its prompt, asking for a pin or not; then it
    ends without anybody's call."""
    server = await make_server(clock=clock)
    await server.post(COMPLETIONS, {"prompt": TEXT, "max_tokens": 1, "prompt_cache_retention": retention})
    for _ in range(3):
        clock.seconds += seconds - 10
        await server.post(COMPLETIONS, {"prompt": TEXT + "and so on", "max_tokens": 1})
    (pin,) = await server.pins()
    assert (pin["num_hits"], pin["refresh"]) == (3, True)
    clock.seconds += seconds + 1
    assert await server.pins() == []
    assert server.cache.stats().num_expired_pins == 1


async def test_equal_requests_share_a_pin(make_server, clock):
    """However often and however long the same prompt is asked to be kept, it has one pin, which counts its uses and
    lives the longest time asked for; another salt, prompt or key has its own."""
    server = await make_server(clock=clock)
    body = {"prompt": TEXT, "max_tokens": 1}
    for retention in ("5m", "5m", "1h", "90s", "1h", "in_memory"):
        clock.seconds += 10
        answer = await server.http.post(COMPLETIONS, json={**body, "prompt_cache_retention": retention})
        assert fields_of(answer.headers["x-looseleaf-pin"])[0]["status"] == "held"
        (pin,) = await server.pins()
    assert pin["expires_at"] - pin["last_used_at"] == pytest.approx(3600, abs=1)
    assert pin["num_hits"] == 4  # since the wish for an hour, that one included
    await server.post(COMPLETIONS, {**body, "prompt": [TEXT, TEXT, TEXT + "?" * 32], "prompt_cache_retention": "5m"})
    await server.post(COMPLETIONS, {**body, "cache_salt": "s", "prompt_cache_retention": "5m"})
    assert len(await server.pins()) == 3


async def test_a_pin_that_ends_soon_is_made_anew(make_server, clock):
    """A wish for a prompt whose pin would end before half of the time asked is granted by a new pin, so that waiting in
    the queue does not lose it; there is one at a time."""
    server = await make_server(clock=clock)
    body = {"prompt": TEXT, "max_tokens": 1, "prompt_cache_retention": "1h"}
    await server.post(COMPLETIONS, body)
    (first,) = await server.pins()
    clock.seconds += 3000
    await server.post(COMPLETIONS, body)
    (second,) = await server.pins()
    assert second["id"] != first["id"]
    assert second["expires_at"] - second["created_at"] == pytest.approx(3600, abs=1)


async def test_owners_are_those_who_ask(make_server):
    """A pin that a request asks for belongs to its key, in its namespace; another key's request neither shares nor ends
    it."""
    keys = (ApiKey("k1", "one", "first"), ApiKey("k2", "two", "second"))
    server = await make_server(settings=ServerSettings(admin_key="root", api_keys=keys))
    body = {"prompt": TEXT, "max_tokens": 1, "prompt_cache_retention": "24h"}
    for key in ("k1", "k2", "k1"):
        await server.post(COMPLETIONS, body, Authorization=f"Bearer {key}")
    pins = await server.pins(Authorization="Bearer root")
    assert [(pin["owner"], pin["namespace"]) for pin in pins] == [("first", 'tenant="one"'), ("second", 'tenant="two"')]
    assert [pin["owner"] for pin in await server.pins(Authorization="Bearer k2")] == ["second"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_abort_before_the_prompt_leaves_no_pin(make_server, wire, eventually, path, stream):
    """A client that leaves while its prompt waits in the queue leaves no pin behind: its tokens never came."""
    server = await make_server(delay_seconds=0.02, max_running_requests=1)
    first = asyncio.ensure_future(server.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 100, "ignore_eos": True}))
    assert await eventually(lambda: server.engine.engine.num_running == 1)
    prompt = {"prompt": TEXT} if path == COMPLETIONS else {"messages": [{"role": "user", "content": TEXT, **MARK}]}
    async with wire(server) as on_wire:
        body = {**prompt, "max_tokens": 5, "stream": stream, "prompt_cache_retention": "24h"}
        _, writer = await on_wire.send(path, body)
        assert await eventually(lambda: len(server.cache.pins()) == (1 if path == COMPLETIONS else 2))
        writer.close()
        assert await eventually(lambda: server.cache.pins() == [])
    await first


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failing_model_leaves_no_pin(server, stream):
    """A request that fails in the engine before its prompt is computed leaves no pin."""
    server.runner.fail_next()
    body = {"prompt": TEXT, "max_tokens": 5, "stream": stream, "prompt_cache_retention": "24h"}
    await server.http.post(COMPLETIONS, json=body)
    assert await server.pins() == []


async def test_the_abort_of_one_does_not_end_the_pin_of_others(make_server, wire, eventually):
    """Of two requests that ask for the same pin one leaves before the prompt is computed: the pin stays for the
    other."""
    server = await make_server(delay_seconds=0.02, max_running_requests=1)
    first = asyncio.ensure_future(server.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 40, "ignore_eos": True}))
    assert await eventually(lambda: server.engine.engine.num_running == 1)
    body = {"prompt": TEXT, "max_tokens": 2, "prompt_cache_retention": "24h"}
    async with wire(server) as on_wire:
        _, writer = await on_wire.send(COMPLETIONS, body)
        assert await eventually(lambda: server.engine.engine.num_waiting == 1)
        other = asyncio.ensure_future(server.http.post(COMPLETIONS, json=body))
        assert await eventually(lambda: server.engine.engine.num_waiting == 2)
        writer.close()
        assert await eventually(lambda: server.engine.engine.num_waiting == 1)
    assert fields_of((await other).headers["x-looseleaf-pin"])[0]["status"] == "held"
    assert len(await server.pins()) == 1
    await first


async def test_many_wishes_are_bounded_by_the_quota(make_server):
    """Of hundreds of distinct prompts that ask to be kept for a day only those that the quota holds have a pin; the
    rest are answered all the same and told `refused`."""
    server = await make_server(num_pages=4, pin_quota=0.5)
    statuses = []
    for index in range(200):
        body = {"prompt": [index] * 33, "max_tokens": 1, "prompt_cache_retention": "24h"}
        response = await server.http.post(COMPLETIONS, json=body)
        assert response.status_code == 200
        statuses.append(fields_of(response.headers["x-looseleaf-pin"])[0]["status"])
    assert statuses == ["held"] * 16 + ["refused"] * 184
    assert len(await server.pins()) == 16
    stats = server.cache.stats()
    assert stats.pinned_blocks == stats.quota_blocks == 32


def test_the_wish_of_longest_ago_goes_first(clock):
    """Beyond the number of pins that requests may have, the one asked for longest ago goes."""
    cache = CacheManager(CacheConfig(num_pages=4), clock)
    pins = RequestPins(cache, clock, max_pins=2)
    for token in (1, 2, 1, 3):
        granted = pins.grant(PinRequest([token] * 16, 300.0), namespace="", owner="o")
        pins.keep([granted])
    assert [pin.num_tokens for pin in cache.pins()] == [16, 16]
    assert [pin.id for pin in cache.pins()] == ["pin-1", "pin-3"]
    assert MAX_REQUEST_PINS == 10_000


def test_a_wish_that_is_taken_back_leaves_the_older_pin(clock):
    """If the engine refuses the request, the pin that was made for it goes, one that was there before stays."""
    cache = CacheManager(CacheConfig(num_pages=4), clock)
    pins = RequestPins(cache, clock)
    wish = PinRequest([1] * 16, 300.0)
    pins.keep([pins.grant(wish, namespace="", owner="o")])
    for seconds in (300.0, 3000.0):
        pins.revoke([pins.grant(PinRequest(wish.tokens, seconds), namespace="", owner="o")])
        assert [pin.id for pin in cache.pins()] == ["pin-1"]


async def test_explanations_tell_of_pins(make_server):
    """The explanation of a request says how much of its hit pins kept, and how much had been cached and was evicted."""
    server = await make_server(num_pages=2, pin_quota=1.0)
    await server.post(COMPLETIONS, {"prompt": [1] * 128, "max_tokens": 1})
    await server.post("/v1/pins", {"tokens": [1] * 64})
    for index in range(5):
        await server.post(COMPLETIONS, {"prompt": [10 + index] * 200, "max_tokens": 1})
    await server.post(COMPLETIONS, {"prompt": [1] * 129, "max_tokens": 1, "request_id": "again"})
    answer = await server.get("/v1/requests/again/cache")
    assert (answer["num_cached_tokens"], answer["num_pinned_tokens"], answer["num_evicted_tokens"]) == (64, 64, 64)
