"""Layered salts: a beginning that all tenants share, then a part of one's own."""

from __future__ import annotations

import asyncio

import pytest

from looseleaf.core.namespaces import namespace_of
from looseleaf.server import ApiKey, ServerSettings
from looseleaf.server.conversations import Turn, stable_prefix
from looseleaf.testing.pair_tokenizer import PairTokenizer

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS, MATCH = "/v1/chat/completions", "/v1/completions", "/v1/cache/match"
POLICY = "all members may borrow five items at a time, ladders for four days. "  # 68 characters
SYSTEM = {"role": "system", "content": POLICY}
KEYS = ServerSettings(
    admin_key="root", api_keys=(ApiKey("k1", "one", "first"), ApiKey("k2", "two", "second")), shared_salts=("org",)
)
ORG = [{"salt": "org", "num_tokens": 64}]


def as_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def cached(server, prompt: str, key: str | None = None, **body) -> int:
    headers = as_key(key) if key else {}
    answer = await server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 1, **body}, **headers)
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_the_shared_part_is_shared_and_the_rest_is_not(server):
    """Tenants with salts of their own share the layer, stored once, and nothing behind it; a request that has the
    layer's salt as its own shares it too; without the layer there is nothing."""
    rest = "and this is what only I say, three blocks of it at least"
    assert await cached(server, POLICY + rest, cache_salt="a", cache_layers=ORG) == 0
    blocks = server.cache.stats().cached_blocks
    assert await cached(server, POLICY + rest, cache_salt="b", cache_layers=ORG) == 64
    assert await cached(server, POLICY + rest, cache_salt="a", cache_layers=ORG) == (1 + len(POLICY + rest)) // 16 * 16
    assert server.cache.stats().cached_blocks == 2 * blocks - 4
    assert await cached(server, POLICY, cache_salt="org") == 64
    assert await cached(server, POLICY, cache_salt="b") == 0
    assert await cached(server, POLICY, cache_salt="b", cache_layers=[{"salt": "dept", "num_tokens": 64}]) == 0


async def test_layers_by_messages(server):
    """A layer of messages reaches as far as every conversation that begins with them is the same; turns after it stay
    with their tenant."""
    layers = [{"salt": "org", "num_messages": 1}]
    used = {}
    for salt, user in (("a", "hello there"), ("b", "hello there"), ("a", "good morning")):
        body = {"messages": [SYSTEM, {"role": "user", "content": user * 5}], "cache_layers": layers}
        usage = (await server.post(CHAT, {**body, "cache_salt": salt, "max_tokens": 1}))["usage"]
        used[salt, user] = usage["prompt_tokens_details"]["cached_tokens"]
    shared = len(stable_prefix(server.tokenizer, [Turn("system", (POLICY,))])) // 16 * 16
    assert used == {("a", "hello there"): 0, ("b", "hello there"): shared, ("a", "good morning"): shared}
    match = await server.post(MATCH, {**body, "cache_salt": "c"})
    assert match["num_cached_tokens"] == shared


async def test_several_layers(server):
    """Layers follow each other: the organisation's, the department's, then one's own."""
    text = POLICY + "the department of ladders says this to all who work in it. " + "x" * 40
    layers = [{"salt": "org", "num_tokens": 64}, {"salt": "ladders", "num_tokens": 112}]
    assert await cached(server, text, cache_salt="a", cache_layers=layers) == 0
    assert await cached(server, text, cache_salt="b", cache_layers=layers) == 112
    other = [{"salt": "org", "num_tokens": 64}, {"salt": "books", "num_tokens": 112}]
    assert await cached(server, text, cache_salt="b", cache_layers=other) == 64


async def test_pins_and_warming_take_layers(server):
    """What is warmed or pinned with layers lies where requests with them look; a pin that ends inside a layer has that
    part of it; a request's own wish too."""
    body = {"text": POLICY * 2, "cache_salt": "a", "cache_layers": ORG}
    await server.post("/v1/cache/warm", body)
    assert await cached(server, POLICY * 2, cache_salt="b", cache_layers=ORG) == 64
    pin = await server.post("/v1/pins", body)
    assert pin["num_pinned_tokens"] == (1 + 2 * len(POLICY)) // 16 * 16
    short = await server.post("/v1/pins", {**body, "last_token": 32})
    assert short["num_pinned_tokens"] == 32
    await server.post("/v1/pins", {"request_id": "x", "cache_layers": ORG}, 400)
    extra = {"cache_salt": "c", "cache_layers": ORG, "prompt_cache_retention": "5m"}
    answer = await server.http.post(COMPLETIONS, json={"prompt": POLICY * 2, "max_tokens": 1, **extra})
    assert "status=held" in answer.headers["x-looseleaf-pin"]


async def test_samples_of_a_layered_prompt(server):
    """Several choices of one layered prompt compute it once."""
    body = {"prompt": POLICY * 2, "max_tokens": 3, "n": 3, "cache_salt": "a", "cache_layers": ORG}
    await server.post(COMPLETIONS, body)
    assert server.runner.num_computed_tokens < 2 * len(POLICY) + 12


