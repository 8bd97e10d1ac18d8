"""One text in two tokenisations: the tokens that were generated, and those that their text becomes.

A model may spell a word with other tokens than the tokenizer would. Sent back as text, its answer is tokenised anew,
and what is cached of it would not match. So a prompt that goes on from an earlier sequence takes that sequence's tokens
as far as their text is the same, up to a place where both have whole tokens:

    rendered   [ same tokens )[ same text, other tokens )[ same tokens )[ what is new ...)
    earlier    [ ............)[ ...... as generated ....)[ ............)[ text that differs, or nothing more
    exact      [ ........... the earlier sequence's tokens ............)[ the rendered tokens ...)
                              ^ a seam .................^
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from looseleaf.engine.request import as_token_array
from looseleaf.engine.tokenizer import Tokenizer
from looseleaf.ids import Int32Array

_PARTIAL = "\ufffd"
_NUM_CONTEXT_TOKENS = 8
_MAX_SEAM_TOKENS = 256
"""Longer stretches without a common end of tokens are given up: decoding them again and again costs too much."""
_NUM_COMPARED_TOKENS = 16


@dataclass(frozen=True)
class Seam:
    """Tokens `exact_start : exact_end` of one tokenisation and `rendered_start : rendered_end` of the other have the
    same text and not the same ids."""

    exact_start: int
    rendered_start: int
    exact_end: int
    rendered_end: int


@dataclass(frozen=True, eq=False)
class ExactPrompt:
    """A prompt as it is computed: `tokens`, int32 [n]. `rendered`: the tokens that its text has by itself; both are the
    same but for `seams`, in order. The first `num_kept_tokens` are those of the sequence that it goes on from."""

    tokens: Int32Array
    rendered: Int32Array
    seams: tuple[Seam, ...] = ()
    num_kept_tokens: int = 0

    @classmethod
    def of(cls, rendered: Int32Array | Sequence[int]) -> ExactPrompt:
        """A prompt that goes on from nothing.

        Raises:
            InvalidTokens: it is empty, or holds what is no token id.
        """
        tokens = as_token_array(rendered)
        return cls(tokens, tokens)

    def num_exact_tokens(self, num_rendered_tokens: int) -> int:
        """How many tokens have the text of the first `num_rendered_tokens` rendered ones; if those end inside a seam,
        of what is before it."""
        return self._up_to(num_rendered_tokens)[0]

    def _up_to(self, num_rendered: int) -> tuple[int, int, list[Seam]]:
        """The last place at or before `num_rendered` where both have whole tokens, and the seams before it."""
        kept = [seam for seam in self.seams if seam.rendered_end <= num_rendered]
        for seam in self.seams[len(kept) : len(kept) + 1]:
            if seam.rendered_start < num_rendered:
                return seam.exact_start, seam.rendered_start, kept
        moved = kept[-1].exact_end - kept[-1].rendered_end if kept else 0
        return num_rendered + moved, num_rendered, kept

    def go_on(self, tokenizer: Tokenizer, generated: Int32Array, rendered: Int32Array) -> ExactPrompt:
        """The prompt that `rendered` (int32 [m]) is, with the tokens of this one and of what was `generated` after it
        as far as its text goes on with theirs. Decodes only where ids differ."""
        earlier = np.concatenate((self.tokens, generated))
        at, there, seams = self._up_to(num_common_tokens(self.rendered, rendered))
        while True:
            num_equal = num_common_tokens(earlier[at:], rendered[there:])
            at, there = at + num_equal, there + num_equal
            seam = _next_seam(tokenizer, earlier, at, rendered, there)
            if seam is None:
                break
            seams.append(seam)
            at, there = seam.exact_end, seam.rendered_end
        if not seams:
            return ExactPrompt(rendered, rendered, (), at)
        tokens = np.concatenate((earlier[:at], rendered[there:]))
        tokens.setflags(write=False)
        return ExactPrompt(tokens, rendered, tuple(seams), at)


def num_common_tokens(tokens: Int32Array, others: Int32Array) -> int:
    """Length of the common prefix."""
    num_tokens = min(len(tokens), len(others))
    if num_tokens == 0 or tokens[0] != others[0]:
        return 0
    differs = tokens[:num_tokens] != others[:num_tokens]
    first = int(differs.argmax())
    return first if differs[first] else num_tokens


def texts_agree(tokenizer: Tokenizer, tokens: Int32Array, others: Int32Array, start: int) -> bool:
    """True if what two sequences with the same first `start` tokens say next is the same text, as far as both go on;
    of whole characters among their next few tokens."""
    ours, theirs = (
        tokenizer.decode(side[start : start + _NUM_COMPARED_TOKENS].tolist(), skip_special_tokens=False)
        for side in (tokens, others)
    )
    num_characters = min(len(ours.rstrip(_PARTIAL)), len(theirs.rstrip(_PARTIAL)))
    return num_characters > 0 and ours[:num_characters] == theirs[:num_characters]


class _Reader:
    """Reads a sequence on from `start`: `text` is that of tokens `start : end`, special tokens included."""

    def __init__(self, tokenizer: Tokenizer, tokens: Int32Array, start: int) -> None:
        self._tokenizer = tokenizer
        self._context = max(0, start - _NUM_CONTEXT_TOKENS)
        self._tokens = tokens[self._context : start + _MAX_SEAM_TOKENS].tolist()
        self._before = self._decode(start)
        self.end, self.text = start, ""
        self.is_over = self._before.endswith(_PARTIAL)  # it would begin inside a character

    def _decode(self, end: int) -> str:
        return self._tokenizer.decode(self._tokens[: end - self._context], skip_special_tokens=False)

    def read_on(self) -> None:
        """Take in the next token; `is_over` is True if there is none or the text is broken."""
        if self.end - self._context == len(self._tokens):
            self.is_over = True
            return
        self.end += 1
        self.text = self._decode(self.end)[len(self._before) :]
        self.is_over = _PARTIAL in self.text.rstrip(_PARTIAL)


def _next_seam(tokenizer: Tokenizer, exact: Int32Array, at: int, rendered: Int32Array, there: int) -> Seam | None:
    """The seam that begins at these places; None if the text differs before both have whole tokens again, or one side
    ends first."""
    ours, theirs = _Reader(tokenizer, exact, at), _Reader(tokenizer, rendered, there)
    while not (ours.is_over or theirs.is_over):
        mine, its = ours.text.rstrip(_PARTIAL), theirs.text.rstrip(_PARTIAL)
        if not (mine.startswith(its) or its.startswith(mine)):
            return None
        if ours.text == theirs.text == mine != "":
            return Seam(at, there, ours.end, theirs.end)
        (ours if len(mine) <= len(its) else theirs).read_on()
    return None
