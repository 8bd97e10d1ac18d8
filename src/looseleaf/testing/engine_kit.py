"""An engine over a fake model, ready to drive by hand: what tests of scheduling, streaming and HTTP build on."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partialmethod
from typing import Any

from looseleaf.core.config import CacheConfig, LayerGroup
from looseleaf.core.manager import CacheManager
from looseleaf.engine.config import EngineConfig
from looseleaf.engine.engine import Engine
from looseleaf.engine.request import FinishReason, GenerationRequest, OutputDelta
from looseleaf.engine.sampling import SamplingParams
from looseleaf.ids import Int32Array
from looseleaf.testing.fake_runner import FakeRunner
from looseleaf.testing.fake_tokenizer import FakeTokenizer


class RecordingObserver:
    """Implements `EngineObserver`: keeps what it is told, as (name, values) in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def named(self, name: str) -> list[dict[str, Any]]:
        """The values of all calls of one name."""
        return [values for called, values in self.calls if called == name]

    def _record(self, name: str, **values: Any) -> None:
        self.calls.append((name, values))

    on_step = partialmethod(_record, "on_step")
    on_first_token = partialmethod(_record, "on_first_token")
    on_finish = partialmethod(_record, "on_finish")
    on_preempt = partialmethod(_record, "on_preempt")
    on_share = partialmethod(_record, "on_share")
    on_fork = partialmethod(_record, "on_fork")
    on_lookup = partialmethod(_record, "on_lookup")
    on_traffic = partialmethod(_record, "on_traffic")


class EngineKit:
    """Cache, fake runner, fake tokenizer and engine, wired; keeps every delta.

    `num_blocks` blocks of `block_tokens` tokens, in pages of `blocks_per_page`, for the lanes of `groups`.
    `clock`: the cache's. `runner_settings` go to `FakeRunner`.
    """

    def __init__(
        self,
        num_blocks: int = 32,
        block_tokens: int = 4,
        *,
        blocks_per_page: int = 1,
        pin_quota: float = 1.0,
        groups: tuple[LayerGroup, ...] = (LayerGroup("full"),),
        config: EngineConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        **runner_settings: Any,
    ) -> None:
        num_pages, page_tokens = num_blocks // blocks_per_page, block_tokens * blocks_per_page
        plan = CacheConfig(num_pages, page_tokens, block_tokens, pin_quota=pin_quota, groups=groups)
        self.cache = CacheManager(plan, clock=clock)
        self.namespaces: dict[str, str] = defaultdict(str)
        self.runner = FakeRunner(
            num_blocks,
            block_tokens,
            groups=groups,
            namespace_of=self.namespaces.__getitem__,
            known_tokens=lambda name: self.engine._sequences[name].tokens,
            **runner_settings,
        )
        self.tokenizer = FakeTokenizer()
        self.observer = RecordingObserver()
        self.engine = Engine(self.cache, self.runner, self.tokenizer, config or EngineConfig(), observer=self.observer)
        self.deltas: dict[str, list[OutputDelta]] = defaultdict(list)

    def add(
        self,
        request_id: str,
        prompt: Sequence[int] | Int32Array,
        max_tokens: int = 8,
        *,
        namespace: str = "",
        reuse: bool = True,
        **params: Any,
    ) -> GenerationRequest:
        """Queue a request; greedy unless `params` (those of `SamplingParams`) say otherwise."""
        return self.add_samples([request_id], prompt, max_tokens, namespace=namespace, reuse=reuse, **params)[0]

    def add_samples(
        self,
        request_ids: Sequence[str],
        prompt: Sequence[int] | Int32Array,
        max_tokens: int = 8,
        *,
        namespace: str = "",
        reuse: bool = True,
        **params: Any,
    ) -> list[GenerationRequest]:
        """As `add`, for several requests that share one prefill; the seed, if one is given, is one more for each."""
        requests = []
        for number, request_id in enumerate(request_ids):
            own = {} if params.get("seed") is None else {"seed": params["seed"] + number}
            sampling = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, **params, **own})
            requests.append(GenerationRequest(request_id, prompt, sampling, namespace, reuse))
        self.engine.add_samples(requests)
        self.namespaces |= dict.fromkeys(request_ids, namespace)
        return requests

    def step(self, times: int = 1) -> list[OutputDelta]:
        """Do `times` steps, check the cache after each; the deltas of these steps."""
        given: list[OutputDelta] = []
        for _ in range(times):
            given += self.engine.step()
            self.cache.check_integrity()
        for delta in given:
            self.deltas[delta.request_id].append(delta)
        return given

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left; an AssertionError if that is not so after `max_steps`."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"the engine still has work after {max_steps} steps")

    def tokens(self, request_id: str) -> list[int]:
        """All tokens given out for a request so far."""
        return [token for delta in self.deltas[request_id] for token in delta.token_ids]

    def text(self, request_id: str) -> str:
        """All text given out for a request so far."""
        return "".join(delta.text for delta in self.deltas[request_id])

    def last(self, request_id: str) -> OutputDelta:
        """The newest delta of a request."""
        return self.deltas[request_id][-1]

    def reason(self, request_id: str) -> FinishReason | None:
        """How a request ended; None if it has not."""
        return self.last(request_id).finish_reason if self.deltas[request_id] else None

    def expected(self, request: GenerationRequest, num_tokens: int | None = None) -> list[int]:
        """What a cold run of `request` alone gives, without an end token (which is not given out)."""
        params = request.params
        num_tokens = params.max_tokens if num_tokens is None else num_tokens
        tokens = self.runner.expected_tokens(request.prompt_tokens, num_tokens, params, request.namespace)
        ends = tokens[-1:] == [self.runner.model.eos_token_id] and not params.ignore_eos
        return tokens[:-1] if ends else tokens


def sample_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Byte tokens that look random; other seeds share no block, the same seed shares all."""
    return [(7 * i + 31 * seed + i * i * (seed + 1)) % 251 for i in range(num_tokens)]
