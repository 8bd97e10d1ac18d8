"""A model runner without a model, in which a wrong block gives a wrong token.

Every slot of the fake KV memory holds a token id, its position and a *stamp*: a number made of the namespace and all
tokens up to this one. The stamp of a new token is computed from that of the token before it, read through the block
table like a real model reads keys and values. So a block that is stale, foreign or out of place changes each stamp
after it and thereby the next token; and each read checks that the whole context is one unbroken chain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from looseleaf.engine.runner import ModelInfo, StepBatch, StepOutput
from looseleaf.engine.sampling import SamplingParams, TokenLogprobs
from looseleaf.ids import Int32Array, Int64Array
from looseleaf.testing.fake_model import FakeModel, fake_token, namespace_stamp, next_stamp

_UInt64Array = npt.NDArray[np.uint64]
_NEVER = -1


class StampMismatch(AssertionError):
    """A block table leads to a slot that does not hold what this sequence wrote there. The message has the facts."""


class FakeRunner:
    """Implements `ModelRunner` over `num_blocks * block_tokens` slots.

    `namespace_of(request_id)`: the namespace that goes into its stamps, `""` for all by default; give it to find reuse
    across namespaces. `eos_every`: about one token in that many is `eos_token_id` (0: never). `alphabet`: the token ids
    that are generated otherwise (all but the end token by default). `delay_seconds`: each step takes that long.

    Counters: `num_steps`, `num_computed_tokens`. `mismatches` keeps the text of every `StampMismatch`, since an engine
    rightly turns an exception into failed requests.
    """

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        vocab_size: int = 260,
        max_model_tokens: int = 4096,
        eos_token_id: int = 257,
        *,
        eos_every: int = 0,
        alphabet: Sequence[int] | None = None,
        delay_seconds: float = 0.0,
        namespace_of: Callable[[str], str] | None = None,
    ) -> None:
        self.model = FakeModel(vocab_size, eos_token_id, eos_every, None if alphabet is None else tuple(alphabet))
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.delay_seconds = delay_seconds
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.mismatches: list[str] = []
        self.info = ModelInfo("fake", vocab_size, max_model_tokens, 8, frozenset({eos_token_id}), "fake/1")
        self._namespace_of = namespace_of or (lambda _: "")
        self._failures: list[Exception] = []
        self._scripts: dict[str, dict[int, int]] = {}
        num_slots = num_blocks * block_tokens
        self._tokens: Int64Array = np.full(num_slots, _NEVER, np.int64)
        self._positions: Int64Array = np.full(num_slots, _NEVER, np.int64)
        self._stamps: _UInt64Array = np.zeros(num_slots, np.uint64)

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
        """Write the step's tokens and stamps, check every context, choose the next tokens.

        Raises:
            StampMismatch: a slot or a block table is wrong.
            Exception: as told by `fail_next`.
        """
        if self.delay_seconds:
            time.sleep(self.delay_seconds)
        self.num_steps += 1
        try:
            self._check_shapes(batch)
            self._copy(batch.copies)
            if self._failures:
                self._stamps[batch.slots] ^= np.uint64(0x5EED)
                self._positions[batch.slots] = _NEVER
                raise self._failures.pop(0)
            self._write(batch)
            stamps = [self._checked_stamp(batch, row) for row in range(len(batch.request_ids))]
        except StampMismatch as error:
            self.mismatches.append(str(error))
            raise
        self.num_computed_tokens += len(batch.token_ids)
        return self._sample(batch, stamps)

    # -- memory --

    def _check_shapes(self, batch: StepBatch) -> None:
        num_rows, num_tokens = len(batch.request_ids), len(batch.token_ids)
        starts = batch.query_starts
        ends = (len(starts) - 1, starts[0], starts[-1])
        facts = {
            "query_starts go from 0 to the number of tokens": ends == (num_rows, 0, num_tokens),
            "no sequence has 0 tokens": bool((np.diff(starts) > 0).all()),
            "positions and slots are one per token": len(batch.positions) == num_tokens == len(batch.slots),
            "no slot is written twice in a step": len(np.unique(batch.slots)) == num_tokens,
            "each sequence has one table": len(batch.block_tables) == num_rows,
            "each sequence has one context": len(batch.num_context_tokens) == num_rows,
            "one sampling row per sampled sequence": len(batch.sampling) == len(batch.sampled),
            "a request is in a step once": len(set(batch.request_ids)) == num_rows,
        }
        for fact, holds in facts.items():
            if not holds:
                raise StampMismatch(f"bad batch: it does not hold that {fact}")
        for row in range(num_rows):
            self._check_row(batch, row)

    def _check_row(self, batch: StepBatch, row: int) -> None:
        name, table = batch.request_ids[row], batch.block_tables[row]
        start, end = batch.query_starts[row : row + 2].tolist()
        context = int(batch.num_context_tokens[row])
        positions = np.arange(context, context + end - start)
        if not np.array_equal(batch.positions[start:end], positions):
            raise StampMismatch(f"{name}: its query positions do not follow its {context} context tokens")
        if len(table) * self.block_tokens < context + end - start:
            raise StampMismatch(f"{name}: {len(table)} blocks do not cover {context + end - start} tokens")
        if len(np.unique(table)) != len(table) or table.min() < 0 or table.max() >= self.num_blocks:
            raise StampMismatch(f"{name}: its block table repeats a block or leaves the pool: {table.tolist()}")
        if not np.array_equal(batch.slots[start:end], self._slots(table, positions)):
            raise StampMismatch(f"{name}: its slots are not those of its block table")

    def _slots(self, table: Int32Array, positions: npt.NDArray[np.int64]) -> Int64Array:
        blocks, offsets = np.divmod(positions, self.block_tokens)
        return table[blocks].astype(np.int64) * self.block_tokens + offsets

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        for from_block, to_block in copies:
            for memory in (self._tokens, self._positions, self._stamps):
                blocks = memory.reshape(self.num_blocks, self.block_tokens)  # a view
                blocks[to_block] = blocks[from_block]

    def _write(self, batch: StepBatch) -> None:
        """Shortest context first: a sequence may go on from blocks that another one writes in this very step."""
        self._tokens[batch.slots] = batch.token_ids
        self._positions[batch.slots] = batch.positions
        for row in np.argsort(batch.num_context_tokens, kind="stable").tolist():
            start, end = batch.query_starts[row : row + 2].tolist()
            context = int(batch.num_context_tokens[row])
            before = namespace_stamp(self._namespace_of(batch.request_ids[row]))
            if context:
                before = int(self._stamps[self._slots(batch.block_tables[row], np.array([context - 1]))[0]])
            tokens, positions = batch.token_ids[start:end].tolist(), batch.positions[start:end].tolist()
            for slot, token, position in zip(batch.slots[start:end], tokens, positions, strict=True):
                before = self._stamps[slot] = next_stamp(before, token, position)

    def _checked_stamp(self, batch: StepBatch, row: int) -> int:
        """The stamp of the last query token, after checking every link from the first token to it."""
        name = batch.request_ids[row]
        num_tokens = int(batch.num_context_tokens[row] + batch.query_starts[row + 1] - batch.query_starts[row])
        positions = np.arange(num_tokens)
        slots = self._slots(batch.block_tables[row], positions)
        wrong = np.flatnonzero(self._positions[slots] != positions)
        if len(wrong):
            at, slot = wrong[0], slots[wrong[0]]
            raise StampMismatch(
                f"{name}: position {at} reads slot {slot}, which holds position {self._positions[slot]}"
            )
        stamps = self._stamps[slots]
        before = np.concatenate((np.array([namespace_stamp(self._namespace_of(name))], np.uint64), stamps[:-1]))
        wrong = np.flatnonzero(_next_stamps(before, self._tokens[slots], positions) != stamps)
        if len(wrong):
            at, slot = wrong[0], slots[wrong[0]]
            raise StampMismatch(f"{name}: slot {slot} at position {at} was written for another prefix or namespace")
        return int(stamps[-1])

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


def _next_stamps(before: _UInt64Array, token_ids: Int64Array, positions: npt.NDArray[np.int64]) -> _UInt64Array:
    """`fake_model.next_stamp` over arrays [n]: what follows each of the stamps `before`."""
    mixed: _UInt64Array = (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0xD6E8FEB86659FD93)
    mixed ^= (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0xA0761D6478BD642F)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    mixed ^= mixed >> np.uint64(29)
    mixed += before * np.uint64(0x9E3779B97F4A7C15)
    return mixed
