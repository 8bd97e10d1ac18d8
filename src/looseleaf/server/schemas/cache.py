"""Bodies of the routes about the cache: match, warm, clear, pins."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from looseleaf.server.schemas.chat import ChatMessage


class PromptBody(BaseModel):
    """One prompt: exactly one of `tokens`, `text`, `messages`; `cache_salt` as in the requests that shall
    share it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    tokens: list[int] | None = None
    text: str | None = None
    messages: list[ChatMessage] | None = None
    cache_salt: str | None = None


class PinBody(PromptBody):
    """A pin to make, of a prompt or of a request that ran (`request_id`).

    `partial` grants what fits under the quota; `wait` computes the prompt first; `refresh` counts
    `ttl_seconds` anew at each use.
    """

    request_id: str | None = None
    owner: str = ""
    level: Literal["hard", "soft"] = "hard"
    priority: int = 0
    ttl_seconds: float | None = Field(default=None, gt=0)
    refresh: bool = False
    partial: bool = False
    wait: bool = False


class ClearBody(BaseModel):
    """What to forget: one namespace (`cache_salt`), or without it all that the caller may clear."""

    model_config = ConfigDict(strict=True, extra="forbid")

    cache_salt: str | None = None
    include_pins: bool = False


class PinAnswer(BaseModel):
    """A live pin. Times are Unix seconds; `expires_at` is null without a time to live."""

    id: str
    object: Literal["pin"] = "pin"
    owner: str
    level: str
    num_tokens: int
    num_pinned_tokens: int
    created_at: float
    expires_at: float | None


class PinList(BaseModel):
    """Live pins."""

    object: Literal["list"] = "list"
    data: list[PinAnswer]


class DeletedPin(BaseModel):
    """A pin that is no more."""

    id: str
    object: Literal["pin"] = "pin"
    deleted: Literal[True] = True


class MatchAnswer(BaseModel):
    """What a prompt would find in the cache now. `by_rung` splits `num_cached_tokens` by how they would be
    had."""

    object: Literal["cache.match"] = "cache.match"
    num_prompt_tokens: int
    num_cached_tokens: int
    by_rung: dict[str, int]


class WarmAnswer(BaseModel):
    """A prompt that is in the cache now."""

    object: Literal["cache.warm"] = "cache.warm"
    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int


class ClearAnswer(BaseModel):
    """What a clear did. `complete` is false while running requests or pins still keep something: then it is
    counted in `num_kept_tokens`, and what requests hold is freed at their end without ever being matched
    again."""

    object: Literal["cache.clear"] = "cache.clear"
    num_cleared_tokens: int
    num_kept_tokens: int
    complete: bool
