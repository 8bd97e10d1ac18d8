"""A model runner without a model, in which a wrong block gives a wrong token.

Every slot of the fake KV memory holds a token id, its position and a *stamp*: a number made of the namespace, all
tokens up to this one, and the lane. Each step works out the stamps that a sequence must find from its tokens alone, and
compares every slot that a query may see, in every lane: a block that is stale, foreign, of another lane or out of place
can't hold them. Slots that no query sees are never looked at; they may belong to somebody else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from looseleaf.core.config import LayerGroup
from looseleaf.engine.runner import GroupBatch, ModelInfo, StepBatch, StepOutput
from looseleaf.engine.sampling import SamplingParams, TokenLogprobs
from looseleaf.errors import CapacityError
from looseleaf.ids import Int32Array, Int64Array
from looseleaf.testing.fake_model import STAMP_FACTOR, FakeModel, fake_token, namespace_stamp

_UInt64Array = npt.NDArray[np.uint64]
_NEVER = -1
_LANE_SALT = 0xC2B2AE3D27D4EB4F


class StampMismatch(AssertionError):
    """A block table leads to a slot that does not hold what this sequence wrote there. The message has the facts."""


@dataclass(frozen=True)
class _Lane:
    """One lane of one group in a step: its number over all groups, slots [T] and a table [num_blocks] per sequence."""

    number: int
    group: LayerGroup
    slots: Int64Array
    tables: list[Int32Array]
    first_blocks: list[int]

    @property
    def salt(self) -> int:
        """What makes the stamps of this lane its own, 64 bits."""
        return self.number * _LANE_SALT % 2**64


class FakeRunner:
    """Implements `ModelRunner` over `num_blocks * block_tokens` slots, shared by all lanes of `groups`.

    `namespace_of(request_id)`: the namespace that goes into its stamps, `""` for all by default; give it to find reuse
    across namespaces. `known_tokens(request_id)`: prompt and generated tokens of a request in a step; without it they
    are read from the memory of a full group, so a model without one needs it. `eos_every`: about one token in that many
    is `eos_token_id` (0: never). `alphabet`: the token ids that are generated otherwise (all but the end token by
    default). `delay_seconds`: each step takes that long. `max_blocks`: `resize` refuses more.

    Counters: `num_steps`, `num_computed_tokens`, `num_copied_blocks`. `mismatches` keeps the text of every
    `StampMismatch`, since an engine rightly turns an exception into failed requests.
    """

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        vocab_size: int = 260,
        max_model_tokens: int = 4096,
        eos_token_id: int = 257,
        *,
        groups: tuple[LayerGroup, ...] = (LayerGroup("full"),),
        eos_every: int = 0,
        alphabet: Sequence[int] | None = None,
        delay_seconds: float = 0.0,
        namespace_of: Callable[[str], str] | None = None,
        known_tokens: Callable[[str], Int32Array] | None = None,
        max_blocks: int | None = None,
    ) -> None:
        """Raises ValueError if neither a full group nor `known_tokens` tells what a sequence must find."""
        self.model = FakeModel(vocab_size, eos_token_id, eos_every, None if alphabet is None else tuple(alphabet))
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.delay_seconds = delay_seconds
        self.max_blocks = max_blocks
        self.num_steps = self.num_computed_tokens = self.num_copied_blocks = 0
        self.mismatches: list[str] = []
        eos_token_ids = frozenset({eos_token_id})
        self.info = ModelInfo("fake", vocab_size, max_model_tokens, 8, eos_token_ids, "fake/1", groups)
        self._groups = groups
        self._namespace_of = namespace_of or (lambda _: "")
        self._known_tokens = known_tokens
        if known_tokens is None and all(group.kind != "full" for group in groups):
            raise ValueError("a model without a full group needs known_tokens")
        self._failures: list[Exception] = []
        self._scripts: dict[str, dict[int, int]] = {}
        self._tokens: Int64Array = np.full((num_blocks, block_tokens), _NEVER, np.int64)
        self._positions: Int64Array = np.full((num_blocks, block_tokens), _NEVER, np.int64)
        self._stamps: _UInt64Array = np.zeros((num_blocks, block_tokens), np.uint64)

    def fail_next(self, error: Exception | None = None, times: int = 1) -> None:
        """The next `times` steps write garbage to their slots and raise `error` (a RuntimeError by default)."""
        self._failures += [error or RuntimeError("the fake model failed as it was told to")] * times

    def script(self, request_id: str, num_prompt_tokens: int, tokens: Sequence[int]) -> None:
        """Make a request generate `tokens`; after them the model goes on by itself. What was computed still counts."""
        self._scripts[request_id] = {num_prompt_tokens + i: int(token) for i, token in enumerate(tokens)}

    def expected_tokens(
        self, prompt: Sequence[int] | Int32Array, num_tokens: int, params: SamplingParams, namespace: str = ""
    ) -> list[int]:
        """What a cold run alone must generate: see `FakeModel.expected_tokens`. Unaware of scripts."""
        return self.model.expected_tokens(prompt, num_tokens, params, namespace)

    def execute(self, batch: StepBatch) -> StepOutput:
        """Write the step's tokens and stamps, check everything that its queries see, choose the next tokens.

        Raises:
            StampMismatch: a slot or a block table is wrong.
            Exception: as told by `fail_next`.
        """
        if self.delay_seconds:
            time.sleep(self.delay_seconds)
        self.num_steps += 1
        try:
            self._check_shapes(batch)
            lanes = self._lanes(batch)
            self._check_tables(batch, lanes)
            self._copy(batch.copies)
            for lane in lanes:
                self._tokens.reshape(-1)[lane.slots] = batch.token_ids
                self._positions.reshape(-1)[lane.slots] = batch.positions
            if self._failures:
                self._positions.reshape(-1)[np.concatenate([lane.slots for lane in lanes])] = _NEVER
                raise self._failures.pop(0)
            chains = [self._chain(batch, lanes, row) for row in range(len(batch.request_ids))]
            self._write(batch, lanes, chains)
            for row, chain in enumerate(chains):
                for lane in lanes:
                    self._check_memory(batch, lane, row, chain)
        except StampMismatch as error:
            self.mismatches.append(str(error))
            raise
        self.num_computed_tokens += len(batch.token_ids)
        return self._sample(batch, [int(chain[-1]) for chain in chains])

    def resize(self, num_blocks: int, copies: Sequence[tuple[int, int]]) -> None:
        """See `ModelRunner.resize`; what is above `max_blocks` is a CapacityError."""
        if self.max_blocks is not None and num_blocks > self.max_blocks:
            raise CapacityError(f"no memory for {num_blocks} blocks; {self.max_blocks} fit")
        num_kept = min(num_blocks, self.num_blocks)
        for name, nothing in (("_tokens", _NEVER), ("_positions", _NEVER), ("_stamps", 0)):
            before = getattr(self, name)
            after = np.full((num_blocks, self.block_tokens), nothing, before.dtype)
            after[:num_kept] = before[:num_kept]
            for from_block, to_block in copies:
                after[to_block] = before[from_block]
            setattr(self, name, after)
        self.num_blocks = num_blocks
        self.num_copied_blocks += len(copies)

    # -- memory --

    def _lanes(self, batch: StepBatch) -> list[_Lane]:
        lanes: list[_Lane] = []
        for group, part in zip(self._groups, batch.groups, strict=True):
            firsts = part.first_blocks.tolist()
            for lane in range(group.num_lanes):
                tables = [table[:, lane] for table in part.block_tables]
                lanes.append(_Lane(len(lanes), group, part.slots[lane], tables, firsts))
        return lanes

    def _check_shapes(self, batch: StepBatch) -> None:
        num_rows, num_tokens = len(batch.request_ids), len(batch.token_ids)
        starts = batch.query_starts
        ends = (len(starts) - 1, starts[0], starts[-1])
        facts = {
            "query_starts go from 0 to the number of tokens": ends == (num_rows, 0, num_tokens),
            "no sequence has 0 tokens": bool((np.diff(starts) > 0).all()),
            "positions are one per token": len(batch.positions) == num_tokens,
            "each sequence has one context": len(batch.num_context_tokens) == num_rows,
            "one sampling row per sampled sequence": len(batch.sampling) == len(batch.sampled),
            "a request is in a step once": len(set(batch.request_ids)) == num_rows,
            "there is one group batch per group": len(batch.groups) == len(self._groups),
        }
        for group, part in zip(self._groups, batch.groups, strict=False):
            facts |= {
                f"{group.name} has slots in each lane": part.slots.shape == (group.num_lanes, num_tokens),
                f"{group.name} has one table per sequence": len(part.block_tables) == num_rows,
                f"{group.name} has one first block per sequence": part.first_blocks.shape == (num_rows,),
                f"{group.name} has tables of all lanes": _all_have_lanes(part, group.num_lanes),
                f"{group.name} begins at 0 if it is full": group.kind != "full" or not part.first_blocks.any(),
            }
        for fact, holds in facts.items():
            if not holds:
                raise StampMismatch(f"bad batch: it does not hold that {fact}")

    def _check_tables(self, batch: StepBatch, lanes: list[_Lane]) -> None:
        slots = np.concatenate([lane.slots for lane in lanes])
        if len(np.unique(slots)) != len(slots):
            raise StampMismatch("bad batch: a slot is written twice in a step")
        for row in range(len(batch.request_ids)):
            for lane in lanes:
                self._check_row(batch, lane, row)
        in_lanes = np.concatenate([np.unique(np.concatenate(lane.tables)) for lane in lanes])
        blocks, counts = np.unique(in_lanes, return_counts=True)
        if (counts > 1).any():
            raise StampMismatch(f"bad batch: two lanes share the blocks {blocks[counts > 1].tolist()}")

    def _check_row(self, batch: StepBatch, lane: _Lane, row: int) -> None:
        table, first_block = lane.tables[row], lane.first_blocks[row]
        name = f"{batch.request_ids[row]}, lane {lane.number} ({lane.group.name})"
        start, end = batch.query_starts[row : row + 2].tolist()
        context = int(batch.num_context_tokens[row])
        positions = np.arange(context, context + end - start)
        if not np.array_equal(batch.positions[start:end], positions):
            raise StampMismatch(f"{name}: its query positions do not follow its {context} context tokens")
        covered = range(first_block * self.block_tokens, (first_block + len(table)) * self.block_tokens)
        first, last = _first_visible(lane.group, context), context + end - start - 1
        if first not in covered or last not in covered:
            raise StampMismatch(f"{name}: {len(table)} blocks from {first_block} on do not cover {first} to {last}")
        if len(np.unique(table)) != len(table) or table.min() < 0 or table.max() >= self.num_blocks:
            raise StampMismatch(f"{name}: its block table repeats a block or leaves the pool: {table.tolist()}")
        if not np.array_equal(lane.slots[start:end], self._slots(lane, row, positions)):
            raise StampMismatch(f"{name}: its slots are not those of its block table")

    def _slots(self, lane: _Lane, row: int, positions: npt.NDArray[np.int64]) -> Int64Array:
        blocks, offsets = np.divmod(positions, self.block_tokens)
        slots: Int64Array = (
            lane.tables[row][blocks - lane.first_blocks[row]].astype(np.int64) * self.block_tokens + offsets
        )
        return slots

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        self.num_copied_blocks += len(copies)
        if copies:
            from_blocks, to_blocks = (list(blocks) for blocks in zip(*copies, strict=True))
            for memory in (self._tokens, self._positions, self._stamps):
                memory[to_blocks] = memory[from_blocks]

    def _chain(self, batch: StepBatch, lanes: list[_Lane], row: int) -> _UInt64Array:
        """The stamps, before the lane's salt, that the sequence must find at each of its positions."""
        name = batch.request_ids[row]
        context = int(batch.num_context_tokens[row])
        queries = batch.token_ids[batch.query_starts[row] : batch.query_starts[row + 1]]
        num_tokens = context + len(queries)
        if self._known_tokens is None:
            lane = next(lane for lane in lanes if lane.group.kind == "full")
            tokens = self._tokens.reshape(-1)[self._slots(lane, row, np.arange(num_tokens))]
        else:
            tokens = self._known_tokens(name)[:num_tokens].astype(np.int64)
        if not np.array_equal(tokens[context:], queries):
            raise StampMismatch(f"{name}: the tokens from {context} on are not those of the request")
        return _stamps_of(namespace_stamp(self._namespace_of(name)), tokens)

    def _write(self, batch: StepBatch, lanes: list[_Lane], chains: list[_UInt64Array]) -> None:
        contexts = batch.num_context_tokens.tolist()
        written = np.concatenate([chain[context:] for chain, context in zip(chains, contexts, strict=True)])
        for lane in lanes:
            self._stamps.reshape(-1)[lane.slots] = written ^ np.uint64(lane.salt)

    def _check_memory(self, batch: StepBatch, lane: _Lane, row: int, chain: _UInt64Array) -> None:
        """Every position that a query of this row may see holds the stamp of this prefix and lane."""
        name = f"{batch.request_ids[row]}, lane {lane.number} ({lane.group.name})"
        first = _first_visible(lane.group, int(batch.num_context_tokens[row]))
        positions = np.arange(first, len(chain))
        slots = self._slots(lane, row, positions)
        found = self._positions.reshape(-1)[slots]
        wrong = np.flatnonzero(
            (found != positions) | (self._stamps.reshape(-1)[slots] != chain[first:] ^ np.uint64(lane.salt))
        )
        if len(wrong):
            at, slot, held = positions[wrong[0]], slots[wrong[0]], found[wrong[0]]
            what = "another prefix, namespace or lane" if held == at else f"position {held}"
            raise StampMismatch(f"{name}: position {at} reads slot {slot}, which was written for {what}")

    # -- sampling --

    def _sample(self, batch: StepBatch, stamps: list[int]) -> StepOutput:
        tokens: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        for row, sampling in zip(batch.sampled.tolist(), batch.sampling, strict=True):
            position = int(batch.positions[batch.query_starts[row + 1] - 1]) + 1
            params, history = sampling.params, None
            if params.needs_history:
                history = (sampling.prompt_tokens.tolist(), sampling.output_tokens.tolist())
            token = fake_token(self.model, stamps[row], None if params.is_greedy else sampling.uniform, history)
            token = self._scripts.get(batch.request_ids[row], {}).get(position, token)
            tokens.append(token)
            logprobs.append(_logprobs(token, stamps[row], params))
        return StepOutput(np.array(tokens, np.int64), tuple(logprobs))


