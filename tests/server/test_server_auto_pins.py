"""`/v1/pins/auto`: what the cache pins by itself is shown, switched and ruled while it runs."""

from __future__ import annotations

import pytest

from looseleaf.core.auto_pin_config import AutoPinConfig, AutoPinRule
from looseleaf.server import ApiKey, ServerSettings

pytestmark = pytest.mark.anyio

AUTO = "/v1/pins/auto"
REPORT = {
    "is_on", "dry_run", "is_paused", "num_pins", "num_pinned_tokens", "num_made", "num_lapsed", "gained_tokens",
    "lost_tokens", "candidates",
}  # fmt: skip


async def test_switching_at_run_time(server):
    """Off, on, dry run, and other rules: the answer is the report with the settings that hold now, and the cache has
    them; what is not given stays, null switches a rule off."""
    off = await server.get(AUTO)
    assert (off["object"], off["mode"], off["is_on"]) == ("auto_pin", "off", False)
    assert off.keys() >= REPORT
    await server.put(AUTO, {"min_tokens": 5}, 400)
    on = await server.put(AUTO, {"mode": "on"})
    assert (on["mode"], on["is_on"], on["dry_run"]) == ("on", True, False)
    assert (on["min_tokens"], on["min_requests_per_second"], on["rate_window_seconds"]) == (1024, 100.0, 1.0)
    dry = await server.put(AUTO, {"mode": "dry-run", "min_tokens": 64})
    assert (dry["mode"], dry["is_on"], dry["dry_run"], dry["min_tokens"]) == ("dry-run", True, True, 64)
    ruled = await server.put(AUTO, {"min_requests_per_second": None, "rate_window_seconds": 2.5})
    assert (ruled["mode"], ruled["min_tokens"], ruled["min_requests_per_second"]) == ("dry-run", 64, None)
    assert server.cache.config.auto_pin == AutoPinConfig(AutoPinRule(64, None), rate_window_seconds=2.5, dry_run=True)
    assert (await server.put(AUTO, {"mode": "off"}))["is_on"] is False
    assert (await server.get(AUTO))["mode"] == "off"


async def test_namespaces_have_rules_of_their_own(server):
    """`namespaces` replaces the rules of single ones: null pins nothing there, what a rule does not say is as
    everywhere."""
    own = {'salt="a"': {"min_tokens": 10, "min_requests_per_second": 5.0}, 'salt="b"': None, "": {"min_tokens": None}}
    answer = await server.put(AUTO, {"mode": "on", "namespaces": own})
    assert answer["namespaces"] == {**own, "": {"min_tokens": None, "min_requests_per_second": 100.0}}
    assert (await server.put(AUTO, {"min_tokens": 7}))["namespaces"] == answer["namespaces"]
    assert (await server.put(AUTO, {"namespaces": {}}))["namespaces"] == {}


@pytest.mark.parametrize(
    "body",
    [{"mode": "maybe"}, {"mode": True}, {"min_tokens": -1}, {"min_tokens": 1.5}, {"min_requests_per_second": -1},
     {"rate_window_seconds": 0}, {"rate_window_seconds": None}, {"namespaces": {"a": 5}}, {"namespaces": None},
     {"namespaces": {"a": {"mode": "on"}}}, {"max_tokens": 5}, []],
)  # fmt: skip
async def test_bad_settings_change_nothing(server, body):
    """What makes no sense is 400, and the settings stay as they are."""
    before = await server.put(AUTO, {"mode": "on"})
    await server.put(AUTO, {"mode": "dry-run", **body} if body and "mode" not in body else body, 400)
    assert await server.get(AUTO) == before


async def test_rules_are_the_operators(make_server):
    """A key with a namespace of its own neither changes the rules, which are everybody's, nor sees the namespaces of
    others in them; with an admin key only that changes them."""
    keys = (ApiKey("k1", "one", "first"), ApiKey("k2", "two", "second"))
    own = {"namespaces": {'tenant="one"': None, 'tenant="two"/salt="s"': None}}
    server = await make_server(settings=ServerSettings(admin_key="root", api_keys=keys))
    root, one = {"Authorization": "Bearer root"}, {"Authorization": "Bearer k1"}
    await server.put(AUTO, {"mode": "on", **own}, **root)
    await server.put(AUTO, {"mode": "off"}, 403, **one)
    assert [*(await server.get(AUTO, **one))["namespaces"]] == ['tenant="one"']
    assert (await server.get(AUTO, **root))["mode"] == "on"
    server = await make_server(settings=ServerSettings(api_keys=keys))
    await server.put(AUTO, {"mode": "on"}, 403, **one)
    server = await make_server(settings=ServerSettings(admin_key="root"))
    await server.put(AUTO, {"mode": "on", **own}, **root)
    assert (await server.get(AUTO))["namespaces"] == {}


async def test_candidates_are_shown_to_their_own(make_server):
    """Each key sees the candidates of its own namespace, the operator all; with length and rate."""
    keys = (ApiKey("k1", "one", "first"), ApiKey("k2", "two", "second"))
    server = await make_server(settings=ServerSettings(admin_key="root", api_keys=keys))
    root = {"Authorization": "Bearer root"}
    await server.put(AUTO, {"mode": "dry-run", "min_tokens": 32, "min_requests_per_second": None}, **root)
    for _ in range(3):
        for key in ("k1", "k2"):
            body = {"prompt": [7] * 200, "max_tokens": 1}
            await server.post("/v1/completions", body, Authorization=f"Bearer {key}")
    names = {one["namespace"] for one in (await server.get(AUTO, **root))["candidates"]}
    assert names == {'tenant="one"', 'tenant="two"'}
    (first, *_) = own = (await server.get(AUTO, Authorization="Bearer k1"))["candidates"]
    assert {one["namespace"] for one in own} == {'tenant="one"'}
    assert (first["num_tokens"] > 32, first["requests_per_second"] > 0, first["is_pinned"]) == (True, True, False)
    assert await server.pins(**root) == []
