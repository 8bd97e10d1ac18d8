"""The pool's size: how long a request may be with it, and changes of it while the engine runs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from looseleaf.core.config import CachePlan
from looseleaf.core.manager import CacheManager
from looseleaf.core.moving import ResizeResult
from looseleaf.engine.config import EngineConfig
from looseleaf.engine.plan import chained_copies
from looseleaf.engine.runner import ModelRunner
from looseleaf.engine.scheduler import Scheduler
from looseleaf.errors import CapacityError, ConfigError, LooseleafError


@dataclass(frozen=True)
class _Wanted:
    """A size that somebody asked for, and where the answer goes."""

    num_pages: int
    answer: Future[ResizeResult]


class PoolSize:
    """Keeps the cache, the runner's memory and the limit on one request in step.

    `lock`: guards the limit and what waits; it is not held while memory moves. `max_model_tokens`: most tokens (prompt
    + output) of one request, the least of model, configuration and pool; `limited_by` says which.
    """

    def __init__(
        self,
        cache: CacheManager,
        runner: ModelRunner,
        config: EngineConfig,
        scheduler: Scheduler,
        lock: threading.RLock,
    ) -> None:
        self._cache = cache
        self._runner = runner
        self._config = config
        self._scheduler = scheduler
        self._lock = lock
        self._wanted: deque[_Wanted] = deque()
        self._set_limit(cache.plan)

    @property
    def is_wanted(self) -> bool:
        """True if somebody waits for another size."""
        return bool(self._wanted)

    def want(self, num_pages: int) -> Future[ResizeResult]:
        """Ask for another size, from any thread; see `Engine.resize`."""
        if isinstance(num_pages, bool) or not isinstance(num_pages, int) or num_pages < 1:
            raise ConfigError(f"num_pages is {num_pages!r}; it must be a whole number of at least 1")
        wanted = _Wanted(num_pages, Future())
        self._wanted.append(wanted)
        return wanted.answer

    def answer_all(self, longest_tokens: Callable[[], int]) -> None:
        """Engine's thread, between steps: do what is wanted, in order. `longest_tokens()`: of live requests, with the
        next token; it is called under the lock."""
        while self._wanted:
            wanted = self._wanted.popleft()
            if wanted.answer.set_running_or_notify_cancel():
                try:
                    wanted.answer.set_result(self._resize(wanted.num_pages, longest_tokens))
                except BaseException as error:
                    wanted.answer.set_exception(error)
                    if not isinstance(error, LooseleafError):
                        raise

    def refuse_all(self, error: LooseleafError) -> None:
        """Answer those who wait with `error`: no step will follow."""
        while self._wanted:
            answer = self._wanted.popleft().answer
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)

    def _resize(self, num_pages: int, longest_tokens: Callable[[], int]) -> ResizeResult:
        cache, runner, before = self._cache, self._runner, self._cache.plan
        with self._lock:
            if num_pages < before.num_pages:
                after = CachePlan.of(cache.config, num_pages)
                limit_tokens, longest = self._limit(after)[0], longest_tokens()
                if longest > limit_tokens:
                    raise CapacityError(
                        f"with {num_pages} pages a request may have {limit_tokens} tokens; one wants {longest} already",
                        "wait until it has ended, or abort it",
                    )
                self._set_limit(after)  # so that nothing longer is added meanwhile
        try:
            if num_pages >= before.num_pages:  # memory first, since it may be refused; no block moves
                runner.resize(CachePlan.of(cache.config, num_pages).num_blocks, ())
                return cache.resize(num_pages)
            result = cache.resize(num_pages)
            copies = chained_copies(self._scheduler.take_copies(), result.copies, result.num_blocks)
            try:
                runner.resize(result.num_blocks, copies)
            except CapacityError:
                back = cache.resize(before.num_pages)
                runner.resize(back.num_blocks, chained_copies(copies, back.copies, back.num_blocks))
                raise
        finally:
            with self._lock:
                self._set_limit(cache.plan)
        return result

    def _set_limit(self, plan: CachePlan) -> None:
        self.max_model_tokens, self.limited_by = self._limit(plan)
        self._scheduler.limit_tokens = self.max_model_tokens

    def _limit(self, plan: CachePlan) -> tuple[int, str]:
        """Most tokens of one request with a pool of `plan`, and what sets them."""
        num_pool_tokens = plan.num_tokens
        if self._config.reserve_output:  # then nothing of what slides out of a window comes back on the way
            num_pool_tokens = plan.num_blocks // plan.num_lanes * plan.block_tokens
        num_model_tokens = self._runner.info.max_model_tokens
        limits = [(num_model_tokens, "positions of the model"), (num_pool_tokens, "tokens of KV memory")]
        if self._config.max_model_tokens is not None:
            limits.append((self._config.max_model_tokens, "max_model_tokens"))
        return min(limits)
