"""Compiled product of some rows with a packed weight: the linear layers of a step. Needs numba (extra `hf`).

The weight [N, K] lies in *panels* of 16 outputs, [N / 16, K, 16], so that a step along K reads the next memory. A
tile of up to six rows by one panel stays in registers while K is passed once (Goto and van de Geijn 2008, "Anatomy of
high-performance matrix multiplication"), and the panel after it is fetched meanwhile: with few rows the time is that of
reading the weight. A weight whose numbers are all bfloat16 numbers, as those of most published models, is kept in 16
bits, half the reading, and widened in registers: no number changes.

Every number of the product is a bias and then products added in the order of K, fused, whatever the number of rows:
a row's result does not depend on what else is in the step.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from looseleaf.hf.compiled import NumbaError, address_of, pointer, take_next

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

PANEL: Final = 16
"""Outputs of a panel: two registers of AVX2, one of AVX-512."""

TILE_ROWS: Final = 6
"""Rows of a tile at most: with two registers each they leave room in 16 for a row of the panel and a number of x."""


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

_I32, _I64, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR, _HALVES, _WORDS = (ir.VectorType(kind, PANEL) for kind in (_FLOAT, ir.IntType(16), _I32))
_BYTE_POINTER = ir.IntType(8).as_pointer()


class _Tile:
    """Writes the code of one tile: `num_rows` rows by `num_panels` panels, over all of K."""

    def __init__(self, builder: Any, num_rows: int, num_panels: int, is_half: bool) -> None:
        self._builder, self._num_rows, self._num_panels, self._is_half = builder, num_rows, num_panels, is_half
        self._fma = self._declared("llvm.fma.v16f32", _VECTOR, [_VECTOR] * 3)
        self._prefetch = self._declared("llvm.prefetch.p0", ir.VoidType(), [_BYTE_POINTER, _I32, _I32, _I32])

    def _declared(self, name: str, result: Any, arguments: list[Any]) -> Any:
        module = self._builder.module
        return module.globals.get(name) or ir.Function(module, ir.FunctionType(result, arguments), name)

    def write(self, rows: Any, stride: Any, panels: Any, depth: Any, bias: Any, output: Any, output_stride: Any) -> None:
        """Addresses as int64; strides in bytes. `depth`: K, at least 1."""
        b = self._builder
        step_bytes = (2 if self._is_half else 4) * PANEL
        panel_bytes = b.mul(depth, _I64(step_bytes))
        first = [self._load(b.add(bias, _I64(4 * PANEL * p)), _VECTOR) for p in range(self._num_panels)]
        before, loop, done = b.block, b.append_basic_block("depth"), b.append_basic_block("stored")
        b.branch(loop)
        b.position_at_end(loop)
        k = b.phi(_I64)
        sums = [[b.phi(_VECTOR) for _ in first] for _ in range(self._num_rows)]
        at = b.add(panels, b.mul(k, _I64(step_bytes)))
        weights = [self._weights(b.add(at, b.mul(panel_bytes, _I64(p))), panel_bytes) for p in range(self._num_panels)]
        added = []
        for r, row_sums in enumerate(sums):
            place = b.add(b.add(rows, b.mul(stride, _I64(r))), b.mul(k, _I64(4)))
            x = self._spread(self._load(place, _FLOAT))
            added.append([b.call(self._fma, [x, w, s]) for w, s in zip(weights, row_sums, strict=True)])
        following = b.add(k, _I64(1))
        b.cbranch(b.icmp_signed("<", following, depth), loop, done)
        k.add_incoming(_I64(0), before)
        k.add_incoming(following, loop)
        for row_sums, row_added in zip(sums, added, strict=True):
            for total, start, after in zip(row_sums, first, row_added, strict=True):
                total.add_incoming(start, before)
                total.add_incoming(after, loop)
        b.position_at_end(done)
        for r, row_added in enumerate(added):
            for p, total in enumerate(row_added):
                place = b.add(b.add(output, b.mul(output_stride, _I64(r))), _I64(4 * PANEL * p))
                b.store(total, b.inttoptr(place, _VECTOR.as_pointer())).align = 4

    def _load(self, address: Any, kind: Any) -> Any:
        loaded = self._builder.load(self._builder.inttoptr(address, kind.as_pointer()))
        loaded.align = 2 if kind is _HALVES else 4
        return loaded

    def _spread(self, number: Any) -> Any:
        nothing = ir.Constant(_VECTOR, ir.Undefined)
        one = self._builder.insert_element(nothing, number, _I32(0))
        return self._builder.shuffle_vector(one, nothing, ir.Constant(_WORDS, [0] * PANEL))

    def _weights(self, address: Any, panel_bytes: Any) -> Any:
        """16 weights as float32. Those in the same place of the panel that comes after this tile's are fetched."""
        b = self._builder
        ahead = b.add(address, b.mul(panel_bytes, _I64(self._num_panels)))
        b.call(self._prefetch, [b.inttoptr(ahead, _BYTE_POINTER), _I32(0), _I32(2), _I32(1)])
        if not self._is_half:
            return self._load(address, _VECTOR)
        wide = b.zext(self._load(address, _HALVES), _WORDS)
        return b.bitcast(b.shl(wide, ir.Constant(_WORDS, [16] * PANEL)), _VECTOR)


