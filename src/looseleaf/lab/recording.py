"""looseleaf-trace/1: traffic as it was, for replays, without a word of it.

A file is one or more recordings. Each begins with a line that says so and goes on with a line per request, in the order
in which they finished; the names are Mooncake's, with two more:

    {"format": "looseleaf-trace/1", "block_tokens": 16, "started_at": 1764500000.0}
    {"timestamp": 1250, "input_length": 40, "output_length": 7, "hash_ids": [17…, 52…], "namespace": "9f…",
     "session_id": "c0…"}   (one line)

`timestamp`: arrival, ms since `started_at` (seconds since 1970). `hash_ids`: one for each whole block of the prompt; an
id stands for the block and all before it, whatever the namespace. `namespace` and `session_id` are left out where there
is none. Ids are BLAKE2b under a secret of 32 bytes that is made for the recording and never written: nobody can test a
guessed text against them, and ids of two recordings can't be compared.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

from looseleaf.core.tokens import TOKEN_BYTES, Tokens, pack_tokens
from looseleaf.errors import ConfigError
from looseleaf.ids import Namespace

FORMAT = "looseleaf-trace/1"
_ID_BITS = 53
"""Integers up to here survive every JSON reader."""


def is_header(row: object) -> bool:
    """True for the line that begins a recording."""
    return isinstance(row, dict) and row.get("format") == FORMAT


class TraceRecorder:
    """Appends what a server answers to a file, one line a request, as each finishes. Calls from several threads are
    fine; memory does not grow. A disk that fails ends the recording, never a request: see `failure`.

    Args:
        path: made if missing; a file that holds recordings is continued with another.
        block_tokens: tokens of a block, those of the cache as a rule.
        clock: the clock that `at_seconds` of the requests is read from; now is when the recording begins.

    Raises:
        ConfigError: the file holds something else, or can't be written.
    """

    def __init__(self, path: Path | str, block_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = Path(path)
        self.num_recorded = 0
        self.failure: OSError | None = None
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._begin = clock()
        try:
            _check_and_mend(self.path)
            self._file = self.path.open("a", encoding="utf-8", buffering=1)
            header = {"format": FORMAT, "block_tokens": block_tokens, "started_at": round(time.time(), 3)}
            self._write(header)
        except OSError as error:
            raise ConfigError(f"cannot record to {path}: {error.strerror or error}") from error

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def record(
        self,
        namespace: Namespace,
        token_ids: Tokens,
        num_output_tokens: int,
        at_seconds: float,
        session: str | None = None,
    ) -> None:
        """Note a request that has finished. Costs some 3 µs for each block of its prompt.

        Args:
            namespace: the namespace that it was served in.
            token_ids: its prompt.
            num_output_tokens: tokens generated.
            at_seconds: when it arrived.
            session: the conversation that it belongs to, if it said so.

        Raises:
            InvalidTokens: an empty prompt, or no token ids.
        """
        data = pack_tokens(token_ids)
        row: dict[str, Any] = {
            "timestamp": round(1000 * (at_seconds - self._begin)),
            "input_length": len(data) // TOKEN_BYTES,
            "output_length": int(num_output_tokens),
            "hash_ids": self._prefix_ids(data),
        }
        if namespace:
            row["namespace"] = self._hidden("namespace", namespace)
        if session is not None:
            row["session_id"] = self._hidden("session", session)
        with self._lock:
            if self.failure is not None or self._file.closed:
                return
            try:
                self._write(row)
                self.num_recorded += 1
            except OSError as error:
                self.failure = error

    def flush(self) -> None:
        """Hand what is written to the operating system; a line is handed over as it ends anyway."""
        with self._lock:
            if self.failure is None and not self._file.closed:
                self._file.flush()

    def close(self) -> None:
        """End the recording; what is recorded later is dropped. Twice is fine."""
        with self._lock:
            try:
                self._file.close()
            except OSError as error:
                self.failure = self.failure or error

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, separators=(",", ":")) + "\n")

    def _prefix_ids(self, data: bytes) -> list[int]:
        size, secret = self._block_bytes, self._secret
        key, ids = b"", []
        for at in range(0, len(data) - size + 1, size):
            key = blake2b(key + data[at : at + size], digest_size=16, key=secret).digest()
            ids.append(int.from_bytes(key[:8], "big") >> (64 - _ID_BITS))
        return ids

    def _hidden(self, kind: str, name: str) -> str:
        return blake2b(name.encode(), digest_size=8, key=self._secret, person=kind.encode()).hexdigest()


def _check_and_mend(path: Path) -> None:
    """Refuse a file that holds no recording; cut off a line that a crash left unfinished.

    Raises:
        ConfigError: it holds something else.
    """
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("r+b") as file:
        try:
            first = json.loads(file.readline())
        except ValueError:
            first = None
        if not is_header(first):
            raise ConfigError(f"{path} exists and is no recording", "name another file")
        end = file.seek(0, 2)
        while end:
            begin = max(0, end - 65536)
            file.seek(begin)
            newline = file.read(end - begin).rfind(b"\n")
            if newline >= 0:
                file.truncate(begin + newline + 1)
                return
            end = begin
