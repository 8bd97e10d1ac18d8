"""Laws of trace reading: every format becomes the same thing, and a broken line is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from looseleaf.lab.recording import TraceRecorder
from looseleaf.lab.replay import replay_instant
from looseleaf.lab.traces import TraceFormatError, load_trace

PTRACE = {"format": "prefix-trace/1", "block_size": 16}
MOONCAKE = {"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}
RECORDED = {"format": "looseleaf-trace/1", "block_tokens": 4, "started_at": 1000.0}


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_prefix_trace(tmp_path: Path) -> None:
    """prefix-trace/1: the first k blocks are those of request `ref`, the rest are new."""
    head = {"format": "prefix-trace/1", "block_size": 16, "name": "tiny"}
    trace = load_trace(write(tmp_path / "t.ptrace", head, [0, 40, 5, -1, 0, 3], [1500, 40, 7, 0, 2, 3, "session"]))
    assert (trace.name, trace.block_tokens, trace.num_unique_blocks) == ("tiny", 16, 4)
    first, second = trace.requests
    assert first.blocks[:2] == second.blocks[:2]
    assert first.blocks[2] != second.blocks[2]
    assert (second.at_seconds, second.num_input_tokens, second.num_output_tokens) == (1.5, 40, 7)


def test_mooncake(tmp_path: Path) -> None:
    """Mooncake JSONL: an id behind another prefix is another block."""
    rows = [
        {"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": [1, 2]},
        {"timestamp": 1000, "input_length": 1000, "output_length": 1, "hash_ids": [3, 2]},
    ]
    trace = load_trace(write(tmp_path / "m.jsonl", *rows))
    assert trace.block_tokens == 512
    assert trace.num_unique_blocks == 4


def test_sessions_and_namespaces(tmp_path: Path) -> None:
    """Both formats tell sessions, Mooncake JSONL namespaces too: the same id in another namespace is another block."""
    head = {"format": "prefix-trace/1", "block_size": 16, "name": "tiny"}
    trace = load_trace(write(tmp_path / "t.ptrace", head, [0, 40, 5, -1, 0, 3, 17], [1, 40, 7, 0, 2, 3]))
    assert [request.session for request in trace.requests] == ["17", None]
    row = {"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": [1, 2]}
    trace = load_trace(write(tmp_path / "m.jsonl", row, {**row, "namespace": "a", "session_id": "s"}))
    assert [(request.namespace, request.session) for request in trace.requests] == [("", None), ("a", "s")]
    assert trace.num_unique_blocks == 4


def test_recordings(tmp_path: Path) -> None:
    """A recording comes back in order of arrival, with its namespaces and sessions told apart."""
    path = tmp_path / "t.jsonl"
    with TraceRecorder(path, 4, clock=lambda: 100.0) as recorder:
        recorder.record("a", range(10), 7, 103.0, "s")
        recorder.record("a", [*range(8), 9, 9, 9, 9], 8, 101.0, "s")
        recorder.record("b", range(10), 9, 102.0)
    trace = load_trace(path)
    assert (trace.name, trace.block_tokens, trace.num_unique_blocks) == ("t", 4, 5)
    first, second, third = trace.requests
    assert [request.at_seconds for request in trace.requests] == [1.0, 2.0, 3.0]
    assert [request.num_output_tokens for request in trace.requests] == [8, 9, 7]
    assert [request.num_input_tokens for request in trace.requests] == [12, 10, 10]
    assert first.blocks[:2] == third.blocks
    assert not set(second.blocks) & set(third.blocks)
    assert first.session == third.session != second.session is None
    assert first.namespace == third.namespace != second.namespace
    assert replay_instant(trace, 10).hit_tokens == 8


def test_several_recordings_in_a_file(tmp_path: Path) -> None:
    """They follow each other in the time that lay between them; what is being written at the end is left out."""
    head = {"format": "looseleaf-trace/1", "block_tokens": 4, "started_at": 1000.0}
    row = {"timestamp": 500, "input_length": 4, "output_length": 1, "hash_ids": [1]}
    path = write(tmp_path / "t.jsonl", head, row, {**head, "started_at": 1060.0}, row)
    with path.open("a") as file:
        file.write('{"timestamp": 90')
    assert [request.at_seconds for request in load_trace(path).requests] == [0.5, 60.5]


def test_blocks_of_mooncake_can_have_another_size(tmp_path: Path) -> None:
    """Where a file does not tell the size, the caller does; where it does, both must agree."""
    row = {"timestamp": 0, "input_length": 30, "output_length": 1, "hash_ids": [1, 2]}
    assert load_trace(write(tmp_path / "m.jsonl", row), 16).block_tokens == 16
    head = {"format": "looseleaf-trace/1", "block_tokens": 4, "started_at": 1000.0}
    with pytest.raises(TraceFormatError, match="blocks of 4 tokens, not 16"):
        load_trace(write(tmp_path / "t.jsonl", head, row), 16)


def test_lengths(tmp_path: Path) -> None:
    """CSV of lengths: arrivals from the first on, no content."""
    trace = load_trace(
        write(
            tmp_path / "l.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            "2023-11-16 18:15:46.6805900,374,44",
            "2023-11-16 18:15:50.9951690,396,109",
        )
    )
    assert trace.block_tokens is None
    assert trace.requests[1].at_seconds == pytest.approx(4.314579)
    assert (trace.requests[1].num_input_tokens, trace.requests[1].num_output_tokens) == (396, 109)


@pytest.mark.parametrize(
    ("lines", "facts"),
    [
        ([""], "is empty"),
        (["hello"], "no trace that can be read"),
        ([{"some": "object"}], "no trace that can be read"),
        ([{"format": "prefix-trace/1", "block_size": 16}, [0, 1]], "request 1 of"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "yesterday,1,2"], "request 1 of"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,1"], "request 1 of"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens"], "has no requests"),
        ([PTRACE, [0, 32, 1, -1, 1, 2]], "1 are those of request -1"),
        ([PTRACE, [0, 32, 1, -1, 0, 2], [0, 32, 1, 1, 1, 2]], "request 2 of"),
        ([PTRACE, [0, 32, 1, -1, 0, 2], [0, 64, 1, 0, 3, 4]], "request 0 has 2 blocks, not 3"),
        ([PTRACE, [0, -1, 1, -1, 0, 0]], "-1 is no number of tokens"),
        ([{"format": "prefix-trace/1", "block_size": 0}, [0, 1, 1, -1, 0, 0]], "blocks of 0 tokens"),
        ([MOONCAKE | {"input_length": "1"}], "'1' is no number of tokens"),
        ([MOONCAKE, [1, 2]], "request 2 of"),
        ([RECORDED, MOONCAKE, RECORDED | {"block_tokens": 8}, MOONCAKE], "blocks of 8 tokens behind one of 4"),
        ([RECORDED, "{", MOONCAKE], "request 1 of"),
        ([RECORDED], "has no requests"),
        ([{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}, "{"], "request 2 of"),
    ],
    ids=str,
)
def test_broken_traces(tmp_path: Path, lines: list[object], facts: str) -> None:
    """What is no trace is refused, with the number of the request that breaks it."""
    with pytest.raises(TraceFormatError, match=facts):
        load_trace(write(tmp_path / "broken", *lines))
