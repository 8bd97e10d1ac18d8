"""What a block holds, as numbers: shapes, lanes, dtype, bytes, and the fingerprint that guards reuse."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch

from looseleaf.errors import ConfigError
from looseleaf.tensors.lanes import LanePlan, LayerShape, RowShape, row_shapes

QUANTISED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""8-bit dtypes, and the largest number of each: that is what the largest number of a head's vector becomes."""

SCALE_DTYPE = torch.bfloat16
"""One scale per token and head stands beside 8-bit numbers: the range of float32 in two bytes."""


@dataclass(frozen=True)
class KVLayout:
    """How K and V of one model lie in blocks.

    `shapes` and `lanes.places` have one entry for each layer. A block is `block_tokens` tokens of one lane: of
    `lanes.layers_per_lane` layers; blocks of all lanes have equal bytes. `dtype`: floating point, or 8 bits (`int8`,
    `float8_e4m3fn`) with a scale per token and head.
    """

    shapes: tuple[LayerShape, ...]
    lanes: LanePlan
    dtype: torch.dtype
    block_tokens: int

    def __post_init__(self) -> None:
        """Check the values. ConfigError if there is no layer, a block of no token, or a dtype that loses values."""
        if self.block_tokens < 1:
            raise ConfigError(f"KV memory needs blocks of at least one token, not {self.block_tokens}")
        if not self.shapes:
            raise ConfigError("KV memory needs at least one layer")
        if not (self.dtype in QUANTISED or (self.dtype.is_floating_point and self.dtype.itemsize > 1)):
            raise ConfigError(
                f"KV memory of {self.dtype} would lose the values written", "take a floating-point dtype, int8 or fp8"
            )

    @cached_property
    def rows(self) -> tuple[RowShape, ...]:
        """Room of each physical layer."""
        return row_shapes(self.shapes, [place.row for place in self.lanes.places])

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token in all layers, scales included; the padding of lanes is not."""
        return sum(token_bytes(shape.numbers_per_token, shape.num_kv_heads, self.dtype) for shape in self.shapes)

    @property
    def lane_bytes_per_token(self) -> int:
        """Bytes that one token takes in one lane, padding included: the same in every lane."""
        return sum(token_bytes(row.keys + row.values, row.heads, self.dtype) for row in self.rows)

    @property
    def fingerprint(self) -> str:
        """Equal layouts can exchange blocks: shapes, groups and places of the layers, dtype, tokens per block."""
        text = f"kv2|{self.shapes}|{self.lanes.groups}|{self.lanes.places}|{self.dtype}|{self.block_tokens}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def token_bytes(num_numbers: int, num_heads: int, dtype: torch.dtype) -> int:
    """Bytes of one token in one layer: its K and V together have `num_numbers` numbers, and `num_heads` heads each."""
    scale_bytes = 2 * num_heads * SCALE_DTYPE.itemsize if dtype in QUANTISED else 0
    return num_numbers * dtype.itemsize + scale_bytes


def num_blocks_for_bytes(memory_bytes: int, bytes_per_token: int, block_tokens: int, page_tokens: int) -> int:
    """Blocks that fit into `memory_bytes`, in whole pages of `page_tokens` tokens of one lane.

    `bytes_per_token` is that of a lane: a page of 256 tokens takes 256 times that. ConfigError if not even one fits.
    """
    if page_tokens % block_tokens:
        raise ConfigError(f"page_tokens {page_tokens} is not a multiple of block_tokens {block_tokens}")
    num_pages = memory_bytes // (bytes_per_token * page_tokens)
    if num_pages < 1:
        raise ConfigError(
            f"KV memory of {memory_bytes} bytes holds no page: one page of {page_tokens} tokens takes "
            f"{bytes_per_token * page_tokens} bytes",
            f"give at least that much with --kv-memory, or use smaller pages than {page_tokens} tokens",
        )
    return num_pages * (page_tokens // block_tokens)
