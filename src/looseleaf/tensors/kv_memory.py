"""The tensors that hold keys and values, addressed by slot. Nothing here knows why a block is held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from looseleaf.errors import CapacityError, ConfigError, IntegrityError
from looseleaf.ids import Int32Array, Int64Array
from looseleaf.tensors.layout import KVLayout
from looseleaf.tensors.rows import Scratch, Selection, TokenRows, zeros


class KeysValues(NamedTuple):
    """K [tokens, kv_heads, key_dim] and V [tokens, kv_heads, value_dim] of one layer."""

    keys: torch.Tensor
    values: torch.Tensor


class KVMemory:
    """Keys and values of `num_blocks` blocks in `layout` on `device`.

    There are as many physical layers as a lane has: per layer one tensor of K and one of V, a row per slot. A slot is
    one token's place in one lane, `block_id * block_tokens + offset`. Which lane a block belongs to only its owner
    knows: layers of all lanes read and write the same tensors, each at the slots of its own lane. Values are converted
    when written, and back to the dtype asked for when read.

    Each block remembers how many of its tokens are written, counted from its start. Writing offset o makes it o + 1:
    the new owner of a reused block starts at 0 and so never sees what the one before left behind.

    Calls come one at a time. Reads give what was written before; writes change only the slots named.
    """

    def __init__(self, layout: KVLayout, *, num_blocks: int, device: torch.device) -> None:
        if num_blocks < 1:
            raise ConfigError(f"KV memory needs at least one block, not {num_blocks}")
        self.layout, self.num_blocks, self.device = layout, num_blocks, device
        self.block_tokens = layout.block_tokens
        num_slots = num_blocks * layout.block_tokens
        self._keys = [TokenRows(num_slots, row.keys, row.heads, layout.dtype, device) for row in layout.rows]
        self._values = [TokenRows(num_slots, row.values, row.heads, layout.dtype, device) for row in layout.rows]
        self._num_written = np.zeros(num_blocks, dtype=np.int32)
        self._key_scratch, self._value_scratch = Scratch(), Scratch()

    @property
    def dtype(self) -> torch.dtype:
        """How numbers are stored."""
        return self.layout.dtype

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block: of `block_tokens` tokens in one lane."""
        return self.layout.lane_bytes_per_token * self.block_tokens

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.bytes_per_block * self.num_blocks

    def mark_written(self, slots: Int64Array) -> None:
        """Note that this step writes `slots` [lanes, T], ascending in a block. IntegrityError if one is outside."""
        flat = slots.reshape(-1)
        blocks = flat // self.block_tokens
        self._require_blocks(blocks)
        self._num_written[blocks] = flat % self.block_tokens + 1

    def require_written(
        self,
        block_tables: Sequence[Int32Array],
        first_blocks: Int32Array,
        first_tokens: Int64Array,
        stop_tokens: Int64Array,
    ) -> None:
        """Check that tokens `first_tokens[s] : stop_tokens[s]` of each sequence are written in every lane.

        `block_tables[s]` [n, lanes] begins with logical block `first_blocks[s]`. O(blocks), a few numpy calls.

        Raises:
            IntegrityError: a table does not cover them or names a block that does not exist, or a token is not written.
        """
        lows = first_tokens // self.block_tokens - first_blocks
        highs = -(-stop_tokens // self.block_tokens) - first_blocks
        lengths = np.fromiter((len(table) for table in block_tables), dtype=np.int64, count=len(block_tables))
        if (short := np.flatnonzero((lows < 0) | (lengths < highs))).size:
            s = short[0]
            raise IntegrityError(
                "KV2",
                f"a table of {lengths[s]} blocks from block {first_blocks[s]} on cannot hold tokens "
                f"{first_tokens[s]}..{stop_tokens[s] - 1}",
            )
        counts = highs - lows
        if not counts.any():
            return
        blocks = np.concatenate([t[low:high] for t, low, high in zip(block_tables, lows, highs, strict=True)])
        self._require_blocks(blocks)
        wanted = np.full(len(blocks), self.block_tokens, dtype=np.int64)
        wanted[(np.cumsum(counts) - 1)[counts > 0]] = (stop_tokens[counts > 0] - 1) % self.block_tokens + 1
        written = self._num_written[blocks]
        missing = written < wanted[:, None]
        if missing.any():
            at, lane = np.argwhere(missing)[0]
            raise IntegrityError(
                "KV3",
                f"block {blocks[at, lane]} (lane {lane}) holds {written[at, lane]} written tokens, "
                f"{wanted[at]} are to be read",
            )

    def _require_blocks(self, blocks: Int64Array | Int32Array) -> None:
        if blocks.size and (blocks.min() < 0 or blocks.max() >= self.num_blocks):
            raise IntegrityError(
                "KV1", f"blocks {blocks.min()}..{blocks.max()} in a memory of {self.num_blocks} blocks"
            )

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write `keys` [T, kv_heads, key_dim] and `values` [T, kv_heads, value_dim] of one layer to `slots` int64 [T].

        Any floating dtype: values are converted. Modifies these slots only.
        """
        row = self.layout.lanes.places[layer].row
        self._keys[row].write(slots, keys)
        self._values[row].write(slots, values)

    def _read(self, layer: int, dtype: torch.dtype, select: Selection) -> KeysValues:
        shape, row = self.layout.shapes[layer], self.layout.lanes.places[layer].row
        return KeysValues(
            self._keys[row].read(shape.num_kv_heads, shape.key_dim, dtype, select, self._key_scratch),
            self._values[row].read(shape.num_kv_heads, shape.value_dim, dtype, select, self._value_scratch),
        )

    def read_slots(self, layer: int, slots: torch.Tensor, dtype: torch.dtype) -> KeysValues:
        """K and V at `slots` int64 [n], in `dtype`, copied together. O(n). They are valid until the next read."""
        return self._read(layer, dtype, lambda stored, scratch: scratch.pick(stored, slots))

    def read_blocks(
        self, layer: int, blocks: torch.Tensor, first_token: int, num_tokens: int, dtype: torch.dtype
    ) -> KeysValues:
        """K and V of tokens `first_token : first_token + num_tokens`, counted from the start of `blocks` int64 [n].

        Whole blocks are copied together; valid until the next read. IntegrityError if they hold fewer tokens.
        """
        stop = first_token + num_tokens
        if stop > len(blocks) * self.block_tokens:
            raise IntegrityError("KV2", f"{len(blocks)} blocks cannot hold {stop} tokens")

        def pick(stored: torch.Tensor, scratch: Scratch) -> torch.Tensor:
            by_block = scratch.pick(stored.view(self.num_blocks, -1), blocks)
            return by_block.view(-1, stored.shape[1])[first_token:stop]

        return self._read(layer, dtype, pick)

    def read_run(self, layer: int, first_slot: int, num_tokens: int, dtype: torch.dtype) -> KeysValues:
        """K and V of `num_tokens` slots in a row: views if `dtype` is the memory's, valid until the next write."""
        return self._read(layer, dtype, lambda stored, _: stored[first_slot : first_slot + num_tokens])

    def in_place(self, layer: int) -> KeysValues | None:
        """All slots of a layer's K and V as they lie, [slots, numbers per slot]: heads one after the other, then room
        that only wider layers fill. None in 8 bits. Valid until the next resize."""
        row = self.layout.lanes.places[layer].row
        keys, values = self._keys[row].tensors, self._values[row].tensors
        return KeysValues(keys[0], values[0]) if len(keys) == len(values) == 1 else None

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, `pairs` of (from_block, to_block); all are read before any is written.

        IntegrityError if a block id lies outside the memory.
        """
        if not pairs:
            return
        sources, targets = np.asarray(pairs, dtype=np.int64).T.copy()
        self._require_blocks(sources)
        self._require_blocks(targets)
        from_rows, to_rows = (torch.from_numpy(ids).to(self.device) for ids in (sources, targets))
        for rows in (*self._keys, *self._values):
            for stored in rows.tensors:
                by_block = stored.view(self.num_blocks, -1)
                by_block.index_copy_(0, to_rows, by_block.index_select(0, from_rows))
        self._num_written[targets] = self._num_written[sources]

    def resize(self, num_blocks: int, copies: Sequence[tuple[int, int]] = ()) -> None:
        """Have `num_blocks` blocks, and do `copies` (see `copy_blocks`): before a shrink, after a growth.

        Tensors are replaced one after the other, so at most one of them exists twice at any time. On the CPU, blocks
        never written stay without real memory.

        Raises:
            CapacityError: there is no memory for so many; nothing has changed.
            ConfigError: fewer than one.
        """
        if num_blocks < 1:
            raise ConfigError(f"KV memory needs at least one block, not {num_blocks}")
        if num_blocks == self.num_blocks:
            self.copy_blocks(copies)
            return
        shrinks = num_blocks < self.num_blocks
        self._require_memory(num_blocks)
        if shrinks:
            self.copy_blocks(copies)
        kept = min(num_blocks, int(np.flatnonzero(self._num_written).max(initial=-1)) + 1)
        all_rows = (*self._keys, *self._values)
        try:
            for rows in all_rows:
                rows.resize(num_blocks * self.block_tokens, kept * self.block_tokens)
        except (MemoryError, RuntimeError) as error:
            for rows in all_rows:
                rows.cut(min(num_blocks, self.num_blocks) * self.block_tokens)
            if not shrinks:
                raise self._no_memory(num_blocks) from error
        self._num_written = np.concatenate([self._num_written, np.zeros(num_blocks, dtype=np.int32)])[:num_blocks]
        self.num_blocks = num_blocks
        if not shrinks:
            self.copy_blocks(copies)

    def _require_memory(self, num_blocks: int) -> None:
        """Try what a resize takes at its peak, before anything changes: the growth, and one tensor twice."""
        largest = max(t.shape[1] * t.itemsize for rows in (*self._keys, *self._values) for t in rows.tensors)
        growth = max(0, num_blocks - self.num_blocks) * self.bytes_per_block
        try:
            zeros((growth + largest * num_blocks * self.block_tokens,), torch.uint8, self.device)
        except (MemoryError, RuntimeError) as error:
            raise self._no_memory(num_blocks) from error

    def _no_memory(self, num_blocks: int) -> CapacityError:
        return CapacityError(
            f"there is no memory on {self.device} for {num_blocks} blocks of {self.bytes_per_block} bytes; "
            f"{self.num_blocks} blocks ({self.num_bytes} bytes) are there now",
            "ask for fewer pages, or free memory on that device",
        )
