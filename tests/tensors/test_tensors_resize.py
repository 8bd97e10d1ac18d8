"""Memory that grows, shrinks and is compacted keeps what its blocks hold, and costs one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from looseleaf import LayerGroup
from looseleaf.errors import CapacityError, ConfigError, IntegrityError
from looseleaf.tensors import KVLayout, KVMemory, LayerShape, kv_memory, plan_lanes, rows

BLOCK = 4
SHAPES = (LayerShape(2, 8, 8), LayerShape(1, 16, 4), LayerShape(2, 8, 8))
HISTORIES = (LayerGroup(), LayerGroup("window", window_tokens=8), LayerGroup("window", window_tokens=8))
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]


def filled(dtype: torch.dtype, num_blocks: int, seed: int = 0) -> KVMemory:
    """A memory with random numbers in all blocks of all rows."""
    layout = KVLayout(SHAPES, plan_lanes(HISTORIES, SHAPES), dtype, BLOCK)
    kv = KVMemory(layout, num_blocks=num_blocks, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    slots = np.arange(num_blocks * BLOCK)
    kv.mark_written(slots[None])
    for layer, shape in enumerate(SHAPES):
        keys, values = (
            torch.randn(len(slots), shape.num_kv_heads, dim, generator=generator)
            for dim in (shape.key_dim, shape.value_dim)
        )
        kv.write(layer, torch.from_numpy(slots), keys, values)
    return kv


def content(kv: KVMemory, blocks: list[int]) -> list[torch.Tensor]:
    """What every layer reads from `blocks`, copied."""
    ids = torch.tensor(blocks, dtype=torch.int64)
    found: list[torch.Tensor] = []
    for layer in range(len(SHAPES)):
        found += [tensor.clone() for tensor in kv.read_blocks(layer, ids, 0, len(blocks) * BLOCK, torch.float32)]
    return found


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 12), st.integers(1, 12), st.data())
def test_resizes_keep_and_move_blocks(dtype: torch.dtype, before: int, after: int, data: st.DataObject) -> None:
    """[P17] Whatever moves come with a resize, each block reads afterwards what its source held before, scales too;
    all are read before any is written.
    """
    kv = filled(dtype, before)
    targets = data.draw(st.lists(st.integers(0, after - 1), unique=True, max_size=6))
    copies = [(data.draw(st.integers(0, before - 1)), target) for target in targets]
    held = {block: content(kv, [block]) for block in range(before)}
    kv.resize(after, copies)
    source = {block: block for block in range(min(before, after))} | {target: start for start, target in copies}
    assert kv.num_blocks == after
    assert kv.num_bytes == kv.bytes_per_block * after
    for block, start in source.items():
        assert equal(content(kv, [block]), held[start])
        kv.require_written([np.array([[block]])], *np.array([[0], [0], [BLOCK]]))
    fresh = set(range(after)) - set(source)
    for block in fresh:
        with pytest.raises(IntegrityError, match="KV3"):
            kv.require_written([np.array([[block]])], *np.array([[0], [0], [1]]))
    with pytest.raises(IntegrityError, match="KV1"):
        kv.mark_written(np.array([[after * BLOCK]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_compaction_keeps_what_sequences_read(dtype: torch.dtype) -> None:
    """[P17] Three sequences interleaved, the middle one goes, the others move together: each reads the same as before,
    a shared block moves once.
    """
    kv = filled(dtype, 12)
    first, last = [0, 3, 6, 9], [0, 5, 8, 11]
    before = content(kv, first), content(kv, last)
    moves = {6: 1, 9: 2, 8: 4, 11: 7}
    kv.copy_blocks(list(moves.items()))
    after = content(kv, [moves.get(b, b) for b in first]), content(kv, [moves.get(b, b) for b in last])
    assert equal(before[0], after[0])
    assert equal(before[1], after[1])


def failing_at(number: int) -> Callable[..., torch.Tensor]:
    """`rows.zeros` whose call `number` finds no memory."""
    calls = iter(range(10**6))

    def zeros(*args: object) -> torch.Tensor:
        if next(calls) == number:
            raise MemoryError
        return right(*args)  # type: ignore[arg-type]

    right = rows.zeros
    return zeros


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_no_memory_for_growth_changes_nothing(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Wherever the allocation fails, the memory is as it was, and the answer has numbers and a hint."""
    for number in range(1 + len(filled(dtype, 1)._keys) * 2 * (2 if dtype is torch.int8 else 1)):
        kv = filled(dtype, 4)
        before = content(kv, [2, 0, 3, 1])
        failing = failing_at(number)
        monkeypatch.setattr(rows, "zeros", failing)
        monkeypatch.setattr(kv_memory, "zeros", failing)
        with pytest.raises(CapacityError, match=rf"for 9 blocks of {kv.bytes_per_block} bytes; 4 blocks[^\n]*\nhint"):
            kv.resize(9, [(0, 1), (1, 8)])
        monkeypatch.undo()
        assert kv.num_blocks == 4
        assert equal(content(kv, [2, 0, 3, 1]), before)
        kv.resize(9, [(0, 1), (1, 8)])
        assert equal(content(kv, [1, 8, 2, 3]), content(filled(dtype, 4), [0, 1, 2, 3]))


