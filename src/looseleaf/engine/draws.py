"""The random numbers of one sequence, made many at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_NUM_AHEAD = 64
_WORDS_PER_COUNTER = 4
"""Philox makes four 64-bit words per counter value; `sampling.draw_uniform` takes the first of them."""


class UniformDraws:
    """`at(position)` equals `sampling.draw_uniform(seed, position)`, but one generator (it takes 10 µs or more to make)
    serves 64 positions in a row: Philox counts up by one for each four words (Salmon et al., "Parallel random numbers:
    as easy as 1, 2, 3", SC 2011)."""

    __slots__ = ("_first_position", "_key", "_uniforms")

    def __init__(self, seed: int) -> None:
        self._key = seed & (2**64 - 1)
        self._first_position = 0
        self._uniforms: npt.NDArray[np.float64] = np.zeros(0)

    def at(self, position: int) -> float:
        """The random number in [0, 1) of the draw at `position`."""
        index = position - self._first_position
        if not 0 <= index < len(self._uniforms):
            generator = np.random.Generator(np.random.Philox(key=self._key, counter=position))
            self._uniforms = generator.random(_NUM_AHEAD * _WORDS_PER_COUNTER)[::_WORDS_PER_COUNTER]
            self._first_position, index = position, 0
        return float(self._uniforms[index])
