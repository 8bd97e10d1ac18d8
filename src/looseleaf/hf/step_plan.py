"""Which tokens attend to which slots in one step, worked out once and used by every layer of equal window."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from looseleaf.engine.runner import StepBatch
from looseleaf.ids import Int32Array, Int64Array

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
class PrefillChunk:
    """One sequence with several query tokens. Where its keys lie, cheapest first:

    - `fresh_rows`: the sequence begins in this step: its K and V are the rows `first : stop` just computed;
    - `first_slot`: its blocks follow each other in memory: a view;
    - else `blocks` int64 [n], copied together, of which the first `skip_tokens` are out of the window.
    """

    tiles: tuple[PrefillTile, ...]
    num_keys: int
    fresh_rows: tuple[int, int] | None = None
    first_slot: int | None = None
    blocks: torch.Tensor | None = None
    skip_tokens: int = 0


@dataclass(frozen=True)
class AttentionPlan:
    """All the attending of one step for layers of one window."""

    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillChunk, ...]


@dataclass
class StepPlan:
    """Step `batch` as attention in `dtype` on `device` sees it; plans are kept by window, layer to layer.

    `slots` int64 [T] on the device. `keep_exact`: the memory stores what the model computes, so a sequence that begins
    in this step may attend to its fresh K and V; otherwise they are read back, so that cold and warm runs see the same
    numbers. `group_tokens`: see `group_by_length`.
    """

    batch: StepBatch
    block_tokens: int
    device: torch.device
    dtype: torch.dtype
    keep_exact: bool
    group_tokens: int | None = None
    slots: torch.Tensor = field(init=False)
    _plans: dict[int | None, AttentionPlan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = self.tensor(self.batch.slots)

    def tensor(self, array: Int64Array) -> torch.Tensor:
        """`array` on the device."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def for_window(self, window: int | None) -> AttentionPlan:
        """The plan for layers that see the last `window` tokens (q - window < k <= q), or everything (None)."""
        if window not in self._plans:
            self._plans[window] = self._make(window)
        return self._plans[window]

    def _make(self, window: int | None) -> AttentionPlan:
        starts = self.batch.query_starts.astype(np.int64)
        num_query = np.diff(starts)
        num_keys = self.batch.num_context_tokens.astype(np.int64) + num_query
        decoding = np.flatnonzero(num_query == 1)
        return AttentionPlan(
            decode=tuple(
                self._decode_group(group, starts[group], num_keys[group], window)
                for group in group_by_length(decoding, num_keys, window, self.group_tokens)
            ),
            prefill=tuple(self._prefill_chunk(int(s), window) for s in np.flatnonzero(num_query > 1)),
        )

    def _decode_group(
        self, sequences: Int64Array, rows: Int64Array, num_keys: Int64Array, window: int | None
    ) -> DecodeGroup:
        seen = num_keys if window is None else np.minimum(num_keys, window)
        longest = int(seen.max())
        slots = np.empty((len(sequences), longest), dtype=np.int64)
        for row, (sequence, stop, count) in enumerate(zip(sequences, num_keys, seen, strict=True)):
            positions = np.arange(stop - count, stop)
            slots[row, :count] = slots_of(self.batch.block_tables[sequence], positions, self.block_tokens)
            slots[row, count:] = slots[row, count - 1]
        mask: torch.Tensor | None = None
        if int(seen.min()) < longest:
            mask = self._additive(np.arange(longest)[None, :] >= seen[:, None])[:, None, None, :]
        return DecodeGroup(self.tensor(rows), self.tensor(slots.reshape(-1)), longest, mask)

    def _prefill_chunk(self, sequence: int, window: int | None) -> PrefillChunk:
        first_row, stop_row = (int(x) for x in self.batch.query_starts[sequence : sequence + 2])
        num_context = int(self.batch.num_context_tokens[sequence])
        total = num_context + stop_row - first_row
        # Keys of this chunk are positions  oldest : total ; the first query token sits at num_context.
        oldest = 0 if window is None else max(0, num_context - window + 1)
        tiles = tuple(prefill_tiles(first_row, stop_row, num_context, oldest, window, self._additive))
        if num_context == 0 and self.keep_exact:
            return PrefillChunk(tiles, total, fresh_rows=(first_row, stop_row))
        first_block = oldest // self.block_tokens
        blocks = self.batch.block_tables[sequence][first_block : -(-total // self.block_tokens)]
        skip = oldest - first_block * self.block_tokens
        if (np.diff(blocks) == 1).all():
            return PrefillChunk(tiles, total - oldest, first_slot=int(blocks[0]) * self.block_tokens + skip)
        return PrefillChunk(tiles, total - oldest, blocks=self.tensor(blocks.astype(np.int64)), skip_tokens=skip)

    def _additive(self, hidden: BoolArray) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self.dtype)
        mask.masked_fill_(torch.from_numpy(hidden), float("-inf"))
        return mask.to(self.device)


def slots_of(block_table: Int32Array, positions: Int64Array, block_tokens: int) -> Int64Array:
    """Slots of token `positions` [n] of the sequence whose blocks are `block_table`."""
    return block_table[positions // block_tokens].astype(np.int64) * block_tokens + positions % block_tokens


def group_by_length(
    sequences: Int64Array, num_keys: Int64Array, window: int | None, group_tokens: int | None
) -> list[Int64Array]:
    """Split `sequences` into groups that are attended in one padded batch each.

    `num_keys` [S] by sequence. Within a group no one sees less than half of the longest, unless the difference is at
    most 64 keys: so much a further group costs. A group of several has at most `group_tokens` keys, fill included.
    """
    if len(sequences) == 0:
        return []
    seen = num_keys[sequences] if window is None else np.minimum(num_keys[sequences], window)
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
    first_row: int,
    stop_row: int,
    num_context: int,
    oldest: int,
    window: int | None,
    additive: Callable[[BoolArray], torch.Tensor],
) -> Iterator[PrefillTile]:
    """Cut a chunk's query rows into tiles, each with just the keys that some row of it may see.

        positions     0 ...... oldest ............... num_context ............. total
        keys kept              [-------------------------------------------------)
        query rows                                    [ tile ) [ tile ) [ tile   )

    Keys are counted from `oldest`. `additive` turns a bool array (True: hidden) into a mask.
    """
    num_rows = stop_row - first_row
    if num_context == 0 and (window is None or num_rows <= window):
        yield PrefillTile(first_row, stop_row, 0, num_rows, None)
        return
    for tile_first in range(0, num_rows, PREFILL_TILE_TOKENS):
        tile_stop = min(tile_first + PREFILL_TILE_TOKENS, num_rows)
        queries = np.arange(num_context + tile_first, num_context + tile_stop)
        low = oldest if window is None else max(oldest, int(queries[0]) - window + 1)
        high = num_context + tile_stop
        keys = np.arange(low, high)
        hidden = keys[None, :] > queries[:, None]
        if window is not None:
            hidden |= keys[None, :] <= queries[:, None] - window
        yield PrefillTile(first_row + tile_first, first_row + tile_stop, low - oldest, high - oldest, additive(hidden))
