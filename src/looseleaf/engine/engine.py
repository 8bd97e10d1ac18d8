"""The engine: requests in, deltas out, one forward pass at a time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from concurrent.futures import Future

import numpy as np

from looseleaf.core.manager import CacheManager
from looseleaf.core.moving import ResizeResult
from looseleaf.engine.batch_builder import build_batch
from looseleaf.engine.config import EngineConfig
from looseleaf.engine.observer import EngineObserver, SilentObserver
from looseleaf.engine.plan import StepPlan
from looseleaf.engine.pool_size import PoolSize
from looseleaf.engine.request import FinishReason, GenerationRequest, OutputDelta
from looseleaf.engine.runner import ModelRunner, StepBatch, StepOutput
from looseleaf.engine.sampling import TokenLogprobs
from looseleaf.engine.scheduler import Scheduler
from looseleaf.engine.sequence import NOTHING, GivenOut, Sequence
from looseleaf.engine.tokenizer import Tokenizer
from looseleaf.errors import (
    ConfigError,
    DuplicateRequest,
    InvalidTokens,
    LooseleafError,
    ModelError,
    PromptTooLong,
    RequestError,
)
from looseleaf.ids import RequestId

_ALIKE = ("namespace", "layers", "session", "reuse")
"""What samples of one prompt have in common besides it."""


class Engine:
    """Continuous batching over paged memory.

    `add`, `add_samples`, `abort` and `resize` may be called from any thread, also while a step runs; `step` from one
    thread only. `cache` may be shared with others (pins, look-ups); `runner` and its blocks belong to this engine.

    Life of a request: added -> waiting -> running (it owns a lease) -> finished; a preempted one goes back to waiting.
    Finishing and aborting exclude each other: exactly one last delta comes of every request.
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
        """`clock` gives seconds; it is used for figures only, never for decisions. ConfigError if the cache is of other
        layer groups or another layout than the model."""
        self._cache = cache
        self._runner = runner
        self._tokenizer = tokenizer
        self._config = config
        self._observer = observer or SilentObserver()
        self._clock = clock
        self._info = runner.info
        if self._info.groups != cache.config.groups:
            raise ConfigError(
                f"the cache has the layer groups {cache.config.groups}, the model {self._info.groups}",
                "make the cache with CacheConfig(groups=runner.info.groups)",
            )
        if cache.config.layout not in ("", self._info.kv_layout):
            raise ConfigError(
                f"the cache is for blocks of {cache.config.layout!r}, the model makes {self._info.kv_layout!r}",
                "give each model, revision and dtype a cache of its own",
            )
        self._scheduler = Scheduler(cache, config, self._observer, clock)
        # Guards the three below and the limit; never held while the model runs. Re-entrant, since dropping a stream
        # aborts, and the garbage collector may do that anywhere.
        self._lock = threading.RLock()
        self._size = PoolSize(cache, runner, config, self._scheduler, self._lock)
        self._sequences: dict[str, Sequence] = {}
        self._arriving: deque[Sequence] = deque()
        self._aborting: deque[Sequence] = deque()
        self._num_added = 0
        self._deltas: list[OutputDelta] = []  # what the step that runs gives out

    @property
    def has_work(self) -> bool:
        """True if a `step` would do something: a request waits, runs, or is to be taken out, or a resize waits."""
        return bool(self._sequences or self._size.is_wanted)

    @property
    def max_model_tokens(self) -> int:
        """Most tokens (prompt + output) of one request: the least of model, configuration and pool, whose size it
        follows."""
        return self._size.max_model_tokens

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks: they wait for admission, for their lead's prefill, or were preempted."""
        return max(0, len(self._sequences) - self.num_running)

    @property
    def request_ids(self) -> list[str]:
        """Ids of all requests that have not finished, in order of arrival."""
        with self._lock:
            return list(self._sequences)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request.

        Raises:
            PromptTooLong: it can never fit; limit and what sets it are in the message.
            InvalidTokens: a token id is outside the model's vocabulary.
            DuplicateRequest: a live request has this id.
        """
        self.add_samples([request])

    def add_samples(self, requests: AbstractSequence[GenerationRequest]) -> None:
        """Queue several requests with the same prompt, namespace, layers, session and `reuse`, ids and parameters of
        their own, of which the prompt is computed once: the first token of each is drawn from one prefill, and all go
        on from its blocks. All are queued or, if one is refused, none.

        Raises:
            RequestError: there is none, or their prompts differ.
            PromptTooLong, InvalidTokens, DuplicateRequest: as `add`.
        """
        if not requests:
            raise RequestError("no request was given", "give one or more, with the same prompt")
        sequences = [Sequence(request, self._tokenizer, self._clock()) for request in requests]
        with self._lock:
            taken: set[RequestId] = set()
            for request in requests:
                self._check(request, requests[0])
                if request.request_id in taken or request.request_id in self._sequences:
                    raise DuplicateRequest(request.request_id)
                taken.add(request.request_id)
            lead: Sequence | None = None
            for sequence in sequences:
                self._num_added += 1
                sequence.arrival = self._num_added
                self._sequences[sequence.request_id] = sequence
                if lead is not None and sequence.request.params.max_tokens:
                    sequence.lead = lead
                    lead.samples.append(sequence)
                    continue
                self._arriving.append(sequence)
                if sequence.request.params.max_tokens:
                    lead = sequence

    def _check(self, request: GenerationRequest, first: GenerationRequest) -> None:
        prompt = request.prompt_tokens
        if request is not first:
            like = all(getattr(request, name) == getattr(first, name) for name in _ALIKE)
            if not (like and np.array_equal(prompt, first.prompt_tokens)):
                raise RequestError(f"samples must have the same prompt, {', '.join(_ALIKE)}", "add them one by one")
        highest, vocab_size = int(prompt.max()), self._info.vocab_size
        if highest >= vocab_size:
            raise InvalidTokens(f"token id {highest} is outside the model's vocabulary of {vocab_size} tokens")
        num_first_tokens = 1 if request.params.max_tokens else 0
        if len(prompt) + num_first_tokens > self.max_model_tokens:
            limited_by = f"{self.max_model_tokens} {self._size.limited_by}"
            if num_first_tokens:
                limited_by += ", one of them for the output"
            raise PromptTooLong(len(prompt), self.max_model_tokens - num_first_tokens, limited_by)

    def abort(self, request_id: str) -> bool:
        """End a request at the next `step`, whatever its stage; its blocks are then free and its last delta says ABORT.
        True if this call is what ends it; False if it is unknown, finished, or aborted before."""
        with self._lock:
            sequence = self._sequences.get(request_id)
            if sequence is None or sequence.is_aborted:
                return False
            sequence.is_aborted = True
            self._aborting.append(sequence)
            return True

    def resize(self, num_pages: int) -> Future[ResizeResult]:
        """Give the pool another size at the start of the next `step`; running requests go on.

        The future has the result, or the refusal, with which nothing has changed: `ResizeRefused` (what is held or
        pinned needs more), `CapacityError` (a request that was accepted would no longer fit, or the runner has no
        memory for it).

        Raises:
            ConfigError: `num_pages` is no whole number of at least 1.
        """
        return self._size.want(num_pages)

    def refuse_resizes(self, error: LooseleafError) -> None:
        """Answer those who wait for a resize with `error`: no step will follow."""
        self._size.refuse_all(error)

    def step(self) -> list[OutputDelta]:
        """Do one forward pass; at most one delta per request. Without work it does nothing.

        An exception of the runner ends the requests of this step with ERROR; none of their tokens are committed.
        """
        started = self._clock()
        self._deltas = []
        self._take_in()
        self._cache.maintain()
        if self._sequences:
            self._step(started)
        return self._deltas

    def _step(self, started: float) -> None:
        plan = self._scheduler.plan()
        for ending in plan.endings:
            self._finish(ending.sequence, ending.reason, error=ending.error)
        if not plan.sequences:
            return
        batch = build_batch(plan, self._info.groups, self._cache.plan.block_tokens)
        scheduled = self._clock()
        commit_seconds = 0.0
        try:
            output = self._checked(batch, self._runner.execute(batch))
        except Exception as error:  # whatever a model raises must not take down the other requests
            self._fail(plan, error)
        else:
            computed = self._clock()
            self._commit(plan)
            commit_seconds = self._clock() - computed
            self._give_out(plan, output)
        self._observer.on_step(
            num_scheduled_tokens=len(batch.token_ids),
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            seconds=self._clock() - started,
            schedule_seconds=scheduled - started,
            commit_seconds=commit_seconds,
        )

    # -- intake and ends --

    def _take_in(self) -> None:
        """What other threads left here: arrivals go to the queue, aborted requests out; then resizes are done."""
        with self._lock:
            arriving, self._arriving = self._arriving, deque()
            aborting, self._aborting = self._aborting, deque()
        self._scheduler.waiting.extend(sequence for sequence in arriving if not sequence.is_aborted)
        for sequence in aborting:
            self._finish(sequence, FinishReason.ABORT)
        self._size.answer_all(self._longest_tokens)

    def _longest_tokens(self) -> int:
        return max((sequence.num_tokens for sequence in self._sequences.values()), default=0) + 1

    def _finish(
        self, sequence: Sequence, reason: FinishReason, given: GivenOut = NOTHING, error: LooseleafError | None = None
    ) -> None:
        """Release, forget, and write the last delta; if the request was aborted meanwhile, that abort ends it."""
        with self._lock:
            is_left_to_abort = sequence.is_aborted and reason is not FinishReason.ABORT
            if is_left_to_abort or self._sequences.get(sequence.request_id) is not sequence:
                return
            del self._sequences[sequence.request_id]
        self._scheduler.remove(sequence)
        if reason is FinishReason.LENGTH:
            rest = sequence.output.flush()
            given = given.joined(rest)
            reason = FinishReason.STOP if rest.is_stopped else reason
        self._give(sequence, given, reason, error)
        now, usage = self._clock(), sequence.usage
        admitted = now if sequence.admitted_seconds is None else sequence.admitted_seconds
        self._observer.on_finish(
            reason=reason.value,
            num_prompt_tokens=usage.num_prompt_tokens,
            num_cached_tokens=usage.num_cached_tokens,
            num_output_tokens=usage.num_output_tokens,
            seconds=now - sequence.added_seconds,
            queue_seconds=admitted - sequence.added_seconds,
        )
        if sequence.is_counted and sequence.request.reuse and self._config.reuse:
            self._observer.on_traffic(
                namespace=sequence.request.namespace,
                session=sequence.request.session,
                prompt_tokens=sequence.request.prompt_tokens,
                num_output_tokens=sequence.num_output_tokens,
                added_seconds=sequence.added_seconds,
            )

    # -- after the model ran --

    def _checked(self, batch: StepBatch, output: StepOutput) -> StepOutput:
        num_sampled, ids = len(batch.sampled), output.token_ids
        if len(ids) != num_sampled or len(output.logprobs) != num_sampled:
            raise ModelError(f"the model runner gave {len(ids)} tokens where {num_sampled} were asked for")
        vocab_size = self._info.vocab_size
        if num_sampled and (ids.min() < 0 or ids.max() >= vocab_size):
            raise ModelError(f"the model runner gave a token outside the vocabulary of {vocab_size} tokens")
        return output

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        if not isinstance(error, LooseleafError):
            cause = error
            error = ModelError(f"the model failed in this step: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
        for sequence in plan.sequences:
            self._finish(sequence, FinishReason.ERROR, error=error)

    def _commit(self, plan: StepPlan) -> None:
        """What the step computed is written: make it shareable, but for requests that were aborted meanwhile."""
        decodes = plan.decodes
        if decodes.sequences:
            # Only aborts, which other threads ask for, make a row drop out between plan and commit.
            is_whole = not self._aborting
            pairs = zip(decodes.sequences, decodes.leases, strict=True)
            self._cache.commit_many(
                decodes.leases if is_whole else [lease for sequence, lease in pairs if not sequence.is_aborted]
            )
        for chunk in plan.chunks:
            if not chunk.sequence.is_aborted:
                chunk.sequence.held.commit(chunk.end)
                chunk.sequence.is_decoding = bool(chunk.drawn)
                if len(chunk.drawn) > 1:
                    self._scheduler.fork_samples(chunk)

    def _give_out(self, plan: StepPlan, output: StepOutput) -> None:
        for sequence, token, logprobs in zip(plan.drawn, output.token_ids.tolist(), output.logprobs, strict=True):
            if not sequence.is_aborted and sequence.lead is None:  # it has one still if that was aborted meanwhile
                self._advance(sequence, token, logprobs)
        for chunk in plan.chunks:
            if chunk.end == chunk.sequence.num_tokens and not chunk.drawn:  # a prefill with nothing to generate
                self._finish(chunk.sequence, FinishReason.LENGTH)

    def _advance(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> None:
        """One new token of one request: append it, and finish or give out what it makes readable."""
        params = sequence.request.params
        sequence.append(token)
        num_output_tokens = sequence.num_output_tokens
        if num_output_tokens == 1:
            self._observer.on_first_token(seconds=self._clock() - sequence.added_seconds)
        if token in self._info.eos_token_ids and not params.ignore_eos:
            self._finish(sequence, FinishReason.STOP, sequence.output.flush())
            return
        given = sequence.output.push(token, logprobs)
        if given.is_stopped:
            self._finish(sequence, FinishReason.STOP, given)
        elif num_output_tokens >= params.max_tokens or sequence.num_tokens >= self.max_model_tokens:
            self._finish(sequence, FinishReason.LENGTH, given)
        elif given is not NOTHING:
            self._give(sequence, given)

    def _give(
        self,
        sequence: Sequence,
        given: GivenOut,
        reason: FinishReason | None = None,
        error: LooseleafError | None = None,
    ) -> None:
        text, tokens, logprobs, usage = given.text, given.token_ids, given.logprobs, sequence.usage
        self._deltas.append(OutputDelta(sequence.request_id, text, tokens, logprobs, reason, usage, error))
