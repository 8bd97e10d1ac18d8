"""Log-probabilities in the two shapes of the OpenAI API; joined token texts always equal the text they come with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from looseleaf.engine.request import OutputDelta
from looseleaf.engine.tokenizer import Tokenizer

_PARTIAL = "\ufffd"


def token_texts(tokenizer: Tokenizer, text: str, token_ids: Sequence[int]) -> list[str]:
    """`text` cut into one piece per token; joined, the pieces are `text` exactly.

    A token that completes no character gets the empty text, and the one that completes it gets the character.
    A leading space that `decode` drops stays with the first token; what a stop string cut off is missing from
    the last.
    """
    if len(token_ids) < 2:
        return [text] * len(token_ids)
    whole = tokenizer.decode(token_ids, skip_special_tokens=True)
    lead = 0 if text.startswith(whole[: len(text)]) or not text[1:].startswith(whole[: len(text) - 1]) else 1
    pieces: list[str] = []
    given = 0
    for num_tokens in range(1, len(token_ids) + 1):
        end = len(text)
        if num_tokens < len(token_ids):
            head = tokenizer.decode(token_ids[:num_tokens], skip_special_tokens=True)
            end = max(given, min(end, lead + len(head.rstrip(_PARTIAL))))
        pieces.append(text[given:end])
        given = end
    return pieces


def chat_logprobs(tokenizer: Tokenizer, deltas: Sequence[OutputDelta]) -> list[dict[str, Any]]:
    """The `content` list of a chat choice's `logprobs`."""
    entries = []
    for delta in deltas:
        for text, logprob in zip(token_texts(tokenizer, delta.text, delta.token_ids), delta.logprobs, strict=True):
            top = [
                _chat_entry(tokenizer.decode([token], skip_special_tokens=False), value)
                for token, value in zip(logprob.top_token_ids, logprob.top_logprobs, strict=True)
            ]
            entries.append({**_chat_entry(text, logprob.logprob), "top_logprobs": top})
    return entries


def _chat_entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}


def completion_logprobs(tokenizer: Tokenizer, deltas: Sequence[OutputDelta], text_offset: int) -> dict[str, Any]:
    """The `logprobs` of a completion choice. `text_offset`: characters of the choice before the first of these."""
    tokens: list[str] = []
    values: list[float] = []
    tops: list[dict[str, float]] = []
    offsets: list[int] = []
    for delta in deltas:
        for text, logprob in zip(token_texts(tokenizer, delta.text, delta.token_ids), delta.logprobs, strict=True):
            top: dict[str, float] = {}
            for token, value in zip(logprob.top_token_ids, logprob.top_logprobs, strict=True):
                top.setdefault(tokenizer.decode([token], skip_special_tokens=False), value)
            tokens.append(text)
            values.append(logprob.logprob)
            tops.append(top)
            offsets.append(text_offset)
            text_offset += len(text)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
