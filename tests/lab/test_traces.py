"""Laws of trace reading: every format becomes the same thing, and a broken line is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from looseleaf.lab.traces import TraceFormatError, load_trace


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
        ([{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}, "{"], "request 2 of"),
    ],
    ids=str,
)
def test_broken_traces(tmp_path: Path, lines: list[object], facts: str) -> None:
    """What is no trace is refused, with the number of the request that breaks it."""
    with pytest.raises(TraceFormatError, match=facts):
        load_trace(write(tmp_path / "broken", *lines))
