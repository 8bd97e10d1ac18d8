"""At load time: does this model, served from blocks, say what its own forward pass says?

No flag of an architecture tells. Some models keep part of their attention in the mask (chunks, sinks,
windows), some never call the registered function, some hold a state. So a short packed, chunked run is
compared with the model's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from transformers import PreTrainedModel

from looseleaf.engine.runner import StepBatch
from looseleaf.errors import UnsupportedModel
from looseleaf.hf.attention import LayerTraits
from looseleaf.ids import Int32Array, Int64Array
from looseleaf.tensors import KVMemory

LONG_TOKENS = 40
"""Length of the longest test sequence, unless a small window asks for more."""

MAX_TEST_TOKENS = 320
"""No test sequence is longer: the test must stay short on a slow machine."""

TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.08}
"""Largest root mean square of the difference of two rows of logits, as a share of the row's own spread."""

MAX_WIDENED_BYTES = 2 << 30
"""Half-precision weights up to this size are tested in float32, where every difference is a fault and not
noise.
"""

NOISE_FACTOR = 2.0
"""Larger ones are tested as they are: so much more than two of the model's own attentions differ is still
accepted.
"""

MAX_TOLERANCE = 0.5
"""No noise excuses more than this."""


@dataclass(frozen=True)
class _Piece:
    """Tokens `first : stop` of one test sequence, to be computed in one step."""

    sequence: int
    first: int
    stop: int


@dataclass(frozen=True)
class OwnAnswer:
    """Test sequences, and the plain model's logits [vocab] by (sequence, position). `noise`: largest
    relative error between two of its own attentions (0 in float32)."""

    sequences: tuple[Int64Array, ...]
    logits: Mapping[tuple[int, int], torch.Tensor]
    noise: float


@dataclass
class _TestRun:
    """The test sequences in blocks of the memory, and the logits that the steps gave: (sequence, position)
    to row.
    """

    memory: KVMemory
    sequences: Sequence[Int64Array]
    tables: list[Int32Array]
    logits: dict[tuple[int, int], torch.Tensor]


