"""A hypothesis state machine over engine and scheduler: anything at any moment, and still the cold tokens.

Run it with `EngineMachine.TestCase` (or `run_state_machine_as_test(EngineMachine, settings=...)`). The oracle is the
fake model's plain recurrence, which knows neither blocks nor steps.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from looseleaf.engine.config import EngineConfig
from looseleaf.engine.request import FinishReason, GenerationRequest, OutputDelta
from looseleaf.errors import CapacityError, OutOfBlocks, PromptTooLong
from looseleaf.testing.engine_kit import EngineKit

_MAX_TOKENS = st.one_of(st.integers(0, 3), st.integers(4, 30))
_STOPS = st.sampled_from(((), (), ("AB",), ("é", "BA"), ("CABC",)))
_ALPHABET = tuple("ABCé€".encode())


class EngineMachine(RuleBasedStateMachine):
    """Adds, steps, aborts, pins, unpins, clears and breaks; checks the cache after every rule and each request at its
    end.

    What must hold: every request ends exactly once; what it gave out is the beginning of its cold tokens, and all of
    them if it ended by itself; each delta's text is its tokens' text; usage adds up; waiting requests hold nothing; the
    model never read a block that was not this sequence's.
    """

    running_ids = Bundle("running_ids")
    pins = Bundle("pins")

    @initialize(
        num_blocks=st.integers(4, 24),
        block_tokens=st.sampled_from((1, 2, 4, 8)),
        max_step_tokens=st.sampled_from((1, 3, 8, 64)),
        max_running=st.sampled_from((1, 2, 5, 64)),
        reserve_output=st.booleans(),
        reuse=st.sampled_from((True, True, True, False)),
        eos_every=st.sampled_from((0, 6)),
    )
    def start(
        self,
        num_blocks: int,
        block_tokens: int,
        max_step_tokens: int,
        max_running: int,
        reserve_output: bool,
        reuse: bool,
        eos_every: int,
    ) -> None:
        """A new engine over an empty pool."""
        config = EngineConfig(max_running, max_step_tokens, None, reuse, reserve_output)
        self.kit = EngineKit(
            num_blocks, block_tokens, pin_quota=0.75, config=config, eos_every=eos_every, alphabet=_ALPHABET
        )
        self.requests: dict[str, GenerationRequest] = {}
        self.aborted: set[str] = set()
        self.ended: set[str] = set()
        self.prompts: list[list[int]] = [[65]]
        self.num_failures = 0

    # -- rules --

    @rule(
        target=running_ids,
        base=st.integers(0, 1000),
        num_kept=st.integers(0, 40),
        tail=st.lists(st.sampled_from(_ALPHABET), min_size=1, max_size=12),
        max_tokens=_MAX_TOKENS,
        namespace=st.sampled_from(("", "", "t")),
        reuse=st.sampled_from((True, True, False)),
        seed=st.one_of(st.none(), st.integers(0, 3)),
        stop=_STOPS,
        extra=st.sampled_from(({}, {}, {"repetition_penalty": 1.1}, {"ignore_eos": True}, {"num_logprobs": 1})),
    )
    def add(
        self,
        base: int,
        num_kept: int,
        tail: list[int],
        max_tokens: int,
        namespace: str,
        reuse: bool,
        seed: int | None,
        stop: tuple[str, ...],
        extra: dict[str, Any],
    ) -> Any:
        """A request whose prompt begins like an earlier one (or like an earlier answer)."""
        prompt = self.prompts[base % len(self.prompts)][:num_kept] + tail
        name = f"r{len(self.requests)}"
        params = {"stop": stop, **extra} if seed is None else {"stop": stop, "temperature": 1.0, "seed": seed, **extra}
        limit = self.kit.engine.max_model_tokens
        fits = len(prompt) + (max_tokens > 0) <= limit
        try:
            request = self.kit.add(name, prompt, max_tokens, namespace=namespace, reuse=reuse, **params)
        except PromptTooLong:
            assert not fits
            return multiple()
        assert fits
        self.requests[name] = request
        return name

    @rule(times=st.integers(1, 6))
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

    @rule(name=consumes(running_ids))
    def abort(self, name: str) -> None:
        """The client leaves; effective once, and only while the request lives."""
        is_live = name not in self.ended
        assert self.kit.engine.abort(name) == is_live
        assert not self.kit.engine.abort(name)
        if is_live:
            self.aborted.add(name)

    @rule()
    def break_the_model(self) -> None:
        """The next step fails."""
        self.num_failures += 1
        self.kit.runner.fail_next()

    @rule(target=pins, name=running_ids, level=st.sampled_from(("hard", "soft")))
    def pin(self, name: str, level: str) -> Any:
        """Pin a request's prompt, whatever of it is there."""
        request = self.requests[name]
        try:
            return self.kit.cache.pin(
                tokens=request.prompt_tokens, namespace=request.namespace, level=level, partial=True
            ).id
        except CapacityError:
            return multiple()

    @rule(pin_id=consumes(pins))
    def unpin(self, pin_id: str) -> None:
        """Undo a pin."""
        self.kit.cache.unpin(pin_id)

    @rule()
    def clear(self) -> None:
        """Forget what nobody holds."""
        self.kit.cache.clear()

    @rule()
    def maintain(self) -> None:
        """Upkeep between steps."""
        self.kit.cache.maintain()

    # -- what holds --

    @invariant()
    def the_cache_is_whole(self) -> None:
        """The cache's own invariants, and one lease for each running request and for nobody else."""
        if not hasattr(self, "kit"):
            return
        self.kit.cache.check_integrity()
        engine = self.kit.engine
        assert self.kit.cache.stats().num_leases == engine.num_running
        assert engine.num_running + engine.num_waiting == len(self.requests) - len(self.ended)
        assert self.kit.runner.mismatches == []

    def teardown(self) -> None:
        """Everything ends, and nothing is held then."""
        if not hasattr(self, "kit"):
            return
        for _ in range(4000):
            if not self.kit.engine.has_work:
                break
            self.step(1)
        assert not self.kit.engine.has_work
        assert self.ended == set(self.requests)
        stats = self.kit.cache.stats()
        assert (stats.num_leases, stats.active_blocks) == (0, 0)

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
            assert self.num_failures or isinstance(delta.error, OutOfBlocks)
            return
        whole = kit.tokenizer.decode([token for token in cold[:num_output] if token < 256])
        stops = [stop for stop in request.params.stop if stop in whole]
        if reason is FinishReason.STOP:
            is_end = cold[num_output - 1] == kit.runner.model.eos_token_id
            assert is_end or stops
            if stops:
                end = min((whole.find(stop) + len(stop), whole.find(stop)) for stop in stops)
                assert kit.text(name) == whole[: end[1]]
            else:
                assert kit.text(name) == whole
            return
        assert not stops
        assert kit.text(name) == whole
        assert kit.tokens(name) == cold[:num_output]
        limit = min(request.params.max_tokens, kit.engine.max_model_tokens - len(request.prompt_tokens))
        assert num_output == limit or (kit.cache.stats().num_pins and num_output < limit)
        self.prompts.append([*request.prompt_tokens.tolist(), *kit.tokens(name)])
