"""From a step plan to the flat arrays of a `StepBatch`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from looseleaf.core.config import LayerGroup
from looseleaf.engine.plan import StepPlan
from looseleaf.engine.runner import GroupBatch, StepBatch
from looseleaf.ids import Int32Array, Int64Array


def build_batch(plan: StepPlan, groups: Sequence[LayerGroup], block_tokens: int) -> StepBatch:
    """The arrays of `plan`: decodes first (one token each), then chunks, in the plan's order.

    Block tables are read from the leases here, after all reservations; a later commit may change them, so a batch is
    good for one step.
    """
    decodes, chunks, num_decodes = plan.decodes, plan.chunks, len(plan.decodes)
    token_ids, request_ids, sampling = plan.decode_tokens, decodes.request_ids, decodes.sampling_rows()
    positions = np.array([sequence.num_tokens for sequence in decodes.sequences], np.int64) - 1
    query_starts, sampled = np.arange(num_decodes + 1, dtype=np.int32), np.arange(num_decodes, dtype=np.int32)
    spans = [np.arange(chunk.start, chunk.end, dtype=np.int64) for chunk in chunks]
    if chunks:
        token_ids = np.concatenate([token_ids, *(chunk.sequence.tokens[chunk.start : chunk.end] for chunk in chunks)])
        positions = np.concatenate([positions, *spans])
        stops = num_decodes + np.cumsum([len(span) for span in spans], dtype=np.int32)
        query_starts = np.concatenate([query_starts, stops.astype(np.int32)])
        drawn = [num_decodes + i for i, chunk in enumerate(chunks) for _ in chunk.drawn]
        sampled = np.concatenate([sampled, np.array(drawn, np.int32)])
        request_ids += tuple([chunk.sequence.request_id for chunk in chunks])
        sampling += tuple([sequence.sampling_row() for chunk in chunks for sequence in chunk.drawn])
    return StepBatch(
        request_ids=request_ids,
        token_ids=token_ids,
        positions=positions,
        query_starts=query_starts,
        num_context_tokens=positions[query_starts[:-1]].astype(np.int32),
        groups=_group_batches(plan, spans, groups, block_tokens),
        sampled=sampled,
        sampling=sampling,
        copies=plan.copies,
    )


def _group_batches(
    plan: StepPlan, spans: list[Int64Array], groups: Sequence[LayerGroup], block_tokens: int
) -> tuple[GroupBatch, ...]:
    """`spans`: the positions of each chunk."""
    leases, num_decodes = plan.decodes.leases, len(plan.decodes)
    if plan.chunks:
        leases = leases + [chunk.sequence.held for chunk in plan.chunks]
    tables_by_group = list(zip(*[lease.views or lease.tables for lease in leases], strict=True))
    batches, lane = [], 0
    for index, (group, tables) in enumerate(zip(groups, tables_by_group, strict=True)):
        first_blocks = np.zeros(len(leases), np.int32)
        if group.kind != "full":
            first_blocks[:] = [lease.first_rows[index] for lease in leases]
        slots = plan.decode_slots[lane : lane + group.num_lanes]
        if spans:
            rows = zip(spans, tables[num_decodes:], first_blocks[num_decodes:].tolist(), strict=True)
            parts = [_chunk_slots(*row, block_tokens) for row in rows]
            slots = np.concatenate([slots, *parts] if num_decodes else parts, axis=1)
        batches.append(GroupBatch(slots, tables, first_blocks))
        lane += group.num_lanes
    return tuple(batches)


def _chunk_slots(positions: Int64Array, table: Int32Array, first_block: int, block_tokens: int) -> Int64Array:
    """Slots int64 [num_lanes, len(positions)] by a table [num_blocks, num_lanes] that begins at `first_block`."""
    blocks, offsets = np.divmod(positions, block_tokens)
    slots: Int64Array = table[blocks - first_block].T.astype(np.int64) * block_tokens + offsets
    return slots
