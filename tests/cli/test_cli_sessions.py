"""`looseleaf sessions`, and what `explain` says of conversations."""

from __future__ import annotations

import json

import httpx
from cli_kit import RunCli, Running

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
