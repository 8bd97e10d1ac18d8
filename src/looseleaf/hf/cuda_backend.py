"""Attention on CUDA by FlashInfer's paged kernels. Written and type-checked; untested without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from looseleaf.core.config import LayerGroup
from looseleaf.engine.runner import GroupBatch
from looseleaf.hf.attention_backend import AttentionCall, GatherBackend
from looseleaf.hf.step_plan import StepPlan, oldest_visible
from looseleaf.ids import Int64Array
from looseleaf.tensors import KVMemory

WORKSPACE_BYTES = 128 << 20
"""Scratch memory on the device that FlashInfer asks for."""

HALVES = (torch.float16, torch.bfloat16)
"""Dtypes of FlashInfer's kernels that queries and memory may share."""


class FlashInferBackend:
    """All rows of a step, chunks and decodes alike, in one call over block tables.

    Half-precision memory in the model's dtype, K and V of one size that fill their slots, full history or a window;
    soft caps. Everything else (sinks, chunked layers, 8 bits, lanes with wider rows) goes to the reference.
    `flashinfer`: the module. Modifies nothing but its own workspace.
    """

    def __init__(self, flashinfer: Any, device: torch.device) -> None:
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self._planned: tuple[StepPlan, tuple[object, ...]] | None = None
        self._reference = GatherBackend()

    def attend(self, call: AttentionCall, plan: StepPlan, memory: KVMemory) -> torch.Tensor:
        """See `AttentionBackend`."""
        group = plan.lanes.groups[plan.lanes.places[call.layer].group]
        stored = memory.in_place(call.layer)
        _, num_kv_heads, dim = call.keys.shape
        fits = call.values.shape == call.keys.shape and call.sinks is None and group.chunk_tokens is None
        if stored is None or not fits or memory.dtype not in HALVES or memory.dtype != call.query.dtype:
            return self._reference.attend(call, plan, memory)
        if stored.keys.shape[1] != num_kv_heads * dim or stored.values.shape[1] != num_kv_heads * dim:
            return self._reference.attend(call, plan, memory)
        self._plan(call, plan, group, memory.dtype)
        paged = tuple(rows.view(-1, memory.block_tokens, num_kv_heads, dim) for rows in stored)
        attended: torch.Tensor = self._wrapper.run(call.query.contiguous(), paged)
        return attended

    def _plan(self, call: AttentionCall, plan: StepPlan, group: LayerGroup, kv_dtype: torch.dtype) -> None:
        """Prepare the wrapper for this step, lane and kind of layer, if it is not prepared for them already."""
        place, (_, num_heads, dim) = plan.lanes.places[call.layer], call.query.shape
        kind = (place.group, place.lane, num_heads, call.keys.shape[1], dim, call.scaling, call.softcap)
        if self._planned is not None and self._planned[0] is plan and self._planned[1] == kind:
            return
        starts, blocks, last = paged_rows(plan, group, plan.batch.groups[place.group], place.lane)
        self._wrapper.plan(
            torch.from_numpy(plan.batch.query_starts.astype(np.int32)).to(plan.device),
            *(torch.from_numpy(each.astype(np.int32)).to(plan.device) for each in (starts, blocks, last)),
            num_heads,
            call.keys.shape[1],
            dim,
            plan.block_tokens,
            causal=True,
            sm_scale=dim**-0.5 if call.scaling is None else call.scaling,
            window_left=-1 if group.window_tokens is None else group.window_tokens - 1,
            logits_soft_cap=call.softcap,
            q_data_type=call.query.dtype,
            kv_data_type=kv_dtype,
        )
        self._planned = (plan, kind)


def paged_rows(
    plan: StepPlan, group: LayerGroup, step: GroupBatch, lane: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The blocks that each of S sequences sees: where they begin [S + 1], their ids, tokens in the last one [S].

    Each table is cut to the blocks from the oldest that a row of the sequence sees to that of its last token. So the
    last key is that of the last query, as FlashInfer's causal mask and window want it.
    """
    block_tokens, batch = plan.block_tokens, plan.batch
    num_context = batch.num_context_tokens.astype(np.int64)
    total = num_context + np.diff(batch.query_starts)
    low = oldest_visible(group, num_context) // block_tokens - step.first_blocks
    high = -(-total // block_tokens) - step.first_blocks
    chosen = [table[first:stop, lane] for table, first, stop in zip(step.block_tables, low, high, strict=True)]
    starts = np.cumsum([0, *(high - low)]).astype(np.int64)
    return starts, np.concatenate(chosen).astype(np.int64), (total - 1) % block_tokens + 1
