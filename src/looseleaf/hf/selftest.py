"""At load time: does this model, served from blocks, say what its own forward pass says?

No flag of an architecture tells. Some models keep part of their attention in the mask (chunks, sinks, windows), some
never call the registered function, some hold a state. So a short packed, chunked run is compared with the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from transformers import PreTrainedModel

from looseleaf.engine.runner import StepBatch
from looseleaf.errors import UnsupportedModel
from looseleaf.hf.attention import LayerTraits
from looseleaf.hf.step_plan import slots_of
from looseleaf.ids import Int32Array, Int64Array
from looseleaf.tensors import KVMemory

LONG_TOKENS = 40
"""Length of the longest test sequence, unless a small window asks for more."""

MAX_TEST_TOKENS = 320
"""No test sequence is longer: the test must stay short on a slow machine."""

TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.08}
"""Largest root mean square of the difference of two rows of logits, as a share of the row's own spread."""

MAX_WIDENED_BYTES = 2 << 30
"""Half-precision weights up to this size are tested in float32, where every difference is a fault and not noise."""

NOISE_FACTOR = 2.0
"""Larger ones are tested as they are: so much more than two of the model's own attentions differ is accepted."""

MAX_TOLERANCE = 0.5
"""No noise excuses more than this."""


@dataclass(frozen=True)
class _Sequence:
    """Test `tokens` whose K and V go to blocks `table`, computed in pieces that end and begin at `marks`."""

    tokens: Int64Array
    table: Int32Array
    marks: Sequence[int]


class _Place(NamedTuple):
    """Where the tests compare: token `position` of test sequence number `sequence`."""

    sequence: int
    position: int


_Logits: TypeAlias = Mapping[_Place, torch.Tensor]
"""A row of logits [vocab] for the last token of each piece."""


def check_against_own_forward(
    model: PreTrainedModel,
    own_attention: str,
    paged_attention: str,
    traits: Sequence[LayerTraits],
    block_tokens: int,
    compute: Callable[[StepBatch, KVMemory], torch.Tensor],
) -> None:
    """Compare a packed, chunked run over shared and shuffled blocks with what the plain model answers.

    Whole prompts, chunks and single tokens are mixed in the steps, each computed by `compute` on scratch memory.

    Raises:
        UnsupportedModel: the two differ, or a pass fails; names the architecture and what it is known to do otherwise.
    """
    sequences = _sequences(model, block_tokens, traits)
    with _widened(model):
        own = _own_logits(model, sequences, own_attention)
        noise = 0.0
        if model.dtype != torch.float32 and own_attention != "eager":  # how far two of its own attentions are apart
            noise = _summary(_errors(_own_logits(model, sequences, "eager"), own), model.dtype)
        model.set_attn_implementation(paged_attention)
        memory = KVMemory(
            [layer.shape for layer in traits],
            num_blocks=sum(len(sequence.table) for sequence in sequences),
            block_tokens=block_tokens,
            dtype=model.dtype,
            device=model.device,
        )
        try:
            served = _served_logits(sequences, memory, compute)
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            raise UnsupportedModel(
                type(model).__name__, f"a packed pass fails with {type(error).__name__}: {error}"
            ) from error
        _compare(model, served, own, noise, traits)


