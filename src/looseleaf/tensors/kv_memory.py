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
    """Blocks that fit into `memory_bytes`, in whole pages of `page_tokens` tokens. ConfigError if not even one fits."""
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
    """Keys and values of `num_blocks` blocks of `block_tokens` tokens, for all `layers`, as `dtype` on `device`.

    The layout is private: per layer one K and one V tensor `[num_blocks * block_tokens, kv_heads, dim]`. A slot is one
    token's place, `block_id * block_tokens + offset`. Values are converted to `dtype` when written.

    Each block remembers how many of its tokens are written, counted from its start. Writing offset o makes it o + 1:
    the new owner of a reused block starts at 0 and so never sees what the one before left behind.

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
        self.layers = tuple(layers)
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        self.dtype, self.device = dtype, device
        num_slots = num_blocks * block_tokens
        self._keys = [_zeros((num_slots, shape.num_kv_heads, shape.key_dim), dtype, device) for shape in layers]
        self._values = [_zeros((num_slots, shape.num_kv_heads, shape.value_dim), dtype, device) for shape in layers]
        self._num_written = np.zeros(num_blocks, dtype=np.int32)
        self._key_scratch, self._value_scratch = _Scratch(), _Scratch()

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token in all layers."""
        return sum(shape.numbers_per_token for shape in self.layers) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.bytes_per_token * self.block_tokens * self.num_blocks

    @property
    def layout(self) -> str:
        """Fingerprint of what a block holds: shapes, dtype, tokens per block. Equal layouts can exchange blocks."""
        shapes = ";".join(f"{s.num_kv_heads}x{s.key_dim}+{s.value_dim}" for s in self.layers)
        text = f"kv1|{shapes}|{self.dtype}|{self.block_tokens}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def mark_written(self, slots: Int64Array) -> None:
        """Note that this step writes `slots` [T], ascending within a block. IntegrityError if one is outside."""
        blocks = slots // self.block_tokens
        self._require_blocks(blocks)
        self._num_written[blocks] = slots % self.block_tokens + 1

    def require_written(self, block_tables: Sequence[Int32Array], num_tokens: Int32Array) -> None:
        """Check that the first `num_tokens[s]` tokens of each table are written. O(blocks), a few numpy calls per step.

        Raises:
            IntegrityError: a table is too short, names a block that does not exist, or a token was never written.
        """
        num_needed = -(-num_tokens.astype(np.int64) // self.block_tokens)
        lengths = np.fromiter((len(table) for table in block_tables), dtype=np.int64, count=len(block_tables))
        if (short := np.flatnonzero(lengths < num_needed)).size:
            first = short[0]
            raise IntegrityError("KV2", f"a table of {lengths[first]} blocks cannot hold {num_tokens[first]} tokens")
        if not num_needed.any():
            return
        blocks = np.concatenate([table[:count] for table, count in zip(block_tables, num_needed, strict=True)])
        self._require_blocks(blocks)
        wanted = np.full(len(blocks), self.block_tokens, dtype=np.int64)
        last_blocks = (np.cumsum(num_needed) - 1)[num_needed > 0]
        wanted[last_blocks] = (num_tokens[num_needed > 0] - 1) % self.block_tokens + 1
        written = self._num_written[blocks]
        if (missing := np.flatnonzero(written < wanted)).size:
            at = missing[0]
            raise IntegrityError(
                "KV3", f"block {blocks[at]} holds {written[at]} written tokens, {wanted[at]} are to be read"
            )

    def _require_blocks(self, blocks: Int64Array | Int32Array) -> None:
        if len(blocks) and (blocks.min() < 0 or blocks.max() >= self.num_blocks):
            raise IntegrityError(
                "KV1", f"blocks {blocks.min()}..{blocks.max()} in a memory of {self.num_blocks} blocks"
            )

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write `keys` [T, kv_heads, key_dim] and `values` [T, kv_heads, value_dim] of one layer to `slots` int64 [T].

        Any floating dtype: values are converted. Modifies these slots only.
        """
        self._keys[layer].index_copy_(0, slots, keys.to(self.dtype))
        self._values[layer].index_copy_(0, slots, values.to(self.dtype))

    def read_slots(self, layer: int, slots: torch.Tensor, dtype: torch.dtype) -> KeysValues:
        """K and V at `slots` int64 [n], in `dtype`, copied together. O(n). They are valid until the next read."""
        keys = self._key_scratch.pick(self._keys[layer], slots)
        values = self._value_scratch.pick(self._values[layer], slots)
        return KeysValues(keys.to(dtype), values.to(dtype))

    def read_blocks(
        self, layer: int, blocks: torch.Tensor, first_token: int, num_tokens: int, dtype: torch.dtype
    ) -> KeysValues:
        """K and V of tokens `first_token : first_token + num_tokens`, counted from the start of `blocks` int64 [n].

        Whole blocks are copied together; valid until the next read. IntegrityError if they hold fewer tokens.
        """
        stop = first_token + num_tokens
        if stop > len(blocks) * self.block_tokens:
            raise IntegrityError("KV2", f"{len(blocks)} blocks cannot hold {stop} tokens")

        def pick(stored: torch.Tensor, scratch: _Scratch) -> torch.Tensor:
            by_block = scratch.pick(stored.view(self.num_blocks, -1), blocks)
            return by_block.view(-1, *stored.shape[1:])[first_token:stop].to(dtype)

        return KeysValues(pick(self._keys[layer], self._key_scratch), pick(self._values[layer], self._value_scratch))

    def read_run(self, layer: int, first_slot: int, num_tokens: int, dtype: torch.dtype) -> KeysValues:
        """K and V of `num_tokens` slots in a row: views if `dtype` is the memory's, valid until the next write."""
        run = slice(first_slot, first_slot + num_tokens)
        return KeysValues(self._keys[layer][run].to(dtype), self._values[layer][run].to(dtype))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks in all layers, `pairs` of (from_block, to_block); all are read before any is written.

        IntegrityError if a block id lies outside the memory.
        """
        if not pairs:
            return
        sources, targets = np.asarray(pairs, dtype=np.int64).T.copy()
        self._require_blocks(sources)
        self._require_blocks(targets)
        from_rows, to_rows = (torch.from_numpy(ids).to(self.device) for ids in (sources, targets))
        for stored in (*self._keys, *self._values):
            by_block = stored.view(self.num_blocks, -1)
            by_block.index_copy_(0, to_rows, by_block.index_select(0, from_rows))
        self._num_written[targets] = self._num_written[sources]


class _Scratch:
    """Memory kept from read to read: a new tensor each time costs several times the copy itself in page faults."""

    def __init__(self) -> None:
        self._kept: torch.Tensor | None = None

    def pick(self, stored: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """`rows` int64 [n] of `stored`; what was picked before is overwritten."""
        count = len(rows) * stored[0].numel()
        if self._kept is None or self._kept.numel() < count:
            with torch.inference_mode(False):  # so that it may be written inside and outside of inference mode
                self._kept = torch.empty(count, dtype=stored.dtype, device=stored.device)
        target = self._kept[:count].view(len(rows), *stored.shape[1:])
        return torch.index_select(stored, 0, rows, out=target)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros. On the CPU by numpy: it asks the system for zeroed pages, real only once they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
