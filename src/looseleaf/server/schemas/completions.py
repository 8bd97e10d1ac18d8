"""Body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from looseleaf.server.schemas.generation import MAX_LOGPROBS, GenerationBody


class CompletionBody(GenerationBody):
    """A prompt to continue: a text, several texts, token ids, or several lists of them. `max_tokens` 0 only
    prefills."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(default=None, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_prompt(cls, value: Any) -> Any:
        """One message for what is none of the four forms, instead of one for each form."""
        if not (isinstance(value, str) or _is_list_of(value, (str, int)) or _is_list_of_token_lists(value)):
            raise ValueError("give a text, a list of texts, a list of token ids, or a list of such lists")
        return value


def _is_list_of(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, list) and any(all(type(item) is kind for item in value) for kind in kinds)


def _is_list_of_token_lists(value: Any) -> bool:
    return isinstance(value, list) and all(_is_list_of(item, (int,)) for item in value)
