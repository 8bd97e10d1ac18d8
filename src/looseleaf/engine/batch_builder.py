"""From a step plan to the flat arrays of a `StepBatch`."""

from __future__ import annotations

import numpy as np

from looseleaf.engine.runner import StepBatch
from looseleaf.engine.scheduler import Chunk, StepPlan
from looseleaf.ids import Int32Array, Int64Array


def build_batch(plan: StepPlan, block_tokens: int) -> StepBatch:
    """The arrays of `plan`: decodes first (one token each), then chunks, in the plan's order.

    Block tables are read from the leases here, after all reservations; a later commit may change them, so a batch is
    good for one step.
    """
    sequences, chunks, num_decodes = plan.sequences, plan.chunks, len(plan.decodes)
    tables = tuple([sequence.held.block_table for sequence in sequences])
    token_ids, slots = plan.decode_tokens, plan.decode_slots
    positions = np.array([sequence.num_tokens - 1 for sequence in plan.decodes], np.int64)
    if chunks:
        spans = [
            _chunk_arrays(chunk, table, block_tokens) for chunk, table in zip(chunks, tables[num_decodes:], strict=True)
        ]
        token_ids = np.concatenate([token_ids, *(span[0] for span in spans)])
        positions = np.concatenate([positions, *(span[1] for span in spans)])
        slots = np.concatenate([slots, *(span[2] for span in spans)])
    lengths = [0, *[1] * num_decodes, *(chunk.end - chunk.start for chunk in chunks)]
    query_starts = np.cumsum(lengths, dtype=np.int32)
    sampled = [*range(num_decodes), *(num_decodes + i for i, chunk in enumerate(chunks) if chunk.is_sampled)]
    return StepBatch(
        request_ids=tuple([sequence.request_id for sequence in sequences]),
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        query_starts=query_starts,
        num_context_tokens=positions[query_starts[:-1]].astype(np.int32),
        block_tables=tables,
        sampled=np.array(sampled, np.int32),
        sampling=tuple([sequences[i].sampling_row() for i in sampled]),
    )


def _chunk_arrays(chunk: Chunk, table: Int32Array, block_tokens: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    token_ids = chunk.sequence.tokens[chunk.start : chunk.end].astype(np.int64)
    positions = np.arange(chunk.start, chunk.end, dtype=np.int64)
    slots = table[positions // block_tokens].astype(np.int64) * block_tokens + positions % block_tokens
    return token_ids, positions, slots
