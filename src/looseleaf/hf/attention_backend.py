"""How a step's query rows attend to keys and values in blocks. One protocol; the reference reads, then calls SDPA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from looseleaf.hf.step_plan import DecodeGroup, PrefillChunk, StepPlan
from looseleaf.tensors import KeysValues, KVMemory


@dataclass(frozen=True)
class AttentionCall:
    """What one layer asks in one step of T tokens.

    `query` [T, heads, key_dim], `keys` [T, kv_heads, key_dim], `values` [T, kv_heads, value_dim]: the step's own,
    already written to the memory. `scaling`: factor on the scores (None: key_dim ** -0.5). `softcap`: scores are
    squashed to ±softcap. `sinks` [heads]: one more score per head that takes weight and gives nothing. Which keys a row
    sees is in the plan.
    """

    layer: int
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scaling: float | None
    softcap: float | None
    sinks: torch.Tensor | None


class AttentionBackend(Protocol):
    """Computes attention over blocks; how is its own business."""

    def attend(self, call: AttentionCall, plan: StepPlan, memory: KVMemory) -> torch.Tensor:
        """Output [T, heads, value_dim] of every row of the step, whose K and V are written. Modifies nothing."""
        ...


class GatherBackend:
    """Reference: copies each sequence's keys and values together and calls torch's scaled dot-product attention.

    Any device and dtype. Decode rows of similar length go in one call; query heads that share a K/V head are folded
    into the row axis, so K and V are never repeated. A prefill chunk is one call, or one per tile if it needs a mask.
    """

    def attend(self, call: AttentionCall, plan: StepPlan, memory: KVMemory) -> torch.Tensor:
        """See `AttentionBackend`."""
        num_rows, num_heads, _ = call.query.shape
        work = plan.for_layer(call.layer)
        output = call.query.new_empty(num_rows, num_heads, call.values.shape[-1])
        for group in work.decode:
            output[group.rows] = self._decode(call, group, memory)
        for chunk in work.prefill:
            self.prefill(call, chunk, memory, output)
        return output

    def _decode(self, call: AttentionCall, group: DecodeGroup, memory: KVMemory) -> torch.Tensor:
        num_rows = len(group.rows)
        stored = memory.read_slots(call.layer, group.slots, call.query.dtype)
        num_kv_heads = stored.keys.shape[1]
        keys = stored.keys.view(num_rows, group.num_keys, num_kv_heads, -1).transpose(1, 2)
        values = stored.values.view(num_rows, group.num_keys, num_kv_heads, -1).transpose(1, 2)
        query = call.query.index_select(0, group.rows)
        # A sink belongs to a head: with sinks, heads can't hide among the rows.
        num_axis_heads = num_kv_heads if call.sinks is None else query.shape[1]
        folded = query.view(num_rows, num_axis_heads, -1, query.shape[2])
        attended = attend_dense(folded, keys, values, call, mask=group.mask, causal=False)
        return attended.reshape(num_rows, query.shape[1], -1)

    def prefill(self, call: AttentionCall, chunk: PrefillChunk, memory: KVMemory, output: torch.Tensor) -> None:
        """Write the rows of `chunk` to `output` [T, heads, value_dim]."""
        keys, values = read_chunk(call, chunk, memory)
        query, keys, values = (tensor.transpose(0, 1)[None] for tensor in (call.query, keys, values))
        for tile in chunk.rows.tiles:
            rows, span = slice(tile.first_row, tile.stop_row), slice(tile.first_key, tile.stop_key)
            attended = attend_dense(
                query[:, :, rows], keys[:, :, span], values[:, :, span], call, mask=tile.mask, causal=tile.mask is None
            )
            output[rows] = attended[0].transpose(0, 1)


def read_chunk(call: AttentionCall, chunk: PrefillChunk, memory: KVMemory) -> KeysValues:
    """Keys and values [n, kv_heads, dim] of `chunk` in the query's dtype: views where they lie together, else copies
    that are valid until the next read."""
    dtype = call.query.dtype
    if chunk.fresh_rows is not None:
        rows = slice(*chunk.fresh_rows)
        return KeysValues(call.keys[rows], call.values[rows])
    if chunk.first_slot is not None:
        return memory.read_run(call.layer, chunk.first_slot, chunk.num_keys, dtype)
    assert chunk.blocks is not None
    return memory.read_blocks(call.layer, chunk.blocks, chunk.skip_tokens, chunk.num_keys, dtype)


def attend_dense(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    call: AttentionCall,
    *,
    mask: torch.Tensor | None,
    causal: bool,
) -> torch.Tensor:
    """Attention of `query` [B, heads, rows, key_dim] over `keys`, `values` [B, kv_heads, n, dim] as `call` asks.

    Output [B, heads, rows, value_dim]. `mask` is additive and broadcast to [B, heads, rows, n]. `causal`: row i sees
    keys 0..i (then rows == n and there is no mask). What the fused call cannot do, soft caps and sinks, is computed
    with the scores in hand, softmax in float32.
    """
    batch, num_heads, num_rows, key_dim = query.shape
    num_kv_heads, num_keys = keys.shape[1:3]
    if call.softcap is None and call.sinks is None:
        return scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=mask,
            is_causal=causal,
            scale=call.scaling,
            enable_gqa=num_heads != num_kv_heads,
        )
    scale = key_dim**-0.5 if call.scaling is None else call.scaling
    folded = query.reshape(batch, num_kv_heads, -1, key_dim)  # heads that share a K/V head, one after the other
    scores = torch.matmul(folded, keys.transpose(2, 3)).mul_(scale).float()
    scores = scores.view(batch, num_heads, num_rows, num_keys)
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if causal:
        hidden = torch.ones(num_rows, num_keys, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if mask is not None:
        scores = scores + mask
    if call.sinks is not None:
        column = call.sinks.float().view(1, -1, 1, 1).expand(batch, -1, num_rows, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :num_keys]
    weights = weights.to(values.dtype).reshape(batch, num_kv_heads, -1, num_keys)
    return torch.matmul(weights, values).view(batch, num_heads, num_rows, -1)
