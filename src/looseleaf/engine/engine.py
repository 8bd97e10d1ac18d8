"""The engine: requests in, deltas out, one forward pass at a time."""

from __future__ import annotations

import time
from collections.abc import Callable

from looseleaf.core import CacheManager
from looseleaf.engine.config import EngineConfig
from looseleaf.engine.observer import EngineObserver
from looseleaf.engine.request import GenerationRequest, OutputDelta
from looseleaf.engine.runner import ModelRunner
from looseleaf.engine.tokenizer import Tokenizer


class Engine:
    """Continuous batching over paged memory.

    `add` and `abort` may be called from any thread, also while a step runs; `step` from one thread only. `cache` may be
    shared with others (pins, look-ups); `runner` and its blocks belong to this engine.
    """

    def __init__(
        self,
        cache: CacheManager,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        config: EngineConfig,
        observer: EngineObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._runner = runner
        self._tokenizer = tokenizer
        self._config = config
        self._observer = observer
        self._clock = clock

    @property
    def max_model_tokens(self) -> int:
        """Most tokens (prompt + output) that one request can have: the least of model, configuration and pool."""
        raise RuntimeError("not written yet")

    @property
    def has_work(self) -> bool:
        """True if a `step` would do something: a request waits, runs, or is to be taken out."""
        raise RuntimeError("not written yet")

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        raise RuntimeError("not written yet")

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission, preempted ones included. They hold no blocks."""
        raise RuntimeError("not written yet")

    def add(self, request: GenerationRequest) -> None:
        """Queue a request.

        Raises:
            PromptTooLong: it can never fit; limit and what sets it are in the message.
            InvalidTokens: a token id is outside the model's vocabulary.
            DuplicateRequest: a live request has this id.
        """
        raise RuntimeError("not written yet")

    def abort(self, request_id: str) -> bool:
        """End a request at the next `step`, whatever its stage; its blocks are then free and its last delta says ABORT.

        True if this call is what ends it; False if it is unknown, finished, or aborted before.
        """
        raise RuntimeError("not written yet")

    def step(self) -> list[OutputDelta]:
        """Do one forward pass; at most one delta per request. Without work it does nothing.

        An exception of the runner ends the requests of this step with ERROR; none of their tokens are committed.
        """
        raise RuntimeError("not written yet")
