"""Which decode rows of a step see the same blocks: work that reads each run of common blocks once. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from looseleaf.ids import Int32Array, Int64Array

ITEM_COLUMNS = 6
"""Numbers of a piece of work: table row, first and stop token in it, first member, number of members, first part."""


@dataclass(frozen=True)
class DecodeTables:
    """The D decode rows of a step in one layer group, their blocks side by side.

    `rows` int64 [D]: their places in the flat step. `tables` int32 [lanes, D, columns]: blocks, the same column for the
    same part of a sequence; 0 where a row has none. Row d sees tokens `first[d] : stop[d]` [D], counted from column 0.
    """

    rows: Int64Array
    tables: Int32Array
    first: Int64Array
    stop: Int64Array


@dataclass(frozen=True)
class WorkItems:
    """All that the decode rows of one step see, in pieces; the same in every lane of the group.

    `items` int64 [n, 6]: tokens `first : stop` of a table row, seen by some `members` (see `ITEM_COLUMNS`). Each member
    of each item gives one partial result, *part*; `order` [parts] lists them row by row, `starts` [D + 1] where each
    row's begin.
    """

    items: Int64Array
    members: Int64Array
    order: Int64Array
    starts: Int64Array


def decode_tables(
    sequences: Int64Array,
    rows: Int64Array,
    oldest: Int64Array,
    num_keys: Int64Array,
    block_tables: Sequence[Int32Array],
    first_blocks: Int32Array,
    block_tokens: int,
) -> DecodeTables:
    """`sequences` [D] of a step side by side; `rows`, `oldest`, `num_keys` [D] are theirs. A few numpy calls."""
    chosen = [block_tables[s] for s in sequences.tolist()]
    lengths = np.fromiter((len(table) for table in chosen), dtype=np.int64, count=len(chosen))
    begins = first_blocks[sequences].astype(np.int64)
    base = int(begins.min())
    which = np.repeat(np.arange(len(chosen)), lengths)
    columns = np.arange(len(which)) + np.repeat(begins - base - np.cumsum(lengths) + lengths, lengths)
    tables = np.zeros((chosen[0].shape[1], len(chosen), int((begins - base + lengths).max())), dtype=np.int32)
    tables[:, which, columns] = np.concatenate(chosen).T
    shift = base * block_tokens
    return DecodeTables(rows, tables, oldest - shift, num_keys - shift)


def common_blocks(of: DecodeTables, block_tokens: int) -> Int64Array:
    """For each row and column [D, columns] the first row that has, and sees in full, the same block in every lane.

    A row that shares a column with none before it is given for itself.
    """
    num_rows, num_columns = of.tables.shape[1:]
    here = np.arange(num_columns)[None, :]
    whole = (here * block_tokens >= of.first[:, None]) & ((here + 1) * block_tokens <= of.stop[:, None])
    own = np.broadcast_to(np.arange(num_rows)[:, None], whole.shape)
    blocks = of.tables[0]
    # A block names the first row that has it: rows are written from the last to the first, and the last write stays.
    first_row = np.empty(int(blocks.max(initial=0)) + 1, dtype=np.int64)
    seen = whole[::-1]
    first_row[blocks[::-1][seen]] = own[::-1][seen]
    leaders = np.where(whole, first_row[blocks], own)
    same = (of.tables[:, leaders, here] == of.tables).all(axis=0)  # also rules out a block at two places
    same &= np.take_along_axis(whole, leaders, axis=0)
    return np.where(same, leaders, own)


def work_items(of: DecodeTables, block_tokens: int, *, item_tokens: int, max_members: int, min_saved: int) -> WorkItems:
    """Cut what the rows of `of` see into items.

    A run of blocks that several rows share becomes items of up to `max_members` rows, if that saves reading at least
    `min_saved` tokens; all else is read row by row. An item has at most about `item_tokens` tokens, a shared one
    fewer the more rows it has.
    """
    num_rows, num_columns = of.tables.shape[1:]
    low = np.arange(num_columns) * block_tokens
    open_to = (low[None, :] < of.stop[:, None]) & (low[None, :] + block_tokens > of.first[:, None])
    leaders = common_blocks(of, block_tokens) if num_rows > 1 else np.zeros((1, num_columns), dtype=np.int64)
    cuts = np.flatnonzero((leaders[:, 1:] != leaders[:, :-1]).any(axis=0)) + 1
    items: list[tuple[int, int, int, Int64Array]] = []
    for start, stop in zip((0, *cuts.tolist()), (*cuts.tolist(), num_columns), strict=True):
        column = leaders[:, start]
        heads, counts = np.unique(column, return_counts=True)
        for head in heads[(counts - 1) * (stop - start) * block_tokens >= max(min_saved, 1)].tolist():
            sharing = np.flatnonzero(column == head)
            open_to[sharing, start:stop] = False
            for at in range(0, len(sharing), max_members):
                members = sharing[at : at + max_members]
                step = max(item_tokens // len(members) // block_tokens, 4) * block_tokens
                items.extend(
                    (head, first, min(first + step, stop * block_tokens), members)
                    for first in range(start * block_tokens, stop * block_tokens, step)
                )
    return _together(items, _alone(of, open_to, block_tokens, item_tokens), num_rows)


def _alone(of: DecodeTables, is_open: np.ndarray, block_tokens: int, item_tokens: int) -> Int64Array:
    """Items int64 [n, 3] (row, first, stop) for the columns [D, columns] that each row reads for itself."""
    edges = np.diff(is_open.astype(np.int8), axis=1, prepend=0, append=0)
    row, start = np.nonzero(edges == 1)
    stop = np.nonzero(edges == -1)[1]
    first = np.maximum(start * block_tokens, of.first[row])
    last = np.minimum(stop * block_tokens, of.stop[row])
    pieces = -(-(last - first) // item_tokens)
    within = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    row, first, last = (np.repeat(each, pieces) for each in (row, first, last))
    first = first + within * item_tokens
    return np.stack([row, first, np.minimum(first + item_tokens, last)], axis=1)


def _together(shared: list[tuple[int, int, int, Int64Array]], alone: Int64Array, num_rows: int) -> WorkItems:
    """Number members and parts; the largest items first, so that threads end together."""
    sizes = np.array([len(members) for *_, members in shared], dtype=np.int64)
    members = np.concatenate([*(members for *_, members in shared), alone[:, 0]]).astype(np.int64)
    items = np.empty((len(shared) + len(alone), ITEM_COLUMNS), dtype=np.int64)
    items[: len(shared), :3] = np.array([item[:3] for item in shared], dtype=np.int64).reshape(-1, 3)
    items[len(shared) :, :3] = alone
    items[:, 4] = np.concatenate([sizes, np.ones(len(alone), dtype=np.int64)])
    items[:, 3] = items[:, 5] = np.cumsum(items[:, 4]) - items[:, 4]
    by_size = np.argsort(-(items[:, 2] - items[:, 1]) * items[:, 4], kind="stable")
    order = np.argsort(members, kind="stable")
    starts = np.searchsorted(members[order], np.arange(num_rows + 1)).astype(np.int64)
    return WorkItems(np.ascontiguousarray(items[by_size]), members, order, starts)