def _logprobs(token: int, stamp: int, params: SamplingParams) -> TokenLogprobs | None:
    if params.num_logprobs is None:
        return None
    top = params.num_logprobs
    value = -float(stamp % 1000) / 1000
    return TokenLogprobs(token, value, tuple(range(token, token + top)), tuple(value - i for i in range(top)))


def _all_have_lanes(part: GroupBatch, num_lanes: int) -> bool:
    return all(table.ndim == 2 and table.shape[1] == num_lanes for table in part.block_tables)


def _first_visible(group: LayerGroup, position: int) -> int:
    """The oldest position that the query at `position` sees, and so the oldest that it and later ones see: a window of
    W counts the query itself, a chunk begins at a multiple of its length."""
    if group.window_tokens is not None:
        return max(0, position - group.window_tokens + 1)
    if group.chunk_tokens is not None:
        return position - position % group.chunk_tokens
    return 0


def _stamps_of(before: int, token_ids: Int64Array) -> _UInt64Array:
    """`fake_model.next_stamp` along a sequence [n] that begins after the stamp `before`, without a loop.

    s[i] = s[i - 1] * F + m[i] (modulo 2**64) is F**(i + 1) * (s[-1] + sum of m[j] / F**(j + 1) for j <= i), and
    F, being odd, has an inverse.
    """
    positions = np.arange(len(token_ids), dtype=np.uint64)
    mixed: _UInt64Array = (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0xD6E8FEB86659FD93)
    mixed ^= (positions + np.uint64(1)) * np.uint64(0xA0761D6478BD642F)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    mixed ^= mixed >> np.uint64(29)
    powers = np.cumprod(np.full(len(mixed), STAMP_FACTOR, np.uint64))
    inverses = np.cumprod(np.full(len(mixed), pow(STAMP_FACTOR, -1, 2**64), np.uint64))
    stamps: _UInt64Array = powers * (np.uint64(before) + np.cumsum(mixed * inverses))
    return stamps
