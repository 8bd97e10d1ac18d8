"""Which rows see which slots: grouping of decodes and tiling of chunks, against brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from looseleaf.engine.runner import StepBatch
from looseleaf.hf import step_plan
from looseleaf.hf.step_plan import StepPlan, group_by_length, prefill_tiles

BLOCK = 4


def visible(num_context: int, query: int, window: int | None) -> set[int]:
    """Positions that query token number `query` of a chunk may see, by the definition."""
    q = num_context + query
    return {k for k in range(q + 1) if window is None or q - window < k}


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(0, 30), st.sampled_from([None, 1, 3, 8, 100]), st.sampled_from([1, 4, 7, 64]))
def test_tiles_show_each_row_exactly_its_keys(num_rows: int, num_context: int, window: int | None, tile: int) -> None:
    """Whatever the tile size, each row of a chunk sees q - window < k <= q, once, and nothing else."""
    before = step_plan.PREFILL_TILE_TOKENS
    step_plan.PREFILL_TILE_TOKENS = tile
    try:
        oldest = 0 if window is None else max(0, num_context - window + 1)
        tiles = list(prefill_tiles(10, 10 + num_rows, num_context, oldest, window, torch.from_numpy))
    finally:
        step_plan.PREFILL_TILE_TOKENS = before
    assert [t.first_row for t in tiles] == [10, *(t.stop_row for t in tiles[:-1])]
    assert tiles[-1].stop_row == 10 + num_rows
    for part in tiles:
        rows, keys = part.stop_row - part.first_row, part.stop_key - part.first_key
        hidden = torch.ones(rows, keys).triu(1).bool() if part.mask is None else part.mask
        assert hidden.shape == (rows, keys)
        for row in range(rows):
            seen = {int(k) + oldest + part.first_key for k in torch.nonzero(~hidden[row])}
            assert seen == visible(num_context, part.first_row - 10 + row, window)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 500), max_size=40), st.sampled_from([None, 64]), st.sampled_from([None, 1, 600]))
def test_groups_hold_each_sequence_once(lengths: list[int], window: int | None, limit: int | None) -> None:
    """Every decoding sequence is in one group; groups of several keep to the limit and to similar lengths."""
    num_keys = np.asarray(lengths, dtype=np.int64)
    groups = group_by_length(np.arange(len(lengths)), num_keys, window, limit)
    assert sorted(int(s) for group in groups for s in group) == list(range(len(lengths)))
    for group in groups:
        seen = num_keys[group] if window is None else np.minimum(num_keys[group], window)
        assert len(group) == 1 or limit is None or len(group) * seen.max() <= limit
        assert 2 * seen.min() >= seen.max() or seen.max() - seen.min() <= 64


@pytest.mark.parametrize("window", [None, 5])
def test_decode_slots_end_with_the_own_token(window: int | None) -> None:
    """Each decode row sees its last tokens, oldest first; the fill repeats its own last slot and is masked."""
    tables = (np.array([7, 2, 9], dtype=np.int32), np.array([4], dtype=np.int32))
    batch = StepBatch(
        request_ids=("a", "b"),
        token_ids=np.array([1, 2]),
        positions=np.array([9, 2]),
        slots=np.array([37, 18]),
        query_starts=np.array([0, 1, 2], dtype=np.int32),
        num_context_tokens=np.array([9, 2], dtype=np.int32),
        block_tables=tables,
        sampled=np.array([0, 1], dtype=np.int32),
        sampling=(),
    )
    plan = StepPlan(
        batch, block_tokens=BLOCK, device=torch.device("cpu"), dtype=torch.float32, keep_exact=True
    ).for_window(window)
    (group,) = plan.decode
    assert not plan.prefill
    assert group.mask is not None
    slots = group.slots.view(2, group.num_keys).tolist()
    first = [28, 29, 30, 31, 8, 9, 10, 11, 36, 37]
    second = [16, 17, 18]
    assert slots[0] == (first if window is None else first[-window:])
    assert slots[1] == second + [18] * (group.num_keys - 3)
    assert (group.mask[1, 0, 0] == 0).sum() == 3
    assert (group.mask[0] == 0).all()
