"""Calls that name many leases at once: a decode step's bookkeeping in a few array operations."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from looseleaf.core.gains import ReleaseGain, release_gain
from looseleaf.core.lease import Lease
from looseleaf.core.leasing import LeaseDesk
from looseleaf.core.store import BlockStore
from looseleaf.core.tokens import pack_one_each
from looseleaf.core.tree import ABSENT
from looseleaf.errors import LeaseClosed, RequestError
from looseleaf.ids import Int64Array


class ManyLeases:
    """Works on rows of the desk's `LeaseTable`, all or nothing. Leases whose run only becomes longer are stored when
    somebody reads the tree (`LeaseDesk.settle`), many blocks at once instead of one by one."""

    def __init__(self, desk: LeaseDesk, store: BlockStore, lock: threading.RLock) -> None:
        self._desk = desk
        self._store = store
        self._lock = lock
        self._block_tokens = store.plan.block_tokens
        self._block_bytes = store.tree.block_bytes
        self._num_lanes = store.plan.num_lanes
        self._named: list[Lease] = []  # by the last call, and their rows, as long as none of them was released
        self._named_rows: Int64Array = np.empty(0, dtype=np.int64)
        self._num_closed = 0

    def append_many(self, leases: Sequence[Lease], token_ids: npt.ArrayLike) -> Int64Array:
        """See `CacheManager.append_many`."""
        packed = pack_one_each(token_ids, len(leases))
        if len(leases) == 0:
            return np.empty(0, dtype=np.int64)
        with self._lock:
            rows = self._rows_of(leases, "append_many")
            table = self._desk.rows
            blocks = table.next_block[rows, 0]
            if np.minimum.reduce(blocks) < 0:
                self._grow_many([leases[i] for i in (blocks < 0).nonzero()[0].tolist()])
                blocks = table.next_block[rows, 0]
            positions = table.num_tokens[rows]
            offsets = positions & (self._block_tokens - 1)
            table.tail[rows, offsets] = packed
            table.num_tokens[rows] = positions + 1
            table.num_reserved[rows] = np.maximum(table.num_reserved[rows], positions + 1)
            is_full = offsets == self._block_tokens - 1
            if is_full.any():
                self._fill(leases, rows, is_full)
            slots: Int64Array = blocks * self._block_tokens + offsets
            return slots

    def _fill(self, leases: Sequence[Lease], rows: Int64Array, is_full: npt.NDArray[np.bool_]) -> None:
        """The last blocks of some leases, `is_full` [num_leases], became full of tokens."""
        table, size = self._desk.rows, self._block_bytes
        full_rows = rows[is_full]
        table.next_block[full_rows] = ABSENT
        data = table.tail[full_rows].tobytes()
        for number, i in enumerate(is_full.nonzero()[0].tolist()):
            lease = leases[i]
            lease.know(data[number * size : (number + 1) * size])
            at = len(lease.head) // size
            if at < lease.num_blocks:
                table.next_block[lease.row] = lease.table[at]

    def slots_many(self, leases: Sequence[Lease]) -> Int64Array:
        """See `CacheManager.slots_many`."""
        with self._lock:
            rows = self._rows_of(leases, "slots_many")
            positions = self._desk.rows.num_tokens[rows] - 1
            offsets = positions & (self._block_tokens - 1)
            blocks = self._desk.rows.next_block[rows]
            for i in np.flatnonzero(offsets == self._block_tokens - 1).tolist():  # the next token begins a block
                blocks[i] = leases[i].table[int(positions[i]) // self._block_tokens]
            slots: Int64Array = blocks * self._block_tokens + offsets[:, None]
            by_lane: Int64Array = np.ascontiguousarray(slots.T)
            return by_lane

    def commit_many(self, leases: Sequence[Lease]) -> None:
        """See `CacheManager.commit_many`."""
        if len(leases) == 0:
            return
        with self._lock:
            rows = self._rows_of(leases, "commit_many")
            table = self._desk.rows
            after = table.num_tokens[rows]
            is_beyond = after > table.num_reserved[rows]
            if is_beyond.any():
                row = int(rows[is_beyond.argmax()])
                raise self._desk.beyond(row, int(table.num_tokens[row]))
            before = table.num_committed[rows]
            may_wait = self._store.may_store_later
            for i in ((after ^ before) >= self._block_tokens).nonzero()[0].tolist():
                lease = leases[i]
                if may_wait and lease.grows_alone:
                    self._desk.store_later(lease)
                else:
                    self._desk.settle_one(lease)
                    self._desk.commit_to(lease, int(before[i]), int(after[i]))
            table.num_committed[rows] = after

    def _grow_many(self, leases: list[Lease]) -> None:
        """Room for the next token of each lease: all or nothing."""
        num_tokens = self._desk.rows.num_tokens
        missing = [self._desk.blocks_for(int(num_tokens[lease.row]) + 1) - lease.num_blocks for lease in leases]
        if not self._desk.make_room(leases, missing):
            raise self._store.out_of_blocks(sum(missing) * self._num_lanes)
        if self._num_lanes == 1 and not self._store.usage.tracks_private and max(missing) == 1:
            self._take_one_each(leases)
            return
        for lease, count in zip(leases, missing, strict=True):
            self._desk.take(lease, count)
            self._desk.sync(lease, num_reserved=int(num_tokens[lease.row]) + 1)

    def _take_one_each(self, leases: list[Lease]) -> None:
        """Give each lease, of one lane, one more block: `LeaseDesk.take` and `sync` in a few array operations."""
        block_tokens, rows = self._block_tokens, np.array([lease.row for lease in leases])
        growths = [
            None
            if lease.expected_tokens is None
            else max(0, self._desk.blocks_for(lease.expected_tokens) - lease.num_blocks - 1)
            for lease in leases
        ]
        lasts = [int(lease.table[lease.num_blocks - 1, 0]) if lease.num_blocks else ABSENT for lease in leases]
        blocks = self._store.ledger.take_one_each(lasts, growths)
        for lease, block in zip(leases, blocks.tolist(), strict=True):
            lease.add_block(block)
        figures = self._desk.rows
        figures.num_reserved[rows] = figures.num_tokens[rows] + 1
        figures.num_places[rows] += block_tokens
        figures.next_block[rows, 0] = blocks

    def _rows_of(self, leases: Sequence[Lease], call: str) -> Int64Array:
        if (
            leases == self._named and self._num_closed == self._desk.num_closed
        ):  # a decode step names them several times
            return self._named_rows
        for lease in leases:
            if not lease.is_open:
                raise LeaseClosed(lease.request_id, call)
            if lease.desk is not self._desk:
                raise RequestError(f"{call} names a lease of another manager: request {lease.request_id!r}")
        rows = np.fromiter((lease.row for lease in leases), dtype=np.int64, count=len(leases))
        if self._desk.rows.has_duplicates(rows):
            raise RequestError(f"{call} names a lease twice", "each lease takes one token per call")
        self._named, self._named_rows, self._num_closed = list(leases), rows, self._desk.num_closed
        return rows

    def release_gains(self, leases: Sequence[Lease]) -> list[ReleaseGain]:
        """See `CacheManager.release_gains`."""
        with self._lock:
            self._rows_of(leases, "release_gains")
            self._desk.settle()
            self._store.expire_pins()
            ledger, size = self._store.ledger, self._block_tokens
            num_committed = self._desk.rows.num_committed
            return [
                release_gain(ledger, lease.node, lease.table[: lease.num_blocks], int(num_committed[lease.row]), size)
                for lease in leases
            ]
