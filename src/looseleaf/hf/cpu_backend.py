"""Attention on the CPU over blocks where they lie: each run of shared blocks is read once for all who share it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import torch

from looseleaf.hf.attention_backend import AttentionBackend, AttentionCall, GatherBackend
from looseleaf.hf.chunk_attention import ChunkAttention, score_factors
from looseleaf.hf.cuda_backend import HALVES, FlashInferBackend
from looseleaf.hf.openmp import Threads
from looseleaf.hf.shared_runs import WorkItems, work_items
from looseleaf.hf.step_plan import AttentionPlan, StepPlan
from looseleaf.ids import Int64Array
from looseleaf.tensors import KeysValues, KVMemory

_LOG = logging.getLogger(__name__)

ITEM_TOKENS = 256
"""An item has at least so many tokens, if there are any: each costs a partial result."""

ITEMS_PER_THREAD = 4
"""Long sequences are cut until each thread has so many items, so that threads end together."""

MEMBER_NUMBERS = 1 << 15
"""Numbers of the queries that share an item: what stays in a core's own cache beside the keys."""

MIN_SAVED_TOKENS = 64
"""A run of shared blocks that saves reading fewer tokens is read row by row."""

KERNELS = {torch.float32: "attend_float32", torch.bfloat16: "attend_bfloat16"}
"""Bodies in `paged_kernel` for the dtypes of memory that it reads."""


