"""What the engine asks of a model: one protocol, plain numpy in and out. `hf` and `testing` implement it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from looseleaf.engine.sampling import SamplingRow, TokenLogprobs
from looseleaf.ids import Int32Array, Int64Array


@dataclass(frozen=True)
class ModelInfo:
    """What the engine and the server need to know of a loaded model.

    `max_model_tokens`: positions that the model was made for. `bytes_per_token`: K and V of one token in all layers.
    `eos_token_ids`: any of them ends a sequence. `kv_layout`: fingerprint of what a block holds (revision, dtype, …).
    """

    name: str
    vocab_size: int
    max_model_tokens: int
    bytes_per_token: int
    eos_token_ids: frozenset[int]
    kv_layout: str


@dataclass(frozen=True)
class StepBatch:
    """One forward pass over S sequences with T tokens in all; prefill, chunk and decode are the same thing.

    The tokens of sequence s are the half-open range `query_starts[s] : query_starts[s + 1]` of the flat arrays:

        token_ids   [T] int64    tokens to compute
        positions   [T] int64    their positions in their own sequence
        slots       [T] int64    where their K and V go: block_id * block_tokens + offset
        query_starts [S + 1] int32
        num_context_tokens [S] int32   tokens of the sequence that lie before its first query token, already in blocks
        block_tables  S arrays int32   blocks of the sequence in order; they cover context and query tokens
        sampled     [N] int32    the sequences (indices into S) whose next token is wanted, from their last query token
        sampling    N rows       how, in the order of `sampled`
        copies      pairs (from_block, to_block) to copy before anything is written

    All of a step's K and V are written before any row attends, so sequences of one step may share blocks.
    """

    request_ids: tuple[str, ...]
    token_ids: Int64Array
    positions: Int64Array
    slots: Int64Array
    query_starts: Int32Array
    num_context_tokens: Int32Array
    block_tables: tuple[Int32Array, ...]
    sampled: Int32Array
    sampling: tuple[SamplingRow, ...]
    copies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class StepOutput:
    """What a step gives back. `token_ids` int64 [N] in the order of `StepBatch.sampled`; `logprobs` has N entries, None
    where the request did not ask."""

    token_ids: Int64Array
    logprobs: tuple[TokenLogprobs | None, ...]


class ModelRunner(Protocol):
    """A model whose keys and values live in blocks.

    Guarantees of the caller: calls come one at a time, from one thread; every slot of `batch.slots` belongs to that
    sequence alone; block ids are below `num_blocks` given at construction. The runner modifies only the slots named and
    the targets of `copies`.
    """

    @property
    def info(self) -> ModelInfo:
        """Facts of the model; constant."""

    def execute(self, batch: StepBatch) -> StepOutput:
        """Do the copies, compute the step, sample. Raises whatever the model raises; the engine then fails the requests
        of this step, and none of their tokens are committed."""
