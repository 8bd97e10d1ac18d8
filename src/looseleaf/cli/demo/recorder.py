"""What happens in memory during a run, seen step by step from inside the engine."""

from __future__ import annotations

import threading
from typing import Any

from looseleaf.core.manager import CacheManager
from looseleaf.engine.observer import EngineObserver


class MemoryRecorder:
    """An engine's observer that passes everything on and keeps a few sums. The same measure for every configuration:

        waste = token places held by running requests in which nothing is written / all places that they hold

    taken at the end of each step and weighted with the step's duration. A place is held from the time it is given to a
    request; places of shared blocks count once; what only the cache keeps counts as neither held nor waste.
    """

    def __init__(self, cache: CacheManager, inner: EngineObserver) -> None:
        self._cache = cache
        self._inner = inner
        self._lock = threading.Lock()
        self.start()

    def start(self) -> None:
        """Forget what was recorded so far."""
        with self._lock:
            self.seconds = 0.0
            self.place_seconds = 0.0
            self.empty_place_seconds = 0.0
            self.running_seconds = 0.0
            self.num_scheduled_tokens = 0
            self.num_output_tokens = 0
            self.num_finished = 0
            self.num_preemptions = 0

    @property
    def waste(self) -> float:
        """Share of the held places that were empty, 0 to 1."""
        return self.empty_place_seconds / self.place_seconds if self.place_seconds else 0.0

    @property
    def mean_running_requests(self) -> float:
        """Requests that held memory at the same time, on average over the time in which anything ran."""
        return self.running_seconds / self.seconds if self.seconds else 0.0

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens computed, those of resumed requests included.

        Each output token came out of one row of a step: of the end of a prefill (one for each request and for each time
        it was resumed) or of a decode, which computes one token. One too many for each that was preempted in its
        prefill, before it had a token.
        """
        num_decoded_tokens = self.num_output_tokens - self.num_finished - self.num_preemptions
        return self.num_scheduled_tokens - num_decoded_tokens

    def on_step(self, *, num_scheduled_tokens: int, num_running: int, seconds: float, **others: Any) -> None:
        """See `EngineObserver`."""
        stats = self._cache.stats()
        places = stats.active_blocks * stats.block_tokens
        with self._lock:
            self.num_scheduled_tokens += num_scheduled_tokens
            self.seconds += seconds
            self.running_seconds += num_running * seconds
            self.place_seconds += places * seconds
            self.empty_place_seconds += (stats.waste * places + stats.uncommitted_tokens * stats.num_lanes) * seconds
        self._inner.on_step(
            num_scheduled_tokens=num_scheduled_tokens, num_running=num_running, seconds=seconds, **others
        )

    def on_finish(self, *, num_output_tokens: int, **others: Any) -> None:
        """See `EngineObserver`."""
        with self._lock:
            self.num_finished += 1
            self.num_output_tokens += num_output_tokens
        self._inner.on_finish(num_output_tokens=num_output_tokens, **others)

    def on_preempt(self, **values: Any) -> None:
        """See `EngineObserver`."""
        with self._lock:
            self.num_preemptions += 1
        self._inner.on_preempt(**values)

    def __getattr__(self, name: str) -> Any:
        """What it does not record goes on unseen."""
        return getattr(self._inner, name)