class CpuBackend:
    """Decode rows by a compiled kernel that reads K and V in place, prefill chunks by another one.

    Float32 and bfloat16 memory; what the kernels cannot do (8 bits, float16) goes to the reference. Sums are taken in
    float32. `compiled`: the module `paged_kernel`; `chunk_kernel`: that module. The first use of a machine compiles
    (about 30 s, kept on disk).
    """

    def __init__(self, compiled: Any, chunk_kernel: Any) -> None:
        self._field = compiled.Field
        self._num_fields = int(compiled.NUM_FIELDS)
        self._attend = {dtype: getattr(compiled, name) for dtype, name in KERNELS.items()}
        self._merge, self._compile_error = compiled.merge, compiled.NumbaError
        self._address_of: Callable[[Any], int] = lru_cache(compiled.address_of)
        self._threads = Threads()
        self._reference = GatherBackend()
        self._chunks = ChunkAttention(chunk_kernel, self._threads)
        self._parts, self._sums = np.empty(0, dtype=np.float32), np.empty(0, dtype=np.float32)

    def prepare(self, kv_dtype: torch.dtype) -> None:
        """Compile what memory of `kv_dtype` needs, or take it from disk. RuntimeError if that fails."""
        try:
            self._address_of(self._attend[kv_dtype])
            self._address_of(self._merge)
            self._chunks.prepare()
        except self._compile_error as error:
            raise RuntimeError(f"the kernel does not compile: {error}") from error

    def attend(self, call: AttentionCall, plan: StepPlan, memory: KVMemory) -> torch.Tensor:
        """See `AttentionBackend`."""
        work = plan.for_layer(call.layer)
        stored = memory.in_place(call.layer)
        if stored is None or memory.dtype not in self._attend:
            return self._reference.attend(call, plan, memory)
        num_rows, num_heads, _ = call.query.shape
        rows = None if work.group.tables is None else work.group.tables.rows
        if rows is not None and len(rows) == num_rows:
            return self._decode(call, call.query, work, stored, memory.block_tokens).to(call.query.dtype)
        output = call.query.new_empty(num_rows, num_heads, call.values.shape[-1])
        if rows is not None:
            where = torch.from_numpy(rows)
            query = call.query.index_select(0, where)
            output[where] = self._decode(call, query, work, stored, memory.block_tokens).to(call.query.dtype)
        prefill = self._chunks.prefill if self._chunks.takes(call) else self._reference.prefill
        for chunk in work.prefill:
            prefill(call, chunk, memory, output)
        return output

    def _decode(
        self, call: AttentionCall, query: torch.Tensor, work: AttentionPlan, stored: KeysValues, block_tokens: int
    ) -> torch.Tensor:
        """Output float32 [D, heads, value_dim] of decode rows `query` [D, heads, key_dim]."""
        num_rows, num_heads, key_dim = query.shape
        num_kv_heads, value_dim = call.values.shape[1:]
        record = self._record(work, block_tokens, max(1, MEMBER_NUMBERS // (num_heads * key_dim)))
        numbers = record.numbers
        query = query.float().contiguous()
        output = torch.empty(num_rows, num_heads, value_dim)
        floats = score_factors(call)
        sinks = None if call.sinks is None else call.sinks.float().contiguous()
        num_parts = len(record.items.members)
        if len(self._parts) < num_parts * num_heads * value_dim:
            self._parts = np.empty(num_parts * num_heads * value_dim, dtype=np.float32)
        if len(self._sums) < num_parts * num_heads:
            self._sums = np.empty(num_parts * num_heads, dtype=np.float32)
        field = self._field
        numbers[field.KEYS : field.OUTPUT + 1] = (
            stored.keys.data_ptr(),
            stored.values.data_ptr(),
            *stored.keys.shape,
            stored.values.shape[1],
            num_kv_heads,
            num_heads // num_kv_heads,
            key_dim,
            value_dim,
            query.data_ptr(),
            output.data_ptr(),
        )
        numbers[field.PARTS : field.SINKS + 1] = (
            self._parts.ctypes.data,
            self._sums.ctypes.data,
            floats.ctypes.data,
            0 if sinks is None else sinks.data_ptr(),
        )
        self._threads.run(self._address_of(self._attend[stored.keys.dtype]), numbers, len(record.items.items))
        self._threads.run(self._address_of(self._merge), numbers, num_rows)
        return output

    def _record(self, work: AttentionPlan, block_tokens: int, max_members: int) -> _Record:
        """The kernel's arguments as far as they are equal in all layers of a lane; made once per step."""
        key = (work.lane, max_members)
        found = work.group.kept.get(key)
        if isinstance(found, _Record):
            return found
        tables = work.group.tables
        assert tables is not None
        items = work.group.kept.get(max_members)
        if not isinstance(items, WorkItems):
            total = int((tables.stop - tables.first).sum())
            share = -(-total // (self._threads.num_threads * ITEMS_PER_THREAD))
            items = work_items(
                tables,
                block_tokens,
                item_tokens=max(ITEM_TOKENS, share),
                max_members=max_members,
                min_saved=MIN_SAVED_TOKENS if max_members > 1 else total,
            )
            work.group.kept[max_members] = items
        numbers = np.zeros(self._num_fields, dtype=np.int64)
        field, lane = self._field, tables.tables[work.lane]
        numbers[field.NUM_ROWS : field.STARTS + 1] = (
            *(len(tables.rows), lane.ctypes.data, lane.shape[1], block_tokens),
            *(items.items.ctypes.data, len(items.items), items.members.ctypes.data, len(items.members)),
            *(items.order.ctypes.data, items.starts.ctypes.data),
        )
        made = work.group.kept[key] = _Record(numbers, items)
        return made


@dataclass(frozen=True)
class _Record:
    """`numbers` int64: the kernel's arguments (`paged_kernel.Field`), some of them addresses of what `items` holds."""

    numbers: Int64Array
    items: WorkItems


def backend_for(device: torch.device, kv_dtype: torch.dtype) -> AttentionBackend:
    """The fastest backend for memory of `kv_dtype` on `device`, compiled and ready to run.

    The reference if there is no other; if only something is missing for a faster one, the log says what.
    """
    if device.type == "cpu" and kv_dtype in KERNELS:
        try:
            kernels = (import_module(f"looseleaf.hf.{name}") for name in ("paged_kernel", "chunk_kernel"))
            backend = CpuBackend(*kernels)
            backend.prepare(kv_dtype)
            return backend
        except (ImportError, RuntimeError, OSError) as error:  # not there, or it cannot compile
            _LOG.warning("attention without the compiled kernel: %s; hint: pip install 'looseleaf[hf]'", error)
    if device.type == "cuda" and kv_dtype in HALVES and (flashinfer := _found("flashinfer")) is not None:
        return FlashInferBackend(flashinfer, device)
    return GatherBackend()


def _found(name: str) -> Any:
    """An optional module, or None."""
    try:
        return import_module(name)
    except ImportError:
        return None
