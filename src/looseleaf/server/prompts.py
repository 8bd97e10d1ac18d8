"""From bodies to token ids. Rendering and tokenizing run in worker threads: a long text must not hold up the
event loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool

from looseleaf.engine.tokenizer import Tokenizer
from looseleaf.server.conversations import Mark, Turn, render, stable_prefix
from looseleaf.server.errors import ApiError
from looseleaf.server.schemas.cache import PromptBody
from looseleaf.server.schemas.chat import CacheControl, ChatMessage


@dataclass(frozen=True)
class Prompt:
    """One prompt. `text` is what the client sent, None where it sent tokens."""

    tokens: list[int]
    text: str | None

    def as_text(self, tokenizer: Tokenizer) -> str:
        """The text, decoded if need be."""
        return tokenizer.decode(self.tokens) if self.text is None else self.text


@dataclass(frozen=True)
class MarkedPlace:
    """A place in a conversation that carries a `cache_control`."""

    mark: Mark
    control: CacheControl


async def completion_prompts(
    tokenizer: Tokenizer, prompt: str | list[str] | list[int] | list[list[int]]
) -> list[Prompt]:
    """The prompts of a completion body.

    Raises:
        ApiError: 400, there is none.
    """
    if isinstance(prompt, str):
        return [await text_prompt(tokenizer, prompt)]
    if not prompt:
        raise ApiError("prompt is an empty list\nhint: give a text or token ids", code="invalid_value", param="prompt")
    prompts: list[Prompt] = []
    whole: list[int] = []
    for item in prompt:
        if isinstance(item, str):
            prompts.append(await text_prompt(tokenizer, item))
        elif isinstance(item, int):
            whole.append(item)
        else:
            prompts.append(Prompt(item, None))
    return prompts or [Prompt(whole, None)]


async def text_prompt(tokenizer: Tokenizer, text: str) -> Prompt:
    """Tokenize a text as the start of a sequence."""
    return Prompt(await run_in_threadpool(tokenizer.encode, text), text)


async def chat_prompt(tokenizer: Tokenizer, turns: Sequence[Turn]) -> list[int]:
    """Token ids of a chat request."""
    return await run_in_threadpool(render, tokenizer, turns)


def turns_of(messages: Sequence[ChatMessage]) -> list[Turn]:
    """Messages as turns; content that is absent is an empty text."""
    turns = []
    for message in messages:
        content = message.content
        texts = [content or ""] if content is None or isinstance(content, str) else [part.text for part in content]
        turns.append(Turn(message.role, tuple(texts), dict(message.model_extra or {})))
    return turns


def marked_places(messages: Sequence[ChatMessage]) -> list[MarkedPlace]:
    """Where the messages ask to be kept, in order."""
    places = []
    for index, message in enumerate(messages):
        parts = message.content if isinstance(message.content, list) else []
        for part_index, part in enumerate(parts):
            if part.cache_control is not None:
                places.append(MarkedPlace(Mark(index, part_index), part.cache_control))
        if message.cache_control is not None:
            places.append(MarkedPlace(Mark(index, max(0, len(parts) - 1)), message.cache_control))
    return places


async def prompt_to_match(tokenizer: Tokenizer, body: PromptBody) -> list[int]:
    """The prompt of a body as a generation request would send it: a conversation as if its answer were asked
    for.

    Raises:
        ApiError: 400, not exactly one of `tokens`, `text`, `messages` is given.
    """
    _check_one_source(body)
    if body.messages is not None:
        return await chat_prompt(tokenizer, turns_of(body.messages))
    return await _plain_tokens(tokenizer, body)


async def prompt_to_keep(tokenizer: Tokenizer, body: PromptBody) -> list[int]:
    """The prompt of a body as a prefix to keep: a conversation up to where every request that begins with it
    is the same.

    Raises:
        ApiError: 400, not exactly one of `tokens`, `text`, `messages` is given.
    """
    _check_one_source(body)
    if body.messages is not None:
        return await run_in_threadpool(stable_prefix, tokenizer, turns_of(body.messages))
    return await _plain_tokens(tokenizer, body)


async def _plain_tokens(tokenizer: Tokenizer, body: PromptBody) -> list[int]:
    if body.text is not None:
        return (await text_prompt(tokenizer, body.text)).tokens
    return body.tokens or []


def _check_one_source(body: PromptBody) -> None:
    given = [name for name in ("tokens", "text", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        what = " and ".join(given) if given else "none of them"
        raise ApiError(f"give exactly one of tokens, text, messages; got {what}", code="invalid_value", param="tokens")
    if body.messages is not None and not body.messages:
        raise ApiError("messages is an empty list", code="invalid_value", param="messages")
