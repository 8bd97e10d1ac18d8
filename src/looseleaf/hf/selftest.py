"""At load time: does this model, served from blocks, say what its own forward pass says?

No flag of an architecture tells. Some models keep part of their attention in the mask (chunks, sinks, windows), some
never call the registered function, some hold a state. So a short packed, chunked run is compared with the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from transformers import PreTrainedModel

from looseleaf.engine.runner import GroupBatch, StepBatch
from looseleaf.errors import UnsupportedModel
from looseleaf.hf.attention import LayerTraits
from looseleaf.hf.step_plan import oldest_visible, slots_of
from looseleaf.ids import Int32Array, Int64Array
from looseleaf.tensors import KVLayout, KVMemory

LONG_TOKENS = 40
"""Length of the longest test sequence, unless a small window asks for more."""

MAX_TEST_TOKENS = 320
"""No test sequence is longer: the test must stay short on a slow machine."""

SPAN_SETTINGS = {"sliding_window": "window", "attention_chunk_size": "chunked"}
"""Settings from which the model's own masks come, and the kind of group that they are for."""

SHORT_SPAN_TOKENS = 10
"""Windows and chunks that even the longest sequence would not leave are tested with so many tokens."""

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
    """Test `tokens` whose K and V go to blocks `table` [blocks, lanes of all groups], in pieces between `marks`."""

    tokens: Int64Array
    table: Int32Array
    marks: Sequence[int]

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """First and stop of each piece."""
        return list(pairwise(self.marks))


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
    layout: KVLayout,
    compute: Callable[[StepBatch, KVMemory], torch.Tensor],
) -> None:
    """Compare a packed, chunked run over shared and shuffled blocks with what the plain model answers.

    Whole prompts, chunks and single tokens are mixed in the steps, each computed by `compute` on scratch memory of
    `layout`, but in the model's dtype: what 8 bits lose is no fault of the architecture. Long windows and chunks are
    short for the time of the test, in configuration and layout, so that it leaves them; if the model's masks do not
    follow its configuration, they stay as they are.

    Raises:
        UnsupportedModel: the two differ, or a pass fails; names the architecture and what it is known to do otherwise.
    """
    short = _shortened(layout) if own_attention in ("eager", "sdpa") else layout  # others go by more than the mask

    def check(tested: KVLayout) -> None:
        sequences = _sequences(model, tested)
        with _configured(model, layout, tested):
            own = _own_logits(model, sequences, own_attention)
            noise = 0.0
            if model.dtype != torch.float32 and own_attention != "eager":  # how far two of its own attentions are apart
                noise = _summary(_errors(_own_logits(model, sequences, "eager"), own), model.dtype)
        model.set_attn_implementation(paged_attention)
        num_blocks = 1 + max(int(sequence.table.max()) for sequence in sequences)
        memory = KVMemory(replace(tested, dtype=model.dtype), num_blocks=num_blocks, device=model.device)
        try:
            served = _served_logits(sequences, memory, compute)
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            raise UnsupportedModel(
                type(model).__name__, f"a packed pass fails with {type(error).__name__}: {error}"
            ) from error
        _compare(model, served, own, noise, traits)

    with _widened(model):
        try:
            check(short)
        except UnsupportedModel:
            sequences = _sequences(model, short)
            with _configured(model, layout, short):
                narrow = _own_logits(model, sequences, own_attention)
            if max(_errors(_own_logits(model, sequences, own_attention), narrow)) > 0:
                raise
            check(layout)


def _shortened(layout: KVLayout) -> KVLayout:
    """`layout` with `SHORT_SPAN_TOKENS` for a window or chunk too long for the test, if there is one size of it."""

    def short(span: int | None) -> int | None:
        return span if span is None or span <= MAX_TEST_TOKENS - 24 else SHORT_SPAN_TOKENS

    kinds = [group.kind for group in layout.lanes.groups]
    if len(set(kinds)) < len(kinds):
        return layout
    groups = tuple(
        replace(group, window_tokens=short(group.window_tokens), chunk_tokens=short(group.chunk_tokens))
        for group in layout.lanes.groups
    )
    return replace(layout, lanes=replace(layout.lanes, groups=groups))


@contextmanager
def _configured(model: PreTrainedModel, layout: KVLayout, short: KVLayout) -> Iterator[None]:
    """Within it, the model's configuration has the windows and chunks of `short` instead of those of `layout`."""
    config = model.config.get_text_config(decoder=True)
    kinds = {old.kind for old, new in zip(layout.lanes.groups, short.lanes.groups, strict=True) if old != new}
    former = {
        name: getattr(config, name) for name, kind in SPAN_SETTINGS.items() if kind in kinds and hasattr(config, name)
    }
    try:
        for name in former:
            setattr(config, name, SHORT_SPAN_TOKENS)
        yield
    finally:
        for name, value in former.items():
            setattr(config, name, value)


