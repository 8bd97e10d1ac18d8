"""`serve --record`: traffic in a file that a replay can read, without a word of it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import httpx
import pytest
from cli_kit import MEMORY, RunCli
from serve_kit import read_json, serving

from looseleaf.cli.build import LoadedModel, build_stack
from looseleaf.cli.serving import BackgroundServer
from looseleaf.cli.traffic import recording
from looseleaf.engine.config import EngineConfig
from looseleaf.errors import ConfigError
from looseleaf.lab.traces import load_trace

TEXT = "All members may borrow five items at a time, ladders for four days only. "
SALT, SESSION = "sesame-salt", "sesame-session"


def post(url: str, path: str = "/v1/completions", **body: object) -> dict[str, object]:
    """One request of at most 5 tokens."""
    response = httpx.post(f"{url}{path}", json={"max_tokens": 5, "temperature": 0, **body})
    assert response.is_success, response.text
    return dict(response.json())


def test_what_is_recorded(fake_model: LoadedModel, tmp_path: Path) -> None:
    """Requests that end are recorded with lengths, prefix ids, hidden namespace and session; those that skip the cache
    are not; no text and no token ids are in the file."""
    path = tmp_path / "traffic.jsonl"
    with recording(path, MEMORY.block_tokens) as recorder:
        stack = build_stack(fake_model, MEMORY, EngineConfig(), recorder=recorder)
        with BackgroundServer(stack.app) as server:
            post(server.url, prompt=TEXT * 2)
            post(server.url, prompt=TEXT * 2, cache_salt=SALT, session_id=SESSION)
            chat = {"messages": [{"role": "user", "content": TEXT}], "stream": True}
            httpx.post(f"{server.url}/v1/chat/completions", json={"max_tokens": 5, **chat})
            post(server.url, prompt=TEXT, reuse=False)
    written = path.read_text()
    header, first, second, third = (json.loads(line) for line in written.splitlines())
    assert header["block_tokens"] == MEMORY.block_tokens
    assert (first["input_length"], first["output_length"]) == (1 + 2 * len(TEXT), 5)
    assert len(first["hash_ids"]) == (1 + 2 * len(TEXT)) // 16
    assert first["timestamp"] <= second["timestamp"] <= third["timestamp"] < 60_000
    assert "namespace" not in first
    assert second["namespace"]
    assert second["session_id"]
    for secret in (SALT, SESSION, "members", "[65", str(list(TEXT.encode())[:3])[1:-1]):
        assert secret not in written
    trace = load_trace(path)
    lengths = [one["input_length"] for one in (first, second, third)]
    assert [request.num_input_tokens for request in trace.requests] == lengths


def test_a_recording_can_be_replayed(cli: RunCli, tmp_path: Path) -> None:
    """The command records, is stopped, and `replay` reads what it wrote: a prompt sent twice hits in the replay as it
    did in the server."""
    path = tmp_path / "traffic.jsonl"
    with serving("--json", "--record", str(path)) as process:
        url = str(read_json(process)["url"])
        answers = [post(url, prompt=TEXT) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    usage = [answer["usage"] for answer in answers]
    hits = sum(one["prompt_tokens_details"]["cached_tokens"] for one in usage)
    result = cli("replay", str(path), "--instant", "--capacity", "64blocks", "--policy", "lru", "--json")
    assert result.exit_code == 0, result.stderr
    replayed = json.loads(result.stdout)
    assert (replayed["requests"], replayed["input_tokens"]) == (3, sum(one["prompt_tokens"] for one in usage))
    assert hits <= replayed["hit_tokens"] <= hits + 2 * 16  # a replay lets the last block hit too


def test_a_file_that_cannot_be_written_is_refused(cli: RunCli, tmp_path: Path) -> None:
    """A file that holds something else is refused, and left as it was; so is a folder that does not exist."""
    notes = tmp_path / "notes.txt"
    notes.write_text("my notes\n")
    for path in (notes, tmp_path / "nowhere" / "file"):
        with pytest.raises(ConfigError), recording(path, 16):
            pass
    assert notes.read_text() == "my notes\n"
    with recording(None, 16) as recorder:
        assert recorder is None


def test_a_full_disk_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A disk that fails ends the recording, not the server; at the end that is said."""
    with recording(tmp_path / "traffic.jsonl", 16) as recorder:
        assert recorder is not None
        recorder.failure = OSError(28, "No space left on device")
    assert "No space left" in capsys.readouterr().err
