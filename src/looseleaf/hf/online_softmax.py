"""Softmax over keys that come in tiles: exponentials against the largest score so far. Needs numba (extra `hf`).

Milakov and Gimelshein 2018, "Online normalizer calculation for softmax". Scores are in units of log 2.
"""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np

LOG2_E: Final = 1.4426950408889634

LEAST: Final = -1e30
"""Below every score; infinity would make NaN of differences."""

MATH: Final = {"reassoc", "contract", "nsz", "arcp"}
"""Sums in any order and fused, but NaN as it is: a token that must not be read shows in the result."""


@numba.njit(fastmath=MATH, error_model="numpy")
def exponentials(scores: Any, bits: Any, powers: Any, largest: Any) -> Any:
    """scores[i] = 2 ** (scores[i] - largest), at most 1; gives their sum. `powers` is `bits` seen as float32.

    The polynomial is that of Cephes (`exp2f`), good to 2e-7.
    """
    total = np.float32(0.0)
    for i in range(len(scores)):
        x = max(scores[i] - largest, np.float32(-126.0))
        whole = np.floor(x + np.float32(0.5))
        bits[i] = (np.int32(whole) + np.int32(127)) << np.int32(23)
        f = x - whole
        p = np.float32(1.535336188319500e-4) * f + np.float32(1.339887440266574e-3)
        p = p * f + np.float32(9.618437357674640e-3)
        p = p * f + np.float32(5.550332471162809e-2)
        p = p * f + np.float32(2.402264791363012e-1)
        p = p * f + np.float32(6.931472028550421e-1)
        scores[i] = p * f + np.float32(1.0)
    for i in range(len(scores)):
        scores[i] *= powers[i]
        total += scores[i]
    return total


@numba.njit(fastmath=MATH, error_model="numpy")
def weigh(line: Any, cap: Any, bits: Any, powers: Any, sums: Any, largest: Any, total: Any) -> Any:
    """Scores `line` of one row to weights, in place; its `sums` so far to the same scale. `cap`: soft cap, or 0.

    Gives the row's largest score and total of weights, both so far.
    """
    if cap > 0:
        for k in range(len(line)):
            line[k] = np.float32(LOG2_E) * cap * np.tanh(line[k])
    top = largest
    for k in range(len(line)):
        top = max(top, line[k])
    added = exponentials(line, bits, powers, top)
    if top > largest:
        factor = np.float32(2.0) ** max(largest - top, np.float32(-126.0))
        total *= factor
        for d in range(len(sums)):
            sums[d] *= factor
    return top, total + added
