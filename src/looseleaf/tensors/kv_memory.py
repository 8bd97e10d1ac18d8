"""The tensors that hold keys and values, addressed by slot. Nothing here knows why a block is held."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from looseleaf.errors import ConfigError, IntegrityError
from looseleaf.ids import Int32Array, Int64Array


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps of a token: `num_kv_heads` keys of `key_dim` and values of `value_dim` numbers."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers_per_token(self) -> int:
        """Numbers stored per token: K and V of all heads."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


class KeysValues(NamedTuple):
    """K [tokens, kv_heads, key_dim] and V [tokens, kv_heads, value_dim] of one layer."""

    keys: torch.Tensor
    values: torch.Tensor


def num_blocks_for_bytes(memory_bytes: int, bytes_per_token: int, block_tokens: int, page_tokens: int) -> int:
    """Blocks that fit into `memory_bytes`, in whole pages of `page_tokens` tokens.

    Raises:
        ConfigError: not even one page fits; the message says how much one page takes.
    """
    if page_tokens % block_tokens:
        raise ConfigError(f"page_tokens {page_tokens} is not a multiple of block_tokens {block_tokens}")
    num_pages = memory_bytes // (bytes_per_token * page_tokens)
    if num_pages < 1:
        raise ConfigError(
            f"KV memory of {memory_bytes} bytes holds no page: one page of {page_tokens} tokens takes "
            f"{bytes_per_token * page_tokens} bytes",
            f"give at least that much with --kv-memory, or use smaller pages than {page_tokens} tokens",
        )
    return num_pages * (page_tokens // block_tokens)


class KVMemory:
    """Keys and values of `num_blocks` blocks, for every layer.

    The layout is private: per layer one K and one V tensor `[num_blocks * block_tokens, kv_heads, dim]`. A
    slot is one token's place, `block_id * block_tokens + offset`. Values are converted to `dtype` when
    written, never reinterpreted.

    Each block remembers how many of its tokens are written, counted from its start. Writing offset o makes
    it o + 1: the new owner of a reused block starts at 0 and so never sees what the one before left behind.
    `require_written` checks it once per step for all layers.

    Calls come one at a time. Reads give what was written before; writes change only the slots named.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if num_blocks < 1 or block_tokens < 1:
            raise ConfigError(f"KV memory needs at least one block of one token, not {num_blocks} of {block_tokens}")
        if not layers:
            raise ConfigError("KV memory needs at least one layer")
        if not dtype.is_floating_point:
            raise ConfigError(f"KV memory of {dtype} would lose the values written: take a floating-point dtype")
        self._layers = tuple(layers)
        self._num_blocks = num_blocks
        self._block_tokens = block_tokens
        self._dtype = dtype
        self._device = device
        num_slots = num_blocks * block_tokens
        self._keys = [_zeros((num_slots, shape.num_kv_heads, shape.key_dim), dtype, device) for shape in layers]
        self._values = [_zeros((num_slots, shape.num_kv_heads, shape.value_dim), dtype, device) for shape in layers]
        self._num_written = np.zeros(num_blocks, dtype=np.int32)
        self._key_scratch, self._value_scratch = _Scratch(), _Scratch()

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """Shapes of the layers, in order."""
        return self._layers

    @property
    def num_blocks(self) -> int:
        """Blocks in this memory."""
        return self._num_blocks

    @property
    def block_tokens(self) -> int:
        """Tokens in a block."""
        return self._block_tokens

    @property
    def dtype(self) -> torch.dtype:
        """Type in which the numbers are stored."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self._device

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token in all layers."""
        return sum(shape.numbers_per_token for shape in self._layers) * self._dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.bytes_per_token * self._block_tokens * self._num_blocks

    @property
    def layout(self) -> str:
        """Fingerprint of what a block holds: shapes of all layers, dtype, tokens per block. Equal layouts
        can exchange blocks.
        """
        shapes = ";".join(f"{s.num_kv_heads}x{s.key_dim}+{s.value_dim}" for s in self._layers)
        text = f"kv1|{shapes}|{self._dtype}|{self._block_tokens}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def mark_written(self, slots: Int64Array) -> None:
        """Note that the K and V of `slots` [T] (numpy) are written in this step, all layers; ascending
        within a block.

        Called once per step, before the layers write.

        Raises:
            IntegrityError: a slot lies outside the memory.
        """
        if len(slots) == 0:
            return
        if int(slots.min()) < 0 or int(slots.max()) >= self._num_blocks * self._block_tokens:
            raise IntegrityError(
                "KV1",
                f"slots {int(slots.min())}..{int(slots.max())} in a memory of {self._num_blocks} blocks",
            )
        self._num_written[slots // self._block_tokens] = slots % self._block_tokens + 1

    def require_written(self, block_tables: Sequence[Int32Array], num_tokens: Int32Array) -> None:
        """Check that the first `num_tokens[s]` tokens of each table are written. O(blocks), a few numpy
        calls.

        Raises:
            IntegrityError: a table is too short, names a block that does not exist, or a token was never
            written.
        """
        num_needed = -(-num_tokens.astype(np.int64) // self._block_tokens)
        lengths = np.fromiter((len(table) for table in block_tables), dtype=np.int64, count=len(block_tables))
        if (short := np.flatnonzero(lengths < num_needed)).size:
            first = int(short[0])
            raise IntegrityError(
                "KV2", f"a table of {int(lengths[first])} blocks cannot hold {int(num_tokens[first])} tokens"
            )
        if not len(block_tables) or not int(num_needed.sum()):
            return
        blocks = np.concatenate([table[:count] for table, count in zip(block_tables, num_needed, strict=True)])
        if int(blocks.min()) < 0 or int(blocks.max()) >= self._num_blocks:
            raise IntegrityError(
                "KV1",
                f"block ids {int(blocks.min())}..{int(blocks.max())} in a memory of {self._num_blocks} blocks",
            )
        wanted = np.full(len(blocks), self._block_tokens, dtype=np.int64)
        ends = np.cumsum(num_needed)[num_needed > 0] - 1
        tails = num_tokens[num_needed > 0].astype(np.int64) - (num_needed[num_needed > 0] - 1) * self._block_tokens
        wanted[ends] = tails
        if (missing := np.flatnonzero(self._num_written[blocks] < wanted)).size:
            first = int(missing[0])
            raise IntegrityError(
                "KV3",
                f"block {int(blocks[first])} holds {int(self._num_written[blocks[first]])} written tokens, "
                f"{int(wanted[first])} are to be read",
            )

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the K and V of T tokens of one layer.

        `slots` int64 [T]; `keys` [T, kv_heads, key_dim], `values` [T, kv_heads, value_dim] of any floating
        dtype: the values are converted. Modifies these slots only.
        """
        self._keys[layer].index_copy_(0, slots, keys.to(self._dtype))
        self._values[layer].index_copy_(0, slots, values.to(self._dtype))

    def read_slots(self, layer: int, slots: torch.Tensor, dtype: torch.dtype) -> KeysValues:
        """K and V at `slots` int64 [n], in `dtype`, copied together. O(n). They are valid until the next read."""
        keys = self._pick(self._keys[layer], slots, self._key_scratch)
        values = self._pick(self._values[layer], slots, self._value_scratch)
        return KeysValues(keys.to(dtype), values.to(dtype))

    def read_blocks(
        self, layer: int, blocks: torch.Tensor, first_token: int, num_tokens: int, dtype: torch.dtype
    ) -> KeysValues:
        """K and V of tokens `first_token : first_token + num_tokens` counted from the start of `blocks` int64 [n].

        Whole blocks are copied together; the result is valid until the next read. The caller has checked with
        `require_written`.

        Raises:
            IntegrityError: the blocks hold fewer tokens than that.
        """
        stop = first_token + num_tokens
        if stop > len(blocks) * self._block_tokens:
            raise IntegrityError("KV2", f"{len(blocks)} blocks cannot hold {stop} tokens")

        def pick(stored: torch.Tensor, scratch: _Scratch) -> torch.Tensor:
            by_block = self._pick(stored.view(self._num_blocks, -1), blocks, scratch)
            return by_block.view(-1, *stored.shape[1:])[first_token:stop].to(dtype)

        return KeysValues(pick(self._keys[layer], self._key_scratch), pick(self._values[layer], self._value_scratch))

    def _pick(self, stored: torch.Tensor, rows: torch.Tensor, scratch: _Scratch) -> torch.Tensor:
        """Rows of `stored` into memory kept from read to read: a new tensor each time would cost more in page faults
        than the copy itself (5 times measured, 32 sequences of 512 tokens with 8 heads).
        """
        target = scratch.take(len(rows) * stored[0].numel(), self._dtype, self._device)
        return torch.index_select(stored, 0, rows, out=target.view(len(rows), *stored.shape[1:]))

    def read_run(self, layer: int, first_slot: int, num_tokens: int, dtype: torch.dtype) -> KeysValues:
        """K and V of `num_tokens` slots that follow each other in memory: views, no copy, if `dtype` is
        that of the memory.

        The caller only reads them, and only before the next write.
        """
        run = slice(first_slot, first_slot + num_tokens)
        return KeysValues(self._keys[layer][run].to(dtype), self._values[layer][run].to(dtype))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks in all layers: `pairs` of (from_block, to_block). All sources are read before
        any target is written.

        Raises:
            IntegrityError: a block id lies outside the memory.
        """
        if not pairs:
            return
        ids = np.asarray(pairs, dtype=np.int64)
        if int(ids.min()) < 0 or int(ids.max()) >= self._num_blocks:
            raise IntegrityError("KV1", f"copy of blocks {pairs} in a memory of {self._num_blocks} blocks")
        sources = torch.from_numpy(ids[:, 0].copy()).to(self._device)
        targets = torch.from_numpy(ids[:, 1].copy()).to(self._device)
        for stored in (*self._keys, *self._values):
            by_block = stored.view(self._num_blocks, -1)
            by_block.index_copy_(0, targets, by_block.index_select(0, sources))
        self._num_written[ids[:, 1]] = self._num_written[ids[:, 0]]


class _Scratch:
    """A flat tensor that grows as needed and is used again."""

    def __init__(self) -> None:
        self._kept: torch.Tensor | None = None

    def take(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """`count` numbers; what was taken before is overwritten. O(1) unless it has to grow."""
        if self._kept is None or self._kept.numel() < count:
            with torch.inference_mode(False):  # so that it may be written inside and outside of inference mode
                self._kept = torch.empty(count, dtype=dtype, device=device)
        return self._kept[:count]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros. On the CPU its pages become real memory only when they are first written: numpy asks the
    system for zeroed pages, where torch would write the zeros itself.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
