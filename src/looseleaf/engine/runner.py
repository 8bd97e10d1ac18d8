"""What the engine asks of a model: one protocol, plain numpy in and out. `hf` and `testing` implement it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from looseleaf.core.config import LayerGroup
from looseleaf.engine.sampling import SamplingRow, TokenLogprobs
from looseleaf.ids import Int32Array, Int64Array


@dataclass(frozen=True)
class ModelInfo:
    """What the engine and the server need to know of a loaded model.

    `max_model_tokens`: positions that the model was made for. `bytes_per_token`: K and V of one token in all layers.
    `eos_token_ids`: any of them ends a sequence. `kv_layout`: fingerprint of what a block holds (revision, dtype, …).
    `groups`: the layer groups whose blocks a step names, in the order of `StepBatch.groups`.
    """

    name: str
    vocab_size: int
    max_model_tokens: int
    bytes_per_token: int
    eos_token_ids: frozenset[int]
    kv_layout: str
    groups: tuple[LayerGroup, ...] = (LayerGroup("full"),)


@dataclass(frozen=True)
class GroupBatch:
    """Where the layers of one group put and find K and V in a step of S sequences and T tokens.

    A group has one or more lanes: sets of layers with equal bytes per token, each with block ids of its own. All lanes
    of all groups take their blocks from one pool.

        slots        [num_lanes, T] int64    where the tokens' K and V go: block_id * block_tokens + offset
        block_tables S arrays int32 [num_blocks, num_lanes]    blocks of the sequence in order, from the logical block
                                             first_blocks[s] on; they cover what its query tokens may see, and these
        first_blocks [S] int32               logical block with which each table begins; 0 in a group of kind "full"
    """

    slots: Int64Array
    block_tables: tuple[Int32Array, ...]
    first_blocks: Int32Array


@dataclass(frozen=True)
class StepBatch:
    """One forward pass over S sequences with T tokens in all; prefill, chunk and decode are the same thing.

    The tokens of sequence s are the half-open range `query_starts[s] : query_starts[s + 1]` of the flat arrays:

        token_ids   [T] int64    tokens to compute
        positions   [T] int64    their positions in their own sequence
        query_starts [S + 1] int32
        num_context_tokens [S] int32   tokens of the sequence that lie before its first query token, already in blocks
        groups      one `GroupBatch` for each group of `ModelInfo.groups`
        sampled     [N] int32    the sequences (indices into S) whose next token is wanted, from their last query token;
                                 one may be named several times (samples that share a prompt)
        sampling    N rows       how, in the order of `sampled`
        copies      pairs (from_block, to_block) to copy before anything is written

    All of a step's K and V are written before any row attends, so sequences of one step may share blocks.
    """

    request_ids: tuple[str, ...]
    token_ids: Int64Array
    positions: Int64Array
    query_starts: Int32Array
    num_context_tokens: Int32Array
    groups: tuple[GroupBatch, ...]
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

    Guarantees of the caller: calls come one at a time, from one thread; every slot that a batch writes belongs to that
    sequence and lane alone; block ids are below the number of blocks given at construction or by `resize`. The runner
    modifies only the slots named and the targets of `copies`.
    """

    @property
    def info(self) -> ModelInfo:
        """Facts of the model; constant."""

    def execute(self, batch: StepBatch) -> StepOutput:
        """Do the copies, compute the step, sample. Raises whatever the model raises; the engine then fails the requests
        of this step, and none of their tokens are committed."""

    def resize(self, num_blocks: int, copies: Sequence[tuple[int, int]]) -> None:
        """Have memory for `num_blocks` blocks from now on, and do `copies` (from_block, to_block) on the way: before a
        shrink, after a growth; all are read before any is written. Blocks at and above `num_blocks` are lost.

        Raises:
            CapacityError: there is no memory for so many; nothing has changed.
        """
