"""Request traces in memory, whatever their file format: arrivals, lengths and which blocks prompts share."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from typing import Any

from looseleaf.errors import RequestError
from looseleaf.ids import Namespace
from looseleaf.lab.recording import is_header

MOONCAKE_BLOCK_TOKENS = 512
PREFIX_TRACE = "prefix-trace/1"


@dataclass(frozen=True)
class TraceRequest:
    """One request. `blocks`: prefix ids, root first; the same id is always the same block behind the same prefix in the
    same namespace. Empty where the trace tells lengths only. `session`: its conversation, if the trace tells."""

    at_seconds: float
    num_input_tokens: int
    num_output_tokens: int
    blocks: tuple[int, ...]
    namespace: Namespace = ""
    session: str | None = None


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
        return len(set(chain.from_iterable(request.blocks for request in self.requests)))


class TraceFormatError(RequestError):
    """A file that is none of the known trace formats, or a line that breaks its format."""

    code = "trace_format"


def load_trace(path: Path | str, block_tokens: int | None = None) -> Trace:
    """Read a trace: a recording of ours (`recording.py`), Mooncake JSONL, prefix-trace/1, or CSV of lengths
    (`TIMESTAMP,ContextTokens,GeneratedTokens`).

    Args:
        path: the file; its first line tells the format.
        block_tokens: tokens of a Mooncake block, 512 if None. The other formats say it themselves and must agree.

    Raises:
        TraceFormatError: not a known format; names the request.
        OSError: the file can't be read.
    """
    path = Path(path)
    with path.open(encoding="utf-8-sig") as file:
        lines = (line for line in file if line.strip())
        head = next(lines, None)
        if head is None:
            raise TraceFormatError(f"{path.name} is empty")
        trace = _read(path, head, lines, block_tokens)
    if not trace.requests:
        raise TraceFormatError(f"{path.name} has no requests")
    return trace


def _read(path: Path, head: str, lines: Iterator[str], block_tokens: int | None) -> Trace:
    if head.startswith("TIMESTAMP,"):
        return Trace(path.stem, None, tuple(_parse(_csv_requests(chain([head], lines)), path)))
    try:
        first = json.loads(head)
    except json.JSONDecodeError:
        first = None
    if isinstance(first, dict) and first.get("format") == PREFIX_TRACE:
        size = _own_size(first.get("block_size"), block_tokens, path)
        rows = _unique_paths(_prefix_trace_rows(lines))
        return Trace(str(first.get("name", path.stem)), size, tuple(_parse(rows, path)))
    if isinstance(first, dict) and is_header(first):
        size = _own_size(first.get("block_tokens"), block_tokens, path)
        rows = _unique_paths(_recorded_rows(chain([head], lines), size))
        return Trace(path.stem, size, tuple(sorted(_parse(rows, path), key=lambda request: request.at_seconds)))
    if isinstance(first, dict) and "hash_ids" in first:
        rows = _unique_paths(_mooncake_row(json.loads(line)) for line in chain([head], lines))
        return Trace(path.stem, block_tokens or MOONCAKE_BLOCK_TOKENS, tuple(_parse(rows, path)))
    raise TraceFormatError(
        f"{path.name} is no trace that can be read",
        "known formats: recordings of `serve --record`, Mooncake JSONL, prefix-trace/1, CSV with "
        "TIMESTAMP,ContextTokens,GeneratedTokens",
    )


def _own_size(size: object, asked: int | None, path: Path) -> int:
    if not isinstance(size, int) or size < 1:
        raise TraceFormatError(f"{path.name} has blocks of {size!r} tokens")
    if asked not in (None, size):
        raise TraceFormatError(f"{path.name} has blocks of {size} tokens, not {asked}")
    return size


def _parse(rows: Iterator[TraceRequest], path: Path) -> Iterator[TraceRequest]:
    """Pass the requests on; what breaks in the middle is reported with its number."""
    for number in count(1):
        try:
            request = next(rows, None)
            if request is None:
                return
            for length in (request.num_input_tokens, request.num_output_tokens):
                if not isinstance(length, int) or length < 0:
                    raise ValueError(f"{length!r} is no number of tokens")
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise TraceFormatError(f"request {number} of {path.name} can't be read: {error!r}") from error
        yield request


def _mooncake_row(row: dict[str, Any], offset_seconds: float = 0.0) -> TraceRequest:
    return TraceRequest(
        offset_seconds + row["timestamp"] / 1000,
        row["input_length"],
        row["output_length"],
        tuple(row["hash_ids"]),
        str(row.get("namespace", "")),
        _session(row.get("session_id")),
    )


def _recorded_rows(lines: Iterable[str], block_tokens: int) -> Iterator[TraceRequest]:
    """Requests of one recording after the other, in the time that lay between them. A last line without an end was
    being written, or a crash cut it off."""
    begin = offset = 0.0
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            if line.endswith("\n"):
                raise
            return
        if is_header(row):
            if row["block_tokens"] != block_tokens:
                raise ValueError(
                    f"a recording with blocks of {row['block_tokens']} tokens behind one of {block_tokens}"
                )
            begin = begin or row["started_at"]
            offset = row["started_at"] - begin
        else:
            yield _mooncake_row(row, offset)


def _prefix_trace_rows(lines: Iterable[str]) -> Iterator[TraceRequest]:
    """`[t_ms, input_tokens, output_tokens, ref, k, n, session?]`: n blocks, the first k are those of request `ref`."""
    paths: list[tuple[int, ...]] = []
    fresh = count()
    for line in lines:
        at_ms, num_input, num_output, ref, num_shared, num_blocks, *session = json.loads(line)
        if not 0 <= num_shared <= num_blocks or (num_shared and not 0 <= ref < len(paths)):
            raise ValueError(f"{num_blocks} blocks, of which {num_shared} are those of request {ref}")
        shared = paths[ref][:num_shared] if num_shared else ()
        if len(shared) < num_shared:
            raise ValueError(f"request {ref} has {len(shared)} blocks, not {num_shared}")
        paths.append(shared + tuple(next(fresh) for _ in range(num_blocks - num_shared)))
        yield TraceRequest(at_ms / 1000, num_input, num_output, paths[-1], session=_session(next(iter(session), None)))


def _session(value: object) -> str | None:
    return None if value is None else str(value)


def _unique_paths(rows: Iterator[TraceRequest]) -> Iterator[TraceRequest]:
    """Renumber blocks by (what lies before, raw id), so that the same id always has the same prefix; what lies before
    the first block is its namespace."""
    ids: dict[tuple[int, int], int] = {}
    roots: dict[Namespace, int] = {}
    for row in rows:
        path = []
        parent = roots.setdefault(row.namespace, -1 - len(roots))
        for raw in row.blocks:
            parent = ids.setdefault((parent, raw), len(ids))
            path.append(parent)
        yield replace(row, blocks=tuple(path))


def _csv_requests(lines: Iterable[str]) -> Iterator[TraceRequest]:
    start: datetime | None = None
    for row in csv.DictReader(lines):
        at = datetime.fromisoformat(row["TIMESTAMP"][:26])  # seven digits of a second are one more than datetime takes
        start = start or at
        yield TraceRequest((at - start).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"]), ())
