"""`POST /v1/cache/resize`: the pool grows and shrinks under running requests, or says with numbers why not."""

from __future__ import annotations

import asyncio

import pytest

from looseleaf.core.config import LayerGroup
from looseleaf.server import ApiKey, ServerSettings

pytestmark = pytest.mark.anyio

GROUPS = (LayerGroup("full"), LayerGroup("window", window_tokens=32, num_lanes=2))
COMPLETIONS, RESIZE = "/v1/completions", "/v1/cache/resize"
PROMPT = [7 * i % 251 for i in range(100)]


@pytest.mark.parametrize(
    ("size", "num_pages"),
    [({"num_pages": 3}, 3), ({"num_blocks": 63}, 3), ({"num_blocks": 64}, 4), ({"kv_bytes": 20 * 16 * 128 + 5}, 20)],
)
async def test_sizes_are_rounded_down_to_whole_pages(server, size, num_pages):
    """A size in pages, blocks or bytes; the answer says what there is now, and statistics and models agree with it."""
    answer = await server.post(RESIZE, size)
    max_model_tokens = min(1024, num_pages * 256)
    assert answer == {
        "object": "cache.resize",
        "num_pages": num_pages,
        "num_blocks": num_pages * 16,
        "num_tokens": num_pages * 256,
        "kv_bytes": num_pages * 16 * 128,
        "max_model_tokens": max_model_tokens,
        "num_evicted_blocks": 0,
        "num_moved_blocks": 0,
    }
    assert (await server.get("/v1/cache/stats"))["num_pages"] == num_pages
    assert (await server.get("/v1/models"))["data"][0]["max_model_len"] == max_model_tokens
    assert server.runner.num_blocks == num_pages * 16


@pytest.mark.parametrize(("groups", "sizes"), [((LayerGroup("full"),), (16, 9, 40, 9)), (GROUPS, (16, 12, 40, 13))])
async def test_running_requests_go_on_in_another_size(make_server, eventually, groups, sizes):
    """Requests that run while the pool shrinks to little more than they hold, and grows again, give the texts of a cold
    run: held blocks are moved where the end is cut off, and copied before the next step reads them."""
    server = await make_server(groups=groups, page_tokens=64, num_pages=32, delay_seconds=0.005)
    body = {"max_tokens": 60, "ignore_eos": True, "temperature": 0}
    bodies = [{**body, "prompt": [number, *PROMPT]} for number in range(3)]
    await server.post("/v1/cache/warm", {"tokens": [9] * 400})
    running = [asyncio.ensure_future(server.post(COMPLETIONS, body)) for body in bodies]
    assert await eventually(lambda: server.engine.engine.num_running == 3 and server.runner.num_steps > 12)
    await server.post("/v1/cache/clear", {})  # leaves the first pages free
    moved = 0
    for num_pages in sizes:
        answer = await server.post(RESIZE, {"num_pages": num_pages})
        assert answer["num_pages"] == server.cache.stats().num_pages == num_pages
        moved += answer["num_moved_blocks"]
        server.cache.check_integrity()
    assert not all(future.done() for future in running)
    texts = [(await future)["choices"][0]["text"] for future in running]
    assert moved > 0
    sample = server.metrics.registry.get_sample_value
    assert sample("looseleaf_resizes_total", {"outcome": "done"}) == 4
    assert sample("looseleaf_resize_moved_blocks_total") == moved
    for body, text in zip(bodies, texts, strict=True):
        cold = await server.post(COMPLETIONS, {**body, "reuse": False})
        assert cold["choices"][0]["text"] == text


async def test_pins_refuse_a_size_that_their_quota_forbids(server):
    """A hard pin of 32 blocks needs a pool of 107; a smaller one is 409 with the numbers, and pin, size and hits are as
    before; without the pin it works, and what does not fit is evicted."""
    tokens = [3 * i % 250 for i in range(512)]
    pin = await server.post("/v1/pins", {"tokens": tokens, "wait": True})
    assert pin["num_pinned_tokens"] == 512
    before = server.cache.stats()
    error = (await server.post(RESIZE, {"num_pages": 6}, 409))["error"]
    assert (error["code"], error["type"]) == ("resize_refused", "conflict_error")
    assert error["details"] == {"num_blocks": 96, "held_blocks": 0, "hard_pinned_blocks": 32, "quota_blocks": 28}
    assert server.cache.stats() == before
    assert (await server.post(RESIZE, {"num_pages": 7}))["num_evicted_blocks"] == 0
    assert (await server.post("/v1/cache/match", {"tokens": [*tokens, 1]}))["num_cached_tokens"] == 512
    assert (await server.http.delete(f"/v1/pins/{pin['id']}")).status_code == 200
    answer = await server.post(RESIZE, {"num_pages": 1})
    assert (answer["num_evicted_blocks"], answer["num_moved_blocks"]) == (16, 0)
    assert (await server.post("/v1/cache/match", {"tokens": [*tokens, 1]}))["num_cached_tokens"] == 256
    refused = server.metrics.registry.get_sample_value("looseleaf_resizes_total", {"outcome": "refused"})
    assert refused == 1


async def test_running_requests_refuse_a_size_below_what_they_hold(make_server, eventually):
    """What runs is never cut off: 409, and it ends as if nothing had been asked."""
    server = await make_server(page_tokens=64, num_pages=16, delay_seconds=0.005)
    bodies = [{"prompt": [number, *PROMPT], "max_tokens": 40, "ignore_eos": True} for number in range(2)]
    running = [asyncio.ensure_future(server.post(COMPLETIONS, body)) for body in bodies]
    assert await eventually(lambda: server.engine.engine.num_running == 2)
    for num_pages, code in ((3, "resize_refused"), (1, "capacity")):
        error = (await server.post(RESIZE, {"num_pages": num_pages}, 409))["error"]
        assert error["code"] == code
        assert "hint:" in error["message"]
    assert server.cache.stats().num_pages == 16
    assert [(await future)["usage"]["completion_tokens"] for future in running] == [40, 40]


async def test_no_memory_for_so_much_changes_nothing(make_server):
    """The runner has no memory for the size: 409 with its message; the pool is as before and serves."""
    server = await make_server(max_blocks=160)
    before = server.cache.stats()
    error = (await server.post(RESIZE, {"num_pages": 11}, 409))["error"]
    assert error["code"] == "capacity"
    assert server.cache.stats() == before
    assert (await server.post(RESIZE, {"num_pages": 10}))["num_blocks"] == 160
    await server.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 3})


async def test_only_who_answers_for_all_may_resize(make_server):
    """With an admin key others are 403; so is a client whose key has a namespace of its own, since the memory is
    everybody's."""
    clients = (ApiKey("k", "space", "client"),)
    for settings in (ServerSettings(admin_key="root"), ServerSettings(api_keys=clients)):
        server = await make_server(settings=settings)
        error = (await server.post(RESIZE, {"num_pages": 4}, 403, Authorization="Bearer k"))["error"]
        assert error["code"] == "admin_key_required"
        assert server.cache.stats().num_pages == 8
    server = await make_server(settings=ServerSettings(admin_key="root"))
    assert (await server.post(RESIZE, {"num_pages": 4}, Authorization="Bearer root"))["num_pages"] == 4
