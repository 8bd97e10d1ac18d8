"""What the fake model computes, written down plainly: one token after the other, Python integers, no blocks.

`FakeRunner` computes the same through blocks; they share how a stamp follows from the one before it, and a token from a
stamp.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from looseleaf.engine.sampling import SamplingParams, draw_uniform
from looseleaf.ids import Int32Array

_MASK = 2**64 - 1
STAMP_FACTOR = 0x9E3779B97F4A7C15
"""By what a stamp is multiplied on the way to the next one."""


@dataclass(frozen=True)
class FakeModel:
    """A deterministic "language model": the next token is a function of the whole prefix and of nothing else."""

    vocab_size: int = 260
    eos_token_id: int = 257
    eos_every: int = 0
    alphabet: tuple[int, ...] | None = None

    def expected_tokens(
        self, prompt: Sequence[int] | Int32Array, num_tokens: int, params: SamplingParams, namespace: str = ""
    ) -> list[int]:
        """The first `num_tokens` tokens after `prompt`, fewer if the end token comes (included) and is not ignored.

        Raises:
            ValueError: a sampled request without a seed.
        """
        if params.seed is None and not params.is_greedy:
            raise ValueError("a sampled request without a seed has no expected tokens")
        prompt_tokens = [int(token) for token in prompt]
        stamp = namespace_stamp(namespace)
        for position, token in enumerate(prompt_tokens):
            stamp = next_stamp(stamp, token, position)
        generated: list[int] = []
        while len(generated) < num_tokens:
            position = len(prompt_tokens) + len(generated)
            uniform = None if params.seed is None or params.is_greedy else draw_uniform(params.seed, position)
            history = (prompt_tokens, generated) if params.needs_history else None
            token = fake_token(self, stamp, uniform, history)
            generated.append(token)
            if token == self.eos_token_id and not params.ignore_eos:
                break
            stamp = next_stamp(stamp, token, position)
        return generated


def namespace_stamp(namespace: str) -> int:
    """The stamp "before" the first token."""
    return zlib.crc32(namespace.encode()) * 0x9E3779B1 + 0x1234567


def fake_token(
    model: FakeModel, stamp: int, uniform: float | None, history: tuple[Sequence[int], Sequence[int]] | None
) -> int:
    """The token that follows a stamp; `uniform` of a sampled request and `history` of a penalized one change it."""
    mixed = _finish(stamp)
    if uniform is not None:
        mixed = _finish(mixed ^ int(uniform * 2**53))
    if history is not None:
        for tokens in history:
            mixed = _finish(mixed ^ zlib.crc32(repr([int(token) for token in tokens]).encode()))
    if model.eos_every and mixed % model.eos_every == 0:
        return model.eos_token_id
    mixed >>= 20
    if model.alphabet is not None:
        return model.alphabet[mixed % len(model.alphabet)]
    token = mixed % (model.vocab_size - 1)
    return token if token < model.eos_token_id else token + 1


def next_stamp(stamp: int, token: int, position: int) -> int:
    """The stamp of `token` at `position`, after that of the token before it."""
    mixed = ((token + 1) * 0xD6E8FEB86659FD93 & _MASK) ^ ((position + 1) * 0xA0761D6478BD642F & _MASK)
    mixed = (mixed ^ (mixed >> 32)) * 0xD6E8FEB86659FD93 & _MASK
    mixed ^= mixed >> 29
    return (stamp * STAMP_FACTOR + mixed) & _MASK


def _finish(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)
