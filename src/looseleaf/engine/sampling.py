"""How the next token is chosen: what a request asks for, and what one step tells the model runner."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from looseleaf.errors import RequestError
from looseleaf.ids import Int32Array


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks of sampling, with the OpenAI names where there is one.

    `temperature` 0 is greedy. `seed` makes the draw a function of (seed, position) alone: batching, preemption and
    resuming do not change it. Penalties look at the tokens generated so far (`repetition_penalty` at the prompt too).
    `num_logprobs`: None for none, n for the chosen token's log-probability and the n most likely ones.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None

    def __post_init__(self) -> None:
        """Refuse values that no sampler can follow.

        Raises:
            RequestError: a value is outside its range; the message names it.
        """
        checks = (
            ("max_tokens", self.max_tokens, self.max_tokens >= 0, ">= 0"),
            ("temperature", self.temperature, 0.0 <= self.temperature <= 100.0, "from 0 to 100"),
            ("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0, at most 1"),
            ("top_k", self.top_k, self.top_k >= 0, ">= 0 (0: no limit)"),
            ("presence_penalty", self.presence_penalty, -2.0 <= self.presence_penalty <= 2.0, "from -2 to 2"),
            ("frequency_penalty", self.frequency_penalty, -2.0 <= self.frequency_penalty <= 2.0, "from -2 to 2"),
            ("repetition_penalty", self.repetition_penalty, 0.0 < self.repetition_penalty <= 100.0, "above 0"),
            ("stop", self.stop, all(self.stop), "without an empty string"),
            ("num_logprobs", self.num_logprobs, self.num_logprobs is None or 0 <= self.num_logprobs <= 20, "0 to 20"),
        )
        for name, value, fine, wanted in checks:
            if not fine:
                raise RequestError(f"{name} is {value!r}; it must be {wanted}")

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is taken, whatever the other settings."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def needs_history(self) -> bool:
        """True if earlier tokens of the request change its next one."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


@dataclass(frozen=True)
class SamplingRow:
    """One sampled sequence of a step. `uniform`: the random number in [0, 1) of the draw (inverse-CDF sampling over the
    kept tokens, most likely first). `prompt_tokens`, `output_tokens`: int32, empty unless `params.needs_history`."""

    params: SamplingParams
    uniform: float
    prompt_tokens: Int32Array
    output_tokens: Int32Array


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities (natural log, of the model's own distribution) at one generated position."""

    token_id: int
    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


def draw_uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of the draw at `position`: the same for the same pair, whatever ran in between."""
    return float(np.random.Generator(np.random.Philox(key=seed & (2**64 - 1), counter=position)).random())
