"""Compiled attention of a chunk's many query rows over one sequence's keys and values. Needs numba (extra `hf`).

First the keys, and the values, are packed into panels (`register_tile`): each is used by many rows. Then each *tile* of
query tokens passes over the keys that some token of it sees, `TILE_KEYS` at a time, with an online softmax: scores that
no token of the tile sees are not computed, so causal and windowed attention costs what it sees. Bodies of parallel
regions, piece by piece as in `paged_kernel`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

import numba
import numpy as np
from numba import types

from looseleaf.hf.compiled import NumbaError, address_of, float_rows, integers, pointer, take_next
from looseleaf.hf.online_softmax import LEAST, LOG2_E, weigh
from looseleaf.hf.register_tile import PANEL, multiply_rows

__all__ = ["NUM_FIELDS", "PACKED_KEYS", "PANEL", "Field", "NumbaError", "address_of", "attend_chunk", "pack_chunk"]

TILE_KEYS: Final = 128
"""Keys whose scores are computed, exponentiated and used together."""

PACKED_KEYS: Final = 128
"""Keys of a piece of packing."""


class Field(IntEnum):
    """Places in the int64 record: sizes, and addresses of float32 arrays. Strides count numbers."""

    NEXT = 0
    NUM_WORK = 1
    QUERY = 2  # [NUM_TOKENS, heads, KEY_DIM]
    QUERY_TOKEN = 3  # from token to token
    QUERY_HEAD = 4  # from head to head
    KEYS = 5  # [NUM_KEYS, NUM_KV_HEADS, KEY_DIM]
    KEY_TOKEN = 6
    KEY_HEAD = 7
    VALUES = 8  # [NUM_KEYS, NUM_KV_HEADS, VALUE_DIM]
    VALUE_TOKEN = 9
    VALUE_HEAD = 10
    OUTPUT = 11  # [NUM_TOKENS, heads, VALUE_DIM], contiguous
    FIRST = 12  # int64 [NUM_TOKENS]: the oldest key that a token sees, never older than the token's before
    STOP = 13  # int64 [NUM_TOKENS]: behind the last one
    NUM_TOKENS = 14
    NUM_KEYS = 15
    NUM_KV_HEADS = 16
    NUM_SHARING = 17  # query heads of one K/V head
    KEY_DIM = 18
    VALUE_DIM = 19  # a multiple of PANEL
    PACKED = 20  # [NUM_KV_HEADS, ceil(NUM_KEYS / PANEL), KEY_DIM, PANEL], then
    #              [NUM_KV_HEADS, VALUE_DIM / PANEL, NUM_KEYS, PANEL]: room for the panels
    TILE_TOKENS = 21
    FLOATS = 22  # [2]: factor on scores, soft cap or 0
    SINKS = 23  # [heads], or 0


NUM_FIELDS: Final = len(Field)


@numba.njit(error_model="numpy")
def _key_panels(a: Any, head: int) -> int:
    num_panels = (a[Field.NUM_KEYS] + PANEL - 1) // PANEL
    return int(a[Field.PACKED] + 4 * PANEL * a[Field.KEY_DIM] * num_panels * head)


@numba.njit(error_model="numpy")
def _value_panels(a: Any, head: int) -> int:
    return int(_key_panels(a, a[Field.NUM_KV_HEADS]) + 4 * a[Field.VALUE_DIM] * a[Field.NUM_KEYS] * head)


@numba.njit(error_model="numpy")
def _pack(a: Any, index: int) -> None:
    """Piece number `index`: the panels of `PACKED_KEYS` keys and values of one head."""
    head, first = index % a[Field.NUM_KV_HEADS], index // a[Field.NUM_KV_HEADS] * PACKED_KEYS
    num_keys, key_dim, value_dim = a[Field.NUM_KEYS], a[Field.KEY_DIM], a[Field.VALUE_DIM]
    stop = min(first + PACKED_KEYS, num_keys)
    keys = a[Field.KEYS] + 4 * a[Field.KEY_HEAD] * head
    panels = _key_panels(a, head)
    for low in range(first, stop, PANEL):
        panel = float_rows(panels + 4 * key_dim * low, key_dim, PANEL)
        for k in range(PANEL):
            if low + k < num_keys:
                key = float_rows(keys + 4 * a[Field.KEY_TOKEN] * (low + k), 1, key_dim)[0]
                for d in range(key_dim):
                    panel[d, k] = key[d]
            else:
                for d in range(key_dim):
                    panel[d, k] = 0
    values = a[Field.VALUES] + 4 * a[Field.VALUE_HEAD] * head
    panels = float_rows(_value_panels(a, head), value_dim // PANEL * num_keys, PANEL)
    for k in range(first, stop):
        value = float_rows(values + 4 * a[Field.VALUE_TOKEN] * k, value_dim // PANEL, PANEL)
        for p in range(len(value)):
            target, source = panels[p * num_keys + k], value[p]
            for d in range(PANEL):
                target[d] = source[d]


@numba.njit(error_model="numpy")
def _attend(a: Any, index: int) -> None:
    """Piece number `index`: one tile of query tokens with one K/V head. The last tiles, which see most, come first."""
    num_kv, sharing = a[Field.NUM_KV_HEADS], a[Field.NUM_SHARING]
    key_dim, value_dim, num_keys = a[Field.KEY_DIM], a[Field.VALUE_DIM], a[Field.NUM_KEYS]
    num_tiles = (a[Field.NUM_TOKENS] + a[Field.TILE_TOKENS] - 1) // a[Field.TILE_TOKENS]
    head, token = index % num_kv, (num_tiles - 1 - index // num_kv) * a[Field.TILE_TOKENS]
    num_tokens = min(a[Field.TILE_TOKENS], a[Field.NUM_TOKENS] - token)
    num_rows, floats = num_tokens * sharing, float_rows(a[Field.FLOATS], 1, 2)[0]
    firsts, stops = integers(a[Field.FIRST] + 8 * token, num_tokens), integers(a[Field.STOP] + 8 * token, num_tokens)
    query = np.empty((num_rows, key_dim), dtype=np.float32)
    for row in range(num_rows):
        place = a[Field.QUERY_TOKEN] * (token + row // sharing) + a[Field.QUERY_HEAD] * (head * sharing + row % sharing)
        given = float_rows(a[Field.QUERY] + 4 * place, 1, key_dim)[0]
        for d in range(key_dim):
            query[row, d] = given[d] * floats[0]
    scores, zeros = np.empty((num_rows, TILE_KEYS), dtype=np.float32), np.zeros(PANEL, dtype=np.float32)
    bits = np.empty(TILE_KEYS, dtype=np.int32)
    powers = bits.view(np.float32)
    sums = np.zeros((num_rows, value_dim), dtype=np.float32)
    largest, totals = np.full(num_rows, LEAST, dtype=np.float32), np.zeros(num_rows, dtype=np.float32)
    key_bytes, value_bytes, pitch = 4 * PANEL * key_dim, 4 * PANEL * num_keys, 4 * TILE_KEYS
    key_panels, value_panels = _key_panels(a, head), _value_panels(a, head)
    for low in range(firsts[0] // PANEL * PANEL, stops[num_tokens - 1], TILE_KEYS):
        count = min(TILE_KEYS, stops[num_tokens - 1] - low)
        for panel in range((count + PANEL - 1) // PANEL):
            multiply_rows(
                None, num_rows, 1, query.ctypes.data, 4 * key_dim, key_panels + key_bytes * (low // PANEL + panel),
                key_bytes, key_dim, zeros.ctypes.data, 0, scores.ctypes.data + 4 * PANEL * panel, pitch,
            )  # fmt: skip
        for row in range(num_rows):
            first = min(max(firsts[row // sharing] - low, 0), count)
            stop = max(min(stops[row // sharing] - low, count), first)
            scores[row, :first] = 0
            scores[row, stop:count] = 0
            largest[row], totals[row] = weigh(
                scores[row, first:stop], floats[1], bits, powers, sums[row], largest[row], totals[row]
            )
        for panel in range(value_dim // PANEL):
            out = sums.ctypes.data + 4 * PANEL * panel
            multiply_rows(
                None, num_rows, 1, scores.ctypes.data, pitch, value_panels + value_bytes * panel + 4 * PANEL * low,
                value_bytes, count, out, 4 * value_dim, out, 4 * value_dim,
            )  # fmt: skip
    heads = num_kv * sharing
    for row in range(num_rows):
        at, total = head * sharing + row % sharing, totals[row]
        if a[Field.SINKS] != 0:
            sink = np.float32(LOG2_E) * float_rows(a[Field.SINKS], 1, heads)[0, at]
            total += np.float32(2.0) ** (sink - largest[row])
        target = numba.carray(
            pointer(a[Field.OUTPUT] + 4 * value_dim * ((token + row // sharing) * heads + at), types.float32),
            (value_dim,),
        )
        for d in range(value_dim):
            target[d] = sums[row, d] / total


def pack_chunk(record: Any) -> None:
    """Body of a parallel region: pack keys and values."""
    a = numba.carray(record, (NUM_FIELDS,))
    while True:
        index = take_next(record)
        if index >= a[Field.NUM_WORK]:
            break
        _pack(a, index)


def attend_chunk(record: Any) -> None:
    """Body of a parallel region: attend, keys and values being packed."""
    a = numba.carray(record, (NUM_FIELDS,))
    while True:
        index = take_next(record)
        if index >= a[Field.NUM_WORK]:
            break
        _attend(a, index)
