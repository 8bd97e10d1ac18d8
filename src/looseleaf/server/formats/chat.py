"""Answers of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from looseleaf.engine.tokenizer import Tokenizer
from looseleaf.server.formats.answer import Envelope
from looseleaf.server.formats.logprobs import chat_logprobs
from looseleaf.server.generation import ChoiceDelta, ChoiceResult

_KIND = "chat.completion"
_CHUNK_KIND = "chat.completion.chunk"


class ChatFormat:
    """One answer of `num_choices` choices. In a stream each choice begins with an event that names the
    role."""

    def __init__(self, envelope: Envelope, tokenizer: Tokenizer, *, with_logprobs: bool, num_choices: int) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._num_choices = num_choices

    def opening(self) -> list[dict[str, Any]]:
        """The role of each choice."""
        delta = {"role": "assistant", "content": ""}
        return [
            self._envelope.wrap(_CHUNK_KIND, [_chunk_choice(index, delta, None, None)])
            for index in range(self._num_choices)
        ]

    def chunk(self, choice: ChoiceDelta) -> dict[str, Any] | None:
        """The event of a delta; None if it has neither text nor tokens nor an end."""
        delta = choice.delta
        logprobs = None
        if self._with_logprobs and delta.token_ids:
            logprobs = {"content": chat_logprobs(self._tokenizer, [delta]), "refusal": None}
        if not delta.text and logprobs is None and delta.finish_reason is None:
            return None
        content = {"content": delta.text} if delta.text or logprobs is not None else {}
        reason = None if delta.finish_reason is None else delta.finish_reason.value
        return self._envelope.wrap(_CHUNK_KIND, [_chunk_choice(choice.index, content, reason, logprobs)])

    def usage_chunk(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The last event, without choices."""
        return {**self._envelope.wrap(_CHUNK_KIND, []), "usage": usage}

    def answer(self, results: Sequence[ChoiceResult], usage: Mapping[str, Any]) -> dict[str, Any]:
        """The whole answer."""
        choices = []
        for result in results:
            logprobs = None
            if self._with_logprobs:
                logprobs = {"content": chat_logprobs(self._tokenizer, result.deltas), "refusal": None}
            message = {"role": "assistant", "content": result.text, "refusal": None}
            choices.append(
                {
                    "index": result.index,
                    "message": message,
                    "logprobs": logprobs,
                    "finish_reason": result.finish_reason.value,
                }
            )
        return {**self._envelope.wrap(_KIND, choices), "usage": usage}


def _chunk_choice(
    index: int, delta: Mapping[str, Any], reason: str | None, logprobs: Mapping[str, Any] | None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
