"""What the engine tells whoever measures it: primitive values by keyword, so that implementing it needs no import."""

from __future__ import annotations

from typing import Protocol


class EngineObserver(Protocol):
    """Receives figures from the engine's own thread. Methods return at once and do not raise."""

    def on_step(
        self,
        *,
        num_scheduled_tokens: int,
        num_running: int,
        num_waiting: int,
        seconds: float,
        schedule_seconds: float,
        commit_seconds: float,
    ) -> None:
        """One forward pass is done: `seconds` in all, `schedule_seconds` of it before the model ran, `commit_seconds`
        for the cache's bookkeeping after it."""

    def on_first_token(self, *, seconds: float) -> None:
        """A request got its first token, `seconds` after it was added."""

    def on_finish(
        self,
        *,
        reason: str,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        num_output_tokens: int,
        seconds: float,
        queue_seconds: float,
    ) -> None:
        """A request ended, `seconds` after it was added; it waited `queue_seconds` for its first admission."""

    def on_preempt(self, *, cause: str, num_lost_tokens: int, num_freed_blocks: int) -> None:
        """A running request gave its blocks back, because there was none for somebody's next token ("decode") or next
        chunk ("prefill"). `num_lost_tokens` computed tokens are kept by nobody else."""

    def on_share(self, *, num_tokens: int) -> None:
        """A request that waited for a prompt in flight was admitted; so many tokens of it need not be computed."""

    def on_fork(self, *, num_tokens: int) -> None:
        """A sample went on from the prefill of another one, with `num_tokens` tokens in common."""


class SilentObserver:
    """Implements `EngineObserver` by doing nothing."""

    def _ignore(self, **values: object) -> None: ...

    on_step = on_first_token = on_finish = on_preempt = on_share = on_fork = _ignore
