"""KV memory: what is written is read, values are converted, nothing else can be seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from looseleaf import LayerGroup
from looseleaf.errors import ConfigError, IntegrityError
from looseleaf.tensors import KVLayout, KVMemory, LayerShape, num_blocks_for_bytes, plan_lanes

BLOCK = 4
SHAPES = (LayerShape(2, 8, 8), LayerShape(1, 16, 4))
CPU = torch.device("cpu")


def layout(
    dtype: torch.dtype = torch.float32, shapes: tuple[LayerShape, ...] = SHAPES, block_tokens: int = BLOCK
) -> KVLayout:
    return KVLayout(shapes, plan_lanes([LayerGroup()] * len(shapes), shapes), dtype, block_tokens)


def memory(dtype: torch.dtype = torch.float32, num_blocks: int = 6) -> KVMemory:
    return KVMemory(layout(dtype), num_blocks=num_blocks, device=CPU)


def require(kv: KVMemory, tables: list[np.ndarray], stops: list[int], first: int = 0, first_block: int = 0) -> None:
    """Check tokens `first : stop` of tables [blocks] or [blocks, lanes]."""
    kv.require_written(
        [table if table.ndim == 2 else table[:, None] for table in tables],
        np.full(len(tables), first_block, dtype=np.int32),
        np.full(len(tables), first, dtype=np.int64),
        np.asarray(stops, dtype=np.int64),
    )


def stamped(layer: int, tokens: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V that carry their token's number."""
    shape = SHAPES[layer]
    numbers = torch.from_numpy(tokens.astype(np.float32))[:, None, None]
    keys = numbers + torch.arange(shape.num_kv_heads * shape.key_dim).view(shape.num_kv_heads, -1) / 1000
    values = -numbers + torch.arange(shape.num_kv_heads * shape.value_dim).view(shape.num_kv_heads, -1) / 1000
    return keys, values


def write(kv: KVMemory, slots: np.ndarray, tokens: np.ndarray) -> None:
    kv.mark_written(slots)
    for layer in range(len(SHAPES)):
        kv.write(layer, torch.from_numpy(slots), *stamped(layer, tokens))


def test_layers_may_differ_in_shape() -> None:
    """Heads and dimensions may differ by layer, and between K and V; each read gives what was written, in
    order.
    """
    kv = memory()
    blocks = torch.tensor([5, 0, 3])
    slots = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).reshape(-1).numpy()[:10]
    write(kv, slots, np.arange(10))
    for layer in range(len(SHAPES)):
        keys, values = stamped(layer, np.arange(10))
        by_blocks = kv.read_blocks(layer, blocks, 0, 10, torch.float32)
        assert torch.equal(by_blocks.keys, keys)
        assert torch.equal(by_blocks.values, values)
        by_slots = kv.read_slots(layer, torch.from_numpy(slots), torch.float32)
        assert torch.equal(by_slots.keys, keys)
        assert torch.equal(by_slots.values, values)
        assert torch.equal(kv.read_blocks(layer, blocks[1:], 2, 3, torch.float32).keys, keys[6:9])


def test_a_run_of_slots_is_a_view() -> None:
    """Slots that follow each other are read without a copy."""
    kv = memory()
    write(kv, np.arange(8, 16), np.arange(8))
    run = kv.read_run(0, 8, 8, torch.float32)
    assert torch.equal(run.keys, stamped(0, np.arange(8))[0])
    assert run.keys.data_ptr() == kv.read_run(0, 8, 2, torch.float32).keys.data_ptr()


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float16, torch.float32])
def test_values_are_converted(stored: torch.dtype, given: torch.dtype) -> None:
    """[O92] Another dtype in the cache than in the model converts values; bits are never reinterpreted."""
    kv = memory(stored)
    slots = torch.tensor([1])
    keys = torch.full((1, 2, 8), 0.1621, dtype=given)
    kv.mark_written(np.array([0]))
    kv.mark_written(slots.numpy())
    kv.write(0, slots, keys, keys)
    read = kv.read_slots(0, slots, given)
    assert read.keys.dtype == given
    assert torch.allclose(read.keys.float(), torch.tensor(0.1621), atol=2e-3)


def test_whole_numbers_are_refused() -> None:
    """[O92] A dtype that cannot hold the values is an error at start."""
    with pytest.raises(ConfigError, match="int16"):
        memory(torch.int16)


def test_copies_read_before_they_write() -> None:
    """[P10] Copies of whole blocks, all layers; a block may be source and target in one call."""
    kv = memory()
    write(kv, np.arange(0, 8), np.arange(8))
    kv.copy_blocks([(0, 1), (1, 2)])
    for layer in range(len(SHAPES)):
        first, second = (stamped(layer, np.arange(at, at + 4))[0] for at in (0, 4))
        assert torch.equal(kv.read_run(layer, 4, 4, torch.float32).keys, first)
        assert torch.equal(kv.read_run(layer, 8, 4, torch.float32).keys, second)
    require(kv, [np.array([1, 2], dtype=np.int32)], [8])
    with pytest.raises(IntegrityError, match="KV1"):
        kv.copy_blocks([(0, 6)])


