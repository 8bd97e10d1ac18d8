"""Answers of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from looseleaf.engine.tokenizer import Tokenizer
from looseleaf.server.formats.answer import Envelope
from looseleaf.server.formats.logprobs import completion_logprobs
from looseleaf.server.generation import ChoiceDelta, ChoiceResult

_KIND = "text_completion"


class CompletionFormat:
    """State of one answer: how many characters of each choice are out. `echoes[i]` is what choice i begins
    with."""

    def __init__(self, envelope: Envelope, tokenizer: Tokenizer, *, with_logprobs: bool, echoes: Sequence[str]) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._echoes = list(echoes)
        self._num_sent = [len(echo) for echo in echoes]

    def opening(self) -> list[dict[str, Any]]:
        """The echoed prompts, if any."""
        echoes = [(index, echo) for index, echo in enumerate(self._echoes) if echo]
        return [self._envelope.wrap(_KIND, [_choice(index, echo, None, None)]) for index, echo in echoes]

    def chunk(self, choice: ChoiceDelta) -> dict[str, Any] | None:
        """The event of a delta; None if it has neither text nor tokens nor an end."""
        delta = choice.delta
        logprobs = None
        if self._with_logprobs and delta.token_ids:
            logprobs = completion_logprobs(self._tokenizer, [delta], self._num_sent[choice.index])
        if not delta.text and logprobs is None and delta.finish_reason is None:
            return None
        self._num_sent[choice.index] += len(delta.text)
        reason = None if delta.finish_reason is None else delta.finish_reason.value
        return self._envelope.wrap(_KIND, [_choice(choice.index, delta.text, reason, logprobs)])

    def usage_chunk(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The last event, without choices."""
        return {**self._envelope.wrap(_KIND, []), "usage": usage}

    def answer(self, results: Sequence[ChoiceResult], usage: Mapping[str, Any]) -> dict[str, Any]:
        """The whole answer."""
        choices = []
        for result in results:
            echo = self._echoes[result.index]
            logprobs = None
            if self._with_logprobs:
                logprobs = completion_logprobs(self._tokenizer, result.deltas, len(echo))
            choices.append(_choice(result.index, echo + result.text, result.finish_reason.value, logprobs))
        return {**self._envelope.wrap(_KIND, choices), "usage": usage}


def _choice(index: int, text: str, reason: str | None, logprobs: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
