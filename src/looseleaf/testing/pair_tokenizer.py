"""A tokenizer that spells words with fewer tokens than a model would: for tests of what becomes of generated tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence

from looseleaf.testing.fake_tokenizer import FakeTokenizer

_A = ord("a")
_FIRST_PAIR = 260


class PairTokenizer(FakeTokenizer):
    """Two small letters in a row make one token; alone they are tokens too, so a text has many tokenisations. Each text
    is `decode` of its `encode`, but seldom the other way round."""

    vocab_size = _FIRST_PAIR + 26 * 26

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Pairs from the left; what is left over as bytes. After BOS if `add_special_tokens`."""
        tokens = [self.bos_token_id] if add_special_tokens else []
        for part in re.findall("[a-z]{2}|.", text, re.DOTALL):
            if re.fullmatch("[a-z]{2}", part):
                tokens.append(_FIRST_PAIR + 26 * (ord(part[0]) - _A) + ord(part[1]) - _A)
            else:
                tokens += part.encode()
        return tokens

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """As `FakeTokenizer.decode`, pairs as their letters."""
        spelt: list[int] = []
        for token in token_ids:
            if token < _FIRST_PAIR:
                spelt.append(token)
            else:
                first, second = divmod(token - _FIRST_PAIR, 26)
                spelt += (_A + first, _A + second)
        return super().decode(spelt, skip_special_tokens=skip_special_tokens)
