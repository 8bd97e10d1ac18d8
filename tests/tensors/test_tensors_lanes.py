"""Lanes: every layer has one place, equal bytes everywhere, little padding."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from looseleaf import LayerGroup
from looseleaf.tensors.lanes import MAX_PADDING, LayerShape, plan_lanes

FULL = LayerGroup()
WINDOW = LayerGroup("window", window_tokens=512)
HISTORIES = [FULL, WINDOW, LayerGroup("window", window_tokens=64), LayerGroup("chunked", chunk_tokens=128)]
SHAPES = [LayerShape(1, 256, 256), LayerShape(4, 64, 64), LayerShape(8, 16, 32)]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(HISTORIES), st.sampled_from(SHAPES)), min_size=1, max_size=40))
def test_every_layer_has_one_place(layers: list[tuple[LayerGroup, LayerShape]]) -> None:
    """[H105] No two layers of a group share a place, all lanes have the same rows, groups come in their order."""
    histories, shapes = [list(column) for column in zip(*layers, strict=True)]
    plan = plan_lanes(histories, shapes)
    assert len(set(plan.places)) == len(plan.places) == len(layers)
    for history, place in zip(histories, plan.places, strict=True):
        group = plan.groups[place.group]
        assert (group.kind, group.window_tokens, group.chunk_tokens) == (
            history.kind,
            history.window_tokens,
            history.chunk_tokens,
        )
        assert 0 <= place.lane < group.num_lanes
        assert 0 <= place.row < plan.layers_per_lane
    for index, group in enumerate(plan.groups):
        assert {place.lane for place in plan.places if place.group == index} == set(range(group.num_lanes))
    assert [HISTORIES.index(h) for h in (FULL, HISTORIES[2], WINDOW, HISTORIES[3]) if h in histories] == [
        next(i for i, h in enumerate(HISTORIES) if h.kind == g.kind and h.window_tokens == g.window_tokens)
        for g in plan.groups
    ]
    assert len({group.name for group in plan.groups}) == len(plan.groups)
    assert 0 <= plan.padding < 1


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 40))
def test_padding_is_small_and_lanes_are_few(num_full: int, num_window: int, num_chunked: int) -> None:
    """With layers of one shape padding is at most 4%, and fewer lanes would not keep to that."""
    counts = [count for count in (num_full, num_window, num_chunked) if count]
    histories = [FULL] * num_full + [WINDOW] * num_window + [HISTORIES[3]] * num_chunked
    plan = plan_lanes(histories, SHAPES[:1] * len(histories))

    def padding(lanes: list[int]) -> float:
        rows = max(-(-count // n) for count, n in zip(counts, lanes, strict=True))
        return 1 - sum(counts) / (rows * sum(lanes))

    assert plan.padding <= MAX_PADDING
    for most in range(1, max(counts) + 1):
        lanes = [-(-count // most) for count in counts]
        assert sum(lanes) >= plan.num_lanes or padding(lanes) > MAX_PADDING


def test_models_of_today() -> None:
    """Lanes of known models: Gemma 3 270M 3 layers each, gpt-oss 12, Llama 4 Scout 12, one lane for one history."""
    shape = SHAPES[:1]
    gemma = plan_lanes([FULL if (i + 1) % 6 == 0 else WINDOW for i in range(18)], shape * 18)
    assert (gemma.layers_per_lane, [g.num_lanes for g in gemma.groups], gemma.padding) == (3, [1, 5], 0)
    oss = plan_lanes([WINDOW, FULL] * 12, shape * 24)
    assert (oss.layers_per_lane, [g.num_lanes for g in oss.groups]) == (12, [1, 1])
    scout = plan_lanes([FULL if i % 4 == 3 else HISTORIES[3] for i in range(48)], shape * 48)
    assert (scout.layers_per_lane, [(g.kind, g.num_lanes) for g in scout.groups]) == (12, [("full", 1), ("chunked", 3)])
    for only in HISTORIES:
        plan = plan_lanes([only] * 32, shape * 32)
        assert (plan.num_lanes, plan.layers_per_lane, plan.padding) == (1, 32, 0)


def test_layers_of_unequal_shape() -> None:
    """Rows are as wide as the widest layer that has them, wide layers share them, and the rest counts as padding."""
    wide, narrow = LayerShape(2, 512, 512), LayerShape(4, 256, 256)
    assert plan_lanes([FULL, WINDOW, WINDOW], [wide, narrow, narrow]).padding == 0
    half = LayerShape(1, 512, 512)
    plan = plan_lanes([FULL] + [WINDOW] * 4, [wide] + [half] * 4)
    assert plan.padding > MAX_PADDING
    mixed = plan_lanes([FULL] * 4, [half, wide, half, wide])
    assert (mixed.num_lanes, mixed.padding) == (1, 0)