def _sequences(model: PreTrainedModel, block_tokens: int, traits: Sequence[LayerTraits]) -> list[_Sequence]:
    """A long sequence (beyond the window if that is small), one that shares its first blocks, a short one.

    The first piece of the long one covers what is shared; no two blocks that follow each other in a table are
    neighbours in memory.
    """
    config = model.config.get_text_config(decoder=True)
    spans = [layer.window for layer in traits] + [getattr(config, "attention_chunk_size", None)]
    longest = max([LONG_TOKENS, *(span + 24 for span in spans if isinstance(span, int))])
    if longest > MAX_TEST_TOKENS:
        longest = LONG_TOKENS
    if isinstance(positions := getattr(config, "max_position_embeddings", None), int) and positions > 0:
        longest = max(2, min(longest, positions))
    num_shared = min(longest - 1, longest // 2) // block_tokens
    shared = num_shared * block_tokens
    second = min(longest, max(shared + 2, longest * 3 // 4))
    third = min(5, longest)
    cuts = (
        (longest, {0, max(shared, longest * 2 // 3, 1), longest - 1, longest}),
        (second, {shared, shared + (second - shared) // 2, second - 1, second}),
        (third, {0, 1, third - 1, third}),
    )
    generator = np.random.Generator(np.random.Philox(key=7))
    free = np.arange(sum(-(-length // block_tokens) for length, _ in cuts), dtype=np.int32)
    free = np.concatenate([free[::2], free[1::2]])[::-1]
    sequences: list[_Sequence] = []
    for index, (length, marks) in enumerate(cuts):
        tokens = generator.integers(0, config.vocab_size, size=length)
        table, free = np.split(free, [-(-length // block_tokens)])
        if index == 1:
            tokens[:shared], table[:num_shared] = sequences[0].tokens[:shared], sequences[0].table[:num_shared]
        sequences.append(_Sequence(tokens, table, sorted(marks)))
    return sequences


@torch.inference_mode()
def _own_logits(model: PreTrainedModel, sequences: Sequence[_Sequence], attention: str) -> _Logits:
    """What the model says to each sequence alone by `attention` of its own; leaves the model with that."""
    model.set_attn_implementation(attention)
    found: dict[_Place, torch.Tensor] = {}
    for index, sequence in enumerate(sequences):
        ids = torch.from_numpy(sequence.tokens)[None].to(model.device)
        last = [mark - 1 for mark in sequence.marks[1:]]
        kept = torch.tensor(last, device=model.device)
        rows = model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits[0]
        found.update((_Place(index, position), row) for position, row in zip(last, rows, strict=True))
    return found


def _served_logits(
    sequences: Sequence[_Sequence], memory: KVMemory, compute: Callable[[StepBatch, KVMemory], torch.Tensor]
) -> _Logits:
    """The same from blocks: each step computes one more piece of every sequence, in changing order."""
    pieces = [list(pairwise(sequence.marks)) for sequence in sequences]
    found: dict[_Place, torch.Tensor] = {}
    for step in range(max(map(len, pieces))):
        order = (2, 0, 1) if step % 2 else (0, 1, 2)
        running = [(index, *pieces[index][step]) for index in order if step < len(pieces[index])]
        spans = [(sequences[index], np.arange(first, stop)) for index, first, stop in running]
        batch = StepBatch(
            request_ids=tuple(f"self-test-{index}" for index, _, _ in running),
            token_ids=np.concatenate([sequence.tokens[at] for sequence, at in spans]),
            positions=np.concatenate([at for _, at in spans]),
            slots=np.concatenate([slots_of(sequence.table, at, memory.block_tokens) for sequence, at in spans]),
            query_starts=np.cumsum([0, *(len(at) for _, at in spans)]).astype(np.int32),
            num_context_tokens=np.asarray([first for _, first, _ in running], dtype=np.int32),
            block_tables=tuple(sequence.table for sequence, _ in spans),
            sampled=np.arange(len(running), dtype=np.int32),
            sampling=(),
        )
        rows = compute(batch, memory)
        found.update((_Place(index, stop - 1), row) for (index, _, stop), row in zip(running, rows, strict=True))
    return found


def _compare(
    model: PreTrainedModel, served: _Logits, own: _Logits, noise: float, traits: Sequence[LayerTraits]
) -> None:
    tolerance = max(TOLERANCES.get(model.dtype, 0.08), min(NOISE_FACTOR * noise, MAX_TOLERANCE))
    errors = _errors(served, own)
    worst = _summary(errors, model.dtype)
    if not worst <= tolerance:  # also true for NaN
        place = list(served)[int(np.argmax(np.nan_to_num(errors, nan=np.inf)))]
        raise UnsupportedModel(
            type(model).__name__,
            f"served from blocks its logits differ from its own forward pass by {worst:.2g} of their spread "
            f"(at most {tolerance:.2g} in {model.dtype}), at token {place.position} of test sequence {place.sequence}"
            f"{_suspects(model, traits)}",
            "this attention does more than look back over keys and values; serve it elsewhere",
        )


def _errors(logits: _Logits, expected: _Logits) -> list[float]:
    """Root mean square difference of each row, as a share of the standard deviation of the expected one."""
    errors = []
    for place, row in logits.items():
        wanted = expected[place].double()
        difference = (row.double() - wanted).square().mean().sqrt()
        errors.append(float(difference / wanted.std().clamp(min=1e-12)))
    return errors


def _summary(errors: Sequence[float], dtype: torch.dtype) -> float:
    """The largest error; in half precision, where single rows may be far off by chance, the upper quartile."""
    return float(np.max(errors) if dtype == torch.float32 else np.quantile(errors, 0.75))


@contextmanager
def _widened(model: PreTrainedModel) -> Iterator[None]:
    """Within it, half-precision weights are float32, if they are few enough; afterwards the very same as before."""
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


def _suspects(model: PreTrainedModel, traits: Sequence[LayerTraits]) -> str:
    """What the configuration says that may explain a mismatch; empty if nothing does."""
    config = model.config.get_text_config(decoder=True)
    kinds = sorted({str(kind) for kind in getattr(config, "layer_types", None) or ()})
    chunk, window = getattr(config, "attention_chunk_size", None), getattr(config, "sliding_window", None)
    suspects = {
        f"layer types {', '.join(kinds)}": set(kinds) - {"full_attention", "sliding_attention"},
        f"attention_chunk_size {chunk}": chunk,
        "attention sinks": any(layer.has_sinks for layer in traits),
        "ALiBi position biases": getattr(config, "alibi", False),
        f"a window of {window} tokens that lives in the mask only": window and not any(t.window for t in traits),
        "bidirectional attention": getattr(config, "use_bidirectional_attention", False),
    }
    found = [text for text, holds in suspects.items() if holds]
    return f"; its configuration has {', '.join(found)}" if found else ""
