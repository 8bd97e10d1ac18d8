"""Stop strings: found across token boundaries, never streamed, not even in part.

Text is held back as long as its end could be the beginning of a stop string, and the tokens of held text are
held back with it. The earliest *end* of a stop string decides, as if text came one character at a time: so
the result does not depend on how the text was cut into tokens.
"""

from __future__ import annotations

from looseleaf.engine.detokenizer import TextPiece


class StopMatcher:
    """State of one sequence. Cost per piece: proportional to the held text, which is shorter than the longest
    stop string plus one piece."""

    __slots__ = ("_held", "_held_text", "_stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held: list[TextPiece] = []
        self._held_text = ""

    @property
    def num_held_tokens(self) -> int:
        """Tokens whose text waits."""
        return sum(piece.num_tokens for piece in self._held)

    def push(self, piece: TextPiece) -> tuple[TextPiece, bool]:
        """Add a piece; what may be given out now (perhaps 0 tokens), and whether a stop string is complete.

        When it is, the text given out ends right before the stop string; a token in which it begins is
        included, later ones are not, and nothing more may be pushed.
        """
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
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = self._held_text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
        return None if best is None else best[1]

    def _num_open_characters(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        text = self._held_text
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _release(self, num_characters: int) -> TextPiece:
        """Give out the held pieces that lie wholly in the first `num_characters`."""
        num_pieces = num_tokens = end = 0
        for piece in self._held:
            if end + len(piece.text) > num_characters:
                break
            end += len(piece.text)
            num_pieces += 1
            num_tokens += piece.num_tokens
        text = self._held_text[:end]
        self._held = self._held[num_pieces:]
        self._held_text = self._held_text[end:]
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
        self._held, self._held_text = [], ""
        return given
