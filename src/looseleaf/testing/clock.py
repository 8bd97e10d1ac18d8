"""A clock that moves only when told to."""

from __future__ import annotations


class ManualClock:
    """Seconds for `CacheManager(config, clock=ManualClock())`; starts at 0."""

    def __init__(self) -> None:
        self.now_seconds = 0.0

    def __call__(self) -> float:
        """The current time in seconds."""
        return self.now_seconds

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self.now_seconds += seconds
