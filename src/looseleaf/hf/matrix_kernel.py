"""Compiled product of some rows with a packed weight: the linear layers of a step. Needs numba (extra `hf`).

The weight [N, K] lies in panels (`register_tile`), [N / 16, K, 16], so that a step along K reads the next memory: with
few rows the time is that of reading the weight. A weight whose numbers are all bfloat16 numbers, as those of most
published models, is kept in 16 bits, half the reading, and widened in registers: no number changes.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

import numba
import numpy as np
from numba import types

from looseleaf.hf.compiled import NumbaError, address_of, pointer, take_next
from looseleaf.hf.register_tile import PANEL, TILE_ROWS, multiply_rows

__all__ = [
    "NUM_FIELDS",
    "PANEL",
    "TILE_ROWS",
    "Field",
    "NumbaError",
    "address_of",
    "multiply_bfloat16",
    "multiply_float32",
]


class Field(IntEnum):
    """Places in the int64 record: sizes, and addresses of arrays."""

    NEXT = 0
    NUM_WORK = 1
    ROWS = 2  # float32 [NUM_ROWS, K], a row ROW_STRIDE numbers after the other
    ROW_STRIDE = 3
    NUM_ROWS = 4
    K = 5
    PANELS = 6  # float32 or bfloat16 [NUM_PANELS, K, 16]
    NUM_PANELS = 7
    BIAS = 8  # float32 [16 * NUM_PANELS]
    OUTPUT = 9  # float32 [NUM_ROWS, N]
    N = 10
    BLOCK_ROWS = 11  # rows of a piece of work
    GROUP_PANELS = 12  # panels of a piece of work


NUM_FIELDS: Final = len(Field)


@numba.njit(error_model="numpy")
def _piece(a: Any, index: int, is_half: Any) -> None:
    """Piece number `index`: one block of rows by one group of panels, a panel with all of the block's rows in turn.

    `is_half` None: the weight is float32; else bfloat16.
    """
    depth, outputs, stride = a[Field.K], a[Field.N], 4 * a[Field.ROW_STRIDE]
    num_groups = (a[Field.NUM_PANELS] + a[Field.GROUP_PANELS] - 1) // a[Field.GROUP_PANELS]
    first_row, panel = index // num_groups * a[Field.BLOCK_ROWS], index % num_groups * a[Field.GROUP_PANELS]
    num_rows, stop = min(a[Field.BLOCK_ROWS], a[Field.NUM_ROWS] - first_row), panel + a[Field.GROUP_PANELS]
    stop, num_whole = min(stop, a[Field.NUM_PANELS]), outputs // PANEL
    rows, panel_bytes = a[Field.ROWS] + stride * first_row, (4 if is_half is None else 2) * PANEL * depth
    widest = 4 if num_rows == 1 else 2 if num_rows == 2 else 1
    while panel < stop:
        width = widest if panel + widest <= min(stop, num_whole) else 1
        panels, bias = a[Field.PANELS] + panel * panel_bytes, a[Field.BIAS] + 4 * PANEL * panel
        out = a[Field.OUTPUT] + 4 * (outputs * first_row + PANEL * panel)
        if panel < num_whole:
            multiply_rows(is_half, num_rows, width, rows, stride, panels, panel_bytes, depth, bias, 0, out, 4 * outputs)
        else:  # the last panel has outputs that nobody asked for
            whole = np.empty((num_rows, PANEL), dtype=np.float32)
            target = whole.ctypes.data
            multiply_rows(is_half, num_rows, 1, rows, stride, panels, panel_bytes, depth, bias, 0, target, 4 * PANEL)
            for r in range(num_rows):
                wanted = numba.carray(pointer(out + 4 * outputs * r, types.float32), (outputs - PANEL * panel,))
                wanted[:] = whole[r, : len(wanted)]
        panel += width


def multiply_float32(record: Any) -> None:
    """Body of a parallel region: product with a float32 weight."""
    a = numba.carray(record, (NUM_FIELDS,))
    while True:
        index = take_next(record)
        if index >= a[Field.NUM_WORK]:
            break
        _piece(a, index, None)


def multiply_bfloat16(record: Any) -> None:
    """Body of a parallel region: product with a bfloat16 weight."""
    a = numba.carray(record, (NUM_FIELDS,))
    while True:
        index = take_next(record)
        if index >= a[Field.NUM_WORK]:
            break
        _piece(a, index, True)
