"""Which rows see which slots: grouping of decodes and tiling of chunks, against brute force."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from looseleaf import LayerGroup
from looseleaf.engine.runner import GroupBatch, StepBatch
from looseleaf.hf import step_plan
from looseleaf.hf.step_plan import StepPlan, group_by_length, oldest_visible, prefill_tiles
from looseleaf.tensors import LanePlan, LayerPlace, LayerShape, plan_lanes

BLOCK = 4
FULL = LayerGroup()
HISTORIES = [
    FULL,
    *(LayerGroup("window", window_tokens=size) for size in (1, 3, 8, 100)),
    *(LayerGroup("chunked", chunk_tokens=size) for size in (1, 5, 16)),
]


def visible(position: int, group: LayerGroup) -> set[int]:
    """Positions that the query token at `position` may see, by the definition."""
    before = range(position + 1)
    if group.window_tokens is not None:
        return {k for k in before if position - group.window_tokens < k}
    return {
        k for k in before if group.chunk_tokens is None or k // group.chunk_tokens == position // group.chunk_tokens
    }


@pytest.mark.parametrize("group", HISTORIES)
def test_the_oldest_visible_token(group: LayerGroup) -> None:
    """[H95] A query sees all from the oldest to itself, also where the length first equals the window or chunk."""
    for position in range(40):
        assert set(range(int(oldest_visible(group, position)), position + 1)) == visible(position, group)
        assert group.first_needed_token(position) <= oldest_visible(group, position)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(0, 30), st.sampled_from(HISTORIES), st.sampled_from([1, 4, 7, 64]))
def test_tiles_show_each_row_exactly_its_keys(num_rows: int, num_context: int, group: LayerGroup, tile: int) -> None:
    """[H96] Whatever the tile size, each row of a chunk sees just what its position may see, once; the first too."""
    before = step_plan.PREFILL_TILE_TOKENS
    step_plan.PREFILL_TILE_TOKENS = tile
    try:
        oldest = int(oldest_visible(group, num_context))
        tiles = list(prefill_tiles(10, 10 + num_rows, num_context, group, torch.from_numpy))
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
            assert seen == visible(num_context + part.first_row - 10 + row, group)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 500), max_size=40), st.sampled_from([None, 1, 600]))
def test_groups_hold_each_sequence_once(lengths: list[int], limit: int | None) -> None:
    """Every decoding sequence is in one group; groups of several keep to the limit and to similar lengths."""
    num_keys = np.asarray(lengths, dtype=np.int64)
    groups = group_by_length(np.arange(len(lengths)), num_keys, limit)
    assert sorted(int(s) for group in groups for s in group) == list(range(len(lengths)))
    for group in groups:
        seen = num_keys[group]
        assert len(group) == 1 or limit is None or len(group) * seen.max() <= limit
        assert 2 * seen.min() >= seen.max() or seen.max() - seen.min() <= 64


@pytest.mark.parametrize("group", [FULL, LayerGroup("window", window_tokens=5), LayerGroup("chunked", chunk_tokens=6)])
def test_decode_slots_end_with_the_own_token(group: LayerGroup) -> None:
    """[H105] Each lane's rows see their last tokens, oldest first, in their own lane's blocks, wherever a table begins;
    the fill repeats their own last slot and is masked.
    """
    first_block = int(oldest_visible(group, 9)) // BLOCK
    tables = (np.array([[7, 17], [2, 12], [9, 19]], dtype=np.int32)[first_block:], np.array([[4, 14]], dtype=np.int32))
    step = GroupBatch(np.array([[37, 18], [77, 58]]), tables, np.array([first_block, 0], dtype=np.int32))
    batch = StepBatch(
        request_ids=("a", "b"),
        token_ids=np.array([1, 2]),
        positions=np.array([9, 2]),
        query_starts=np.array([0, 1, 2], dtype=np.int32),
        num_context_tokens=np.array([9, 2], dtype=np.int32),
        groups=(GroupBatch(np.array([[0, 0]]), tables[::-1], np.zeros(2, dtype=np.int32)), step),
        sampled=np.array([0, 1], dtype=np.int32),
        sampling=(),
    )
    places = tuple(LayerPlace(*place) for place in ((1, 0, 0), (0, 0, 0), (1, 1, 0)))
    lanes = LanePlan((LayerGroup("window", window_tokens=99), replace(group, num_lanes=2)), places, 1, 0.0)
    plan = StepPlan(batch, lanes, BLOCK, torch.device("cpu"), torch.float32, keep_exact=True)
    for lane, shift in enumerate((0, 40)):
        found = plan.for_layer(2 * lane)
        assert found.slots.tolist() == step.slots[lane].tolist()
        (together,) = found.decode
        assert not found.prefill
        slots = together.slots.view(2, together.num_keys).tolist()
        first = [shift + slot for slot in (28, 29, 30, 31, 8, 9, 10, 11, 36, 37)][-len(visible(9, group)) :]
        second = [shift + slot for slot in (16, 17, 18)]
        assert slots == [first, second + second[-1:] * (len(first) - 3)]
        assert together.mask is not None
        assert (together.mask[:, 0, 0] == 0).sum(-1).tolist() == [len(first), 3]


def test_structure_is_shared_between_lanes() -> None:
    """What rows see is worked out once per group: the lanes of a group share tiles and masks, not slots."""
    shape, window = LayerShape(1, 1, 1), LayerGroup("window", window_tokens=6)
    lanes = plan_lanes([FULL, window, window, window], [shape] * 4)
    assert [group.num_lanes for group in lanes.groups] == [1, 3]
    count = 12
    table = np.arange(9, dtype=np.int32).reshape(3, 3)[:, ::-1]
    slots = np.stack([step_plan.slots_of(table, 0, np.arange(count), BLOCK)[:, 4:]])[0]
    groups = (
        GroupBatch(slots[:1], (table[:, :1],), np.zeros(1, dtype=np.int32)),
        GroupBatch(slots, (table,), np.zeros(1, dtype=np.int32)),
    )
    batch = StepBatch(
        request_ids=("a",),
        token_ids=np.arange(8),
        positions=np.arange(4, 12),
        query_starts=np.array([0, 8], dtype=np.int32),
        num_context_tokens=np.array([4], dtype=np.int32),
        groups=groups,
        sampled=np.array([0], dtype=np.int32),
        sampling=(),
    )
    plan = StepPlan(batch, lanes, BLOCK, torch.device("cpu"), torch.float32, keep_exact=True)
    parts = [plan.for_layer(layer) for layer in range(4)]
    assert plan.for_layer(2) is parts[2]
    assert parts[1].prefill[0].rows.tiles is parts[2].prefill[0].rows.tiles
    assert parts[1].prefill[0].blocks.tolist() == [2, 5, 8]
    assert parts[2].prefill[0].blocks.tolist() == [1, 4, 7]
    assert parts[3].slots.tolist() == [12 + o for o in range(4)] + [24 + o for o in range(4)]