async def test_prompts_that_arrive_together_share_the_layer(make_server):
    """Two tenants' prompts that come at the same time compute their common layer once, and no more of each other."""
    server = await make_server(delay_seconds=0.02)
    texts = {"a": POLICY + "x" * 50, "b": POLICY + "x" * 50}
    await asyncio.gather(*(cached(server, text, cache_salt=salt, cache_layers=ORG) for salt, text in texts.items()))
    assert server.runner.num_computed_tokens == 2 * (1 + len(texts["a"])) - 64


@pytest.mark.parametrize(
    "layers",
    [
        "org", [{}], [{"salt": "org"}], [{"salt": "org", "num_tokens": 16, "num_messages": 1}],
        [{"salt": "org", "num_tokens": 0}], [{"salt": "org", "num_tokens": -1}], [{"salt": 7, "num_tokens": 16}],
        [{"salt": "org", "num_messages": 3}], [{"salt": "org", "num_messages": 0}], [{"salt": "a", "num_tokens": 9999}],
        [{"salt": "a", "num_tokens": 32}, {"salt": "b", "num_tokens": 32}], [{"tenant": "org", "num_tokens": 16}],
        [{"salt": "a", "num_tokens": 32}, {"salt": "b", "num_tokens": 16}],
        [{"salt": "a", "num_tokens": 16}, {"salt": "b", "num_tokens": 32}, {"salt": "a", "num_tokens": 48}],
        [{"salt": f"s{n}", "num_tokens": n + 1} for n in range(9)],
    ],
)  # fmt: skip
async def test_layers_that_cannot_be(server, layers):
    """Layers that do not fit together, to the prompt or to the schema are 400, and nothing runs."""
    messages = [SYSTEM, {"role": "user", "content": "hello"}]
    error = (await server.post(CHAT, {"messages": messages, "max_tokens": 1, "cache_layers": layers}, 400))["error"]
    assert error["type"] == "invalid_request_error"
    await server.post(MATCH, {"messages": messages, "cache_layers": layers}, 400)
    assert server.runner.num_steps == 0


async def test_completions_have_no_messages(server):
    """A layer of messages needs messages; an empty list is none."""
    await server.post(COMPLETIONS, {"prompt": POLICY, "cache_layers": [{"num_messages": 1}]}, 400)
    await server.post(CHAT, {"prompt_token_ids": [1, 2], "cache_layers": [{"num_messages": 1}]}, 400)
    assert await cached(server, POLICY, cache_layers=[]) == 0
    assert await cached(server, POLICY, cache_salt="a", cache_layers=[{"num_tokens": 64}]) == 64


async def test_keys_share_what_the_server_allows(make_server):
    """[T134] Between keys a layer is shared only if its salt is one of the server's shared ones; the admin fills it by
    that `cache_salt`. Any other layer is the key's own."""
    server = await make_server(settings=KEYS)
    await server.post("/v1/cache/warm", {"text": POLICY, "cache_salt": "org"}, **as_key("root"))
    assert await cached(server, POLICY, "k1", cache_layers=ORG) == 64
    assert await cached(server, POLICY, "k2", cache_layers=ORG) == 64
    mine = [{"salt": "mine", "num_tokens": 64}]
    assert await cached(server, POLICY, "k1", cache_layers=mine) == 0
    assert await cached(server, POLICY, "k1", cache_salt="x", cache_layers=mine) == 64
    assert await cached(server, POLICY, "k2", cache_layers=mine) == 0
    assert await cached(server, POLICY, "k1", cache_salt="org") == 0


async def test_a_model_revision_is_part_of_every_namespace(make_server):
    """[T134] With a model revision, each namespace tells it, between the key's own and the salt; keys own theirs
    still."""
    settings = ServerSettings(api_keys=KEYS.api_keys, model_revision="abc", shared_salts=("org",))
    server = await make_server(settings=settings)
    await cached(server, POLICY, "k1", cache_salt="s", cache_layers=ORG, prompt_cache_retention="5m")
    (pin,) = await server.pins(**as_key("k1"))
    assert pin["namespace"] == namespace_of(tenant="one", model_revision="abc", salt="s")
    assert await server.pins(**as_key("k2")) == []
    assert await cached(server, POLICY, "k2", cache_layers=ORG) == 64


async def test_generated_tokens_of_layered_conversations(make_server):
    """Turns of a layered conversation go on with their generated tokens; the layer's border is that of its text."""
    server = await make_server(tokenizer=PairTokenizer(), vocab_size=PairTokenizer.vocab_size)
    body = {"max_tokens": 40, "cache_salt": "a", "cache_layers": [{"salt": "org", "num_messages": 1}]}
    messages = [SYSTEM, {"role": "user", "content": "tell me more about it"}]
    first = await server.post(CHAT, {"messages": messages, **body})
    messages += [first["choices"][0]["message"], {"role": "user", "content": "go on"}]
    second = await server.post(CHAT, {"messages": messages, **body})
    known = first["usage"]["prompt_tokens"] + 39
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == known // 16 * 16
