"""Laws of recording: prefixes stay prefixes, nothing of the text is kept, and a disk that fails costs no request."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from looseleaf import ConfigError, InvalidTokens
from looseleaf.lab.recording import TraceRecorder


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def record(
    path: Path, block_tokens: int, tokens: Sequence[int], namespace: str = "", session: str | None = None
) -> None:
    """A recording of one request."""
    with TraceRecorder(path, block_tokens) as recorder:
        recorder.record(namespace, tokens, 1, 0.0, session)


def test_a_recording_is_a_header_and_a_line_per_request(tmp_path: Path) -> None:
    """Arrival since the begin, lengths, an id per whole block; namespace and session only where there is one."""
    path = tmp_path / "t.jsonl"
    recorder = TraceRecorder(path, 4, clock=lambda: 100.0)
    recorder.record("", range(10), 7, 101.25)
    recorder.record("tenant", [5], 0, 102.0, "chat-1")
    recorder.close()
    head, first, second = rows_of(path)
    assert (head["format"], head["block_tokens"]) == ("looseleaf-trace/1", 4)
    assert (first["timestamp"], first["input_length"], first["output_length"]) == (1250, 10, 7)
    assert len(first["hash_ids"]) == 2
    assert not {"namespace", "session_id"} & set(first)
    assert second["hash_ids"] == []
    assert len(second["namespace"]) == len(second["session_id"]) == 16


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8])
def test_ids_are_those_of_whole_blocks(tmp_path: Path, num_tokens: int) -> None:
    """As many ids as whole blocks, at every length around a boundary."""
    path = tmp_path / "t.jsonl"
    record(path, 4, range(num_tokens))
    assert len(rows_of(path)[1]["hash_ids"]) == num_tokens // 4


def test_an_id_stands_for_all_before_it(tmp_path: Path) -> None:
    """Equal prefixes have equal ids, in any namespace; an equal block behind another prefix has another id."""
    path = tmp_path / "t.jsonl"
    with TraceRecorder(path, 2) as recorder:
        for namespace, tokens in (("", [1, 2, 3, 4, 5, 6]), ("a", [1, 2, 3, 4, 9, 9]), ("", [7, 7, 3, 4, 5, 6])):
            recorder.record(namespace, tokens, 1, 0.0)
    one, two, three = (row["hash_ids"] for row in rows_of(path)[1:])
    assert one[:2] == two[:2]
    assert one[2] != two[2]
    assert not set(one) & set(three)
    assert all(0 <= block < 2**53 for block in one + two + three)


def test_nothing_can_be_guessed(tmp_path: Path) -> None:
    """The same request has other ids, another namespace and session in another recording, and no name is in the file:
    without the secret, which is not written, a guess can't be tested."""
    for name in ("a", "b"):
        record(tmp_path / name, 2, [1, 2, 3, 4], "tenant-a", "session-1")
    a, b = rows_of(tmp_path / "a")[1], rows_of(tmp_path / "b")[1]
    assert not set(a["hash_ids"]) & set(b["hash_ids"])
    assert a["namespace"] != b["namespace"]
    assert a["session_id"] != b["session_id"]
    assert "tenant-a" not in (tmp_path / "a").read_text()
    assert "session-1" not in (tmp_path / "a").read_text()


def test_a_file_is_continued_with_another_recording(tmp_path: Path) -> None:
    """A restart keeps what was recorded and begins anew; a line that a crash cut off is dropped."""
    path = tmp_path / "t.jsonl"
    record(path, 2, [1, 2])
    with path.open("a") as file:
        file.write('{"timestamp": 12, "hash_ids": [' + "1," * 100_000)
    record(path, 2, [1, 2])
    assert ["format" in row for row in rows_of(path)] == [True, False, True, False]


@pytest.mark.parametrize("content", ["precious\n", '{"timestamp": 0}\n', "\x00\x01"])
def test_other_files_are_left_alone(tmp_path: Path, content: str) -> None:
    """What is no recording is never written to."""
    path = tmp_path / "model.bin"
    path.write_text(content)
    with pytest.raises(ConfigError, match="is no recording"):
        TraceRecorder(path, 16)
    assert path.read_text() == content


def test_a_file_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    """At the start, where somebody is there to read it."""
    with pytest.raises(ConfigError, match="cannot record to"):
        TraceRecorder(tmp_path / "missing" / "t.jsonl", 16)


def test_bad_tokens_are_refused(tmp_path: Path) -> None:
    """No tokens, no line."""
    path = tmp_path / "t.jsonl"
    for tokens in ([], [-1]):
        with pytest.raises(InvalidTokens):
            record(path, 16, tokens)
    assert ["format" in row for row in rows_of(path)] == [True, True]


def test_a_disk_that_fails_later_costs_no_request(tmp_path: Path) -> None:
    """The first failed write is kept in `failure`, later requests are dropped in silence, and closing works."""
    recorder = TraceRecorder(tmp_path / "t.jsonl", 2)
    recorder.record("", [1, 2], 1, 0.0)

    def fail(_: object) -> int:
        raise OSError(28, "No space left on device")

    recorder._file.write = fail  # type: ignore[method-assign]
    recorder.record("", [1, 2], 1, 0.0)
    recorder.record("", [1, 2], 1, 0.0)
    assert recorder.num_recorded == 1
    assert recorder.failure is not None
    assert recorder.failure.errno == 28
    recorder.flush()
    recorder.close()
    assert len(rows_of(tmp_path / "t.jsonl")) == 2


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    """Lines of several threads do not mix; after `close` nothing more is written, and closing twice is fine."""
    path = tmp_path / "t.jsonl"
    recorder = TraceRecorder(path, 2)
    threads = [
        threading.Thread(target=lambda: [recorder.record("", range(400), 1, 0.0) for _ in range(50)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    recorder.record("", [1, 2], 1, 0.0)
    recorder.close()
    assert recorder.num_recorded == 200
    assert len({tuple(row["hash_ids"]) for row in rows_of(path)[1:]}) == 1
    assert len(rows_of(path)) == 201
