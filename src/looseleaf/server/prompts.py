"""From bodies to token ids. Rendering and tokenizing run in worker threads: a long text must not hold up the event
loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool

from looseleaf.ids import Namespace
from looseleaf.server.auth import Caller
from looseleaf.server.context import ServerContext
from looseleaf.server.conversations import ChatRenderer, Mark, Turn, common_prefix, prefix_up_to, render, stable_prefix
from looseleaf.server.errors import ApiError
from looseleaf.server.layers import Placement, layers_of
from looseleaf.server.past_turns import ContinuedPrompt, Conversation
from looseleaf.server.schemas import CacheControl, ChatBody, ChatMessage, PromptBody
from looseleaf.server.tools import renderer_for, with_parsed_arguments


@dataclass(frozen=True, eq=False)
class ChatPrompt:
    """A conversation that asks for an answer. `continued`: its tokens, and what they go on from."""

    renderer: ChatRenderer
    turns: Sequence[Turn]
    rendered: list[int]
    continued: ContinuedPrompt

    @property
    def tokens(self) -> list[int]:
        """The tokens to compute."""
        tokens: list[int] = self.continued.prompt.tokens.tolist()
        return tokens

    def tokens_up_to(self, mark: Mark) -> list[int]:
        """Those of `tokens` that reach up to a mark and do not depend on what comes after it. Costs a few
        renderings."""
        prefix = prefix_up_to(self.renderer, self.turns, mark, self.rendered)
        return self.tokens[: self.continued.prompt.num_exact_tokens(len(prefix))]

    def num_tokens_of(self, num_messages: int) -> int:
        """How many of `tokens` are the first so many messages in every prompt that begins with them.

        Raises:
            ApiError: 400, there are fewer messages.
        """
        if num_messages > len(self.turns):
            message = f"cache_layers: {num_messages} messages are meant, there are {len(self.turns)}"
            raise ApiError(message, code="invalid_value", param="cache_layers")
        prefix = common_prefix([stable_prefix(self.renderer, self.turns[:num_messages]), self.rendered])
        return self.continued.prompt.num_exact_tokens(len(prefix))


@dataclass(frozen=True)
class PlacedPrompt:
    """A prompt, and where its tokens belong."""

    tokens: list[int]
    placement: Placement


def chat_prompt(context: ServerContext, body: ChatBody, namespace: Namespace, session: str | None) -> ChatPrompt:
    """The prompt of a conversation, with the very tokens of an earlier request where it goes on from one.

    Raises:
        RequestError: the template refuses these messages.
        ApiError: 400, it would not show tools or tool calls.
    """
    turns = turns_of(body.messages)
    renderer = renderer_for(context.tokenizer, turns, body.tools)
    rendered = render(renderer, turns)
    past_turns = context.past_turns if body.reuse is not False else context.no_past_turns
    continued = past_turns.go_on(Conversation(turns, body.tools or (), namespace, session), rendered)
    return ChatPrompt(renderer, turns, rendered, continued)


def turns_of(messages: Sequence[ChatMessage]) -> list[Turn]:
    """Messages as turns; content that is absent is an empty text.

    Raises:
        ApiError: 400, a tool call is none.
    """
    turns = []
    for index, message in enumerate(messages):
        content = message.content
        texts = [part.text for part in content] if isinstance(content, list) else [content or ""]
        turns.append(Turn(message.role, tuple(texts), with_parsed_arguments(message.model_extra or {}, index)))
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


async def placed_prompt(
    context: ServerContext,
    caller: Caller,
    body: PromptBody,
    conversation_tokens: Callable[[ChatRenderer, Sequence[Turn]], list[int]],
) -> PlacedPrompt:
    """The prompt of a body; a conversation as `conversation_tokens` gives it (`render` or `stable_prefix`), with the
    tokens that a request of it would have.

    Raises:
        ApiError: 400, not exactly one of `tokens`, `text`, `messages` is given, tools without messages, or layers that
            cannot be.
    """
    if len(body.sources) != 1:
        given = " and ".join(body.sources) or "none of them"
        message = f"give exactly one of tokens, text, messages; got {given}"
        raise ApiError(message, code="invalid_value", param="tokens")
    if body.tools and body.messages is None:
        raise ApiError("tools are shown in a conversation: give messages", code="invalid_value", param="tools")
    namespace = caller.namespace(body.cache_salt)
    if body.messages is not None:
        return await run_in_threadpool(_placed_conversation, context, caller, body, namespace, conversation_tokens)
    layers = layers_of(body.cache_layers, caller, context.settings)
    if body.text is not None:
        tokens = await run_in_threadpool(context.tokenizer.encode, body.text)
        return PlacedPrompt(tokens, Placement(namespace, layers))
    return PlacedPrompt(body.tokens or [], Placement(namespace, layers))


def _placed_conversation(
    context: ServerContext,
    caller: Caller,
    body: PromptBody,
    namespace: Namespace,
    conversation_tokens: Callable[[ChatRenderer, Sequence[Turn]], list[int]],
) -> PlacedPrompt:
    turns = turns_of(body.messages or [])
    renderer = renderer_for(context.tokenizer, turns, body.tools)
    rendered = conversation_tokens(renderer, turns)
    continued = context.past_turns.go_on(Conversation(turns, body.tools or (), namespace), rendered)
    asked = ChatPrompt(renderer, turns, rendered, continued)
    layers = layers_of(body.cache_layers, caller, context.settings, asked.num_tokens_of)
    return PlacedPrompt(asked.tokens, Placement(namespace, layers))
