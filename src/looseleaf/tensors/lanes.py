"""Which layer's keys and values go where: layers of one history in lanes of equal bytes. Pure, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from looseleaf.core.config import GROUP_KINDS, LayerGroup

MAX_PADDING = 0.04
"""Share of all layer places that may stay without a layer for the sake of fewer lanes."""


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps of a token: `num_kv_heads` keys of `key_dim` and values of `value_dim` numbers."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers_per_token(self) -> int:
        """Numbers stored per token: K and V of all heads."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class LayerPlace:
    """Where a layer's K and V are: lane number `lane` of group number `group`, physical layer `row` of that lane."""

    group: int
    lane: int
    row: int


@dataclass(frozen=True)
class LanePlan:
    """All layers of a model in lanes.

    `groups`: the groups with their number of lanes; full first, then windows by size, then chunked. `places`: one for
    each layer. `layers_per_lane`: physical layers of every lane. `padding`: share of all numbers of a token that no
    layer fills: places without a layer, and rows wider than their layer where shapes differ.
    """

    groups: tuple[LayerGroup, ...]
    places: tuple[LayerPlace, ...]
    layers_per_lane: int
    padding: float

    @property
    def num_lanes(self) -> int:
        """Lanes of all groups."""
        return sum(group.num_lanes for group in self.groups)


def plan_lanes(histories: Sequence[LayerGroup], shapes: Sequence[LayerShape]) -> LanePlan:
    """Lanes for layers that keep `histories` [L] (kind and size count) and have `shapes` [L].

    The fewest lanes with at most `MAX_PADDING`; if there are none such, which needs shapes that differ, the least
    padding. Layers of one history make one lane of all layers. Every layer has one place, no place two layers.
    """
    members: dict[LayerGroup, list[int]] = {}
    for layer, history in enumerate(histories):
        members.setdefault(history, []).append(layer)
    groups = sorted(members, key=_order)
    for group in groups:  # wide layers first, so that they share the wide rows of their lanes
        members[group].sort(key=lambda layer: (-shapes[layer].numbers_per_token, layer))
    layers = [members[group] for group in groups]
    candidates = [_plan(groups, layers, shapes, most) for most in range(max(map(len, layers)), 0, -1)]
    least = min(plan.padding for plan in candidates)
    return next(plan for plan in candidates if plan.padding <= max(least, MAX_PADDING))


def _order(group: LayerGroup) -> tuple[int, int]:
    return GROUP_KINDS.index(group.kind), group.window_tokens or group.chunk_tokens or 0


def _plan(
    groups: Sequence[LayerGroup], members: Sequence[Sequence[int]], shapes: Sequence[LayerShape], most: int
) -> LanePlan:
    """The plan with at most `most` layers per lane: each group's layers dealt out to its lanes, row by row."""
    num_lanes = [-(-len(layers) // most) for layers in members]
    places = {
        layer: LayerPlace(index, at % lanes, at // lanes)
        for index, (layers, lanes) in enumerate(zip(members, num_lanes, strict=True))
        for at, layer in enumerate(layers)
    }
    ordered = tuple(places[layer] for layer in range(len(shapes)))
    rows = row_shapes(shapes, [place.row for place in ordered])
    stored = sum(shape.numbers_per_token for shape in shapes)
    kinds = [group.kind for group in groups]
    named = tuple(
        replace(
            group,
            num_lanes=lanes,
            name=group.kind if kinds.count(group.kind) == 1 else f"{group.kind}_{_order(group)[1]}",
        )
        for group, lanes in zip(groups, num_lanes, strict=True)
    )
    padding = 1 - stored / (sum(row.keys + row.values for row in rows) * sum(num_lanes))
    return LanePlan(named, ordered, len(rows), padding)


@dataclass(frozen=True)
class RowShape:
    """Room of one physical layer per token: numbers of K and of V, and heads; enough for each layer that has it."""

    keys: int
    values: int
    heads: int


def row_shapes(shapes: Sequence[LayerShape], rows: Sequence[int]) -> tuple[RowShape, ...]:
    """Room that each physical layer needs when layer l of `shapes` [L] is kept in row `rows[l]`."""
    found: list[RowShape] = []
    for row in range(max(rows) + 1):
        here = [shape for shape, at in zip(shapes, rows, strict=True) if at == row]
        found.append(
            RowShape(
                max(shape.num_kv_heads * shape.key_dim for shape in here),
                max(shape.num_kv_heads * shape.value_dim for shape in here),
                max(shape.num_kv_heads for shape in here),
            )
        )
    return tuple(found)
