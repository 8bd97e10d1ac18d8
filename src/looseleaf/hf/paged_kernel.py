"""Compiled attention of single query rows over keys and values where they lie in memory. Needs numba (extra `hf`).

Work is cut into *items* (`shared_runs`): some query rows that all see the same tokens of the same blocks. An item
gives a partial result with the logarithm of its sum of weights for each row; `merge` puts a row's partial results
together (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"). Both are bodies of a parallel
region: every thread takes the next piece of work until none is left.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

import numba
import numpy as np
from numba import types

from looseleaf.hf.compiled import NumbaError, address_of, float_rows, integers, pointer, take_next
from looseleaf.hf.online_softmax import LEAST, LOG2_E, MATH, weigh
from looseleaf.hf.register_tile import PANEL, multiply_rows

__all__ = ["NUM_FIELDS", "Field", "NumbaError", "address_of", "attend_bfloat16", "attend_float32", "merge"]

TILE_KEYS: Final = 64
"""Keys whose scores are computed, exponentiated and used together."""


PACKED_ROWS: Final = 16
"""Rows from which on it pays to pack a tile's keys and values into panels (`register_tile`) first."""


class Field(IntEnum):
    """Places in the int64 array that all bodies get: sizes, and addresses of contiguous arrays. D rows attend."""

    NEXT = 0  # piece of work that is taken next; the threads count it up
    NUM_WORK = 1
    KEYS = 2  # float32 or bfloat16 [NUM_SLOTS, KEY_WIDTH]
    VALUES = 3
    NUM_SLOTS = 4
    KEY_WIDTH = 5
    VALUE_WIDTH = 6
    NUM_KV_HEADS = 7
    NUM_SHARING = 8  # query heads of one K/V head
    KEY_DIM = 9
    VALUE_DIM = 10
    QUERY = 11  # float32 [D, heads, KEY_DIM]
    OUTPUT = 12  # float32 [D, heads, VALUE_DIM]
    NUM_ROWS = 13  # D
    TABLES = 14  # int32 [D, NUM_COLUMNS]
    NUM_COLUMNS = 15
    BLOCK_TOKENS = 16
    ITEMS = 17  # int64 [NUM_ITEMS, 6], see `shared_runs.WorkItems`
    NUM_ITEMS = 18
    MEMBERS = 19  # int64 [NUM_PARTS]
    NUM_PARTS = 20
    ORDER = 21  # int64 [NUM_PARTS]
    STARTS = 22  # int64 [D + 1]
    PARTS = 23  # float32 [NUM_PARTS, heads, VALUE_DIM]
    SUMS = 24  # float32 [NUM_PARTS, heads]: base-2 logarithm of the sum of weights
    FLOATS = 25  # float32 [2]: factor on scores, soft cap or 0
    SINKS = 26  # float32 [heads], or 0


NUM_FIELDS: Final = len(Field)


@numba.njit(fastmath=MATH, error_model="numpy")
def _score_four(query: Any, keys: Any, at: Any, first: int, scores: Any, count: int) -> None:
    """scores[r, k] = query[r] . key k, for four rows at once: each key is loaded once for all of them."""
    q0, q1, q2, q3 = query[0], query[1], query[2], query[3]
    dim = len(q0)
    for k in range(count):
        key = keys[at[k], first : first + dim]
        s0 = s1 = s2 = s3 = np.float32(0.0)
        for d in range(dim):
            x = key[d]
            s0 += q0[d] * x
            s1 += q1[d] * x
            s2 += q2[d] * x
            s3 += q3[d] * x
        scores[0, k] = s0
        scores[1, k] = s1
        scores[2, k] = s2
        scores[3, k] = s3


@numba.njit(fastmath=MATH, error_model="numpy")
def _score_one(query: Any, keys: Any, at: Any, first: int, scores: Any, count: int) -> None:
    dim = len(query)
    for k in range(count):
        key = keys[at[k], first : first + dim]
        s = np.float32(0.0)
        for d in range(dim):
            s += query[d] * key[d]
        scores[k] = s


