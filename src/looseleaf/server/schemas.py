"""Bodies of requests, as pydantic models. pydantic is used here and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import Header
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

MAX_LOGPROBS = 20

_DURATION = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([smhd]?)\s*", re.ASCII)
_SECONDS_OF_UNIT = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}

# Fields of other servers that would change the answer and are not known here, with values that are harmless all the
# same: refused, not ignored.
_ABSENT: tuple[object, ...] = (None, "", [], {}, False)
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(
        ("suffix", "logit_bias", "tools", "functions", "function_call", "audio", "min_p", "min_tokens",
         "stop_token_ids", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
         "prompt_logprobs", "use_beam_search", "length_penalty", "bad_words", "allowed_token_ids", "prompt_embeds"),
        _ABSENT,
    ),
    "best_of": (*_ABSENT, 1),
    "response_format": (*_ABSENT, {"type": "text"}),
    "tool_choice": (*_ABSENT, "none", "auto"),
}  # fmt: skip


def parse_duration(value: object) -> float:
    """Seconds, above 0, of "24h", "5m", 90 or "90" (seconds), or "in_memory" (five minutes).

    Raises:
        ValueError: it is no duration.
    """
    if value in ("in_memory", "in-memory"):
        return 300.0
    seconds = 0.0
    if isinstance(value, str):
        if found := _DURATION.fullmatch(value):
            seconds = float(found[1]) * _SECONDS_OF_UNIT[found[2]]
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = value
    if not 0 < seconds < 1e15:
        raise ValueError(f'{value!r} is no duration such as "24h", "5m", 90 (seconds) or "in_memory"')
    return float(seconds)


def check_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """`tool` itself, as the client wrote it: templates show it in its own order.

    Raises:
        ValueError: it is no `{"type": "function", "function": {"name": …}}`.
    """
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError('a tool is {"type": "function", "function": {"name": …, "parameters": …}}')
    return tool


Tools = list[Annotated[dict[str, Any], AfterValidator(check_tool)]]
Duration = Annotated[float, BeforeValidator(parse_duration), WithJsonSchema({"type": ["string", "number"]})]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Prompts = Annotated[list[str | list[int]], WithJsonSchema({"type": ["string", "array"]})]
RequestIdText = Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]{1,200}$")]
SessionIdHeader = Annotated[RequestIdText | None, Header(alias="x-session-id")]
RequestIdHeader = Annotated[RequestIdText | None, Header(alias="x-request-id")]


class CacheControl(BaseModel):
    """Asks for a pin of the prompt up to here."""

    model_config = ConfigDict(strict=True)

    type: Literal["ephemeral"]
    ttl: Duration = 300.0


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


class CacheLayer(BaseModel):
    """A beginning of the prompt that lies in another namespace: its first `num_tokens` tokens, or what the first
    `num_messages` messages are in every prompt that begins with them. `salt` null: the caller's namespace without
    one."""

    model_config = ConfigDict(strict=True, extra="forbid")

    salt: str | None = None
    num_tokens: int | None = Field(default=None, ge=1)
    num_messages: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check(self) -> CacheLayer:
        if (self.num_tokens is None) == (self.num_messages is None):
            raise ValueError("give exactly one of num_tokens and num_messages")
        return self


CacheLayers = Annotated[list[CacheLayer], Field(max_length=8)]


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class GenerationBody(BaseModel):
    """What completions and chat completions have in common; null means the default. Unknown fields are ignored unless
    they would change the answer.

    Own fields: `request_id` (the engine's id of the request), `cache_salt` (only requests of the same salt share),
    `cache_layers` (beginnings that others share), `prompt_cache_key` (a label of the pins that the request asks for),
    `prompt_cache_retention` (asks for a pin of the prompt), `reuse` (false: neither match nor store),
    `return_token_ids` (as in vLLM), `session_id`, `top_k`, `repetition_penalty`, `ignore_eos`.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    n: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=0)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: RequestIdText | None = None
    cache_salt: str | None = None
    cache_layers: CacheLayers | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Duration | None = None
    reuse: bool | None = None
    return_token_ids: bool | None = None
    session_id: RequestIdText | None = None

    @property
    def num_choices(self) -> int:
        """Choices for each prompt."""
        return self.n or 1

    @property
    def num_samples(self) -> int:
        """Choices that are generated for each prompt; the best `num_choices` of them are answered."""
        return self.num_choices

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives wanted at each token; None without log-probabilities."""
        return None

    @property
    def wants_usage_event(self) -> bool:
        """True if there is a stream that is to end with an event that carries the usage."""
        return bool(self.stream and self.stream_options and self.stream_options.include_usage)

    def unsupported_field(self) -> str | None:
        """The first field that is set, would change the answer, and is not supported; None if there is none."""
        extra: dict[str, Any] = self.model_extra or {}
        return next((name for name, harmless in _UNSUPPORTED.items() if extra.get(name) not in harmless), None)


class CompletionBody(GenerationBody):
    """Prompts to continue: texts or token ids; one alone is taken as a list of one. `max_tokens` 0 only prefills.

    `best_of` generates so many choices for each prompt and answers the `n` of highest mean log-probability.
    """

    prompt: Prompts
    best_of: int | None = Field(default=None, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None

    @property
    def num_samples(self) -> int:
        """As `GenerationBody.num_samples`."""
        return self.best_of or self.num_choices

    @property
    def num_logprobs(self) -> int | None:
        """As `GenerationBody.num_logprobs`."""
        return self.logprobs

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _as_list(cls, value: Any, validate: Callable[[Any], list[str | list[int]]]) -> list[str | list[int]]:
        is_one = isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int))
        try:
            prompts = validate([value] if is_one else value)
        except ValidationError:
            prompts = []
        if len({type(prompt) for prompt in prompts}) != 1:
            raise ValueError("give a text, a list of texts, a list of token ids, or a list of such lists")
        return prompts


class ChatBody(GenerationBody):
    """A conversation to continue: `messages`, or (own field) `prompt_token_ids`, the very tokens of the prompt."""

    messages: list[ChatMessage] = []
    prompt_token_ids: list[int] | None = Field(default=None, min_length=1)
    tools: Tools | None = None
    max_completion_tokens: int | None = Field(default=None, ge=0)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        """As `GenerationBody.num_logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None


class PromptBody(BaseModel):
    """One prompt: exactly one of `tokens`, `text`, `messages` (with their `tools`); `cache_salt` as in the requests
    that shall share it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    tokens: list[int] | None = None
    text: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    tools: Tools | None = None
    cache_salt: str | None = None
    cache_layers: CacheLayers | None = None

    @property
    def sources(self) -> list[str]:
        """Which of `tokens`, `text`, `messages` are given."""
        return [name for name in ("tokens", "text", "messages") if getattr(self, name) is not None]


class PinBody(PromptBody):
    """A pin to make, of a prompt or of what a live or finished request has computed (`request_id`).

    `part` (of a request): all of it, or its prompt without the answer; `last_token`: the first so many tokens only.
    `partial` grants what fits under the quota; `wait` computes the prompt first; `refresh` counts `ttl_seconds` anew at
    each use, at most until `max_ttl_seconds` after the pin was made.
    """

    request_id: str | None = None
    part: Literal["all", "prompt"] = "all"
    last_token: int | None = Field(default=None, ge=1)
    owner: str = ""
    labels: dict[str, str] = Field(default={}, max_length=64)
    level: Literal["hard", "soft"] = "hard"
    priority: int = Field(default=0, gt=-(2**31), lt=2**31)
    ttl_seconds: PositiveSeconds | None = None
    max_ttl_seconds: PositiveSeconds | None = None
    refresh: bool = False
    partial: bool = False
    wait: bool = False


class QuotaBody(BaseModel):
    """Share of all blocks that pins may hold: in all, or those of one namespace. It is named as pins show it, or by its
    `cache_salt`; a key with a namespace of its own means that."""

    model_config = ConfigDict(strict=True, extra="forbid")

    share: float = Field(ge=0, le=1)
    namespace: str | None = None
    cache_salt: str | None = None


class AutoRuleBody(BaseModel):
    """Which prefixes may be pinned automatically: longer ones than that, or more often asked for; null: no such."""

    model_config = ConfigDict(strict=True, extra="forbid")

    min_tokens: int | None = Field(default=None, ge=0)
    min_requests_per_second: float | None = Field(default=None, ge=0, allow_inf_nan=False)


class AutoPinBody(AutoRuleBody):
    """How to pin automatically; what is not given stays as it is. `namespaces`: those with rules of their own, by the
    names that pins show; null: nothing is pinned there."""

    mode: Literal["on", "off", "dry-run"] | None = None
    rate_window_seconds: PositiveSeconds = 1.0
    namespaces: dict[str, AutoRuleBody | None] = {}


class ClearBody(BaseModel):
    """What to forget: one namespace (`cache_salt`), or without it all that the caller may clear."""

    model_config = ConfigDict(strict=True, extra="forbid")

    cache_salt: str | None = None
    include_pins: bool = False


class ResizeBody(BaseModel):
    """The pool's new size: exactly one of pages, blocks, and bytes; the last two are rounded down to whole pages."""

    model_config = ConfigDict(strict=True, extra="forbid")

    num_pages: int | None = Field(default=None, ge=1)
    num_blocks: int | None = Field(default=None, ge=1)
    kv_bytes: int | None = Field(default=None, ge=1)
