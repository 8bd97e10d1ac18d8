"""From bodies to token ids. Rendering and tokenizing run in worker threads: a long text must not hold up the event
loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.concurrency import run_in_threadpool

from looseleaf.engine.tokenizer import Tokenizer
from looseleaf.server.conversations import Mark, Turn
from looseleaf.server.errors import ApiError
from looseleaf.server.schemas import CacheControl, ChatMessage, PromptBody


def turns_of(messages: Sequence[ChatMessage]) -> list[Turn]:
    """Messages as turns; content that is absent is an empty text."""
    turns = []
    for message in messages:
        content = message.content
        texts = [part.text for part in content] if isinstance(content, list) else [content or ""]
        turns.append(Turn(message.role, tuple(texts), dict(message.model_extra or {})))
    return turns


def marked_places(messages: Sequence[ChatMessage]) -> dict[Mark, CacheControl]:
    """Where the messages ask to be kept, in order. A message's own mark is that of its end."""
    places = {}
    for index, message in enumerate(messages):
        parts = message.content if isinstance(message.content, list) else []
        for part_index, part in enumerate(parts):
            if part.cache_control is not None:
                places[Mark(index, part_index)] = part.cache_control
        if message.cache_control is not None:
            places[Mark(index, max(0, len(parts) - 1))] = message.cache_control
    return places


async def prompt_tokens(
    tokenizer: Tokenizer, body: PromptBody, conversation_tokens: Callable[[Tokenizer, Sequence[Turn]], list[int]]
) -> list[int]:
    """The prompt of a body; a conversation as `conversation_tokens` gives it (`render` or `stable_prefix`).

    Raises:
        ApiError: 400, not exactly one of `tokens`, `text`, `messages` is given.
    """
    if len(body.sources) != 1:
        given = " and ".join(body.sources) or "none of them"
        message = f"give exactly one of tokens, text, messages; got {given}"
        raise ApiError(message, code="invalid_value", param="tokens")
    if body.messages is not None:
        return await run_in_threadpool(conversation_tokens, tokenizer, turns_of(body.messages))
    if body.text is not None:
        return await run_in_threadpool(tokenizer.encode, body.text)
    return body.tokens or []