def _longest(model: PreTrainedModel, layout: KVLayout) -> int:
    """Tokens of the longest test sequence: well beyond one and a half windows or chunks, or one, if they are small."""
    spans = [group.window_tokens or group.chunk_tokens or 0 for group in layout.lanes.groups]
    wanted = (max(LONG_TOKENS, *(halves * span // 2 + 24 for span in spans)) for halves in (3, 2))
    longest = next((tokens for tokens in wanted if tokens <= MAX_TEST_TOKENS), LONG_TOKENS)
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return max(2, min(longest, positions)) if isinstance(positions, int) and positions > 0 else longest


def _sequences(model: PreTrainedModel, layout: KVLayout) -> list[_Sequence]:
    """A long sequence, one that shares its first blocks, a short one.

    The first piece of the long one covers what is shared; no two blocks that follow each other in a table are
    neighbours in memory.
    """
    longest, block_tokens = _longest(model, layout), layout.block_tokens
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
    num_lanes = layout.lanes.num_lanes
    ids = np.arange(sum(-(-length // block_tokens) for length, _ in cuts) * num_lanes, dtype=np.int32)
    free = np.concatenate([ids[::2], ids[1::2]])[::-1].reshape(-1, num_lanes)
    sequences: list[_Sequence] = []
    for index, (length, marks) in enumerate(cuts):
        tokens = generator.integers(0, model.config.get_text_config(decoder=True).vocab_size, size=length)
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
    """The same from blocks: each step computes one more piece of every sequence, in changing order.

    What no later query may see, because it slid out of its window, holds NaN by then, and no table leads there.
    """
    found: dict[_Place, torch.Tensor] = {}
    for step in range(max(len(sequence.pieces) for sequence in sequences)):
        order = (2, 0, 1) if step % 2 else (0, 1, 2)
        running = [(index, *sequences[index].pieces[step]) for index in order if step < len(sequences[index].pieces)]
        spans = [(sequences[index], np.arange(first, stop)) for index, first, stop in running]
        tables = [_tables(sequence, int(at[0]), memory.layout) for sequence, at in spans]
        _spoil_all_but((table for of_groups in tables for _, table in of_groups), memory)
        batch = StepBatch(
            request_ids=tuple(f"self-test-{index}" for index, _, _ in running),
            token_ids=np.concatenate([sequence.tokens[at] for sequence, at in spans]),
            positions=np.concatenate([at for _, at in spans]),
            query_starts=np.cumsum([0, *(len(at) for _, at in spans)]).astype(np.int32),
            num_context_tokens=np.asarray([first for _, first, _ in running], dtype=np.int32),
            groups=tuple(
                GroupBatch(
                    slots=np.concatenate(
                        [
                            slots_of(table, first, at, memory.block_tokens)
                            for (first, table), (_, at) in zip(of_group, spans, strict=True)
                        ],
                        axis=1,
                    ),
                    block_tables=tuple(table for _, table in of_group),
                    first_blocks=np.asarray([first for first, _ in of_group], dtype=np.int32),
                )
                for of_group in zip(*tables, strict=True)
            ),
            sampled=np.arange(len(running), dtype=np.int32),
            sampling=(),
        )
        rows = compute(batch, memory)
        found.update((_Place(index, stop - 1), row) for (index, _, stop), row in zip(running, rows, strict=True))
    return found


class _Table(NamedTuple):
    """A sequence's blocks [n, lanes] in one group, from logical block `first` on."""

    first: int
    blocks: Int32Array


def _tables(sequence: _Sequence, num_context: int, layout: KVLayout) -> list[_Table]:
    """For each group what queries from `num_context` on may see of `sequence`, to its end."""
    ends = np.cumsum([group.num_lanes for group in layout.lanes.groups])[:-1]
    firsts = [int(oldest_visible(group, num_context)) // layout.block_tokens for group in layout.lanes.groups]
    return [
        _Table(first, blocks[first:]) for first, blocks in zip(firsts, np.split(sequence.table, ends, 1), strict=True)
    ]


def _spoil_all_but(tables: Iterable[Int32Array], memory: KVMemory) -> None:
    """Write NaN to all blocks that are in none of `tables`."""
    stale = np.setdiff1d(np.arange(memory.num_blocks), np.concatenate([table.reshape(-1) for table in tables]))
    slots = (stale[:, None] * memory.block_tokens + np.arange(memory.block_tokens)).reshape(-1)
    where = torch.from_numpy(slots).to(memory.device)
    for layer, shape in enumerate(memory.layout.shapes):
        keys, values = (
            torch.full((len(slots), shape.num_kv_heads, dim), float("nan"), device=memory.device)
            for dim in (shape.key_dim, shape.value_dim)
        )
        memory.write(layer, where, keys, values)


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
