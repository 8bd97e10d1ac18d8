"""The figures of all live leases in arrays, one row each, so that a decode step is a few numpy calls."""

from __future__ import annotations

import numpy as np

from looseleaf.ids import Int32Array, Int64Array


class LeaseTable:
    """Row-wise state of leases; rows are given out and taken back, free rows hold zeros.

    num_tokens     [rows] int64   tokens known
    num_reserved   [rows] int64   tokens that have room
    num_committed  [rows] int64   tokens written
    num_places     [rows] int64   token places in the blocks of one lane of the table
    next_block     [rows, lanes] int64   the blocks that the next token would fall into, -1 if it has none yet
    tail           [rows, block_tokens] int32   known tokens behind the last full block
    """

    def __init__(self, block_tokens: int, num_lanes: int) -> None:
        self.block_tokens = block_tokens
        self.num_lanes = num_lanes
        self._free_rows: list[int] = []
        self._allocate(0)

    def open(self, num_tokens: int, num_blocks: int) -> int:
        """A row for a sequence of so many known tokens, of which those of its first `num_blocks` blocks are written,
        while it has no others: `next_block` is -1."""
        if not self._free_rows:
            self._grow()
        row = self._free_rows.pop()
        self.num_tokens[row] = num_tokens
        self.num_reserved[row] = self.num_committed[row] = self.num_places[row] = num_blocks * self.block_tokens
        self.next_block[row] = -1
        return row

    def close(self, row: int) -> None:
        """Take a row back."""
        self.num_tokens[row] = self.num_reserved[row] = self.num_committed[row] = self.num_places[row] = 0
        self.next_block[row] = 0
        self._free_rows.append(row)

    @property
    def num_unfilled_places(self) -> int:
        """Token places held by all leases, in all lanes, that no reserved token fills. Only last blocks have any, and
        these are private."""
        return int(self.num_places.sum() - self.num_reserved.sum()) * self.num_lanes

    @property
    def num_bytes(self) -> int:
        """Memory of all columns."""
        return sum(column.nbytes for column in self._columns()) + self.tail.nbytes + self._mark.nbytes

    @property
    def num_uncommitted_tokens(self) -> int:
        """Tokens reserved by all leases but not written yet."""
        return int(self.num_reserved.sum() - self.num_committed.sum())

    def has_duplicates(self, rows: Int64Array) -> bool:
        """True if a row is named twice. O(rows), without sorting."""
        order = np.arange(len(rows))
        self._mark[rows] = order
        return bool((self._mark[rows] != order).any())

    def _columns(self) -> tuple[Int64Array, ...]:
        return (self.num_tokens, self.num_reserved, self.num_committed, self.num_places, self.next_block)

    def _allocate(self, num_rows: int) -> None:
        self.num_tokens: Int64Array = np.zeros(num_rows, dtype=np.int64)
        self.num_reserved: Int64Array = np.zeros(num_rows, dtype=np.int64)
        self.num_committed: Int64Array = np.zeros(num_rows, dtype=np.int64)
        self.num_places: Int64Array = np.zeros(num_rows, dtype=np.int64)
        self.next_block: Int64Array = np.zeros((num_rows, self.num_lanes), dtype=np.int64)
        self.tail: Int32Array = np.zeros((num_rows, self.block_tokens), dtype=np.int32)
        self._mark: Int64Array = np.zeros(num_rows, dtype=np.int64)

    def _grow(self) -> None:
        before = len(self.num_tokens)
        after = max(16, 2 * before)
        old_tail, old_columns = self.tail, self._columns()
        self._allocate(after)
        self.tail[:before] = old_tail
        for source, target in zip(old_columns, self._columns(), strict=True):
            target[:before] = source
        self._free_rows.extend(range(after - 1, before - 1, -1))


def read_only(table: Int32Array) -> Int32Array:
    """A view (a copy, if it is not in one piece) that can't be made writable, as one with its flag cleared could."""
    if len(table) == 0:
        return np.frombuffer(b"", dtype=np.int32).reshape(0, table.shape[1])
    return np.frombuffer(np.ascontiguousarray(table).data.toreadonly(), dtype=np.int32).reshape(table.shape)
