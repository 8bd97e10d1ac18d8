"""Tools in chat requests: checked, given to the chat template, and refused where the template would not show them.

What a model answers is given back as text; a client that wants tool calls out of it reads them itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from looseleaf.engine.tokenizer import Tokenizer
from looseleaf.errors import RequestError
from looseleaf.server.conversations import ChatRenderer, Turn
from looseleaf.server.errors import ApiError

_PROBE = Turn("user", ("a",))


class WithTools:
    """Renders conversations in which `tools` are offered; a `ChatRenderer`."""

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]]) -> None:
        self._tokenizer = tokenizer
        self._tools = tools

    def render_chat(self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True) -> list[int]:
        """As `Tokenizer.render_chat`, with the tools."""
        return self._tokenizer.render_chat(messages, tools=self._tools, add_generation_prompt=add_generation_prompt)


def renderer_for(
    tokenizer: Tokenizer, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] | None
) -> ChatRenderer:
    """What renders a conversation with these tools. Costs a few renderings of a line where there are tools or calls.

    Raises:
        ApiError: 400, the chat template shows the model no tools, or no tool calls of earlier turns.
    """
    renderer: ChatRenderer = WithTools(tokenizer, tools) if tools else tokenizer
    if tools and _render(renderer, [_PROBE]) == _render(tokenizer, [_PROBE]):
        raise _not_shown("tools", "tools", "describe them in a message")
    for turn in turns:
        if turn.extra.get("tool_calls"):
            bare = Turn(turn.role, turn.parts)
            if _render(tokenizer, [_PROBE, turn]) == _render(tokenizer, [_PROBE, bare]) is not None:
                raise _not_shown("messages", "tool calls of earlier turns", "write them into the content")
            break
    return renderer


def _render(renderer: ChatRenderer, turns: Sequence[Turn]) -> list[int] | None:
    try:
        return renderer.render_chat([turn.as_message() for turn in turns], add_generation_prompt=False)
    except RequestError:  # it wants other messages with it: the whole conversation will tell
        return None


def _not_shown(param: str, what: str, hint: str) -> ApiError:
    message = f"the chat template of this model does not show it {what}\nhint: {hint}"
    return ApiError(message, code="tools_not_shown", param=param)


def with_parsed_arguments(extra: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The fields of message `index`, in its `tool_calls` the arguments as objects: templates expect that, while clients
    send them as JSON in a string.

    Raises:
        ApiError: 400, a call has no function with a name, or arguments that are no JSON object.
    """
    calls = extra.get("tool_calls")
    if not calls:
        return dict(extra)
    parsed = []
    for place, call in enumerate(calls if isinstance(calls, list) else [calls]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _bad_call(index, place, "it needs a function with a name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError as error:
                raise _bad_call(index, place, f"its arguments are no JSON: {error}") from error
        if not isinstance(arguments, (dict, type(None))):
            raise _bad_call(index, place, "its arguments are no JSON object")
        parsed.append({**call, "function": {**function, "arguments": arguments or {}}})
    return {**extra, "tool_calls": parsed}


def _bad_call(index: int, place: int, problem: str) -> ApiError:
    return ApiError(f"messages.{index}.tool_calls.{place}: {problem}", code="invalid_value", param="messages")
