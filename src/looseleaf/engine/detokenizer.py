"""Token ids to text, one token at a time, never a part of a character.

A token alone often has no text of its own: byte-level tokens hold parts of a UTF-8 character, and
sentencepiece-like tokens show their leading space only after another token. So new tokens are decoded behind
a short *window* of tokens that were given out before, and what they add to the window's text is their text:

    prompt tail / given out          new
    [ window ....................)[ pending ........)     text = decode(window + pending) - decode(window)

Pending tokens are given out together as soon as that text does not end inside a character.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from looseleaf.engine.tokenizer import Tokenizer

_PARTIAL = "\ufffd"
_NUM_WINDOW_TOKENS = 6
_MAX_CHARACTER_TOKENS = 4
_MAX_PENDING_TOKENS = 16


class TextPiece(NamedTuple):
    """Text that whole tokens make: the next `num_tokens` of the sequence read `text`."""

    num_tokens: int
    text: str


class Detokenizer:
    """State of one sequence. Cost per token: two `decode` calls over a few tokens."""

    __slots__ = ("_pending", "_tokenizer", "_window", "_window_text")

    def __init__(self, tokenizer: Tokenizer, prompt_tail: Sequence[int]) -> None:
        """`prompt_tail`: the last tokens of the prompt, of which a few serve as the first window."""
        self._tokenizer = tokenizer
        self._pending: list[int] = []
        self._window: list[int] = [int(token) for token in prompt_tail[-_NUM_WINDOW_TOKENS:]]
        self._window_text = tokenizer.decode(self._window) if self._window else ""
        if self._window_text.endswith(_PARTIAL):
            # The prompt ends inside a character; what follows must not be measured against half of it.
            self._window, self._window_text = [], ""

    def push(self, token_id: int) -> TextPiece | None:
        """Add a token; the piece that is whole now, or None while a character is open."""
        self._pending.append(token_id)
        text = self._pending_text()
        if not text.endswith(_PARTIAL):
            return self._take(len(self._pending), text)
        if len(self._pending) >= _MAX_PENDING_TOKENS:
            return self._take_what_cannot_change(text)
        return None

    def flush(self) -> TextPiece | None:
        """Give out what is pending, open characters as U+FFFD; None if nothing is."""
        if not self._pending:
            return None
        return self._take(len(self._pending), self._pending_text())

    def _pending_text(self) -> str:
        return self._tokenizer.decode(self._window + self._pending)[len(self._window_text) :]

    def _take(self, num_tokens: int, text: str) -> TextPiece:
        taken = self._pending[:num_tokens]
        del self._pending[:num_tokens]
        if text:
            self._window = taken[-_NUM_WINDOW_TOKENS:]
        else:  # special tokens without text: a window of them alone would hide the next leading space
            self._window = (self._window + taken)[-2 * _NUM_WINDOW_TOKENS :]
        self._window_text = self._tokenizer.decode(self._window)
        return TextPiece(num_tokens, text)

    def _take_what_cannot_change(self, text: str) -> TextPiece | None:
        """Bytes that will never be a character, without those at the end that still may become one."""
        for num_tokens in range(len(self._pending) - _MAX_CHARACTER_TOKENS + 1, 0, -1):
            head = self._tokenizer.decode(self._window + self._pending[:num_tokens])[len(self._window_text) :]
            rest = self._tokenizer.decode(self._pending[num_tokens:])
            if head + rest == text:
                return self._take(num_tokens, head)
        return None
