"""How a step's query rows attend to keys and values in blocks. One protocol; the reference reads, then
calls SDPA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from looseleaf.hf.step_plan import DecodeGroup, PrefillChunk, PrefillTile, StepPlan
from looseleaf.tensors import KVMemory


@dataclass(frozen=True)
class AttentionCall:
    """What one layer asks in one step of T tokens.

    `query` [T, heads, key_dim], `keys` [T, kv_heads, key_dim], `values` [T, kv_heads, value_dim]: the
    step's own, already written to the memory. `scaling`: factor on the scores (None: key_dim ** -0.5).
    `window`: a row at position q sees q - window < k <= q (None: all k <= q). `softcap`: scores are
    squashed to ±softcap. `sinks` [heads]: one more score per head that takes weight and gives nothing.
    """

    layer: int
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scaling: float | None
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


class AttentionBackend(Protocol):
    """Computes attention over blocks; how is its own business."""

    def attend(self, call: AttentionCall, plan: StepPlan, memory: KVMemory) -> torch.Tensor:
        """Output [T, heads, value_dim] of every row of the step. Reads `memory`, modifies nothing.

        The caller has written the K and V of all rows of this step before.
        """
        ...


class GatherBackend:
    """Reference: copies the keys and values of each sequence together and calls torch's scaled dot-product
    attention.

    Any device and dtype. Decode rows of similar length go in one call; query heads that share a K/V head
    are folded into the row axis, so K and V are never repeated. A prefill chunk is one call where it starts
    its sequence, else one per tile.
    """

    def attend(self, call: AttentionCall, plan: StepPlan, memory: KVMemory) -> torch.Tensor:
        """See `AttentionBackend`."""
        num_rows, num_heads, _ = call.query.shape
        work = plan.for_window(call.window)
        output = call.query.new_empty(num_rows, num_heads, call.values.shape[-1])
        for group in work.decode:
            output[group.rows] = self._decode(call, group, memory)
        for chunk in work.prefill:
            self._prefill(call, chunk, memory, output)
        return output

    def _decode(self, call: AttentionCall, group: DecodeGroup, memory: KVMemory) -> torch.Tensor:
        num_rows = len(group.rows)
        stored = memory.read_slots(call.layer, group.slots, call.query.dtype)
        num_kv_heads = stored.keys.shape[1]
        keys = stored.keys.view(num_rows, group.num_keys, num_kv_heads, -1).transpose(1, 2)
        values = stored.values.view(num_rows, group.num_keys, num_kv_heads, -1).transpose(1, 2)
        query = call.query.index_select(0, group.rows)
        num_heads, key_dim = query.shape[1:]
        folded = query.view(num_rows, num_kv_heads, num_heads // num_kv_heads, key_dim)
        if call.sinks is not None:  # a sink belongs to a head: heads can't hide among the rows
            attended = attend_dense(
                query[:, :, None],
                keys,
                values,
                call,
                mask=group.mask,
                causal=False,
                sinks=call.sinks.view(1, -1, 1, 1),
            )
        else:
            attended = attend_dense(folded, keys, values, call, mask=group.mask, causal=False, sinks=None)
        return attended.reshape(num_rows, num_heads, -1)

    def _prefill(
        self, call: AttentionCall, chunk: PrefillChunk, memory: KVMemory, output: torch.Tensor
    ) -> None:
        dtype = call.query.dtype
        if chunk.fresh_rows is not None:
            rows = slice(*chunk.fresh_rows)
            keys, values = call.keys[rows], call.values[rows]
        elif chunk.first_slot is not None:
            keys, values = memory.read_run(call.layer, chunk.first_slot, chunk.num_keys, dtype)
        elif chunk.blocks is not None:
            keys, values = memory.read_blocks(
                call.layer, chunk.blocks, chunk.skip_tokens, chunk.num_keys, dtype
            )
        for tile in chunk.tiles:
            rows = slice(tile.first_row, tile.stop_row)
            output[rows] = self._tile(call, tile, keys, values)

    def _tile(
        self, call: AttentionCall, tile: PrefillTile, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        span = slice(tile.first_key, tile.stop_key)
        query = call.query[tile.first_row : tile.stop_row].transpose(0, 1)[None]
        sinks = None if call.sinks is None else call.sinks.view(1, -1, 1, 1)
        attended = attend_dense(
            query,
            keys[span].transpose(0, 1)[None],
            values[span].transpose(0, 1)[None],
            call,
            mask=tile.mask,
            causal=tile.mask is None,
            sinks=sinks,
        )
        return attended[0].transpose(0, 1)


def attend_dense(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    call: AttentionCall,
    *,
    mask: torch.Tensor | None,
    causal: bool,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of `query` [B, heads, rows, key_dim] over `keys`/`values` [B, kv_heads, n, dim]; output [B,
    heads, rows, value_dim].

    `mask` is additive and broadcast to [B, heads, rows, n]. `causal`: row i sees keys 0..i (then rows == n
    and there is no mask). `sinks` [1, heads, 1, 1].
    """
    if call.softcap is None and sinks is None:
        grouped = query.shape[1] != keys.shape[1]
        return scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=causal, scale=call.scaling, enable_gqa=grouped
        )
    return _attend_by_scores(query, keys, values, call, mask, causal, sinks)


def _attend_by_scores(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    call: AttentionCall,
    mask: torch.Tensor | None,
    causal: bool,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The same with the scores in hand, for what the fused call cannot do: soft caps and sinks. Softmax in
    float32.
    """
    batch, num_heads, num_rows, key_dim = query.shape
    num_kv_heads, num_keys = keys.shape[1:3]
    scale = key_dim**-0.5 if call.scaling is None else call.scaling
    folded = query.reshape(
        batch, num_kv_heads, -1, key_dim
    )  # rows of the heads that share a K/V head, one after the other
    scores = (
        torch.matmul(folded, keys.transpose(2, 3))
        .mul_(scale)
        .float()
        .view(batch, num_heads, num_rows, num_keys)
    )
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if causal:
        hidden = torch.ones(num_rows, num_keys, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.float().expand(batch, num_heads, num_rows, 1)
        weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    weights = weights.to(values.dtype).reshape(batch, num_kv_heads, -1, num_keys)
    return torch.matmul(weights, values).view(batch, num_heads, num_rows, -1)
