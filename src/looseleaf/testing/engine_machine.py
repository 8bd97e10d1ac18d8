"""A hypothesis state machine over engine and scheduler: anything at any moment, and still the cold tokens.

Run it with `EngineMachine.TestCase`. The oracle is the fake model's plain recurrence, which knows neither blocks nor
steps.
"""

from __future__ import annotations

import operator
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

import hypothesis.strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from looseleaf.core.config import LayerGroup
from looseleaf.core.moving import ResizeResult
from looseleaf.engine.config import EngineConfig
from looseleaf.engine.request import FinishReason, GenerationRequest, OutputDelta
from looseleaf.errors import CapacityError, OutOfBlocks, PromptTooLong, UnknownRequest
from looseleaf.testing.engine_kit import EngineKit

_MAX_TOKENS = st.sampled_from((0, 1, 2, 5, 12, 25, 40))
_RARELY = st.sampled_from((False, False, False, False, False, True))
_MOSTLY = _RARELY.map(operator.not_)
_STOPS = st.sampled_from(((), (), (), ("ABCA",), ("éé", "BAB"), ("CABC",)))
_ALPHABET = tuple("ABCé€".encode())
_MAX_LIVE_REQUESTS = 12


@dataclass(frozen=True)
class _Arrival:
    """One request to add, or several samples of it, once or twice; its prompt is `num_kept` tokens of an earlier text
    and then `tail`."""

    base: int
    num_kept: int
    tail: list[int]
    max_tokens: int
    namespace: str
    reuse: bool
    seed: int | None
    stop: tuple[str, ...]
    extra: dict[str, Any]
    num_samples: int
    times: int


_ARRIVALS = st.builds(
    _Arrival,
    base=st.integers(0, 1000),
    num_kept=st.integers(0, 40),
    tail=st.lists(st.sampled_from(_ALPHABET), min_size=1, max_size=12),
    max_tokens=_MAX_TOKENS,
    namespace=st.sampled_from(("", "", "t")),
    reuse=_MOSTLY,
    seed=st.one_of(st.none(), st.integers(0, 3)),
    stop=_STOPS,
    extra=st.sampled_from(({}, {}, {"repetition_penalty": 1.1}, {"ignore_eos": True}, {"num_logprobs": 1})),
    num_samples=st.sampled_from((1, 1, 1, 3)),
    times=st.sampled_from((1, 1, 2)),
)