@numba.njit(fastmath=MATH, error_model="numpy")
def _add_two(weights: Any, values: Any, at: Any, first: int, sums: Any, count: int) -> None:
    """sums[r] += weights[r, k] * value k, for two rows and four values at once."""
    w0, w1, sum0, sum1 = weights[0], weights[1], sums[0], sums[1]
    dim = len(sum0)
    whole = count - count % 4
    for k in range(0, whole, 4):
        v0 = values[at[k], first : first + dim]
        v1 = values[at[k + 1], first : first + dim]
        v2 = values[at[k + 2], first : first + dim]
        v3 = values[at[k + 3], first : first + dim]
        a0, a1, a2, a3 = w0[k], w0[k + 1], w0[k + 2], w0[k + 3]
        b0, b1, b2, b3 = w1[k], w1[k + 1], w1[k + 2], w1[k + 3]
        for d in range(dim):
            x0, x1, x2, x3 = v0[d], v1[d], v2[d], v3[d]
            sum0[d] += (a0 * x0 + a1 * x1) + (a2 * x2 + a3 * x3)
            sum1[d] += (b0 * x0 + b1 * x1) + (b2 * x2 + b3 * x3)
    for k in range(whole, count):
        value = values[at[k], first : first + dim]
        a0, b0 = w0[k], w1[k]
        for d in range(dim):
            sum0[d] += a0 * value[d]
            sum1[d] += b0 * value[d]


@numba.njit(fastmath=MATH, error_model="numpy")
def _add_one(weights: Any, values: Any, at: Any, first: int, sums: Any, count: int) -> None:
    dim = len(sums)
    for k in range(count):
        value, w = values[at[k], first : first + dim], weights[k]
        for d in range(dim):
            sums[d] += w * value[d]


@numba.njit(error_model="numpy")
def _widen(stored: Any, at: Any, first: int, wide: Any, count: int) -> None:
    """bfloat16 numbers, given as uint16, as float32: `wide` is a uint32 view."""
    dim = wide.shape[1]
    for k in range(count):
        row, target = stored[at[k], first : first + dim], wide[k]
        for d in range(dim):
            target[d] = np.uint32(row[d]) << np.uint32(16)


