"""Everything about pins at once: requests that ask for them, clients that leave, pins, unpins, quotas, expiry."""

from __future__ import annotations

import asyncio
import random

import pytest

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"
NUM_ACTIONS = 25
NUM_CLIENTS = 8


async def act(rng: random.Random, server, on_wire, clock) -> None:
    """One random deed; whatever it is answered must be one of the answers that are documented for it."""
    prompt = [rng.randrange(4)] * rng.choice((8, 16, 33, 64, 150))
    body = {"prompt": prompt, "max_tokens": rng.randrange(1, 6), "stream": rng.random() < 0.5, "ignore_eos": True}
    if rng.random() < 0.7:
        body["prompt_cache_retention"] = rng.choice(("in_memory", "24h", "30s"))
    deed = rng.randrange(8)
    if deed < 3:
        response = await server.http.post(COMPLETIONS, json=body)
        assert response.status_code in (200, 503), response.text
    elif deed < 5:
        _, writer = await on_wire.send(COMPLETIONS, body)
        await asyncio.sleep(rng.random() * 0.02)
        writer.close()
    elif deed == 5:
        pin = {"tokens": prompt, "owner": "storm", "level": rng.choice(("hard", "soft")), "partial": rng.random() < 0.5}
        pin |= {"ttl_seconds": rng.choice((5, 500)), "wait": rng.random() < 0.5, "refresh": rng.random() < 0.5}
        response = await server.http.post("/v1/pins", json=pin)
        assert response.status_code in (200, 409, 503), response.text
        if rng.random() < 0.5 and response.status_code == 200:
            assert (await server.http.delete(f"/v1/pins/{response.json()['id']}")).status_code in (200, 404)
    elif deed == 6:
        response = await server.http.put("/v1/pins/quota", json={"share": rng.choice((0.1, 0.3, 0.6))})
        assert response.status_code in (200, 409)
    else:
        clock.seconds += rng.choice((1, 20, 400))


@pytest.mark.parametrize("seed", range(2))
async def test_nothing_is_left_behind(make_server, wire, eventually, clock, seed):
    """After a storm of wishes, aborts, pins, unpins, quotas and expiry nothing runs, all invariants hold, and a day
    later no pin is left: not one had been made without an end."""
    server = await make_server(num_pages=3, delay_seconds=0.001, max_running_requests=4, clock=clock)

    async def client(number: int) -> None:
        rng = random.Random(100 * seed + number)
        for _ in range(NUM_ACTIONS):
            await act(rng, server, on_wire, clock)
            server.cache.check_integrity()

    async with wire(server) as on_wire:
        await asyncio.gather(*(client(number) for number in range(NUM_CLIENTS)))
        assert await eventually(lambda: server.is_idle)
    kept = server.app.state.context.request_pins
    assert all(one.num_running == 0 for one in kept._kept.values())
    live = {pin["id"] for pin in await server.pins()}
    assert all(pin["expires_at"] is not None for pin in await server.pins())
    assert all(pin["num_pinned_tokens"] for pin in await server.pins() if pin["owner"] == "anonymous")
    clock.seconds += 86_401
    assert await server.pins() == []
    ends = {pin["end"] for pin in (await server.get("/v1/pins?past=true"))["data"] if pin["id"] in live}
    assert ends <= {"expired"}
    assert server.cache.stats().pinned_blocks == 0
