"""Request traces in memory, whatever their file format: arrivals, lengths and which blocks prompts share."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

from looseleaf.errors import RequestError

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True)
class TraceRequest:
    """One request. `blocks`: prefix ids, root first; the same id is always the same block behind the same prefix. Empty
    where the trace tells lengths only."""

    at_seconds: float
    num_input_tokens: int
    num_output_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival. `block_tokens`: tokens of one of its blocks (the last of a request may be
    partial), None without content."""

    name: str
    block_tokens: int | None
    requests: tuple[TraceRequest, ...]

    @property
    def num_unique_blocks(self) -> int:
        """Different blocks in all requests."""
        return len({block for request in self.requests for block in request.blocks})


class TraceFormatError(RequestError):
    """A file that is none of the known trace formats, or a line that breaks its format."""

    code = "trace_format"


def load_trace(path: Path | str, block_tokens: int | None = None) -> Trace:
    """Read a trace: Mooncake JSONL, prefix-trace/1, or CSV of lengths (`TIMESTAMP,ContextTokens,GeneratedTokens`).

    Args:
        path: the file; its first line tells the format.
        block_tokens: tokens of a Mooncake block, 512 if None. A prefix-trace says it itself and must agree.

    Raises:
        TraceFormatError: not a known format; names the line.
        OSError: the file can't be read.
    """
    path = Path(path)
    lines = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    if not lines:
        raise TraceFormatError(f"{path.name} is empty")
    if lines[0].startswith("TIMESTAMP,"):
        return Trace(path.stem, None, tuple(_parse(_csv_requests(lines), path)))
    try:
        first = json.loads(lines[0])
    except json.JSONDecodeError:
        first = None
    if isinstance(first, dict) and first.get("format") == "prefix-trace/1":
        size = int(first["block_size"])
        if block_tokens not in (None, size):
            raise TraceFormatError(f"{path.name} has blocks of {size} tokens, not {block_tokens}")
        rows = _unique_paths(_prefix_trace_rows(lines[1:]))
        return Trace(str(first.get("name", path.stem)), size, tuple(_parse(rows, path)))
    if isinstance(first, dict) and "hash_ids" in first:
        rows = _unique_paths(_mooncake_rows(lines))
        return Trace(path.stem, block_tokens or MOONCAKE_BLOCK_TOKENS, tuple(_parse(rows, path)))
    raise TraceFormatError(
        f"{path.name} is no trace that can be read",
        "known formats: Mooncake JSONL, prefix-trace/1, CSV with TIMESTAMP,ContextTokens,GeneratedTokens",
    )


def _parse(rows: Iterator[TraceRequest], path: Path) -> Iterator[TraceRequest]:
    """Pass the requests on; what breaks in the middle is reported with its number."""
    for number in count(1):
        try:
            request = next(rows, None)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise TraceFormatError(f"request {number} of {path.name} can't be read: {error!r}") from error
        if request is None:
            return
        yield request


def _mooncake_rows(lines: Sequence[str]) -> Iterator[TraceRequest]:
    for line in lines:
        row = json.loads(line)
        yield TraceRequest(row["timestamp"] / 1000, row["input_length"], row["output_length"], tuple(row["hash_ids"]))


def _prefix_trace_rows(lines: Sequence[str]) -> Iterator[TraceRequest]:
    """`[t_ms, input_tokens, output_tokens, ref, k, n, session?]`: n blocks, the first k are those of request `ref`."""
    paths: list[tuple[int, ...]] = []
    fresh = count()
    for line in lines:
        at_ms, num_input, num_output, ref, num_shared, num_blocks, *_session = json.loads(line)
        shared = paths[ref][:num_shared] if num_shared else ()
        blocks = shared + tuple(next(fresh) for _ in range(num_blocks - num_shared))
        paths.append(blocks)
        yield TraceRequest(at_ms / 1000, num_input, num_output, blocks)


def _unique_paths(rows: Iterator[TraceRequest]) -> Iterator[TraceRequest]:
    """Renumber blocks by (what lies before, raw id), so that the same id always has the same prefix."""
    ids: dict[tuple[int, int], int] = {}
    for row in rows:
        path = []
        parent = -1
        for raw in row.blocks:
            parent = ids.setdefault((parent, raw), len(ids))
            path.append(parent)
        yield TraceRequest(row.at_seconds, row.num_input_tokens, row.num_output_tokens, tuple(path))


def _csv_requests(lines: Sequence[str]) -> Iterator[TraceRequest]:
    start: datetime | None = None
    for row in csv.DictReader(lines):
        at = datetime.fromisoformat(row["TIMESTAMP"][:26])  # seven digits of a second are one more than datetime takes
        start = start or at
        yield TraceRequest((at - start).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"]), ())
