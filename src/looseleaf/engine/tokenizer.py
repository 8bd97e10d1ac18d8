"""What engine and server ask of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text to token ids and back. Safe to call from several threads."""

    @property
    def chat_stops(self) -> tuple[str, ...]:
        """Strings that end an assistant's turn, where the template marks turns by text and not by tokens."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with `add_special_tokens` what the model expects at the start (BOS) is added."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are no whole character yet come out as U+FFFD."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a conversation in the model's chat template (a plain default one where it has none). `tools`:
        what the template may show as callable, each `{"type": "function", "function": {...}}`; some templates ignore
        it.

        Raises:
            RequestError: the template refuses these messages.
        """
