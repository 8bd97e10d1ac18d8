"""The tensors of one physical layer: a row of numbers per slot, in 8 bits with a scale per head beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch

from looseleaf.tensors.layout import QUANTISED, SCALE_DTYPE

SCALE_MARGIN = 1 + 2**-8
"""Scales are that much larger than need be: rounded to `SCALE_DTYPE`, they still let no number go beyond the limit."""

SMALLEST_SCALE = 1e-30
"""A vector of zeros has this scale."""


class Scratch:
    """Memory kept from read to read: a new tensor each time costs several times the copy itself in page faults."""

    def __init__(self) -> None:
        self._kept: dict[torch.dtype, torch.Tensor] = {}

    def pick(self, stored: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """`rows` int64 [n] of `stored`; what was picked before in its dtype is overwritten."""
        count = len(rows) * stored[0].numel()
        kept = self._kept.get(stored.dtype)
        if kept is None or kept.numel() < count:
            with torch.inference_mode(False):  # so that it may be written inside and outside of inference mode
                kept = self._kept[stored.dtype] = torch.empty(count, dtype=stored.dtype, device=stored.device)
        return torch.index_select(stored, 0, rows, out=kept[:count].view(len(rows), *stored.shape[1:]))


Selection: TypeAlias = Callable[[torch.Tensor, Scratch], torch.Tensor]
"""Takes some slots [n, ...] out of a tensor [slots, ...]."""


class TokenRows:
    """K or V of one physical layer: `width` numbers per slot, room for `heads` heads, as `dtype` on `device`.

    In 8 bits each head's vector of each token has a scale of its own, so what is stored depends on that vector alone
    and not on what is written before, after or beside it.
    """

    def __init__(self, num_slots: int, width: int, heads: int, dtype: torch.dtype, device: torch.device) -> None:
        self._limit = QUANTISED.get(dtype)
        self._dtype = dtype
        raw = torch.uint8 if dtype is torch.float8_e4m3fn else dtype  # torch can't copy rows of float8 on every device
        self.tensors = [zeros((num_slots, width), raw, device)]
        if self._limit is not None:
            self.tensors.append(zeros((num_slots, heads), SCALE_DTYPE, device))

    def write(self, slots: torch.Tensor, vectors: torch.Tensor) -> None:
        """Write `vectors` [T, heads, dim] of any floating dtype to `slots` int64 [T]."""
        if self._limit is not None:
            wide = vectors.float()
            scales = (wide.abs().amax(dim=-1) * (SCALE_MARGIN / self._limit)).clamp_(min=SMALLEST_SCALE).to(SCALE_DTYPE)
            self.tensors[1][:, : scales.shape[1]].index_copy_(0, slots, scales)
            wide = wide / scales[..., None]
            vectors = wide.round_() if self._dtype is torch.int8 else wide
        numbers = vectors.to(self._dtype).flatten(1)
        stored = self.tensors[0]
        stored[:, : numbers.shape[1]].index_copy_(0, slots, numbers.view(stored.dtype))

    def read(self, num_heads: int, dim: int, dtype: torch.dtype, select: Selection, scratch: Scratch) -> torch.Tensor:
        """What `select` takes, as [n, num_heads, dim] in `dtype`; a view if nothing is copied or converted."""
        numbers = select(self.tensors[0], scratch)[:, : num_heads * dim].view(-1, num_heads, dim)
        if self._limit is None:
            return numbers.to(dtype)
        scales = select(self.tensors[1], scratch)[:, :num_heads, None].to(dtype)
        return numbers.view(self._dtype).to(dtype).mul_(scales)

    def resize(self, num_slots: int, num_kept: int) -> None:
        """Have `num_slots` slots, of which the first `num_kept` keep what they hold; one tensor after the other."""
        for index, stored in enumerate(self.tensors):
            larger = zeros((num_slots, stored.shape[1]), stored.dtype, stored.device)
            larger[:num_kept] = stored[:num_kept]
            self.tensors[index] = larger

    def cut(self, num_slots: int) -> None:
        """Have no more than `num_slots` slots, without memory for it and without giving any back."""
        self.tensors = [stored[:num_slots] for stored in self.tensors]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros. On the CPU by numpy: it asks the system for zeroed pages, real only once they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
