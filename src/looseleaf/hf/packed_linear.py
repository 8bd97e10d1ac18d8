"""Weights of linear layers in the order that the matrix product wants: packed once instead of at each call."""

from __future__ import annotations

import logging
import platform
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import linear

from looseleaf.hf.openmp import Threads
from looseleaf.ids import Int64Array

_LOG = logging.getLogger(__name__)

CHECK_ROWS = 3
"""Random rows with which each packed layer is compared with the plain one."""

CHECK_TOLERANCE = 1e-4
"""Largest difference accepted in that, as a share of the largest number."""

BLOCK_ROWS = 48
"""Rows of a piece of work at most: with K of some thousands they stay in a core's own cache."""

PIECES_PER_THREAD = 4
"""The outputs are cut into so many pieces for each thread, so that threads end together."""


class Multiplier:
    """Products with packed weights: the compiled bodies of `matrix_kernel` on torch's threads."""

    def __init__(self, compiled: Any) -> None:
        self.panel: int = compiled.PANEL
        self._tile_rows: int = compiled.TILE_ROWS
        self._bodies = {torch.float32: compiled.multiply_float32, torch.bfloat16: compiled.multiply_bfloat16}
        self._field, self._num_fields, self._compile_error = compiled.Field, compiled.NUM_FIELDS, compiled.NumbaError
        self._address_of: Callable[[Any], int] = lru_cache(compiled.address_of)
        self._threads = Threads()

    def prepare(self, dtype: torch.dtype) -> None:
        """Compile what weights of `dtype` need, or take it from disk. RuntimeError if that fails."""
        try:
            self._address_of(self._bodies[dtype])
        except self._compile_error as error:
            raise RuntimeError(f"the product does not compile: {error}") from error

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """`weight` float32 [N, K] as panels [ceil(N / 16), K, 16]: bfloat16 if that loses nothing, else float32."""
        short = weight.bfloat16()
        kept = short if torch.equal(short.float(), weight) else weight
        num_outputs, depth = weight.shape
        num_panels = -(-num_outputs // self.panel)
        whole = kept if num_outputs % self.panel == 0 else kept.new_zeros(num_panels * self.panel, depth)
        if whole is not kept:
            whole[:num_outputs] = kept
        return whole.reshape(num_panels, self.panel, depth).transpose(1, 2).contiguous()

    def unpack(self, panels: torch.Tensor, num_outputs: int) -> torch.Tensor:
        """The weight float32 [N, K] that `pack` got, to the bit."""
        return panels.transpose(1, 2).reshape(-1, panels.shape[1])[:num_outputs].float().contiguous()

    def product(self, rows: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor, num_outputs: int) -> torch.Tensor:
        """`rows` [..., K] float32 times the weight, plus `bias` [16 * panels]: float32 [..., N].

        Raises:
            TypeError: `rows` are no float32 on the CPU.
        """
        if rows.dtype != torch.float32 or rows.device.type != "cpu":
            raise TypeError(f"a packed layer takes float32 on the CPU, got {rows.dtype} on {rows.device}")
        depth = panels.shape[1]
        given = rows.reshape(-1, depth)
        given = given if given.stride(1) == 1 else given.contiguous()
        output = torch.empty(len(given), num_outputs)
        if len(given):
            record, num_pieces = self._record(given, panels, bias, output)
            self._threads.run(self._address_of(self._bodies[panels.dtype]), record, num_pieces)
        return output.view(*rows.shape[:-1], num_outputs)

    def _record(
        self, rows: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor, output: torch.Tensor
    ) -> tuple[Int64Array, int]:
        """The body's arguments, and how many pieces of work they make."""
        (num_rows, num_outputs), num_panels = output.shape, len(panels)
        num_blocks = -(-num_rows // BLOCK_ROWS)
        block_rows = -(-num_rows // (num_blocks * self._tile_rows)) * self._tile_rows
        group_panels = -(-num_panels // (self._threads.num_threads * PIECES_PER_THREAD))
        field, record = self._field, np.zeros(self._num_fields, dtype=np.int64)
        record[field.ROWS : field.GROUP_PANELS + 1] = (
            *(rows.data_ptr(), rows.stride(0), num_rows, rows.shape[1]),
            *(panels.data_ptr(), num_panels, bias.data_ptr()),
            *(output.data_ptr(), num_outputs, block_rows, group_panels),
        )
        return record, -(-num_rows // block_rows) * -(-num_panels // group_panels)


@dataclass(frozen=True)
class _Packed:
    """One layer: its `module`, the `panels` of its weight, its bias [16 * panels] (zeros without one)."""

    module: nn.Linear
    multiplier: Multiplier
    panels: torch.Tensor
    bias: torch.Tensor
    num_outputs: int
    is_kept: bool

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """What the module's own `forward` gives."""
        return self.multiplier.product(rows, self.panels, self.bias, self.num_outputs)


class PackedLinears:
    """The linear layers of `model`, packed until `restore`.

    Float32 on x86 processors, with numba; otherwise nothing is done. The plain weight is given up for the packed one,
    which takes as much memory, or half of it if its numbers are bfloat16 numbers. Where a weight is shared with another
    module (an embedding) both are kept, `extra_bytes` in all. A layer whose packed product is not the plain one but for
    rounding stays plain.
    """

    def __init__(self, model: nn.Module, *, pack: bool = True) -> None:
        self._layers: list[_Packed] = []
        uses = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
        found = [module for module in model.modules() if type(module) is nn.Linear and _fits(module)]
        multiplier = compiled_multiplier() if pack and found else None
        if multiplier is not None:
            try:
                for module in found:
                    self._pack(module, multiplier, is_kept=uses[id(module.weight)] > 1)
            except (RuntimeError, OSError) as error:  # it cannot compile; what is packed already stays so
                _LOG.warning("linear layers stay plain: %s", error)

    @property
    def num_layers(self) -> int:
        """Layers that are packed."""
        return len(self._layers)

    @property
    def extra_bytes(self) -> int:
        """Bytes of packed weights whose plain ones are kept."""
        return sum(layer.panels.numel() * layer.panels.itemsize for layer in self._layers if layer.is_kept)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _pack(self, module: nn.Linear, multiplier: Multiplier, is_kept: bool) -> None:
        weight = module.weight.detach()
        panels = multiplier.pack(weight)
        multiplier.prepare(panels.dtype)
        bias = torch.zeros(len(panels) * multiplier.panel)
        if module.bias is not None:
            bias[: len(weight)] = module.bias.detach()
        layer = _Packed(module, multiplier, panels, bias, len(weight), is_kept)
        rows = torch.randn(CHECK_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0))
        wanted, found = linear(rows, weight, module.bias), layer.forward(rows)
        if not (wanted - found).abs().max() <= CHECK_TOLERANCE * wanted.abs().max():
            _LOG.warning("a linear layer of %s stays plain: its packed product is another", tuple(weight.shape))
            return
        vars(module)["forward"] = layer.forward
        if not is_kept:  # the shape stays; who reads these numbers all the same is told by NaN
            module.weight.data = weight.new_full((1, 1), float("nan")).expand(weight.shape)
        self._layers.append(layer)

    @torch.inference_mode(False)
    @torch.no_grad()
    def restore(self) -> None:
        """Give the layers their plain weights back. Twice does nothing more."""
        while self._layers:
            layer = self._layers.pop()
            del vars(layer.module)["forward"]
            if not layer.is_kept:
                layer.module.weight.data = layer.multiplier.unpack(layer.panels, layer.num_outputs)


def _fits(module: nn.Linear) -> bool:
    weight = module.weight
    is_float32 = weight.dtype == torch.float32 and weight.device.type == "cpu"
    return is_float32 and weight.numel() > 0 and not module.training


def compiled_multiplier() -> Multiplier | None:
    """What multiplies here, or None: said in the log if only something is missing for it."""
    if not is_known_processor():
        return None
    try:
        return Multiplier(import_module("looseleaf.hf.matrix_kernel"))
    except (ImportError, OSError) as error:
        _LOG.warning("linear layers are not packed: %s; hint: pip install 'looseleaf[hf]'", error)
        return None


def is_known_processor() -> bool:
    """True where packing is known to help: x86 processors."""
    return platform.machine().lower() in ("x86_64", "amd64")
