"""What the answers of all doors share: the envelope and the usage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from looseleaf.engine.request import Usage
from looseleaf.server.generation import ChoiceDelta, ChoiceResult


@dataclass(frozen=True)
class Envelope:
    """What every object of one answer repeats. `created` in Unix seconds."""

    answer_id: str
    created: int
    model: str
    includes_usage: bool

    def wrap(self, kind: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """An object of `kind` with these choices; in a stream that ends with the usage, `usage` is null until
        then."""
        wrapped: dict[str, Any] = {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
        }
        if self.includes_usage:
            wrapped["usage"] = None
        return wrapped


class AnswerFormat(Protocol):
    """One door's way to say what the engine generated."""

    def opening(self) -> list[dict[str, Any]]:
        """Stream events before the first delta."""
        ...

    def chunk(self, choice: ChoiceDelta) -> dict[str, Any] | None:
        """The stream event of a delta; None if it says nothing."""
        ...

    def usage_chunk(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The stream event that carries the usage."""
        ...

    def answer(self, results: Sequence[ChoiceResult], usage: Mapping[str, Any]) -> dict[str, Any]:
        """The whole answer of a request that does not stream."""
        ...


def usage_object(usages: Mapping[int, Usage], num_choices: int) -> dict[str, Any]:
    """The `usage` of an answer. `usages` by choice; `num_choices` choices belong to each prompt.

    A prompt counts once, however many choices it has, and its cached tokens are those of its first choice.
    `cached_tokens` is always a number.
    """
    firsts = [usage for index, usage in sorted(usages.items()) if index % num_choices == 0]
    num_prompt_tokens = sum(usage.num_prompt_tokens for usage in firsts)
    num_output_tokens = sum(usage.num_output_tokens for usage in usages.values())
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.num_cached_tokens for usage in firsts)},
    }
