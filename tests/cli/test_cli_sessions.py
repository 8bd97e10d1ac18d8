"""`looseleaf sessions`, and what `explain` says of conversations."""

from __future__ import annotations

import json

import httpx
import pytest
from cli_kit import RunCli, Running
from serve_kit import read_json, serving

from looseleaf.cli.explain import seconds_of
from looseleaf.cli.serve import quotas_of
from looseleaf.core.namespaces import namespace_of
from looseleaf.errors import ConfigError

ASK = {"role": "user", "content": "tell me a story about binders, please, and make it long"}


def chat(server: Running, messages: list[dict[str, str]], **body: object) -> dict[str, str]:
    """The assistant's message."""
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": messages, "max_tokens": 20, **body})
    assert answer.is_success, answer.text
    return dict(answer.json()["choices"][0]["message"])


def test_sessions_are_listed_and_ended(cli: RunCli, server: Running) -> None:
    """`sessions list` and `rm` show and do what the server says, in text and in JSON; an unknown one is an error."""
    assert cli("sessions", "list", "--url", server.url).stdout == "no sessions\n"
    chat(server, [ASK], session_id="a/b")
    chat(server, [ASK, ASK], session_id="salted", cache_salt="tenant")
    listed = cli("sessions", "list", "--url", server.url)
    assert listed.exit_code == 0, listed.stderr
    assert "a/b" in listed.stdout
    rows = json.loads(cli("sessions", "list", "--json", "--url", server.url).stdout)["data"]
    assert [row["id"] for row in rows] == ["a/b", "salted"]
    ended = cli("sessions", "rm", "a/b", "--url", server.url)
    assert "a/b has ended" in ended.stdout
    as_json = cli("sessions", "rm", "salted", "--salt", "tenant", "--json", "--url", server.url)
    assert json.loads(as_json.stdout)["num_released_tokens"] == rows[1]["num_tokens"] > 0
    assert cli("sessions", "list", "--url", server.url).stdout == "no sessions\n"
    unknown = cli("sessions", "rm", "a/b", "--url", server.url)
    assert unknown.exit_code == 1
    assert "a/b" in unknown.stderr


def test_explain_tells_of_drift(cli: RunCli, server: Running) -> None:
    """`explain` says where a conversation left its last turn and why, with the texts of both sides; and the texts where
    a prompt leaves what is stored."""
    answer = chat(server, [ASK])
    edited = {**answer, "content": "Never mind. " + answer["content"]}
    chat(server, [ASK, edited, {"role": "user", "content": "go on"}], request_id="second")
    told = cli("explain", "second", "--url", server.url)
    assert told.exit_code == 0, told.stderr
    assert "drift: message_edited" in told.stdout
    assert repr(answer["content"][:12]) in told.stdout
    assert "'Never mind. '" in told.stdout
    assert "stored there: " + repr(answer["content"][:6])[:-1] in told.stdout
    assert json.loads(cli("explain", "second", "--json", "--url", server.url).stdout)["drift"]["message_index"] == 1


def test_explain_summary(cli: RunCli, server: Running) -> None:
    """`explain --summary` says where misses came from, in a sentence and in tables; `--since` and `--salt` narrow
    it."""
    empty = cli("explain", "--summary", "--url", server.url)
    assert empty.stdout.strip() == "Nothing was looked up."
    chat(server, [ASK])
    chat(server, [ASK])
    chat(server, [ASK], cache_salt="tenant")
    told = cli("explain", "--summary", "--since", "10m", "--url", server.url)
    assert told.exit_code == 0, told.stderr
    stats = server.stack.cache.stats()
    assert f"Of {stats.query_tokens:,} tokens in 3 look-ups" in told.stdout
    assert "other_namespace" in told.stdout
    salted = cli("explain", "--summary", "--salt", "tenant", "--json", "--url", server.url)
    assert json.loads(salted.stdout)["num_lookups"] == 1


def test_explain_what_is_stored(cli: RunCli, server: Running) -> None:
    """`--stored` tells what is stored of a request now, and what the policy makes of it."""
    chat(server, [ASK], request_id="r")
    told = cli("explain", "r", "--stored", "--url", server.url)
    assert "first token: 0" in told.stdout
    assert "policy:" in told.stdout
    assert json.loads(cli("explain", "r", "--stored", "--json", "--url", server.url).stdout)["stored"]


@pytest.mark.parametrize(
    "arguments",
    [[], ["r", "--summary"], ["r", "--since", "10m"], ["--salt", "x"], ["--summary", "--since", "soon"],
     ["--summary", "--since", "0m"], ["--summary", "--since", "-5"]],
)  # fmt: skip
def test_explain_one_thing(cli: RunCli, server: Running, arguments: list[str]) -> None:
    """One request or the summary, with a time that is one: anything else is a mistake of the command line."""
    assert cli("explain", *arguments, "--url", server.url).exit_code == 2


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("2h", 7200), ("1d", 86_400), ("1.5h", 5400)])
def test_times(text: str, seconds: float) -> None:
    """Times with a unit are seconds."""
    assert seconds_of(text) == seconds


def test_namespace_quotas_are_named_by_salt() -> None:
    """`--namespace-quota` names a namespace by its salt or as the server shows it; what is no share is refused."""
    assert quotas_of(None) == {}
    assert quotas_of(["acme=0.2", 'tenant="b"=1', "a=b=0.5"]) == {
        namespace_of(salt="acme"): 0.2, 'tenant="b"': 1.0, namespace_of(salt="a=b"): 0.5
    }  # fmt: skip
    for bad in ("acme", "acme=", "acme=lots"):
        with pytest.raises(ConfigError, match="SALT"):
            quotas_of([bad])


def test_a_server_with_quotas_and_fair_shares() -> None:
    """`serve --fair-shares --namespace-quota` gives them to the cache: a tenant at its quota takes its own place."""
    with serving("--json", "--fair-shares", "--namespace-quota", "acme=0.25", "--policy", "lru") as process:
        url = str(read_json(process)["url"])
        for letter in "abcde":
            body = {"prompt": letter * 600, "max_tokens": 1, "cache_salt": "acme"}
            httpx.post(f"{url}/v1/completions", json=body).raise_for_status()
        (usage,) = httpx.get(f"{url}/v1/cache/namespaces").json()["data"]
        assert usage["quota_blocks"] == usage["stored_blocks"] > 0
        assert usage["over_quota_tokens"] > 0


def test_a_share_that_is_none_is_refused(cli: RunCli) -> None:
    """A quota outside 0 to 1 stops the server before it loads a model."""
    result = cli("serve", "--namespace-quota", "acme=1.5")
    assert result.exit_code == 2
    assert "1.5" in result.stderr
