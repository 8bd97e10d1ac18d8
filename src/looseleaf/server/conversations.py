"""Conversations as token ids, and which of these tokens stay the same when the conversation goes on.

A chat template decides what a message looks like in context (some put the system text into the first user
turn, some drop thoughts from old turns), so the tokens of `messages[:k]` are not simply the first tokens of
`messages`. What *is* common is found by trying: render the conversation with two different continuations, and
take the prefix on which all renderings agree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from looseleaf.errors import RequestError

_PROBES = ("a", "7")
_RARE = "\u00a7"  # a character with which no template goes on after a text, and that merges with none before it


class ChatRenderer(Protocol):
    """What turns messages into token ids: a tokenizer, or one to which the request's tools were given."""

    def render_chat(self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True) -> list[int]:
        """As `Tokenizer.render_chat`."""


@dataclass(frozen=True)
class Turn:
    """One message: its text in parts, and what else the template may want to know (`extra`)."""

    role: str
    parts: tuple[str, ...]
    extra: Mapping[str, object] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Its parts, joined by a newline."""
        return "\n".join(self.parts)

    def as_message(self) -> dict[str, object]:
        """The message as chat templates expect it."""
        return {"role": self.role, "content": self.text, **self.extra}


@dataclass(frozen=True)
class Mark:
    """A place in a conversation: the end of part `part` of turn `turn`."""

    turn: int
    part: int


def render(renderer: ChatRenderer, turns: Sequence[Turn]) -> list[int]:
    """Token ids of a request that asks for the next answer.

    Raises:
        RequestError: the template refuses these messages.
    """
    return renderer.render_chat([turn.as_message() for turn in turns], add_generation_prompt=True)


def stable_prefix(renderer: ChatRenderer, turns: Sequence[Turn]) -> list[int]:
    """The tokens with which every request begins whose conversation begins with `turns`. Costs two or three renderings.

    Raises:
        RequestError: the template refuses these messages with every continuation.
    """
    answers = turns[-1].role in ("user", "tool", "function")
    role = "assistant" if answers else "user"
    renderings = _renderings(renderer, [[*turns, Turn(role, (probe,))] for probe in _PROBES])
    if answers:
        renderings.append(render(renderer, turns))
    if not renderings:
        renderings.append(_render_history(renderer, turns))
    return common_prefix(renderings)


def prefix_up_to(renderer: ChatRenderer, turns: Sequence[Turn], mark: Mark, prompt: list[int]) -> list[int]:
    """The tokens of `prompt` (= `render(turns)`) up to the end of the part that `mark` names, without what the template
    writes behind it, as far as they do not depend on what comes later. Costs three or four renderings."""
    before, turn, after = turns[: mark.turn], turns[mark.turn], turns[mark.turn + 1 :]
    kept, rest = turn.parts[: mark.part + 1], turn.parts[mark.part + 1 :]
    renderings = [prompt]
    with contextlib.suppress(RequestError):  # that the conversation may not end there does not matter
        if rest:
            variants = [[*before, replace(turn, parts=(*kept, probe))] for probe in _PROBES]
            renderings += _renderings(renderer, variants)
        else:
            renderings.append(stable_prefix(renderer, [*before, turn]))
    if kept and kept[-1]:  # a longer part moves all that is behind it
        longer = replace(turn, parts=(*kept[:-1], kept[-1] + _RARE, *rest))
        renderings.append(render(renderer, [*before, longer, *after]))
    return common_prefix(renderings)


def _renderings(renderer: ChatRenderer, conversations: Sequence[Sequence[Turn]]) -> list[list[int]]:
    """Renderings of those that the template accepts."""
    renderings = []
    for turns in conversations:
        with contextlib.suppress(RequestError):
            renderings.append(_render_history(renderer, turns))
    return renderings


def _render_history(renderer: ChatRenderer, turns: Sequence[Turn]) -> list[int]:
    return renderer.render_chat([turn.as_message() for turn in turns], add_generation_prompt=False)


def common_prefix(sequences: Sequence[list[int]]) -> list[int]:
    """The longest list with which all of them begin."""
    shortest = min(len(sequence) for sequence in sequences)
    table = np.array([sequence[:shortest] for sequence in sequences], dtype=np.int64)
    differs = np.flatnonzero((table != table[0]).any(axis=0))
    return sequences[0][: int(differs[0]) if differs.size else shortest]
