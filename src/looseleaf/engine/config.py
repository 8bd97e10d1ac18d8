"""Settings of the engine."""

from __future__ import annotations

from dataclasses import dataclass

from looseleaf.core.settings import strict_settings
from looseleaf.errors import ConfigError


@strict_settings
@dataclass(frozen=True)
class EngineConfig:
    """How much runs at once.

    `max_running_requests`: requests that hold blocks at the same time; never more than `max_step_tokens`, so that every
    running request gets at least one token of each step. `max_step_tokens`: tokens computed in one forward pass; longer
    prompts are cut into chunks. `max_model_tokens`: limit on prompt + output, on top of the model's and the pool's own.
    `reuse`: False computes every prompt in full and stores nothing. `reserve_output`: True reserves prompt + max_tokens
    at admission (the classical contiguous way); nothing is then ever preempted, and much less fits. `share_in_flight`:
    False computes prompts that arrive together each by itself, instead of letting the later ones wait for what they
    share with one that is being computed.
    """

    max_running_requests: int = 64
    max_step_tokens: int = 2048
    max_model_tokens: int | None = None
    reuse: bool = True
    reserve_output: bool = False
    share_in_flight: bool = True

    def __post_init__(self) -> None:
        """Refuse values that no schedule can follow.

        Raises:
            ConfigError: a value is outside its range; the message names it.
        """
        for name in ("max_running_requests", "max_step_tokens", "max_model_tokens"):
            value = getattr(self, name)
            if name == "max_model_tokens" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1")
        for name in ("reuse", "reserve_output", "share_in_flight"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be True or False")
