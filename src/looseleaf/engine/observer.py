"""What the engine tells whoever measures it: primitive values by keyword, so that implementing it needs no import."""

from __future__ import annotations

from functools import partialmethod
from typing import Protocol

from looseleaf.ids import Int32Array, Namespace


class EngineObserver(Protocol):
    """Receives figures from the engine's own thread. Methods return at once and do not raise."""

    def on_lookup(self, *, namespace: Namespace, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """A prompt was looked up, `num_cached_tokens` of it were there; once a request, never for one that is resumed
        or skips the cache: what the cache's own statistics count."""

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

    def on_traffic(
        self,
        *,
        namespace: Namespace,
        session: str | None,
        prompt_tokens: Int32Array,
        num_output_tokens: int,
        added_seconds: float,
    ) -> None:
        """A request that looked up the cache ended, for those who record traffic: its prompt, int32 [n], how much it
        generated, and when it had come, by the engine's clock."""


class SilentObserver:
    """Implements `EngineObserver` by doing nothing."""

    def _ignore(self, **values: object) -> None: ...

    on_step = on_first_token = on_finish = on_preempt = on_share = on_fork = on_lookup = on_traffic = _ignore


class Observers:
    """Implements `EngineObserver` by passing everything on to several."""

    def __init__(self, *observers: EngineObserver) -> None:
        self._observers = observers

    def _tell(self, name: str, **values: object) -> None:
        for observer in self._observers:
            getattr(observer, name)(**values)

    on_step = partialmethod(_tell, "on_step")
    on_first_token = partialmethod(_tell, "on_first_token")
    on_finish = partialmethod(_tell, "on_finish")
    on_preempt = partialmethod(_tell, "on_preempt")
    on_share = partialmethod(_tell, "on_share")
    on_fork = partialmethod(_tell, "on_fork")
    on_lookup = partialmethod(_tell, "on_lookup")
    on_traffic = partialmethod(_tell, "on_traffic")
