"""What one step computes: made by the scheduler, read by batch builder and engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from looseleaf.core.lease import Lease
from looseleaf.engine.request import FinishReason
from looseleaf.engine.sampling import SamplingRow
from looseleaf.engine.sequence import Sequence
from looseleaf.errors import LooseleafError
from looseleaf.ids import Int64Array, RequestId

_NO_TOKENS, _NO_SLOTS = np.zeros(0, np.int64), np.zeros((1, 0), np.int64)


@dataclass(frozen=True)
class Chunk:
    """Tokens `start : end` (at least one) of a sequence's known tokens, to compute in one step. `drawn`: the sequences
    whose next token is wanted; none before the last known token, then it and its samples."""

    sequence: Sequence
    start: int
    end: int
    drawn: tuple[Sequence, ...]


@dataclass(frozen=True)
class Ending:
    """A sequence that can't go on or begin, found out while the plan was made; it is not in the step."""

    sequence: Sequence
    reason: FinishReason
    error: LooseleafError | None = None


@dataclass(frozen=True)
class DecodeRows:
    """Decoding sequences and what stays the same from step to step as long as they are the same: so a step of hundreds
    is a few array operations. `sampling`: their rows, None if one of them changes with each token."""

    sequences: list[Sequence]
    leases: list[Lease]
    request_ids: tuple[RequestId, ...]
    sampling: tuple[SamplingRow, ...] | None

    @classmethod
    def of(cls, sequences: list[Sequence]) -> DecodeRows:
        """All of `sequences` run."""
        rows = [sequence.plain_row for sequence in sequences]
        plain = tuple([row for row in rows if row is not None])
        ids = tuple([sequence.request_id for sequence in sequences])
        return cls(
            sequences, [sequence.held for sequence in sequences], ids, plain if len(plain) == len(rows) else None
        )

    def sampling_rows(self) -> tuple[SamplingRow, ...]:
        """How the next token of each is chosen."""
        return self.sampling or tuple([sequence.sampling_row() for sequence in self.sequences])

    def __len__(self) -> int:
        return len(self.sequences)


NO_DECODES = DecodeRows([], [], (), None)


@dataclass
class StepPlan:
    """The step to compute: each of `decodes` one token, each of `chunks` its own range. No sequence is in both.

    `decode_tokens`: int64 [len(decodes)], the tokens to compute; `decode_slots`: int64 [num_lanes, len(decodes)], where
    their K and V go in each lane of all groups. `copies`: pairs (from_block, to_block) to copy before all else.
    `has_preempted`: a running request gave way.
    """

    decodes: DecodeRows = NO_DECODES
    decode_tokens: Int64Array = field(default_factory=lambda: _NO_TOKENS)
    decode_slots: Int64Array = field(default_factory=lambda: _NO_SLOTS)
    chunks: list[Chunk] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    copies: tuple[tuple[int, int], ...] = ()
    has_preempted: bool = False

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences of the step, decodes first: the rows of the batch."""
        return self.decodes.sequences + [chunk.sequence for chunk in self.chunks]

    @property
    def drawn(self) -> list[Sequence]:
        """The sequences whose next token is wanted, in the order of `StepBatch.sampled`."""
        return [*self.decodes.sequences, *(sequence for chunk in self.chunks for sequence in chunk.drawn)]

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return len(self.decodes) + sum(chunk.end - chunk.start for chunk in self.chunks)


def chained_copies(
    copies: Iterable[tuple[int, int]], moves: Iterable[tuple[int, int]], num_blocks: int
) -> list[tuple[int, int]]:
    """What does `copies` and then `moves`, in a memory of `num_blocks` blocks afterwards, as one set of copies of which
    all are read before any is written. A copy to a block that a move overwrites is of no use any more and left out."""
    origins = {to_block: from_block for from_block, to_block in copies}
    moved = {to_block: origins.get(from_block, from_block) for from_block, to_block in moves}
    kept = {to_block: origin for to_block, origin in origins.items() if to_block < num_blocks}
    return [(from_block, to_block) for to_block, from_block in (kept | moved).items()]
