"""`pins` and `explain` against a running server."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from cli_kit import LETTERS, MEMORY, RunCli, Running, running

from looseleaf.cli.build import LoadedModel
from looseleaf.cli.client import ServerClient, ServerError
from looseleaf.core.auto_pin_config import AutoPinConfig, AutoPinRule
from looseleaf.core.config import LayerGroup
from looseleaf.errors import ConfigError
from looseleaf.server import ServerSettings
from looseleaf.testing.fake_runner import FakeRunner
from looseleaf.testing.fake_tokenizer import FakeTokenizer

TEXT = "All members may borrow five items at a time, ladders for four days only. " * 2


def complete(server: Running, request_id: str, prompt: str = TEXT) -> None:
    """Run a prompt through the server."""
    body = {"prompt": prompt, "max_tokens": 2, "request_id": request_id}
    httpx.post(f"{server.url}/v1/completions", json=body).raise_for_status()


def test_a_pin_is_made_listed_and_undone(cli: RunCli, server: Running) -> None:
    """`pins add`, `list`, `rm` do what the server says they did, in text and in JSON."""
    assert cli("pins", "list", "--url", server.url).stdout == "no pins\n"
    added = cli("pins", "add", "--text", TEXT, "--owner", "ops", "--wait", "--json", "--url", server.url)
    assert added.exit_code == 0, added.stderr
    pin = json.loads(added.stdout)
    assert pin["owner"] == "ops"
    assert pin["num_pinned_tokens"] == len(TEXT) // 16 * 16
    assert [live.id for live in server.stack.cache.pins()] == [pin["id"]]
    listed = cli("pins", "list", "--url", server.url)
    assert pin["id"] in listed.stdout
    assert "ops" in listed.stdout
    assert json.loads(cli("pins", "list", "--json", "--url", server.url).stdout)["data"][0]["id"] == pin["id"]
    assert cli("pins", "rm", pin["id"], "--url", server.url).exit_code == 0
    assert server.stack.cache.pins() == []


def test_a_pin_of_a_file_and_of_a_request(cli: RunCli, server: Running, tmp_path: Path) -> None:
    """`--file` pins the file's text, `--request-id` what a request computed; salt and expiry are passed on."""
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    options = ("--salt", "tenant", "--ttl-seconds", "60", "--level", "soft", "--url", server.url)
    assert cli("pins", "add", "--file", str(tmp_path / "text.txt"), *options).exit_code == 0
    complete(server, "r1")
    held = cli("pins", "add", "--request-id", "r1", "--url", server.url)
    assert held.exit_code == 0, held.stderr
    of_file, of_request = server.stack.cache.pins()
    assert (of_file.level, of_file.namespace != "", of_file.expires_at is not None) == ("soft", True, True)
    assert of_request.num_pinned_tokens > 0


@pytest.mark.parametrize("what", [[], ["--text", "a", "--request-id", "b"], ["--tokens", "a", "--messages", "b"]])
def test_what_to_pin_is_said_once(cli: RunCli, what: list[str]) -> None:
    """None or two of text, file, chat, tokens, request id is exit code 2, without asking the server."""
    result = cli("pins", "add", *what, "--url", "http://127.0.0.1:1")
    assert result.exit_code == 2
    assert "--request-id" in result.stderr


