"""`serve --record`: what the engine tells of its traffic, into a trace that holds no text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from looseleaf.cli.failures import say_error
from looseleaf.engine.observer import SilentObserver
from looseleaf.lab.recording import TraceRecorder


class TrafficRecorder(SilentObserver):
    """An engine's observer that records each request as it ends."""

    def __init__(self, recorder: TraceRecorder) -> None:
        self._recorder = recorder

    def on_traffic(self, **values: Any) -> None:
        """See `EngineObserver`."""
        self._recorder.record(
            values["namespace"],
            values["prompt_tokens"],
            values["num_output_tokens"],
            values["added_seconds"],
            values["session"],
        )


@contextmanager
def recording(path: Path | None, block_tokens: int) -> Iterator[TraceRecorder | None]:
    """A recorder for the time of a `with` block, or None without a path; at the end it says if the disk failed.

    Raises:
        ConfigError: the file cannot be written, or holds something else.
    """
    if path is None:
        yield None
        return
    with TraceRecorder(path, block_tokens) as recorder:
        yield recorder
    if recorder.failure is not None:
        say_error(f"{path} has {recorder.num_recorded} requests; then it could not be written: {recorder.failure}")
