"""Drives a runner by hand: sequences with block tables chosen by the test, steps of any mix of chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from looseleaf.engine.runner import StepBatch
from looseleaf.hf.runner import HFRunner


@dataclass
class HandSequence:
    """Tokens, the blocks they go to, and how many are computed."""

    tokens: np.ndarray
    table: np.ndarray
    num_computed: int = 0


@dataclass
class HandDriver:
    """Hands out blocks in random order and builds step batches. `block_tokens` as the runner's."""

    runner: HFRunner
    rng: np.random.Generator
    free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = self.rng.permutation(self.runner.num_blocks).tolist()

    @property
    def block_tokens(self) -> int:
        return self.runner.memory.block_tokens

    def sequence(self, tokens: np.ndarray, shared: Sequence[int] = ()) -> HandSequence:
        """A sequence whose first blocks are `shared` (and computed); the rest are fresh, in permuted order."""
        num_own = -(-len(tokens) // self.block_tokens) - len(shared)
        own = [self.free.pop() for _ in range(num_own)]
        table = np.asarray([*shared, *own], dtype=np.int32)
        return HandSequence(np.asarray(tokens, dtype=np.int64), table, len(shared) * self.block_tokens)

    def append(self, sequence: HandSequence, token: int) -> None:
        sequence.tokens = np.append(sequence.tokens, token)
        if len(sequence.tokens) > len(sequence.table) * self.block_tokens:
            sequence.table = np.append(sequence.table, np.int32(self.free.pop())).astype(np.int32)

    def step(self, work: Sequence[tuple[HandSequence, int]], copies: Sequence[tuple[int, int]] = ()) -> torch.Tensor:
        """Compute `n` more tokens of each sequence in one pass; logits [S, vocab] of their last tokens."""
        logits = self.runner.logits(self.batch(work, copies))
        for sequence, count in work:
            sequence.num_computed += count
        return logits

    def batch(self, work: Sequence[tuple[HandSequence, int]], copies: Sequence[tuple[int, int]] = ()) -> StepBatch:
        spans = [np.arange(s.num_computed, s.num_computed + count) for s, count in work]
        slots = [
            s.table[at // self.block_tokens].astype(np.int64) * self.block_tokens + at % self.block_tokens
            for (s, _), at in zip(work, spans, strict=True)
        ]
        return StepBatch(
            request_ids=tuple(f"r{i}" for i in range(len(work))),
            token_ids=np.concatenate([s.tokens[at] for (s, _), at in zip(work, spans, strict=True)]),
            positions=np.concatenate(spans),
            slots=np.concatenate(slots),
            query_starts=np.cumsum([0, *(count for _, count in work)]).astype(np.int32),
            num_context_tokens=np.asarray([s.num_computed for s, _ in work], dtype=np.int32),
            block_tables=tuple(s.table for s, _ in work),
            sampled=np.arange(len(work), dtype=np.int32),
            sampling=(),
            copies=tuple(copies),
        )