def sequences_for(model: PreTrainedModel, block_tokens: int, traits: Sequence[LayerTraits]) -> list[Int64Array]:
    """Three token sequences: a long one (beyond the window if that is small), one with the same first
    blocks, a short one.
    """
    windows = [layer.window for layer in traits if layer.window is not None]
    config = model.config.get_text_config(decoder=True)
    chunk = getattr(config, "attention_chunk_size", None)
    wanted = max([LONG_TOKENS, *(w + 24 for w in windows), *([chunk + 24] if isinstance(chunk, int) else [])])
    longest = LONG_TOKENS if wanted > MAX_TEST_TOKENS else wanted
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        longest = max(2, min(longest, positions))
    generator = np.random.Generator(np.random.Philox(key=7))
    first = generator.integers(0, config.vocab_size, size=longest)
    shared = min(longest - 1, longest // 2) // block_tokens * block_tokens
    second = generator.integers(0, config.vocab_size, size=max(shared + 2, longest * 3 // 4))[:longest]
    second[:shared] = first[:shared]
    third = generator.integers(0, config.vocab_size, size=min(5, longest))
    return [first, second, third]


def blocks_for(sequences: Sequence[Int64Array], block_tokens: int) -> int:
    """Blocks of scratch memory that the test of `sequences` takes."""
    return sum(-(-len(tokens) // block_tokens) for tokens in sequences)


def check_against_own_forward(
    model: PreTrainedModel,
    memory: KVMemory,
    step_logits: Callable[[StepBatch], torch.Tensor],
    own: OwnAnswer,
    traits: Sequence[LayerTraits],
) -> None:
    """Compare a packed, chunked run over shared and shuffled blocks with what the plain model answers.

    `memory` is scratch with `blocks_for(own.sequences)` blocks; `step_logits` computes one step on it.
    Whole prompts, chunks and single tokens are mixed in the steps.

    Raises:
        UnsupportedModel: the two differ, or a pass fails; names the architecture and what it is known to do
        differently.
    """
    run = _place(memory, own.sequences)
    try:
        for pieces in schedule(own.sequences, memory.block_tokens):
            _run_step(run, pieces, step_logits)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise UnsupportedModel(
            type(model).__name__, f"a packed pass fails with {type(error).__name__}: {error}"
        ) from error
    _compare(model, run, own, traits)


@torch.inference_mode()
def own_answer(model: PreTrainedModel, sequences: Sequence[Int64Array], block_tokens: int, attention: str) -> OwnAnswer:
    """What the model says to each sequence alone by its own `attention`, at the tokens where the steps will
    end.

    In half precision also how far two of its own attentions are apart, if it has a second one. Leaves the
    model with another attention than it had.
    """
    wanted: list[list[int]] = [[] for _ in sequences]
    for pieces in schedule(sequences, block_tokens):
        for piece in pieces:
            wanted[piece.sequence].append(piece.stop - 1)

    def answers(implementation: str) -> dict[tuple[int, int], torch.Tensor]:
        model.set_attn_implementation(implementation)
        return {
            (index, position): row
            for index, tokens in enumerate(sequences)
            for position, row in zip(wanted[index], _rows(model, tokens, wanted[index]), strict=True)
        }

    logits = answers(attention)
    if model.dtype == torch.float32 or attention == "eager":
        return OwnAnswer(tuple(sequences), logits, 0.0)
    second = answers("eager")
    noise = _summary([relative_error(second[at], row) for at, row in logits.items()], model.dtype)
    return OwnAnswer(tuple(sequences), logits, noise)


def _rows(model: PreTrainedModel, tokens: Int64Array, positions: Sequence[int]) -> torch.Tensor:
    """Logits [n, vocab] of one sequence alone at `positions` [n]."""
    rows = torch.tensor(positions, device=model.device)
    inputs = {"input_ids": torch.from_numpy(tokens)[None].to(model.device), "use_cache": False}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        kept: torch.Tensor = model(**inputs, logits_to_keep=rows).logits
        return kept[0]
    every: torch.Tensor = model(**inputs).logits
    return every[0, rows]


def _place(memory: KVMemory, sequences: Sequence[Int64Array]) -> _TestRun:
    """Give each sequence blocks, out of order; the second shares the blocks whose tokens equal the first's."""
    block = memory.block_tokens
    free = list(range(memory.num_blocks))
    free = free[1::2][::-1] + free[0::2]  # no two blocks that follow each other logically are neighbours in memory
    tables: list[Int32Array] = []
    for index, tokens in enumerate(sequences):
        shared = shared_blocks(sequences, block) if index == 1 else 0
        own = [free.pop() for _ in range(-(-len(tokens) // block) - shared)]
        tables.append(np.asarray([*(tables[0][:shared] if index == 1 else ()), *own], dtype=np.int32))
    return _TestRun(memory, sequences, tables, {})


def shared_blocks(sequences: Sequence[Int64Array], block_tokens: int) -> int:
    """Whole blocks in which the first two sequences agree."""
    length = min(len(sequences[0]), len(sequences[1]))
    differs = np.flatnonzero(sequences[0][:length] != sequences[1][:length])
    return (int(differs[0]) if differs.size else length) // block_tokens


def schedule(sequences: Sequence[Int64Array], block_tokens: int) -> list[list[_Piece]]:
    """Steps that mix whole prompts, chunks and single tokens; the second sequence starts behind the blocks
    it shares.
    """
    lengths = [len(tokens) for tokens in sequences]
    shared = shared_blocks(sequences, block_tokens) * block_tokens
    shared = min(shared, lengths[1] - 1)
    cut = max(shared, lengths[0] * 2 // 3, 1)
    cuts = [
        [0, cut, lengths[0] - 1, lengths[0]],
        [shared, shared + (lengths[1] - shared) // 2, max(shared, lengths[1] - 1), lengths[1]],
        [0, 1, lengths[2] - 1, lengths[2]],
    ]
    pieces = [
        [_Piece(index, a, b) for a, b in pairwise(marks) if b > a]
        for index, marks in enumerate(sorted(set(m)) for m in cuts)
    ]
    steps: list[list[_Piece]] = []
    while any(pieces):
        order = (2, 0, 1) if len(steps) % 2 else (0, 1, 2)
        steps.append([pieces[index].pop(0) for index in order if pieces[index]])
    return steps


def _run_step(run: _TestRun, pieces: list[_Piece], step_logits: Callable[[StepBatch], torch.Tensor]) -> None:
    positions = [np.arange(piece.first, piece.stop) for piece in pieces]
    block = run.memory.block_tokens
    batch = StepBatch(
        request_ids=tuple(f"self-test-{piece.sequence}" for piece in pieces),
        token_ids=np.concatenate([run.sequences[p.sequence][p.first : p.stop] for p in pieces]),
        positions=np.concatenate(positions),
        slots=np.concatenate(
            [
                run.tables[p.sequence][at // block].astype(np.int64) * block + at % block
                for p, at in zip(pieces, positions, strict=True)
            ]
        ),
        query_starts=np.cumsum([0, *(len(at) for at in positions)]).astype(np.int32),
        num_context_tokens=np.asarray([piece.first for piece in pieces], dtype=np.int32),
        block_tables=tuple(run.tables[piece.sequence] for piece in pieces),
        sampled=np.arange(len(pieces), dtype=np.int32),
        sampling=(),
    )
    for piece, row in zip(pieces, step_logits(batch), strict=True):
        run.logits[piece.sequence, piece.stop - 1] = row


def _compare(model: PreTrainedModel, run: _TestRun, own: OwnAnswer, traits: Sequence[LayerTraits]) -> None:
    tolerance = max(TOLERANCES.get(dtype, 0.08) for dtype in (model.dtype, run.memory.dtype))
    tolerance = max(tolerance, min(NOISE_FACTOR * own.noise, MAX_TOLERANCE))
    errors = [relative_error(row, own.logits[at]) for at, row in run.logits.items()]
    worst = _summary(errors, model.dtype)
    if not worst <= tolerance:  # also true for NaN
        place = list(run.logits)[int(np.argmax(np.nan_to_num(errors, nan=np.inf)))]
        raise UnsupportedModel(
            type(model).__name__,
            f"served from blocks its logits differ from its own forward pass by {worst:.2g} of their spread "
            f"(at most {tolerance:.2g} in {model.dtype}), at token {place[1]} of test sequence {place[0]}"
            f"{_suspects(model, traits)}",
            "this attention does more than look back over keys and values; serve it elsewhere",
        )


def _summary(errors: Sequence[float], dtype: torch.dtype) -> float:
    """The largest error in float32; in half precision, where single rows may be far off by chance, the
    upper quartile.
    """
    return float(np.max(errors) if dtype == torch.float32 else np.quantile(errors, 0.75))


@contextmanager
def widened(model: PreTrainedModel) -> Iterator[None]:
    """Within it, half-precision weights are float32, if they are few enough; afterwards the very same as
    before.
    """
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.dtype in (torch.float16, torch.bfloat16)]
    if sum(t.numel() * t.itemsize for t in tensors) > MAX_WIDENED_BYTES:
        tensors = []
    narrow = [t.data for t in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, data in zip(tensors, narrow, strict=True):
            tensor.data = data


def relative_error(row: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square difference of two rows of logits [vocab], as a share of the standard deviation of
    `expected`.
    """
    wanted = expected.double()
    difference = (row.double() - wanted).square().mean().sqrt()
    return float(difference / wanted.std().clamp(min=1e-12))


def _suspects(model: PreTrainedModel, traits: Sequence[LayerTraits]) -> str:
    """What the configuration says that may explain a mismatch; empty if nothing does."""
    config = model.config.get_text_config(decoder=True)
    found = []
    kinds = sorted({str(kind) for kind in getattr(config, "layer_types", None) or ()})
    if set(kinds) - {"full_attention", "sliding_attention"}:
        found.append(f"layer types {', '.join(kinds)}")
    if getattr(config, "attention_chunk_size", None):
        found.append(f"attention_chunk_size {config.attention_chunk_size}")
    if any(layer.has_sinks for layer in traits):
        found.append("attention sinks")
    if getattr(config, "alibi", False):
        found.append("ALiBi position biases")
    if getattr(config, "sliding_window", None) and not any(layer.window for layer in traits):
        found.append(f"a window of {config.sliding_window} tokens that lives in the mask only")
    if getattr(config, "use_bidirectional_attention", False):
        found.append("bidirectional attention")
    return f"; its configuration has {', '.join(found)}" if found else ""
