"""Prefill chunks on the CPU by the compiled kernel of `chunk_kernel`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from looseleaf.hf.attention_backend import AttentionCall, read_chunk
from looseleaf.hf.openmp import Threads
from looseleaf.hf.step_plan import PrefillChunk
from looseleaf.tensors import KVMemory

TILE_ROWS: Final = 128
"""Rows of the kernel, query heads of a token counted, that attend together: their numbers fit a core's own cache."""


class ChunkAttention:
    """Attends a sequence's query tokens of one step, in float32. `compiled`: the module `chunk_kernel`."""

    def __init__(self, compiled: Any, threads: Threads) -> None:
        self._field, self._num_fields = compiled.Field, int(compiled.NUM_FIELDS)
        self._panel, self._packed_keys = int(compiled.PANEL), int(compiled.PACKED_KEYS)
        self._pack, self._attend = compiled.pack_chunk, compiled.attend_chunk
        self._address_of: Callable[[Any], int] = lru_cache(compiled.address_of)
        self._threads = threads
        self._packed = torch.empty(0)

    def prepare(self) -> None:
        """Compile, or take from disk."""
        self._address_of(self._pack)
        self._address_of(self._attend)

    def takes(self, call: AttentionCall) -> bool:
        """Whether the kernel can do `call`; in bfloat16 torch's own attention is left to it."""
        return call.query.dtype == torch.float32 and call.values.shape[-1] % self._panel == 0

    def prefill(self, call: AttentionCall, chunk: PrefillChunk, memory: KVMemory, output: torch.Tensor) -> None:
        """Write the rows of `chunk` to `output` [T, heads, value_dim], as `GatherBackend.prefill` does."""
        rows = slice(chunk.rows.first_row, chunk.rows.stop_row)
        query, target = _even(call.query[rows]), output[rows]
        keys, values = (_even(tensor) for tensor in read_chunk(call, chunk, memory))
        (num_tokens, num_heads, key_dim), (num_keys, num_kv_heads, value_dim) = query.shape, values.shape
        num_panels = -(-num_keys // self._panel)
        numbers = num_kv_heads * (num_panels * self._panel * key_dim + num_keys * value_dim)
        if len(self._packed) < numbers:
            self._packed = torch.empty(numbers)
        tile_tokens = max(1, TILE_ROWS * num_kv_heads // num_heads)
        factors = score_factors(call)
        sinks = None if call.sinks is None else call.sinks.float().contiguous()
        record = np.zeros(self._num_fields, dtype=np.int64)
        record[self._field.QUERY : self._field.SINKS + 1] = (
            *(query.data_ptr(), *query.stride()[:2]),
            *(keys.data_ptr(), *keys.stride()[:2]),
            *(values.data_ptr(), *values.stride()[:2]),
            *(target.data_ptr(), chunk.rows.first_keys.ctypes.data, chunk.rows.stop_keys.ctypes.data),
            *(num_tokens, num_keys, num_kv_heads, num_heads // num_kv_heads, key_dim, value_dim),
            *(self._packed.data_ptr(), tile_tokens, factors.ctypes.data, 0 if sinks is None else sinks.data_ptr()),
        )
        run, address_of = self._threads.run, self._address_of
        run(address_of(self._pack), record, num_kv_heads * -(-num_keys // self._packed_keys))
        run(address_of(self._attend), record, num_kv_heads * -(-num_tokens // tile_tokens))


def score_factors(call: AttentionCall) -> npt.NDArray[np.float32]:
    """Factor on scores (so that weights are powers of 2, or arguments of the soft cap), and the soft cap or 0."""
    scale = call.query.shape[-1] ** -0.5 if call.scaling is None else call.scaling
    factor = scale / call.softcap if call.softcap else scale / math.log(2)
    return np.array([factor, call.softcap or 0.0], dtype=np.float32)


def _even(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its last dimension's numbers side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
