"""What completions and chat completions have in common: sampling, streaming, and looseleaf's own fields."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

MAX_LOGPROBS = 20

# Fields of other servers that would change the answer and that this one does not know: refused, not ignored.
_UNSUPPORTED = (
    "suffix", "logit_bias", "tools", "functions", "function_call", "audio", "min_p", "min_tokens",
    "stop_token_ids", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
    "prompt_logprobs", "use_beam_search", "length_penalty", "bad_words", "allowed_token_ids",
    "prompt_embeds", "best_of",
)  # fmt: skip


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class GenerationBody(BaseModel):
    """Fields of both doors; null means the default. Unknown fields are ignored unless they would change the
    answer.

    Own fields: `request_id` (the engine's id of the request), `cache_salt` (divides the cache: only requests
    of the same salt share), `prompt_cache_key` (a label of the client's; changes nothing here),
    `prompt_cache_retention` (asks for a pin of the prompt: "24h", "in_memory", "1h", or seconds), `reuse`
    (false: neither match nor store), `top_k`, `repetition_penalty`, `ignore_eos`.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    n: int | None = Field(default=None, ge=1)
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
    request_id: str | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | int | float | None = None
    reuse: bool | None = None

    @property
    def num_choices(self) -> int:
        """Choices for each prompt."""
        return self.n or 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wants_usage_event(self) -> bool:
        """True if the stream is to end with an event that carries the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def unsupported_field(self) -> str | None:
        """The first field that is set, would change the answer, and is not supported; None if there is
        none."""
        extra: dict[str, Any] = self.model_extra or {}
        return next((name for name in _UNSUPPORTED if extra.get(name) not in (None, "", [], {}, False)), None)
