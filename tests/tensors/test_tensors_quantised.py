"""Keys and values in 8 bits: a scale per token and head, so that content depends on nothing but the vector itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from looseleaf import LayerGroup
from looseleaf.tensors import KVLayout, KVMemory, LayerShape, plan_lanes

BLOCK = 4
SHAPE = LayerShape(2, 16, 8)
EIGHT_BITS = [torch.int8, torch.float8_e4m3fn]


def memory(dtype: torch.dtype, num_blocks: int = 8, shapes: tuple[LayerShape, ...] = (SHAPE,)) -> KVMemory:
    layout = KVLayout(shapes, plan_lanes([LayerGroup()] * len(shapes), shapes), dtype, BLOCK)
    return KVMemory(layout, num_blocks=num_blocks, device=torch.device("cpu"))


def vectors(num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random K and V of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** torch.empty(num_tokens, 2, 1).uniform_(-4, 4, generator=generator)
    return (
        torch.randn(num_tokens, 2, SHAPE.key_dim, generator=generator) * sizes,
        torch.randn(num_tokens, 2, SHAPE.value_dim, generator=generator) * sizes,
    )


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(EIGHT_BITS), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.integers(0, 10**6)
)
def test_error_of_one_vector(dtype: torch.dtype, given_as: torch.dtype, seed: int) -> None:
    """int8: within 0.6% of the largest number of the vector; fp8: within a sixteenth of each number itself, or 0.03% of
    the largest.
    """
    keys, values = (tensor.to(given_as) for tensor in vectors(6, seed))
    kv = memory(dtype)
    kv.write(0, torch.arange(6), keys, values)
    read = kv.read_run(0, 0, 6, torch.float32)
    for got, wanted in ((read.keys, keys.float()), (read.values, values.float())):
        largest = wanted.abs().amax(-1, keepdim=True)
        error = (got - wanted).abs()
        if dtype is torch.int8:
            assert (error <= 0.006 * largest).all()
        else:
            assert (error <= torch.maximum(wanted.abs() / 15, largest * 3e-4)).all()


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_edges_of_the_range(dtype: torch.dtype) -> None:
    """Zeros stay zeros, and neither tiny nor huge nor equal numbers become NaN or infinite."""
    kv = memory(dtype)
    keys = torch.stack([torch.full((2, 16), x) for x in (0.0, 1e-38, -1e-20, 1e30, -3e38, 6e4)])
    keys[3, :, 1:] = 0.0
    kv.write(0, torch.arange(6), keys, keys[..., :8])
    read = kv.read_run(0, 0, 6, torch.float32)
    assert torch.isfinite(read.keys).all()
    assert (read.keys[0] == 0).all()
    assert torch.allclose(read.keys[2:], keys[2:], rtol=0.01)
    assert (read.keys[3, :, 1:] == 0).all()


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_content_depends_on_the_vector_alone(dtype: torch.dtype) -> None:
    """[R44] In one go, in pieces cut anywhere, one by one, in any order, beside other vectors, over what was there
    before: the same bits in numbers and scales. A partly filled block is never quantised again.
    """
    keys, values = vectors(3 * BLOCK)
    expected: list[torch.Tensor] | None = None
    orders = [np.array_split(np.arange(12), cuts) for cuts in ([], [4, 8], [1, 5, 6, 11], range(1, 12))]
    orders.append(np.array_split(np.random.default_rng(0).permutation(12), 5))
    for pieces in orders:
        kv = memory(dtype)
        noise = vectors(8 * BLOCK, seed=9)
        kv.write(0, torch.arange(8 * BLOCK), *noise)
        for piece in pieces:
            at = torch.from_numpy(piece)
            kv.write(0, at + 2 * BLOCK, keys[at], values[at])
        found = [t[2 * BLOCK : 5 * BLOCK].clone() for row in (kv._keys[0], kv._values[0]) for t in row.tensors]
        expected = expected or found
        assert len(found) == 4
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_all_ways_of_reading_agree(dtype: torch.dtype, wanted: torch.dtype) -> None:
    """[R44] By slots, by blocks and as a run: the same bits, also of a copy of the block."""
    kv = memory(dtype)
    keys, values = vectors(8 * BLOCK)
    kv.write(0, torch.arange(8 * BLOCK), keys, values)
    kv.copy_blocks([(3, 6)])
    run = kv.read_run(0, 3 * BLOCK + 1, 3, wanted)
    ways = [
        kv.read_slots(0, torch.arange(3 * BLOCK + 1, 4 * BLOCK), wanted),
        kv.read_blocks(0, torch.tensor([3]), 1, 3, wanted),
        kv.read_run(0, 6 * BLOCK + 1, 3, wanted),
    ]
    for read in ways:
        assert read.keys.dtype == wanted
        assert torch.equal(read.keys, run.keys)
        assert torch.equal(read.values, run.values)


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_scales_count_as_bytes(dtype: torch.dtype) -> None:
    """A token takes a byte per number and two for the scale of each head's key and value: what the tensors really take,
    also where a row is shared by layers of unequal shape.
    """
    kv = memory(dtype)
    assert kv.layout.bytes_per_token == 2 * (16 + 8) + 2 * 2 * 2
    wide = LayerShape(1, 64, 32)
    histories = [LayerGroup(), LayerGroup("window", window_tokens=8)]
    mixed = KVMemory(
        KVLayout((SHAPE, wide), plan_lanes(histories, (SHAPE, wide)), dtype, BLOCK), num_blocks=3, device=kv.device
    )
    for each in (kv, mixed):
        real = sum(t.nbytes for row in (*each._keys, *each._values) for t in row.tensors)
        assert real == each.num_bytes == each.layout.lane_bytes_per_token * BLOCK * each.num_blocks
    assert mixed.layout.lane_bytes_per_token == 64 + 32 + 2 * 2 * 2
    keys, values = vectors(3)
    mixed.write(0, torch.arange(3), keys, values)
    mixed.write(1, torch.arange(4, 7), torch.ones(3, 1, 64), torch.ones(3, 1, 32))
    kv.write(0, torch.arange(3), keys, values)
    assert torch.equal(
        mixed.read_slots(0, torch.arange(3), torch.float32).keys, kv.read_run(0, 0, 3, torch.float32).keys
    )
    assert torch.allclose(mixed.read_run(1, 4, 3, torch.float32).values, torch.ones(3, 1, 32), rtol=0.01)
