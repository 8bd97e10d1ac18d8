"""Body of `POST /v1/completions`."""

from __future__ import annotations

from pydantic import Field

from looseleaf.server.schemas.generation import MAX_LOGPROBS, GenerationBody


class CompletionBody(GenerationBody):
    """A prompt to continue: a text, several texts, token ids, or several lists of them. `max_tokens` 0 only
    prefills."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(default=None, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = None