def test_a_copied_tail_is_no_longer_than_its_source() -> None:
    """[R40] A copy of a partly written block does not make its rest readable."""
    kv = memory()
    write(kv, np.arange(0, 2), np.arange(2))
    kv.copy_blocks([(0, 4)])
    table = [np.array([4], dtype=np.int32)]
    require(kv, table, [2])
    with pytest.raises(IntegrityError, match=r"KV3: block 4 \(lane 0\) holds 2 written tokens, 3"):
        require(kv, table, [3])


def test_the_next_owner_sees_nothing_of_the_one_before() -> None:
    """[R40] A block written again from its start ends where the new owner's writing ends."""
    kv = memory()
    write(kv, np.arange(0, 4), np.arange(4))
    write(kv, np.array([0]), np.array([9]))
    with pytest.raises(IntegrityError, match="KV3"):
        require(kv, [np.array([0], dtype=np.int32)], [2])


@pytest.mark.parametrize("num_tokens", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_exactly_what_is_written_is_readable(num_tokens: int) -> None:
    """[S115] n written tokens can be read, n + 1 cannot; other sequences of the call do not matter."""
    kv = memory()
    table = np.array([3, 1, 5], dtype=np.int32)
    positions = np.arange(num_tokens)
    slots = table[positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    write(kv, slots, positions)
    write(kv, np.array([8]), np.array([1]))
    other = np.array([2], dtype=np.int32)
    require(kv, [other, table, other[:0]], [1, num_tokens, 0])
    with pytest.raises(IntegrityError, match="KV3"):
        require(kv, [other, table], [1, num_tokens + 1])


def test_short_tables_and_strange_ids() -> None:
    """Tables that are too short or point outside are named as such; slots outside are refused before
    anything is noted.
    """
    kv = memory()
    with pytest.raises(IntegrityError, match=r"KV2: a table of 1 blocks from block 0 on cannot hold tokens 0\.\.4"):
        require(kv, [np.array([0], dtype=np.int32)], [5])
    with pytest.raises(IntegrityError, match="KV1"):
        require(kv, [np.array([-1], dtype=np.int32)], [1])
    for slot in (-1, 6 * BLOCK):
        with pytest.raises(IntegrityError, match="KV1"):
            kv.mark_written(np.array([0, slot]))
    with pytest.raises(IntegrityError, match="KV3"):
        require(kv, [np.array([0], dtype=np.int32)], [1])
    with pytest.raises(IntegrityError, match="KV2"):
        kv.read_blocks(0, torch.tensor([0]), 2, 3, torch.float32)


def test_bytes_and_fingerprint() -> None:
    """Bytes are those of the tensors; the fingerprint changes with shapes, dtype, block size, groups and lanes, but not
    with the number of blocks.
    """
    kv = memory(torch.bfloat16)
    assert kv.layout.bytes_per_token == kv.layout.lane_bytes_per_token == (2 * 16 + 1 * 20) * 2
    assert kv.num_bytes == kv.layout.bytes_per_token * BLOCK * 6 == kv.bytes_per_block * 6
    assert kv.layout == memory(torch.bfloat16, num_blocks=9).layout
    others = [layout(torch.float32), layout(torch.bfloat16, SHAPES[:1]), layout(torch.bfloat16, block_tokens=8)]
    window = LayerGroup("window", window_tokens=8)
    plans = [plan_lanes(of, SHAPES) for of in ([LayerGroup(), window], [window, LayerGroup()], [window, window])]
    others += [KVLayout(SHAPES, plan, torch.bfloat16, BLOCK) for plan in plans]
    assert len({other.fingerprint for other in (kv.layout, *others)}) == 7


@pytest.mark.parametrize(
    ("memory_bytes", "pages"), [(256 * 100, 1), (2 * 256 * 100 - 1, 1), (2 * 256 * 100, 2), (10 * 256 * 100 + 7, 10)]
)
def test_blocks_for_bytes_are_whole_pages(memory_bytes: int, pages: int) -> None:
    """Memory is cut into whole pages, never more than asked."""
    assert num_blocks_for_bytes(memory_bytes, 100, 16, 256) == pages * 16


def test_less_than_a_page_is_refused_with_numbers() -> None:
    """Memory below one page is refused, with the bytes that one page takes."""
    with pytest.raises(ConfigError, match="25600 bytes"):
        num_blocks_for_bytes(256 * 100 - 1, 100, 16, 256)
    with pytest.raises(ConfigError, match="multiple"):
        num_blocks_for_bytes(10**6, 100, 16, 250)
    with pytest.raises(ConfigError, match="at least one block"):
        memory(num_blocks=0)
