"""`pins` and `explain` against a running server."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from cli_kit import RunCli, Running, running

from looseleaf.cli.build import LoadedModel
from looseleaf.cli.client import ServerClient, ServerError
from looseleaf.errors import ConfigError
from looseleaf.server import ServerSettings

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


@pytest.mark.parametrize("what", [[], ["--text", "a", "--request-id", "b"]])
def test_what_to_pin_is_said_once(cli: RunCli, what: list[str]) -> None:
    """None or two of text, file, request id is exit code 2, without asking the server."""
    result = cli("pins", "add", *what, "--url", "http://127.0.0.1:1")
    assert result.exit_code == 2
    assert "--request-id" in result.stderr


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
