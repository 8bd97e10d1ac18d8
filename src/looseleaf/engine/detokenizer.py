"""Token ids to text, one token at a time, never a part of a character.

A token alone often has no text of its own: byte-level tokens hold parts of a UTF-8 character, and sentencepiece-like
tokens show their leading space only after another token. So new tokens are decoded behind a short *window* of tokens
given out before, and what they add to the window's text is their text:

    prompt tail / given out          new
    [ window ....................)[ pending ........)     text = decode(window + pending) - decode(window)

Pending tokens are given out together as soon as that text does not end inside a character. They join the window, whose
text is then known without decoding; only when it has become long is it cut and decoded anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from looseleaf.engine.tokenizer import Tokenizer

_PARTIAL = "\ufffd"
_NUM_WINDOW_TOKENS = 6
_MAX_WINDOW_TOKENS = 24
_MAX_CHARACTER_TOKENS = 4
_MAX_PENDING_TOKENS = 16


class TextPiece(NamedTuple):
    """Text that whole tokens make: the next `num_tokens` of the sequence read `text`."""

    num_tokens: int
    text: str


class Detokenizer:
    """State of one sequence. Cost per token: little more than one `decode` call over at most some 30 tokens. Made
    without the tokenizer, which others may hold: it is asked first when there is a token."""

    __slots__ = ("_is_begun", "_pending", "_tokenizer", "_window", "_window_text")

    def __init__(self, tokenizer: Tokenizer, prompt_tail: Sequence[int]) -> None:
        """`prompt_tail`: the last tokens of the prompt, of which a few serve as the first window."""
        self._tokenizer = tokenizer
        self._pending: list[int] = []
        self._window: list[int] = [int(token) for token in prompt_tail[-_NUM_WINDOW_TOKENS:]]
        self._window_text = ""
        self._is_begun = not self._window

    def _begin(self) -> None:
        self._is_begun = True
        self._window_text = self._tokenizer.decode(self._window)
        if self._window_text.endswith(_PARTIAL):
            # The prompt ends inside a character; what follows must not be measured against half of it.
            self._window, self._window_text = [], ""

    def push(self, token_id: int) -> TextPiece | None:
        """Add a token; the piece that is whole now, or None while a character is open."""
        if not self._is_begun:
            self._begin()
        self._pending.append(token_id)
        text = self._tokenizer.decode(self._window + self._pending)
        if not text.endswith(_PARTIAL):
            return self._take_all(text)
        if len(self._pending) >= _MAX_PENDING_TOKENS:
            return self._take_what_cannot_change(text)
        return None

    def flush(self) -> TextPiece | None:
        """Give out what is pending, open characters as U+FFFD; None if nothing is."""
        return self._take_all(self._tokenizer.decode(self._window + self._pending)) if self._pending else None

    def _take_all(self, text: str) -> TextPiece:
        """Give out all that is pending; `text` is that of window and pending tokens."""
        piece = TextPiece(len(self._pending), text[len(self._window_text) :])
        self._window += self._pending
        self._window_text = text
        self._pending = []
        if len(self._window) > _MAX_WINDOW_TOKENS:
            self._cut_window()
        return piece

    def _cut_window(self) -> None:
        """Keep the last tokens that make whole characters; special ones alone would hide the next leading space."""
        shortest = len(self._window) - _NUM_WINDOW_TOKENS
        for start in (*range(shortest, 0, -1), shortest):  # the last one if none is good
            window = self._window[start:]
            text = self._tokenizer.decode(window)
            if text and not text.startswith(_PARTIAL) and self._window_text.endswith(text):
                break
        self._window, self._window_text = window, text

    def _take_what_cannot_change(self, text: str) -> TextPiece | None:
        """Bytes that will never be a character, without those at the end that still may become one."""
        for num_tokens in range(len(self._pending) - _MAX_CHARACTER_TOKENS + 1, 0, -1):
            head = self._tokenizer.decode(self._window + self._pending[:num_tokens])
            if head + self._tokenizer.decode(self._pending[num_tokens:]) == text:
                rest = self._pending[num_tokens:]
                del self._pending[num_tokens:]
                piece = self._take_all(head)
                self._pending = rest
                return piece
        return None