def test_a_pin_of_a_chat_and_of_tokens(cli: RunCli, server: Running, tmp_path: Path) -> None:
    """`--messages` pins what the chats that begin with them have in common, in the model's template; `--tokens` token
    ids, `--last-token` the first of them."""
    messages = [{"role": "system", "content": TEXT}]
    (tmp_path / "chat.json").write_text(json.dumps(messages), encoding="utf-8")
    (tmp_path / "ids.json").write_text(json.dumps([97, 98, 99, 100] * 10), encoding="utf-8")
    chat = cli("pins", "add", "--messages", str(tmp_path / "chat.json"), "--wait", "--json", "--url", server.url)
    assert chat.exit_code == 0, chat.stderr
    question = {"model": "fake", "messages": [*messages, {"role": "user", "content": "And saws?"}], "max_tokens": 1}
    usage = httpx.post(f"{server.url}/v1/chat/completions", json=question).json()["usage"]
    held = json.loads(chat.stdout)["num_pinned_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == held >= len(TEXT)
    options = ("--tokens", str(tmp_path / "ids.json"), "--last-token", "33", "--level", "soft", "--priority", "2")
    limits = ("--ttl", "60", "--refresh", "--max-ttl", "90", "--label", "team=docs", "--label", "kind=a=b", "--partial")
    assert cli("pins", "add", *options, *limits, "--url", server.url).exit_code == 0
    pin = server.stack.cache.pins()[1]
    assert (pin.num_tokens, pin.priority, pin.refresh, pin.level) == (33, 2, True, "soft")
    assert pin.expires_at == pytest.approx(pin.created_at + 60)
    assert dict(pin.labels) == {"team": "docs", "kind": "a=b"}


def test_a_pin_of_a_prompt_leaves_the_answer_out(cli: RunCli, server: Running) -> None:
    """`--part prompt` pins a request without what it generated."""
    complete(server, "r1", TEXT[:20])
    pins = [
        json.loads(cli("pins", "add", "--request-id", "r1", "--part", part, "--json", "--url", server.url).stdout)
        for part in ("all", "prompt")
    ]
    assert [pin["num_tokens"] for pin in pins] == [22, 21]


def test_the_list_tells_who_holds_what_and_what_it_served(cli: RunCli, server: Running) -> None:
    """One row a pin, with any owner's name, by owner and label where asked; ended pins are in the past with their
    end."""
    for owner, label, level in (("[/ops]", "team=docs", "soft"), ("b", "team=web", "hard")):
        options = ("--owner", owner, "--label", label, "--level", level, "--wait", "--url", server.url)
        assert cli("pins", "add", "--text", owner + TEXT, "--priority", "7", *options).exit_code == 0
    complete(server, "r1", "b" + TEXT)

    def listed(*options: str) -> list[dict[str, object]]:
        return json.loads(cli("pins", "list", *options, "--json", "--url", server.url).stdout)["data"]

    assert [pin["owner"] for pin in listed()] == ["[/ops]", "b"]
    assert [pin["owner"] for pin in listed("--owner", "b")] == ["b"]
    assert [pin["owner"] for pin in listed("--label", "team=docs")] == ["[/ops]"]
    assert listed("--label", "team=docs", "--owner", "b") == listed("--past") == []
    text = cli("pins", "list", "--url", server.url).stdout
    first, second = (line.split() for line in text.splitlines() if "pin-" in line)
    num_held = (len(TEXT) + 1) // 16 * 16
    num_left = (server.stack.cache.plan.quota_blocks - num_held // 16) * 16  # the hard pin displaced the soft one
    assert first[:6] == ["pin-1", "[/ops]", "soft", "7", f"{num_left}/{len(TEXT) + 7}", "(quota)"]
    assert second[:6] == ["pin-2", "b", "hard", f"{num_held}/{len(TEXT) + 2}", str(num_held), "1"]
    assert second[-2:] == ["for", "good"]
    assert cli("pins", "rm", "--owner", "b", "--url", server.url).stdout == "pin-2 is gone\n"
    (past,) = listed("--past")
    assert (past["id"], past["end"]) == ("pin-2", "unpinned")
    assert "unpinned" in cli("pins", "list", "--past", "--url", server.url).stdout


def test_pins_are_undone_by_id_owner_or_request(cli: RunCli, server: Running) -> None:
    """`rm` takes one of the three, undoes the latest of a request or all of an owner, and says which are gone."""
    complete(server, "r1")
    for _ in range(2):
        assert cli("pins", "add", "--request-id", "r1", "--owner", "ops", "--url", server.url).exit_code == 0
        assert cli("pins", "add", "--text", TEXT, "--owner", "ops", "--url", server.url).exit_code == 0
    gone = json.loads(cli("pins", "rm", "--request-id", "r1", "--json", "--url", server.url).stdout)
    assert (gone["id"], gone["deleted"]) == ("pin-3", True)
    assert cli("pins", "rm", "--owner", "nobody", "--url", server.url).stdout == "no pins are gone\n"
    assert cli("pins", "rm", "--owner", "ops", "--url", server.url).stdout == "pin-1, pin-2, pin-4 are gone\n"
    assert server.stack.cache.pins() == []
    for arguments in ([], ["pin-1", "--owner", "ops"], ["--owner", "a", "--request-id", "b"]):
        result = cli("pins", "rm", *arguments, "--url", "http://127.0.0.1:1")
        assert result.exit_code == 2
        assert "--owner" in result.stderr


def test_labels_are_written_with_an_equals_sign(cli: RunCli) -> None:
    """Anything else is exit code 2, without asking the server."""
    for label in ("team", "=docs"):
        result = cli("pins", "add", "--text", "a", "--label", label, "--url", "http://127.0.0.1:1")
        assert result.exit_code == 2
        assert repr(label) in result.stderr


def test_the_quota_is_shown_and_set(cli: RunCli, server: Running) -> None:
    """`pins quota` shows share, blocks and what is used; with a share it sets it, with `--salt` that of a namespace.
    Less than hard pins hold is refused with the numbers."""
    assert cli("pins", "add", "--text", TEXT, "--wait", "--url", server.url).exit_code == 0
    shown = cli("pins", "quota", "--url", server.url).stdout
    assert "share: 0.5\n" in shown
    assert f"used: {len(TEXT) // 16}\n" in shown
    assert json.loads(cli("pins", "quota", "0.75", "--json", "--url", server.url).stdout)["num_blocks"] == 24
    assert server.stack.cache.config.pin_quota == 0.75
    one = cli("pins", "quota", "0.25", "--salt", "tenant", "--url", server.url)
    assert one.exit_code == 0, one.stderr
    assert 'namespaces:\n  salt="tenant":\n    share: 0.25\n    num blocks: 8\n' in one.stdout
    assert server.stack.cache.config.namespace_pin_quotas == {'salt="tenant"': 0.25}
    refused = cli("pins", "quota", "0.1", "--url", server.url)
    assert refused.exit_code == 1
    assert "(HTTP 409)" in refused.stderr
    assert cli("pins", "quota", "--salt", "tenant", "--url", server.url).exit_code == 2


def test_automatic_pinning_is_shown_and_switched(cli: RunCli, server: Running) -> None:
    """`pins auto` tells what it does and by which rules; with a mode or a rule it changes that, and nothing else."""
    cache = server.stack.cache
    cache.set_auto_pin(AutoPinConfig())
    shown = json.loads(cli("pins", "auto", "--json", "--url", server.url).stdout)
    assert (shown["mode"], shown["min_tokens"], shown["min_requests_per_second"]) == ("on", 1024, 100.0)
    assert (shown["num_pins"], shown["gained_tokens"], shown["candidates"]) == (0, 0, [])
    text = cli("pins", "auto", "dry-run", "--min-tokens", "2048", "--min-rate", "off", "--url", server.url).stdout
    assert "mode: dry-run\n" in text
    assert cache.config.auto_pin == AutoPinConfig(AutoPinRule(2048, None), dry_run=True)
    assert cli("pins", "auto", "off", "--url", server.url).exit_code == 0
    assert cache.config.auto_pin is None
    for arguments in (["sometimes"], ["on", "--min-tokens", "many"], ["--min-tokens", "5"]):
        assert cli("pins", "auto", *arguments, "--url", server.url).exit_code != 0
    assert cache.config.auto_pin is None


def test_figures_of_pins_are_plain_numbers_with_windows_too(cli: RunCli) -> None:
    """What pins hold in groups that slide is counted in plain integers, so that quota and statistics can be sent."""
    groups = (LayerGroup("full"), LayerGroup("window", window_tokens=32, num_lanes=2))
    num_blocks = MEMORY.num_pages * MEMORY.blocks_per_page
    runner = FakeRunner(num_blocks, MEMORY.block_tokens, alphabet=LETTERS, groups=groups)
    with running(LoadedModel("fake", runner, FakeTokenizer(), num_blocks, 8 * MEMORY.block_tokens)) as server:
        added = cli("pins", "add", "--text", TEXT[:60], "--wait", "--url", server.url)
        assert added.exit_code == 0, added.stderr
        shown = cli("pins", "quota", "--json", "--url", server.url)
        assert shown.exit_code == 0, shown.stderr
        assert json.loads(shown.stdout)["used"] == server.stack.cache.pins()[0].num_blocks > 0
        assert httpx.get(f"{server.url}/v1/cache/stats").status_code == 200


def test_a_file_that_is_not_there_is_bad_input(cli: RunCli, tmp_path: Path) -> None:
    """A file that cannot be read is exit code 2 and named."""
    result = cli("pins", "add", "--file", str(tmp_path / "none.txt"))
    assert result.exit_code == 2
    assert "none.txt" in result.stderr


def test_the_servers_own_words_come_through(cli: RunCli, server: Running) -> None:
    """An error answer is shown with its facts, hint and status, as exit code 1."""
    result = cli("pins", "rm", "pin-99", "--url", server.url)
    assert result.exit_code == 1
    assert "pin-99" in result.stderr
    assert "(HTTP 404)" in result.stderr
    assert "\nhint: " in result.stderr


def test_explain_says_why(cli: RunCli, server: Running) -> None:
    """The second run of a prompt is explained with what it found; `--json` gives the server's answer."""
    complete(server, "r1")
    complete(server, "chat/2")
    cold = json.loads(cli("explain", "r1", "--json", "--url", server.url).stdout)
    assert cold["num_cached_tokens"] == 0
    warm = cli("explain", "chat/2", "--url", server.url)
    assert warm.exit_code == 0, warm.stderr
    assert warm.stdout.startswith(f"{len(TEXT) // 16 * 16} of {len(TEXT) + 1} prompt tokens came from the cache")


def test_explain_of_an_unknown_request_fails(cli: RunCli, server: Running) -> None:
    """A request that the server does not know is exit code 1."""
    result = cli("explain", "nobody", "--url", server.url)
    assert result.exit_code == 1
    assert "nobody" in result.stderr


def test_a_key_is_sent(cli: RunCli, fake_model: LoadedModel) -> None:
    """`--key` opens what the admin key guards."""
    with running(fake_model, ServerSettings(admin_key="secret")) as server:
        assert cli("pins", "add", "--text", TEXT, "--url", server.url).exit_code == 1
        assert cli("pins", "add", "--text", TEXT, "--url", server.url, "--key", "secret").exit_code == 0


def test_no_server_is_said_with_a_hint(cli: RunCli) -> None:
    """Where nothing listens: exit code 1 and the command that starts a server."""
    result = cli("pins", "list", "--url", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "looseleaf serve" in result.stderr


def test_an_address_that_is_none_is_bad_input() -> None:
    """A URL without scheme is refused before anything is sent."""
    with pytest.raises(ConfigError, match="no URL"):
        ServerClient("localhost:8000", None)


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (httpx.Response(200, text="<html>"), "without JSON"),
        (httpx.Response(200, json=[1]), "HTTP 200"),
        (httpx.Response(500, json={"error": {"message": "broken\nhint: mend it"}}), "broken"),
        (httpx.Response(400, json={"detail": "no"}), "no"),
    ],
)
def test_odd_answers_are_errors_not_tracebacks(response: httpx.Response, said: str) -> None:
    """What is no answer of ours becomes a `ServerError` that says what came."""
    client = ServerClient("http://test", None, transport=httpx.MockTransport(lambda _: response))
    with pytest.raises(ServerError, match=said):
        client.call("GET", "/v1/pins")