@numba.njit(error_model="numpy")
def _pack(keys: Any, key_at: Any, first_key: int, values: Any, value_at: Any, first_value: int, count: int,
          key_panels: Any, value_panels: Any) -> None:  # fmt: skip
    """A tile: keys as panels [TILE_KEYS / PANEL, key_dim, PANEL], values as [value_dim / PANEL, TILE_KEYS, PANEL]."""
    key_dim, num_value_panels = key_panels.shape[1], len(value_panels)
    for k in range(count):
        key, panel, column = keys[key_at[k], first_key : first_key + key_dim], key_panels[k // PANEL], k % PANEL
        for d in range(key_dim):
            panel[d, column] = key[d]
        for p in range(num_value_panels):
            low = first_value + PANEL * p
            source, target = values[value_at[k], low : low + PANEL], value_panels[p, k]
            for d in range(PANEL):
                target[d] = source[d]


@numba.njit(error_model="numpy")
def _weigh_all(
    scores: Any, count: int, cap: Any, bits: Any, powers: Any, sums: Any, largest: Any, totals: Any, num_rows: int
) -> None:
    for row in range(num_rows):
        largest[row], totals[row] = weigh(scores[row, :count], cap, bits, powers, sums[row], largest[row], totals[row])


@numba.njit(error_model="numpy")
def _tile(
    query: Any, keys: Any, key_at: Any, first_key: int, values: Any, value_at: Any, first_value: int, count: int,
    cap: Any, scores: Any, bits: Any, powers: Any, sums: Any, largest: Any, totals: Any, num_rows: int,
    key_panels: Any, value_panels: Any,
) -> None:  # fmt: skip
    """`num_rows` rows over one tile of `count` keys and values: packed, if there is room for the panels."""
    if len(key_panels):
        _pack(keys, key_at, first_key, values, value_at, first_value, count, key_panels, value_panels)
        key_dim, value_dim, pitch = query.shape[1], sums.shape[1], 4 * TILE_KEYS
        zeros = np.zeros(PANEL, dtype=np.float32)
        for p in range((count + PANEL - 1) // PANEL):
            multiply_rows(
                None, num_rows, 1, query.ctypes.data, 4 * key_dim, key_panels[p].ctypes.data, 4 * PANEL * key_dim,
                key_dim, zeros.ctypes.data, 0, scores.ctypes.data + 4 * PANEL * p, pitch,
            )  # fmt: skip
        _weigh_all(scores, count, cap, bits, powers, sums, largest, totals, num_rows)
        for p in range(len(value_panels)):
            out = sums.ctypes.data + 4 * PANEL * p
            multiply_rows(
                None, num_rows, 1, scores.ctypes.data, pitch, value_panels[p].ctypes.data, 4 * PANEL * TILE_KEYS,
                count, out, 4 * value_dim, out, 4 * value_dim,
            )  # fmt: skip
        return
    for row in range(0, len(query), 4):
        if num_rows == 1:
            _score_one(query[0], keys, key_at, first_key, scores[0], count)
        else:
            _score_four(query[row : row + 4], keys, key_at, first_key, scores[row : row + 4], count)
    _weigh_all(scores, count, cap, bits, powers, sums, largest, totals, num_rows)
    even = num_rows - num_rows % 2
    for row in range(0, even, 2):
        _add_two(scores[row : row + 2], values, value_at, first_value, sums[row : row + 2], count)
    if even < num_rows:
        _add_one(scores[even], values, value_at, first_value, sums[even], count)


@numba.njit(error_model="numpy")
def _halves(address: int, rows: int, width: int) -> Any:
    return numba.carray(pointer(address, types.uint16), (rows, width))


@numba.njit(error_model="numpy")
def _attend(a: Any, index: int, keys: Any, values: Any, is_half: Any) -> None:
    """Work on item number `index`, tile by tile, in each tile head by head. `a`: see `Field`.

    `is_half` None: keys and values are float32; else bfloat16. Only the branch that is needed is compiled.
    """
    num_kv, sharing = a[Field.NUM_KV_HEADS], a[Field.NUM_SHARING]
    key_dim, value_dim = a[Field.KEY_DIM], a[Field.VALUE_DIM]
    num_heads, block_tokens, num_columns = num_kv * sharing, a[Field.BLOCK_TOKENS], a[Field.NUM_COLUMNS]
    item = integers(a[Field.ITEMS], 6 * a[Field.NUM_ITEMS])[6 * index :]
    first, stop, first_part, num_members = item[1], item[2], item[5], item[4]
    table = numba.carray(pointer(a[Field.TABLES] + 4 * item[0] * num_columns, types.int32), (num_columns,))
    members = integers(a[Field.MEMBERS], a[Field.NUM_PARTS])[item[3] : item[3] + num_members]
    given = float_rows(a[Field.QUERY], a[Field.NUM_ROWS] * num_heads, key_dim)
    parts = float_rows(a[Field.PARTS], a[Field.NUM_PARTS] * num_heads, value_dim)
    logs = float_rows(a[Field.SUMS], a[Field.NUM_PARTS], num_heads)
    floats = float_rows(a[Field.FLOATS], 1, 2)[0]
    num_rows = num_members * sharing
    query = np.zeros((num_kv, (num_rows + 3) // 4 * 4, key_dim), dtype=np.float32)
    for h in range(num_kv):
        for row in range(num_rows):
            source = given[members[row // sharing] * num_heads + h * sharing + row % sharing]
            target = query[h, row]
            for d in range(key_dim):
                target[d] = source[d] * floats[0]
    scores = np.empty((query.shape[1], TILE_KEYS), dtype=np.float32)
    bits = np.empty(TILE_KEYS, dtype=np.int32)
    powers = bits.view(np.float32)
    sums = np.zeros((num_kv, num_rows, value_dim), dtype=np.float32)
    largest = np.full((num_kv, num_rows), LEAST, dtype=np.float32)
    totals = np.zeros((num_kv, num_rows), dtype=np.float32)
    at = np.empty(TILE_KEYS, dtype=np.int64)
    wide = 0 if is_half is None else TILE_KEYS
    wide_keys, wide_values = np.empty((wide, key_dim), dtype=np.float32), np.empty((wide, value_dim), dtype=np.float32)
    in_order = np.arange(TILE_KEYS)
    packed = TILE_KEYS // PANEL if num_rows >= PACKED_ROWS and value_dim % PANEL == 0 else 0
    key_panels = np.zeros((packed, key_dim, PANEL), dtype=np.float32)
    value_panels = np.empty((value_dim // PANEL if packed else 0, TILE_KEYS, PANEL), dtype=np.float32)
    for low in range(first, stop, TILE_KEYS):
        count = min(TILE_KEYS, stop - low)
        for k in range(count):
            at[k] = table[(low + k) // block_tokens] * block_tokens + (low + k) % block_tokens
        for h in range(num_kv):
            if is_half is None:
                _tile(
                    query[h], keys, at, h * key_dim, values, at, h * value_dim, count,
                    floats[1], scores, bits, powers, sums[h], largest[h], totals[h], num_rows,
                    key_panels, value_panels,
                )  # fmt: skip
            else:
                _widen(keys, at, h * key_dim, wide_keys.view(np.uint32), count)
                _widen(values, at, h * value_dim, wide_values.view(np.uint32), count)
                _tile(
                    query[h], wide_keys, in_order, 0, wide_values, in_order, 0, count,
                    floats[1], scores, bits, powers, sums[h], largest[h], totals[h], num_rows,
                    key_panels, value_panels,
                )  # fmt: skip
    for h in range(num_kv):
        for row in range(num_rows):
            part, head = first_part + row // sharing, h * sharing + row % sharing
            target, source, total = parts[part * num_heads + head], sums[h, row], totals[h, row]
            for d in range(value_dim):
                target[d] = source[d] / total
            logs[part, head] = largest[h, row] + np.log2(total)


@numba.njit(error_model="numpy")
def _merge(a: Any, row: int) -> None:
    """Put the parts of row number `row` together, with the sinks."""
    num_heads, value_dim = a[Field.NUM_KV_HEADS] * a[Field.NUM_SHARING], a[Field.VALUE_DIM]
    starts, order = integers(a[Field.STARTS], a[Field.NUM_ROWS] + 1), integers(a[Field.ORDER], a[Field.NUM_PARTS])
    mine = order[starts[row] : starts[row + 1]]
    parts = float_rows(a[Field.PARTS], a[Field.NUM_PARTS] * num_heads, value_dim)
    logs = float_rows(a[Field.SUMS], a[Field.NUM_PARTS], num_heads)
    output = float_rows(a[Field.OUTPUT], a[Field.NUM_ROWS] * num_heads, value_dim)
    for head in range(num_heads):
        top = np.float32(LEAST)
        for part in mine:
            top = max(top, logs[part, head])
        total = np.float32(0.0)
        if a[Field.SINKS] != 0:
            sink = np.float32(LOG2_E) * float_rows(a[Field.SINKS], 1, num_heads)[0, head]
            top = max(top, sink)
            total = np.float32(2.0) ** (sink - top)
        target = output[row * num_heads + head]
        for d in range(value_dim):
            target[d] = 0
        for part in mine:
            weight = np.float32(2.0) ** (logs[part, head] - top)
            total += weight
            source = parts[part * num_heads + head]
            for d in range(value_dim):
                target[d] += weight * source[d]
        for d in range(value_dim):
            target[d] /= total


def attend_float32(record: Any) -> None:
    """Body of a parallel region: attend on float32 memory."""
    a = numba.carray(record, (NUM_FIELDS,))
    keys = float_rows(a[Field.KEYS], a[Field.NUM_SLOTS], a[Field.KEY_WIDTH])
    values = float_rows(a[Field.VALUES], a[Field.NUM_SLOTS], a[Field.VALUE_WIDTH])
    while True:
        index = take_next(record)
        if index >= a[Field.NUM_WORK]:
            break
        _attend(a, index, keys, values, None)


def attend_bfloat16(record: Any) -> None:
    """Body of a parallel region: attend on bfloat16 memory."""
    a = numba.carray(record, (NUM_FIELDS,))
    keys = _halves(a[Field.KEYS], a[Field.NUM_SLOTS], a[Field.KEY_WIDTH])
    values = _halves(a[Field.VALUES], a[Field.NUM_SLOTS], a[Field.VALUE_WIDTH])
    while True:
        index = take_next(record)
        if index >= a[Field.NUM_WORK]:
            break
        _attend(a, index, keys, values, True)


def merge(record: Any) -> None:
    """Body of a parallel region: put the parts of all rows together."""
    a = numba.carray(record, (NUM_FIELDS,))
    while True:
        index = take_next(record)
        if index >= a[Field.NUM_WORK]:
            break
        _merge(a, index)
