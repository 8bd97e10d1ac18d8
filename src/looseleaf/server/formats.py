"""How answers look on the wire: plain dicts, whole or as events of a stream."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from looseleaf.engine.request import FinishReason, OutputDelta, Usage
from looseleaf.server.context import ServerContext
from looseleaf.server.generation import ChoiceDelta
from looseleaf.server.logprobs import chat_logprobs, completion_logprobs
from looseleaf.server.schemas import GenerationBody


class AnswerFormat(ABC):
    """One answer. `starts[i]` is the text that choice i begins with before anything is generated; `prompts` are the
    tokens of the prompts, each with the same number of choices."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(
        self,
        context: ServerContext,
        body: GenerationBody,
        answer_id: str,
        starts: Sequence[str],
        prompts: Sequence[list[int]],
    ) -> None:
        self.answer_id = answer_id
        self._tokenizer = context.tokenizer
        self._body = body
        self._head: dict[str, Any] = {"id": answer_id, "created": int(time.time()), "model": context.model_name}
        if body.wants_usage_event:
            self._head["usage"] = None
        self._starts = starts
        self._prompts = prompts
        self._wants_ids = bool(body.return_token_ids)
        self._begun: set[int] = set()
        self._num_sent = [len(start) for start in starts]  # characters

    @abstractmethod
    def opening(self) -> list[dict[str, Any]]:
        """Stream events before the first delta."""

    @abstractmethod
    def _piece(self, text: str) -> dict[str, Any]:
        """A choice's new text in a stream."""

    @abstractmethod
    def _whole(self, text: str) -> dict[str, Any]:
        """A choice's text in a whole answer."""

    @abstractmethod
    def _logprobs(self, deltas: Sequence[OutputDelta], num_sent: int) -> dict[str, Any]:
        """Log-probabilities of `deltas`, before which `num_sent` characters of the choice were sent."""

    def chunk(self, choice: ChoiceDelta) -> dict[str, Any] | None:
        """The event of a delta; None if it has neither text nor tokens nor an end."""
        index, delta = choice.index, choice.delta
        logprobs = self._wanted_logprobs(index, [delta]) if delta.token_ids else None
        is_empty = not delta.text and logprobs is None and not (self._wants_ids and delta.token_ids)
        if is_empty and delta.finish_reason is None:
            return None
        self._num_sent[index] += len(delta.text)
        piece = self._piece(delta.text) | self._token_ids(index, [delta])
        return self._wrap([self._choice(index, piece, logprobs, delta.finish_reason)])

    def usage_chunk(self, usages: Sequence[Usage]) -> dict[str, Any]:
        """The stream event that carries the usage, without choices."""
        return {**self._wrap([]), "usage": self._usage(usages)}

    def answer(self, results: Sequence[Sequence[OutputDelta]]) -> dict[str, Any]:
        """The whole answer, from the deltas of each sample; the best `num_choices` of each prompt's are its choices."""
        choices = []
        body = self._body
        for index, deltas in enumerate(best_samples(results, body.num_samples, body.num_choices)):
            whole = self._whole(self._starts[index] + "".join(delta.text for delta in deltas))
            whole |= self._token_ids(index, deltas)
            logprobs = self._wanted_logprobs(index, deltas)
            choices.append(self._choice(index, whole, logprobs, deltas[-1].finish_reason))
        usage = self._usage([deltas[-1].usage for deltas in results])
        return {**self._head, "object": self.kind, **self._prompt_ids(), "choices": choices, "usage": usage}

    def _prompt_ids(self) -> dict[str, Any]:
        """The prompt's tokens where they are told once an answer."""
        return {}

    def _token_ids(self, index: int, deltas: Sequence[OutputDelta]) -> dict[str, Any]:
        """The tokens of a choice's text, if they are asked for: without end tokens and those of a stop string."""
        del index  # all choices alike
        if not self._wants_ids:
            return {}
        return {"token_ids": [token for delta in deltas for token in delta.token_ids]}

    def _wrap(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_kind, "choices": choices}

    def _choice(
        self, index: int, content: dict[str, Any], logprobs: dict[str, Any] | None, reason: FinishReason | None
    ) -> dict[str, Any]:
        finish_reason = None if reason is None else reason.value
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}

    def _wanted_logprobs(self, index: int, deltas: Sequence[OutputDelta]) -> dict[str, Any] | None:
        return None if self._body.num_logprobs is None else self._logprobs(deltas, self._num_sent[index])

    def _usage(self, usages: Sequence[Usage]) -> dict[str, Any]:
        """A prompt counts once, however many samples it has, and its cached tokens are those of the first of them."""
        firsts = usages[:: self._body.num_samples]
        num_prompt_tokens = sum(usage.num_prompt_tokens for usage in firsts)
        num_output_tokens = sum(usage.num_output_tokens for usage in usages)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(usage.num_cached_tokens for usage in firsts)},
        }


def best_samples(
    results: Sequence[Sequence[OutputDelta]], num_samples: int, num_choices: int
) -> list[Sequence[OutputDelta]]:
    """Of each `num_samples` results in a row the `num_choices` with the highest mean log-probability of a token, best
    first; all in their order if all are wanted. A result without tokens comes last."""
    if num_samples == num_choices:
        return list(results)
    chosen: list[Sequence[OutputDelta]] = []
    for start in range(0, len(results), num_samples):
        ranked = sorted(results[start : start + num_samples], key=_mean_logprob, reverse=True)
        chosen += ranked[:num_choices]
    return chosen


def _mean_logprob(deltas: Sequence[OutputDelta]) -> float:
    logprobs = [item.logprob for delta in deltas for item in delta.logprobs]
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf


class CompletionFormat(AnswerFormat):
    """Answers of `/v1/completions`; a choice may begin with its prompt."""

    kind = chunk_kind = "text_completion"

    def opening(self) -> list[dict[str, Any]]:
        """The echoed prompts, if any."""
        starts = enumerate(self._starts)
        return [self._wrap([self._choice(index, self._piece(start), None, None)]) for index, start in starts if start]

    def _piece(self, text: str) -> dict[str, Any]:
        return {"text": text}

    _whole = _piece

    def _token_ids(self, index: int, deltas: Sequence[OutputDelta]) -> dict[str, Any]:
        """As for all answers; the first piece of each choice has its prompt's tokens too."""
        ids = super()._token_ids(index, deltas)
        if ids and index not in self._begun:
            self._begun.add(index)
            ids["prompt_token_ids"] = self._prompts[index // self._body.num_choices]
        return ids

    def _logprobs(self, deltas: Sequence[OutputDelta], num_sent: int) -> dict[str, Any]:
        return completion_logprobs(self._tokenizer, deltas, num_sent)


class ChatFormat(AnswerFormat):
    """Answers of `/v1/chat/completions`. In a stream each choice begins with an event that names the role."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        """The role of each choice."""
        role = {"delta": {"role": "assistant", "content": ""}}
        events = [self._wrap([self._choice(index, role, None, None)]) for index in range(len(self._starts))]
        events[0] |= self._prompt_ids()
        return events

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompts[0]} if self._wants_ids else {}

    def _piece(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(self, deltas: Sequence[OutputDelta], num_sent: int) -> dict[str, Any]:
        del num_sent  # chat has no offsets
        return {"content": chat_logprobs(self._tokenizer, deltas), "refusal": None}
