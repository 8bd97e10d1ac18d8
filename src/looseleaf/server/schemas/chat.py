"""Body of `POST /v1/chat/completions`, and conversations wherever a prompt is given as `messages`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from looseleaf.server.schemas.generation import MAX_LOGPROBS, GenerationBody


class CacheControl(BaseModel):
    """Asks for a pin of the prompt up to here. `ttl` is a duration such as "5m" or "1h"."""

    model_config = ConfigDict(strict=True)

    type: Literal["ephemeral"]
    ttl: str | int | float = "5m"


class TextPart(BaseModel):
    """A piece of text in a message."""

    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class ChatMessage(BaseModel):
    """One message. Fields besides these (`name`, …) go to the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str = Field(min_length=1)
    content: str | list[TextPart] | None = None
    cache_control: CacheControl | None = None


class ResponseFormat(BaseModel):
    """Form of the answer: text only."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str


class ChatBody(GenerationBody):
    """A conversation to continue."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=0)
    max_completion_tokens: int | None = Field(default=None, ge=0)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    tool_choice: Any = None

    def unsupported_field(self) -> str | None:
        """As `GenerationBody.unsupported_field`, with what only chat has."""
        if self.response_format is not None and self.response_format.type != "text":
            return "response_format"
        if self.tool_choice not in (None, "none", "auto"):
            return "tool_choice"
        return super().unsupported_field()