class EngineMachine(RuleBasedStateMachine):
    """Adds, samples, steps, aborts, pins, unpins, clears, resizes, breaks. What must hold: every request ends exactly
    once; what it gave out is the beginning of its cold tokens, and all of them if it ended by itself; each delta's text
    is its tokens' text; usage adds up; waiting requests hold nothing; the model never read a block that was not this
    sequence's.

    `groups`: the model's layer groups; make a subclass for others. `happened` counts what came about in all runs: a
    machine that never preempts or forks shows nothing about it.
    """

    groups: ClassVar[tuple[LayerGroup, ...]] = (LayerGroup("full"),)
    happened: ClassVar[Counter[str]] = Counter()

    running_ids = Bundle("running_ids")
    pins = Bundle("pins")

    @initialize(
        pool_tokens=st.sampled_from((24, 40, 64, 96)),
        block_tokens=st.sampled_from((1, 2, 4, 8)),
        max_step_tokens=st.sampled_from((64, 8, 3, 1)),
        max_running=st.sampled_from((64, 5, 2, 1)),
        reserve_output=_RARELY,
        reuse=_MOSTLY,
        share_in_flight=_MOSTLY,
        eos_every=st.sampled_from((0, 20)),
    )
    def start(
        self,
        pool_tokens: int,
        block_tokens: int,
        max_step_tokens: int,
        max_running: int,
        reserve_output: bool,
        reuse: bool,
        share_in_flight: bool,
        eos_every: int,
    ) -> None:
        """A new engine over an empty pool; each lane has room for `pool_tokens` on average."""
        config = EngineConfig(max_running, max_step_tokens, None, reuse, reserve_output, share_in_flight)
        num_blocks = pool_tokens // block_tokens * sum(group.num_lanes for group in self.groups)
        self.kit = EngineKit(
            num_blocks,
            block_tokens,
            pin_quota=0.75,
            groups=self.groups,
            config=config,
            eos_every=eos_every,
            alphabet=_ALPHABET,
            max_blocks=2 * num_blocks,
        )
        self.requests: dict[str, GenerationRequest] = {}
        self.aborted: set[str] = set()
        self.ended: set[str] = set()
        self.prompts: list[list[int]] = [[65]]
        self.has_failed = False

    # -- rules --

    @rule(target=running_ids, arrivals=st.lists(_ARRIVALS, min_size=1, max_size=4))
    def add(self, arrivals: list[_Arrival]) -> Any:
        """Some requests at once, whose prompts begin like earlier ones or earlier answers."""
        if len(self.requests) - len(self.ended) > _MAX_LIVE_REQUESTS:
            return multiple()
        names = [name for arrival in arrivals for _ in range(arrival.times) for name in self._add(arrival)]
        return multiple(*names)

    def _add(self, arrival: _Arrival) -> list[str]:
        prompt = self.prompts[arrival.base % len(self.prompts)][: arrival.num_kept] + arrival.tail
        names = [f"r{len(self.requests) + number}" for number in range(arrival.num_samples)]
        params: dict[str, Any] = {"stop": arrival.stop, "namespace": arrival.namespace, "reuse": arrival.reuse}
        params |= arrival.extra
        if arrival.seed is not None:
            params |= {"temperature": 1.0, "seed": arrival.seed}
        fits = len(prompt) + (arrival.max_tokens > 0) <= self.kit.engine.max_model_tokens
        try:
            requests = self.kit.add_samples(names, prompt, arrival.max_tokens, **params)
        except PromptTooLong:
            assert not fits
            return []
        assert fits
        self.requests |= dict(zip(names, requests, strict=True))
        self.prompts.append(prompt)
        return names

    @rule(times=st.integers(1, 20))
    def step(self, times: int) -> None:
        """Some forward passes."""
        for _ in range(times):
            before = self.kit.runner.num_steps
            deltas = self.kit.step()
            assert len({delta.request_id for delta in deltas}) == len(deltas)
            for delta in deltas:
                self._check_delta(delta)
            if not deltas and self.kit.engine.has_work:
                assert self.kit.runner.num_steps == before + 1, "a step with work did nothing"

    @rule(name=running_ids, really=_RARELY)
    def abort(self, name: str, really: bool) -> None:
        """The client leaves; effective once, and only while the request lives."""
        if not really:
            return
        assert self.kit.engine.abort(name) == (name not in self.ended | self.aborted)
        assert not self.kit.engine.abort(name)
        self.aborted.add(name)

    @rule(really=_RARELY)
    def break_the_model(self, really: bool) -> None:
        """The next step fails."""
        if really:
            self.has_failed = True
            self.kit.runner.fail_next()

    @rule(
        target=pins,
        name=running_ids,
        level=st.sampled_from(("hard", "soft")),
        part=st.sampled_from((None, "prompt", "all")),
    )
    def pin(self, name: str, level: str, part: str | None) -> Any:
        """Pin a request's prompt, whatever of it is there, or what it has computed, if it has begun."""
        request = self.requests[name]
        whose: dict[str, Any] = {"tokens": request.prompt_tokens, "namespace": request.namespace}
        if part is not None:
            whose = {"request_id": name, "part": part}
        try:
            return self.kit.cache.pin(**whose, level=level, partial=True).id
        except UnknownRequest:
            assert part is not None
            return multiple()

    @rule(pin_id=consumes(pins))
    def unpin(self, pin_id: str) -> None:
        """Undo a pin."""
        self.kit.cache.unpin(pin_id)

    @rule(really=_RARELY)
    def clear(self, really: bool) -> None:
        """Forget what nobody holds."""
        if really:
            self.kit.cache.clear()

    @rule(num_pages=st.integers(1, 200), really=_RARELY)
    def resize(self, num_pages: int, really: bool) -> None:
        """Another size, at the next step: done, or refused and nothing changed."""
        if not really:
            return
        kit = self.kit
        before = kit.cache.plan.num_blocks
        wanted: Future[ResizeResult] = kit.engine.resize(num_pages)
        self.step(1)
        error = wanted.exception(timeout=0)
        assert error is None or isinstance(error, CapacityError)
        assert kit.cache.plan.num_blocks == (num_pages if error is None else before) == kit.runner.num_blocks
        self.happened["resize" if error is None else "refused resize"] += 1

    # -- what holds --

    @invariant()
    def the_cache_is_whole(self) -> None:
        """The cache's own invariants, and one lease for each running request and for nobody else."""
        self.kit.cache.check_integrity()
        engine = self.kit.engine
        assert self.kit.cache.stats().num_leases == engine.num_running
        assert engine.num_running + engine.num_waiting == len(self.requests) - len(self.ended)
        assert self.kit.runner.mismatches == []

    def teardown(self) -> None:
        """Everything ends, and nothing is held then."""
        if not hasattr(self, "kit"):
            return
        live = [request for name, request in self.requests.items() if name not in self.ended]
        for _ in range(100 + 4 * sum(len(request.prompt_tokens) + request.params.max_tokens for request in live)):
            self.step(1)
            if not self.kit.engine.has_work:
                break
        assert self.ended == set(self.requests)
        stats = self.kit.cache.stats()
        assert (stats.num_leases, stats.active_blocks) == (0, 0)
        for called in ("on_fork", "on_preempt", "on_share"):
            self.happened[called] += len(self.kit.observer.named(called))

    def _check_delta(self, delta: OutputDelta) -> None:
        name, kit = delta.request_id, self.kit
        request = self.requests[name]
        assert name not in self.ended, f"{name} goes on after its end"
        text = kit.tokenizer.decode(delta.token_ids)
        if delta.finish_reason is FinishReason.STOP:
            assert text.startswith(delta.text)
        elif delta.finish_reason is None:
            assert text == delta.text
        assert len(delta.logprobs) == (0 if request.params.num_logprobs is None else len(delta.token_ids))
        usage = delta.usage
        assert usage.num_prompt_tokens == len(request.prompt_tokens)
        assert 0 <= usage.num_cached_tokens < usage.num_prompt_tokens
        if delta.finish_reason is not FinishReason.ABORT:  # the pool may have shrunk in the step that took it out
            assert usage.num_prompt_tokens + usage.num_output_tokens <= kit.engine.max_model_tokens
        given = kit.tokens(name)
        cold = kit.runner.expected_tokens(
            request.prompt_tokens, max(request.params.max_tokens, len(given)), request.params, request.namespace
        )
        assert given == cold[: len(given)], f"{name} gave other tokens than a cold run"
        if delta.finish_reason is not None:
            self.ended.add(name)
            self._check_end(delta, request, cold)

    def _check_end(self, delta: OutputDelta, request: GenerationRequest, cold: list[int]) -> None:
        reason, kit, name = delta.finish_reason, self.kit, delta.request_id
        num_output = delta.usage.num_output_tokens
        assert (delta.error is not None) == (reason is FinishReason.ERROR)
        if reason is FinishReason.ABORT:
            assert name in self.aborted
            return
        if reason is FinishReason.ERROR:
            assert self.has_failed or (isinstance(delta.error, OutOfBlocks) and kit.cache.stats().num_pins)
            return
        whole = kit.tokenizer.decode([token for token in cold[:num_output] if token < 256])
        stops = [stop for stop in request.params.stop if stop in whole]
        if reason is FinishReason.STOP:
            assert stops or cold[num_output - 1] == kit.runner.model.eos_token_id
            ends = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops]
            assert kit.text(name) == whole[: min(ends)[1] if ends else None]
            return
        assert not stops
        assert kit.text(name) == whole
        assert kit.tokens(name) == cold[:num_output]
        limit = min(request.params.max_tokens, kit.engine.max_model_tokens - len(request.prompt_tokens))
        assert num_output == limit or (kit.cache.stats().num_pins and num_output < limit)
        self.prompts.append([*request.prompt_tokens.tolist(), *kit.tokens(name)])
