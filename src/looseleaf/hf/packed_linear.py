"""Weights of linear layers in the order that the matrix product wants: packed once instead of at each call."""

from __future__ import annotations

import logging
import platform
from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import linear

_LOG = logging.getLogger(__name__)

CHECK_ROWS = 3
"""Random rows with which each packed layer is compared with the plain one."""

CHECK_TOLERANCE = 1e-4
"""Largest difference accepted in that, as a share of the largest number."""


@dataclass(frozen=True)
class _Packed:
    """One layer: its `module`, the `packed` weight (oneDNN's own order), whether the plain one is kept beside it."""

    module: nn.Linear
    packed: torch.Tensor
    is_kept: bool

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """What the module's own `forward` gives. A single row is read faster from the plain weight, if it is there."""
        if self.is_kept and rows.numel() == rows.shape[-1]:
            return linear(rows, self.module.weight, self.module.bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.module.bias, "none", [], "")
        return product


class PackedLinears:
    """The linear layers of `model`, packed until `restore`.

    Float32 on x86 processors, where torch has oneDNN; otherwise nothing is done. The plain weight is given up for the
    packed one, so memory stays as it was, except where a weight is shared with another module (an embedding): there
    both are kept, `extra_bytes` in all. A layer whose packed product is not the plain one but for rounding stays plain.
    """

    def __init__(self, model: nn.Module, *, pack: bool = True) -> None:
        self._layers: list[_Packed] = []
        if pack and can_pack():
            uses = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
            for module in model.modules():
                if type(module) is nn.Linear and _fits(module.weight) and not module.training:
                    self._pack(module, is_kept=uses[id(module.weight)] > 1)

    @property
    def num_layers(self) -> int:
        """Layers that are packed."""
        return len(self._layers)

    @property
    def extra_bytes(self) -> int:
        """Bytes of packed weights whose plain ones are kept."""
        kept = [layer.module.weight for layer in self._layers if layer.is_kept]
        return sum(weight.numel() * weight.itemsize for weight in kept)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _pack(self, module: nn.Linear, is_kept: bool) -> None:
        weight = module.weight.detach()
        layer = _Packed(module, torch.ops.mkldnn._reorder_linear_weight(weight), is_kept)
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
                layer.module.weight.data = layer.packed.to_dense()


def _fits(weight: torch.Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.is_contiguous()


def can_pack() -> bool:
    """True where packing is known to help: x86 processors, and a torch with oneDNN that takes packed weights."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
    has_call = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return is_x86 and torch._C._has_mkldnn and has_call