def test_no_memory_for_a_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shrink that finds no memory at its beginning changes nothing; later it goes on without giving memory back."""
    for number in range(1, 5):
        kv = filled(torch.float32, 6)
        before = content(kv, [4, 1, 2])
        failing = failing_at(number)
        monkeypatch.setattr(rows, "zeros", failing)
        monkeypatch.setattr(kv_memory, "zeros", failing)
        kv.resize(3, [(4, 0)])
        monkeypatch.undo()
        assert kv.num_blocks == 3
        assert equal(content(kv, [0, 1, 2]), before)
        kv.copy_blocks([(0, 1)])
        assert equal(content(kv, [1]), content(kv, [0]))
    kv = filled(torch.float32, 6)
    monkeypatch.setattr(kv_memory, "zeros", failing_at(0))
    with pytest.raises(CapacityError, match="for 3 blocks"):
        kv.resize(3, [(4, 0)])
    assert equal(content(kv, [0]), content(filled(torch.float32, 6), [0]))


@pytest.mark.parametrize(("before", "after"), [(8, 20), (20, 8)])
def test_one_tensor_at_a_time(monkeypatch: pytest.MonkeyPatch, before: int, after: int) -> None:
    """At no time does more than one tensor exist twice: two whole memories would not fit where one does."""
    kv = filled(torch.int8, before)
    peaks: list[int] = []
    right = rows.zeros

    def watching(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made = right(shape, dtype, device)
        peaks.append(made.nbytes + sum(t.nbytes for r in (*kv._keys, *kv._values) for t in r.tensors))
        return made

    monkeypatch.setattr(rows, "zeros", watching)
    largest = max(t.nbytes // before for r in (*kv._keys, *kv._values) for t in r.tensors) * max(before, after)
    kv.resize(after)
    assert max(peaks) <= max(before, after) * kv.bytes_per_block + largest


def test_blocks_never_written_stay_without_real_memory() -> None:
    """A growth copies no further than the last written block."""
    layout = KVLayout(SHAPES, plan_lanes(HISTORIES, SHAPES), torch.float32, BLOCK)
    kv = KVMemory(layout, num_blocks=8, device=torch.device("cpu"))
    kv._keys[0].tensors[0][5 * BLOCK :] = 7.0  # nobody wrote this
    kv.mark_written(np.array([[4 * BLOCK]]))
    kv.resize(9)
    assert (kv._keys[0].tensors[0] == 0).all()
    with pytest.raises(ConfigError, match="at least one block"):
        kv.resize(0)
