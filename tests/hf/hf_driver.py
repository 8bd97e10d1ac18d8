"""Drives a runner by hand: sequences with block tables chosen by the test, steps of any mix of chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from looseleaf.engine.runner import GroupBatch, StepBatch
from looseleaf.hf.runner import HFRunner
from looseleaf.hf.step_plan import oldest_visible, slots_of


@dataclass
class HandSequence:
    """Tokens, the blocks they go to [blocks, lanes of all groups], and how many are computed."""

    tokens: np.ndarray
    table: np.ndarray
    num_computed: int = 0


@dataclass
class HandDriver:
    """Hands out blocks in random order and builds step batches. Tables begin where a group may still look back."""

    runner: HFRunner
    rng: np.random.Generator
    free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = self.rng.permutation(self.runner.num_blocks).tolist()

    @property
    def block_tokens(self) -> int:
        return self.runner.memory.block_tokens

    @property
    def num_lanes(self) -> int:
        return self.runner.memory.layout.lanes.num_lanes

    def blocks(self, count: int) -> np.ndarray:
        """Fresh blocks [count, lanes]."""
        taken = [self.free.pop() for _ in range(count * self.num_lanes)]
        return np.asarray(taken, dtype=np.int32).reshape(count, self.num_lanes)

    def sequence(self, tokens: np.ndarray, shared: np.ndarray | None = None) -> HandSequence:
        """A sequence whose first blocks are `shared` (and computed); the rest are fresh, in permuted order."""
        shared = self.blocks(0) if shared is None else shared
        own = self.blocks(-(-len(tokens) // self.block_tokens) - len(shared))
        table = np.concatenate([shared, own])
        return HandSequence(np.asarray(tokens, dtype=np.int64), table, len(shared) * self.block_tokens)

    def append(self, sequence: HandSequence, token: int) -> None:
        sequence.tokens = np.append(sequence.tokens, token)
        if len(sequence.tokens) > len(sequence.table) * self.block_tokens:
            sequence.table = np.concatenate([sequence.table, self.blocks(1)])

    def step(self, work: Sequence[tuple[HandSequence, int]], copies: Sequence[tuple[int, int]] = ()) -> torch.Tensor:
        """Compute `n` more tokens of each sequence in one pass; logits [S, vocab] of their last tokens."""
        logits = self.runner.logits(self.batch(work, copies))
        for sequence, count in work:
            sequence.num_computed += count
        return logits

    def batch(self, work: Sequence[tuple[HandSequence, int]], copies: Sequence[tuple[int, int]] = ()) -> StepBatch:
        spans = [np.arange(s.num_computed, s.num_computed + count) for s, count in work]
        groups, lane = [], 0
        for group in self.runner.info.groups:
            lanes = slice(lane, lane := lane + group.num_lanes)
            firsts = [int(oldest_visible(group, s.num_computed)) // self.block_tokens for s, _ in work]
            slots = [
                slots_of(s.table[:, lanes], 0, at, self.block_tokens) for (s, _), at in zip(work, spans, strict=True)
            ]
            groups.append(
                GroupBatch(
                    slots=np.concatenate(slots, axis=1),
                    block_tables=tuple(s.table[first:, lanes] for first, (s, _) in zip(firsts, work, strict=True)),
                    first_blocks=np.asarray(firsts, dtype=np.int32),
                )
            )
        return StepBatch(
            request_ids=tuple(f"r{i}" for i in range(len(work))),
            token_ids=np.concatenate([s.tokens[at] for (s, _), at in zip(work, spans, strict=True)]),
            positions=np.concatenate(spans),
            query_starts=np.cumsum([0, *(count for _, count in work)]).astype(np.int32),
            num_context_tokens=np.asarray([s.num_computed for s, _ in work], dtype=np.int32),
            groups=tuple(groups),
            sampled=np.arange(len(work), dtype=np.int32),
            sampling=(),
            copies=tuple(copies),
        )
