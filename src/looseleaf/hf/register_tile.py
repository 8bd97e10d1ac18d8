"""Product of a few rows with panels, in registers: the inner part of compiled bodies. Needs numba (extra `hf`).

A *panel* holds 16 columns of a matrix [depth, columns], one row of them after the other: [depth, 16]. A tile of up to
six rows by one panel stays in registers while the depth is passed once (Goto and van de Geijn 2008, "Anatomy of
high-performance matrix multiplication"), and the panel after it is fetched meanwhile. numba has no vectors, so the code
is written in LLVM's terms.

Every number is what stood there before and then products added in the order of depth, each fused with its addition,
whatever the number of rows: a row's result does not depend on what else is computed.
"""

from __future__ import annotations

from typing import Any, Final

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

PANEL: Final = 16
"""Columns of a panel: two registers of AVX2, one of AVX-512."""

TILE_ROWS: Final = 6
"""Rows of a tile at most: with two registers each they leave room in 16 for a row of the panel and a number of x."""

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

    def write(
        self, rows: Any, stride: Any, panels: Any, distance: Any, depth: Any, start: Any, start_stride: Any, out: Any,
        out_stride: Any,
    ) -> None:  # fmt: skip
        """out = start + rows x panels. Addresses as int64; strides, and the distance of panels, in bytes; depth > 0."""
        b = self._builder
        step_bytes = (2 if self._is_half else 4) * PANEL
        starts = [
            [self._load(self._place(start, start_stride, r, p), _VECTOR) for p in range(self._num_panels)]
            for r in range(self._num_rows)
        ]
        before, loop, done = b.block, b.append_basic_block("depth"), b.append_basic_block("stored")
        b.branch(loop)
        b.position_at_end(loop)
        k = b.phi(_I64)
        sums = [[b.phi(_VECTOR) for _ in row] for row in starts]
        at = b.add(panels, b.mul(k, _I64(step_bytes)))
        weights = [self._weights(b.add(at, b.mul(distance, _I64(p))), distance) for p in range(self._num_panels)]
        added = []
        for r, row in enumerate(sums):
            x = self._spread(self._load(b.add(b.add(rows, b.mul(stride, _I64(r))), b.mul(k, _I64(4))), _FLOAT))
            added.append([b.call(self._fma, [x, w, total]) for w, total in zip(weights, row, strict=True)])
        following = b.add(k, _I64(1))
        b.cbranch(b.icmp_signed("<", following, depth), loop, done)
        k.add_incoming(_I64(0), before)
        k.add_incoming(following, loop)
        b.position_at_end(done)
        for r, row in enumerate(sums):
            for p, total in enumerate(row):
                total.add_incoming(starts[r][p], before)
                total.add_incoming(added[r][p], loop)
                place = self._place(out, out_stride, r, p)
                b.store(added[r][p], b.inttoptr(place, _VECTOR.as_pointer())).align = 4

    def _place(self, address: Any, stride: Any, row: int, panel: int) -> Any:
        b = self._builder
        return b.add(b.add(address, b.mul(stride, _I64(row))), _I64(4 * PANEL * panel))

    def _load(self, address: Any, kind: Any) -> Any:
        loaded = self._builder.load(self._builder.inttoptr(address, kind.as_pointer()))
        loaded.align = 2 if kind is _HALVES else 4
        return loaded

    def _spread(self, number: Any) -> Any:
        nothing = ir.Constant(_VECTOR, ir.Undefined)
        one = self._builder.insert_element(nothing, number, _I32(0))
        return self._builder.shuffle_vector(one, nothing, ir.Constant(_WORDS, [0] * PANEL))

    def _weights(self, address: Any, distance: Any) -> Any:
        """16 weights as float32. Those in the same place of the panel that comes after this tile's are fetched."""
        b = self._builder
        ahead = b.add(address, b.mul(distance, _I64(self._num_panels)))
        b.call(self._prefetch, [b.inttoptr(ahead, _BYTE_POINTER), _I32(0), _I32(2), _I32(1)])
        if not self._is_half:
            return self._load(address, _VECTOR)
        wide = b.zext(self._load(address, _HALVES), _WORDS)
        return b.bitcast(b.shl(wide, ir.Constant(_WORDS, [16] * PANEL)), _VECTOR)


def _tile(num_rows: int, num_panels: int, is_half: bool) -> Any:
    """The compiled tile: a function of `_Tile.write`'s addresses and sizes."""

    @intrinsic
    def tile(
        typingctx: Any, rows: Any, stride: Any, panels: Any, distance: Any, depth: Any, start: Any, start_stride: Any,
        out: Any, out_stride: Any,
    ) -> Any:  # fmt: skip
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _Tile(builder, num_rows, num_panels, is_half).write(*arguments)
            return context.get_dummy_value()

        return types.none(*[types.int64] * 9), code

    return tile


def _tiles(is_half: bool) -> Any:
    """The compiled choice of a tile by its rows (1 to 6) and panels (4 or 1 with one row, 2 or 1 with two, else 1)."""
    one, one_wide, two, two_wide = (_tile(r, p, is_half) for r, p in ((1, 1), (1, 4), (2, 1), (2, 2)))
    three, four, five, six = (_tile(r, 1, is_half) for r in (3, 4, 5, 6))

    @numba.njit(error_model="numpy")
    def multiply(
        num_rows: int, num_panels: int, rows: int, stride: int, panels: int, distance: int, depth: int, start: int,
        start_stride: int, out: int, out_stride: int,
    ) -> None:  # fmt: skip
        if num_rows == 1:
            if num_panels == 4:
                one_wide(rows, stride, panels, distance, depth, start, start_stride, out, out_stride)
            else:
                one(rows, stride, panels, distance, depth, start, start_stride, out, out_stride)
        elif num_rows == 2:
            if num_panels == 2:
                two_wide(rows, stride, panels, distance, depth, start, start_stride, out, out_stride)
            else:
                two(rows, stride, panels, distance, depth, start, start_stride, out, out_stride)
        elif num_rows == 3:
            three(rows, stride, panels, distance, depth, start, start_stride, out, out_stride)
        elif num_rows == 4:
            four(rows, stride, panels, distance, depth, start, start_stride, out, out_stride)
        elif num_rows == 5:
            five(rows, stride, panels, distance, depth, start, start_stride, out, out_stride)
        else:
            six(rows, stride, panels, distance, depth, start, start_stride, out, out_stride)

    return multiply


_float32, _bfloat16 = _tiles(False), _tiles(True)


@numba.njit(error_model="numpy")
def multiply_rows(
    is_half: Any, num_rows: int, num_panels: int, rows: int, stride: int, panels: int, distance: int, depth: int,
    start: int, start_stride: int, out: int, out_stride: int,
) -> None:  # fmt: skip
    """out [num_rows, 16 * num_panels] = start + rows [num_rows, depth] x panels, any number of rows, tile by tile.

    Addresses of float32 numbers; strides in bytes. `panels`: bfloat16 numbers unless `is_half` is None (only the branch
    that is needed is compiled), a panel `distance` bytes after the other. More than one panel (4 or 2) only with one or
    two rows. A start stride of 0: all rows start with the same numbers.
    """
    num_tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    for tile in range(num_tiles):
        low, high = num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles
        first, begin, target = rows + stride * low, start + start_stride * low, out + out_stride * low
        if is_half is None:
            _float32(
                high - low, num_panels, first, stride, panels, distance, depth, begin, start_stride, target, out_stride
            )
        else:
            _bfloat16(
                high - low, num_panels, first, stride, panels, distance, depth, begin, start_stride, target, out_stride
            )
