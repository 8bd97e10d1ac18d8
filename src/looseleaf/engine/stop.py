"""Stop strings: found across token boundaries, never streamed, not even in part.

Text is held back, with its tokens, as long as its end could be the beginning of a stop string. The earliest *end* of a
stop string decides, as if text came one character at a time, so the cut into tokens does not matter.
"""

from __future__ import annotations

from collections import deque

from looseleaf.engine.detokenizer import TextPiece


class StopMatcher:
    """State of one sequence. The held text is shorter than the longest stop string plus one piece."""

    __slots__ = ("_held", "_held_text", "_stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held: deque[TextPiece] = deque()
        self._held_text = ""

    def push(self, piece: TextPiece) -> tuple[TextPiece, bool]:
        """Add a piece; what may be given out now (perhaps 0 tokens), and whether a stop string is complete. When it is,
        the text ends right before it, with the token in which it begins, and nothing more may be pushed."""
        if not self._stops:
            return piece, False
        self._held.append(piece)
        self._held_text += piece.text
        start = self._find_stop()
        if start is not None:
            return self._cut_at(start), True
        return self._release(len(self._held_text) - self._num_open_characters()), False

    def flush(self) -> TextPiece:
        """Give out everything held: the sequence ended and no stop string completed."""
        return self._release(len(self._held_text))

    def _find_stop(self) -> int | None:
        """Where the stop string that ends first begins (the longest of those that end there)."""
        found = [(self._held_text.find(stop), stop) for stop in self._stops]
        return min(((start + len(stop), start) for start, stop in found if start >= 0), default=(0, None))[1]

    def _num_open_characters(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        lengths = range(max(map(len, self._stops)) - 1, 0, -1)
        heads = (stop[:length] for length in lengths for stop in self._stops if length < len(stop))
        return next((len(head) for head in heads if self._held_text.endswith(head)), 0)

    def _release(self, num_characters: int) -> TextPiece:
        """Give out the held pieces that lie wholly in the first `num_characters`."""
        num_tokens = end = 0
        while self._held and end + len(self._held[0].text) <= num_characters:
            piece = self._held.popleft()
            end += len(piece.text)
            num_tokens += piece.num_tokens
        text, self._held_text = self._held_text[:end], self._held_text[end:]
        return TextPiece(num_tokens, text)

    def _cut_at(self, start: int) -> TextPiece:
        """Give out the text before `start` with the tokens that begin in it, and drop the rest."""
        num_tokens = position = 0
        for piece in self._held:
            if position >= start:
                break
            num_tokens += piece.num_tokens
            position += len(piece.text)
        given = TextPiece(num_tokens, self._held_text[:start])
        self._held.clear()
        self._held_text = ""
        return given