def _tile(num_rows: int, num_panels: int, is_half: bool) -> Any:
    """The compiled tile: a function of `_Tile.write`'s addresses and sizes."""

    @intrinsic
    def tile(
        typingctx: Any, rows: Any, stride: Any, panels: Any, depth: Any, bias: Any, output: Any, output_stride: Any
    ) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
            _Tile(builder, num_rows, num_panels, is_half).write(*arguments)
            return context.get_dummy_value()

        return types.none(*[types.int64] * 7), code

    return tile


def _tiles(is_half: bool) -> Any:
    """The compiled choice of a tile by its rows (1 to 6) and panels (4 or 1 with one row, 2 or 1 with two, else 1)."""
    one, one_wide, two, two_wide = (_tile(r, p, is_half) for r, p in ((1, 1), (1, 4), (2, 1), (2, 2)))
    three, four, five, six = (_tile(r, 1, is_half) for r in (3, 4, 5, 6))

    @numba.njit(error_model="numpy")
    def multiply(
        num_rows: int, num_panels: int, rows: int, stride: int, panels: int, depth: int, bias: int, out: int, pitch: int
    ) -> None:
        if num_rows == 1:
            if num_panels == 4:
                one_wide(rows, stride, panels, depth, bias, out, pitch)
            else:
                one(rows, stride, panels, depth, bias, out, pitch)
        elif num_rows == 2:
            if num_panels == 2:
                two_wide(rows, stride, panels, depth, bias, out, pitch)
            else:
                two(rows, stride, panels, depth, bias, out, pitch)
        elif num_rows == 3:
            three(rows, stride, panels, depth, bias, out, pitch)
        elif num_rows == 4:
            four(rows, stride, panels, depth, bias, out, pitch)
        elif num_rows == 5:
            five(rows, stride, panels, depth, bias, out, pitch)
        else:
            six(rows, stride, panels, depth, bias, out, pitch)

    return multiply


_multiply_float32, _multiply_bfloat16 = _tiles(False), _tiles(True)


@numba.njit(error_model="numpy")
def _multiply(is_half: Any, rows: int, width: int, x: int, stride: int, w: int, k: int, bias: int, y: int, pitch: int) -> None:
    if is_half is None:
        _multiply_float32(rows, width, x, stride, w, k, bias, y, pitch)
    else:
        _multiply_bfloat16(rows, width, x, stride, w, k, bias, y, pitch)


@numba.njit(error_model="numpy")
def _piece(a: Any, index: int, is_half: Any) -> None:
    """Piece number `index`: one block of rows by one group of panels, a panel with all of the block's rows in turn.

    `is_half` None: the weight is float32; else bfloat16. Only the branch that is needed is compiled.
    """
    number_bytes = 4 if is_half is None else 2
    depth, outputs, stride = a[Field.K], a[Field.N], 4 * a[Field.ROW_STRIDE]
    num_groups = (a[Field.NUM_PANELS] + a[Field.GROUP_PANELS] - 1) // a[Field.GROUP_PANELS]
    first_row, panel = index // num_groups * a[Field.BLOCK_ROWS], index % num_groups * a[Field.GROUP_PANELS]
    num_rows, stop = min(a[Field.BLOCK_ROWS], a[Field.NUM_ROWS] - first_row), panel + a[Field.GROUP_PANELS]
    stop, num_whole = min(stop, a[Field.NUM_PANELS]), outputs // PANEL
    num_tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    widest = 4 if num_rows == 1 else 2 if num_rows == 2 else 1
    edge = np.empty((TILE_ROWS, PANEL), dtype=np.float32)  # the last panel's outputs, if there are fewer than 16
    while panel < stop:
        width = widest if panel + widest <= min(stop, num_whole) else 1
        panels, bias = a[Field.PANELS] + panel * number_bytes * PANEL * depth, a[Field.BIAS] + 4 * PANEL * panel
        for tile in range(num_tiles):
            low, high = num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles
            rows = a[Field.ROWS] + stride * (first_row + low)
            out = a[Field.OUTPUT] + 4 * (outputs * (first_row + low) + PANEL * panel)
            if panel < num_whole:
                _multiply(is_half, high - low, width, rows, stride, panels, depth, bias, out, 4 * outputs)
            else:
                _multiply(is_half, high - low, 1, rows, stride, panels, depth, bias, edge.ctypes.data, 4 * PANEL)
                for r in range(high - low):
                    target = numba.carray(pointer(out + 4 * outputs * r, types.float32), (outputs - PANEL * panel,))
                    target[:] = edge[r, : len(target)]
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
