"""Which tokens attend to which slots in one step: worked out once per group, and used by every layer of a lane."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from looseleaf.core.config import LayerGroup
from looseleaf.engine.runner import GroupBatch, StepBatch
from looseleaf.hf.shared_runs import DecodeTables, decode_tables
from looseleaf.ids import Int32Array, Int64Array
from looseleaf.tensors import LanePlan

BoolArray: TypeAlias = npt.NDArray[np.bool_]

PREFILL_TILE_TOKENS = 256
"""Query tokens attended at once when a mask is needed: keys that no row of a tile may see are not even read."""


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences of one query token each, of similar length, attended in one batch of D.

    `rows` int64 [D]: their tokens in the flat step. `slots` int64 [D * num_keys]: what each may see, oldest first; a
    shorter row is filled up with its own last slot, so that nothing unwritten is ever read. `mask` [D, 1, 1, num_keys]:
    0 where a row may look and -inf on the fill; None if nothing is filled.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    num_keys: int
    mask: torch.Tensor | None


@dataclass(frozen=True)
class PrefillTile:
    """Query tokens `first_row : stop_row` of the flat step; they see keys `first_key : stop_key` of their chunk.

    `mask` [rows, keys] is 0 or -inf; None means causal from the upper left corner (as many keys as rows).
    """

    first_row: int
    stop_row: int
    first_key: int
    stop_key: int
    mask: torch.Tensor | None


@dataclass(frozen=True)
class ChunkRows:
    """The query tokens `first_row : stop_row` of the flat step that one sequence has, and the keys they see.

    Row number i sees keys `first_keys[i] : stop_keys[i]`, int64, counted from the oldest one that any row sees. Given
    once more as `tiles`, made when first asked for.
    """

    first_row: int
    stop_row: int
    first_keys: Int64Array
    stop_keys: Int64Array
    make_tiles: Callable[[], Iterator[PrefillTile]]

    @cached_property
    def tiles(self) -> tuple[PrefillTile, ...]:
        """The rows in tiles with their masks."""
        return tuple(self.make_tiles())


@dataclass(frozen=True)
class PrefillChunk:
    """One sequence with several query tokens, `rows`. Where its keys lie, cheapest first:

    - `fresh_rows`: the sequence begins in this step: its K and V are the rows `first : stop` just computed;
    - `first_slot`: its blocks follow each other in memory: a view;
    - else `blocks` int64 [n], copied together, of which the first `skip_tokens` are out of the window.
    """

    rows: ChunkRows
    num_keys: int
    fresh_rows: tuple[int, int] | None = None
    first_slot: int | None = None
    blocks: torch.Tensor | None = None
    skip_tokens: int = 0


@dataclass(frozen=True)
class GroupPlan:
    """What is equal in all lanes of one group: `tables` of the decode rows (None without any), whatever a backend keeps
    for the step in `kept`, and how to make the decode groups of all lanes."""

    tables: DecodeTables | None
    make_decode: Callable[[], list[tuple[DecodeGroup, ...]]]
    kept: dict[Hashable, object] = field(default_factory=dict)

    @cached_property
    def decode(self) -> list[tuple[DecodeGroup, ...]]:
        """Decode groups, for each lane."""
        return self.make_decode()


@dataclass(frozen=True)
class AttentionPlan:
    """All the writing and attending of one step for the layers of one lane. `slots` int64 [T]: where K and V go.

    Decode rows are given twice, as a backend likes: as `decode`, slot by slot (made when first asked for), and as row
    tables of `group`, block by block.
    """

    slots: torch.Tensor
    prefill: tuple[PrefillChunk, ...]
    lane: int
    group: GroupPlan

    @property
    def decode(self) -> tuple[DecodeGroup, ...]:
        """The decode rows in groups of similar length."""
        return self.group.decode[self.lane]


@dataclass
class StepPlan:
    """Step `batch` as attention in `dtype` on `device` sees it, for layers in `lanes`.

    What rows see is worked out once per group, where it lies for each lane. `keep_exact`: the memory stores what the
    model computes, so a sequence that begins in this step may attend to its fresh K and V; otherwise they are read
    back, so that cold and warm runs see the same numbers. `group_tokens`: see `group_by_length`.
    """

    batch: StepBatch
    lanes: LanePlan
    block_tokens: int
    device: torch.device
    dtype: torch.dtype
    keep_exact: bool
    group_tokens: int | None = None
    _plans: dict[int, list[AttentionPlan]] = field(default_factory=dict)

    def tensor(self, array: Int64Array) -> torch.Tensor:
        """`array` on the device."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Position int64 [T] of each token in its own sequence."""
        return self.tensor(self.batch.positions)

    def for_layer(self, layer: int) -> AttentionPlan:
        """The plan of the lane in which `layer` is kept."""
        place = self.lanes.places[layer]
        if place.group not in self._plans:
            self._plans[place.group] = self._make(place.group)
        return self._plans[place.group][place.lane]

    def _make(self, index: int) -> list[AttentionPlan]:
        """Plans of all lanes of group number `index`."""
        group, step = self.lanes.groups[index], self.batch.groups[index]
        num_query = np.diff(self.batch.query_starts)
        num_keys = self.batch.num_context_tokens.astype(np.int64) + num_query
        oldest = oldest_visible(group, num_keys - 1)
        single = np.flatnonzero(num_query == 1)
        tables: DecodeTables | None = None
        if len(single):
            rows = self.batch.query_starts[single].astype(np.int64)
            tables = decode_tables(
                single, rows, oldest[single], num_keys[single], step.block_tables, step.first_blocks, self.block_tokens
            )
        prefill = [self._prefill_chunks(int(s), group, step) for s in np.flatnonzero(num_query > 1)]
        shared = GroupPlan(tables, lambda: self._decode_groups(tables, len(step.slots)))
        return [
            AttentionPlan(self.tensor(slots), tuple(lanes[lane] for lanes in prefill), lane, shared)
            for lane, slots in enumerate(step.slots)
        ]

    def _decode_groups(self, tables: DecodeTables | None, num_lanes: int) -> list[tuple[DecodeGroup, ...]]:
        """For each lane: the decode rows in groups of similar length."""
        if tables is None:
            return [()] * num_lanes
        seen = tables.stop - tables.first
        parts = group_by_length(np.arange(len(seen)), seen, self.group_tokens)
        groups = [self._decode_group(tables, part, seen[part]) for part in parts]
        return [tuple(lanes[lane] for lanes in groups) for lane in range(num_lanes)]

    def _decode_group(self, tables: DecodeTables, part: Int64Array, seen: Int64Array) -> list[DecodeGroup]:
        """One for each lane, for decode rows `part` [D] that see `seen` [D] tokens."""
        longest = int(seen.max())
        places = np.minimum(tables.first[part, None] + np.arange(longest), tables.stop[part, None] - 1)
        blocks = tables.tables[:, part[:, None], places // self.block_tokens].astype(np.int64)
        slots = blocks * self.block_tokens + places % self.block_tokens
        mask: torch.Tensor | None = None
        if int(seen.min()) < longest:
            mask = self._additive(np.arange(longest)[None, :] >= seen[:, None])[:, None, None, :]
        rows = self.tensor(tables.rows[part])
        return [DecodeGroup(rows, self.tensor(of_lane.reshape(-1)), longest, mask) for of_lane in slots]

    def _prefill_chunks(self, sequence: int, group: LayerGroup, step: GroupBatch) -> list[PrefillChunk]:
        """One for each lane."""
        first_row, stop_row = (int(x) for x in self.batch.query_starts[sequence : sequence + 2])
        num_context = int(self.batch.num_context_tokens[sequence])
        total = num_context + stop_row - first_row
        # Keys of this chunk are positions  oldest : total ; the first query token sits at num_context.
        oldest = int(oldest_visible(group, num_context))
        positions = np.arange(num_context, total)
        rows = ChunkRows(
            first_row,
            stop_row,
            oldest_visible(group, positions) - oldest,
            positions + 1 - oldest,
            lambda: prefill_tiles(first_row, stop_row, num_context, group, self._additive),
        )
        if num_context == 0 and self.keep_exact:
            return [PrefillChunk(rows, total, fresh_rows=(first_row, stop_row))] * len(step.slots)
        first_block = oldest // self.block_tokens
        skip = oldest - first_block * self.block_tokens
        before = int(step.first_blocks[sequence])
        table = step.block_tables[sequence][first_block - before : -(-total // self.block_tokens) - before]
        chunks: list[PrefillChunk] = []
        for blocks in table.T.astype(np.int64):
            if (np.diff(blocks) == 1).all():
                first_slot = int(blocks[0]) * self.block_tokens + skip
                chunks.append(PrefillChunk(rows, total - oldest, first_slot=first_slot))
            else:
                chunks.append(PrefillChunk(rows, total - oldest, blocks=self.tensor(blocks), skip_tokens=skip))
        return chunks

    def _additive(self, hidden: BoolArray) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self.dtype)
        mask.masked_fill_(torch.from_numpy(hidden), float("-inf"))
        return mask.to(self.device)


def oldest_visible(group: LayerGroup, positions: Int64Array | int) -> Int64Array:
    """The oldest token that a query at each of `positions` sees in layers of `group`; it sees all from there to itself.

    Everything, the last W tokens with itself (q - W < k <= q), or those since the last multiple of the chunk size.
    """
    at = np.asarray(positions, dtype=np.int64)
    if group.window_tokens is not None:
        return np.maximum(at - (group.window_tokens - 1), 0)
    return at * 0 if group.chunk_tokens is None else at - at % group.chunk_tokens


def slots_of(block_table: Int32Array, first_block: int, positions: Int64Array, block_tokens: int) -> Int64Array:
    """Slots [lanes, n] of tokens `positions` [n] of a sequence; `block_table` [b, lanes] begins with `first_block`."""
    blocks: Int64Array = block_table[positions // block_tokens - first_block].T.astype(np.int64)
    return blocks * block_tokens + positions % block_tokens


def group_by_length(sequences: Int64Array, num_seen: Int64Array, group_tokens: int | None) -> list[Int64Array]:
    """Split `sequences` into groups that are attended in one padded batch each.

    `num_seen` [S]: keys that each sequence sees. Within a group no one sees less than half of the longest, unless the
    difference is at most 64 keys: so much a further group costs. A group of several has at most `group_tokens` keys,
    fill included.
    """
    if len(sequences) == 0:
        return []
    seen = num_seen[sequences]
    order = np.argsort(-seen, kind="stable")
    groups: list[Int64Array] = []
    first = 0
    for index in range(1, len(order)):
        longest, length = int(seen[order[first]]), int(seen[order[index]])
        is_full = group_tokens is not None and (index + 1 - first) * longest > group_tokens
        if is_full or (2 * length < longest and longest - length > 64):
            groups.append(sequences[order[first:index]])
            first = index
    groups.append(sequences[order[first:]])
    return groups


def prefill_tiles(
    first_row: int, stop_row: int, num_context: int, group: LayerGroup, additive: Callable[[BoolArray], torch.Tensor]
) -> Iterator[PrefillTile]:
    """Cut a chunk's query rows into tiles, each with just the keys that some row of it may see.

        positions     0 ...... oldest ............... num_context ............. total
        keys kept              [-------------------------------------------------)
        query rows                                    [ tile ) [ tile ) [ tile   )

    Keys are counted from `oldest`. `additive` turns a bool array (True: hidden) into a mask.
    """
    num_rows = stop_row - first_row
    oldest = oldest_visible(group, np.arange(num_context, num_context + num_rows))
    if num_context == 0 and oldest[-1] == 0:
        yield PrefillTile(first_row, stop_row, 0, num_rows, None)
        return
    for first in range(0, num_rows, PREFILL_TILE_TOKENS):
        stop = min(first + PREFILL_TILE_TOKENS, num_rows)
        keys = np.arange(oldest[first], num_context + stop)
        hidden = keys[None, :] > np.arange(num_context + first, num_context + stop)[:, None]
        if oldest[stop - 1] > oldest[first]:
            hidden |= keys[None, :] < oldest[first:stop, None]
        low, high = (int(key - oldest[0]) for key in (oldest[first], num_context + stop))
        yield PrefillTile(first_row + first, first_row + stop, low, high, additive(hidden))
