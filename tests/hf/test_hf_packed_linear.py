"""Packed linear layers give what plain ones give, cost no memory but where weights are shared, and can be undone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hf_models import full_logits, random_tokens, tiny_model
from torch import nn

from looseleaf.hf import packed_linear
from looseleaf.hf.packed_linear import PackedLinears, can_pack
from looseleaf.hf.runner import HFRunner

pytestmark = pytest.mark.skipif(not can_pack(), reason="nothing is packed on this processor")


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 100), nn.Linear(100, 7, bias=False), nn.Linear(7, 5)).eval()


@torch.inference_mode()
def test_products_are_the_plain_ones() -> None:
    """Any number of rows, none too, with and without bias: the same but for rounding."""
    model = layers()
    rows = [torch.randn(1, count, 40) for count in (0, 1, 2, 16, 33)]
    wanted = [model(each) for each in rows]
    packed = PackedLinears(model)
    assert packed.num_layers == 3
    for each, want in zip(rows, wanted, strict=True):
        torch.testing.assert_close(model(each), want, atol=1e-5, rtol=1e-4)


def test_restored_to_the_bit() -> None:
    """Plain weights are gone while packed (reading one shows NaN), and afterwards the very same numbers."""
    model = layers()
    before = [weight.detach().clone() for weight in model.parameters()]
    packed = PackedLinears(model)
    assert model[0].weight.isnan().all()
    assert model[0].weight.shape == before[0].shape
    assert packed.extra_bytes == 0
    packed.restore()
    packed.restore()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert all("forward" not in vars(module) for module in model)


def test_shared_weights_are_kept() -> None:
    """A weight that an embedding shares stays readable, and its bytes are told."""
    model = nn.ModuleDict({"table": nn.Embedding(50, 8), "head": nn.Linear(8, 50, bias=False)}).eval()
    model["head"].weight = model["table"].weight
    before = model["table"].weight.detach().clone()
    packed = PackedLinears(model)
    assert packed.extra_bytes == before.numel() * 4
    assert torch.equal(model["table"].weight, before)


def test_what_is_not_the_same_stays_plain(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A layer whose packed product is another one is left as it was, and the log says so."""
    model = layers()
    monkeypatch.setattr(packed_linear._Packed, "forward", lambda self, rows: rows @ self.module.weight.T * 1.01)
    assert PackedLinears(model).num_layers == 0
    assert not any(weight.isnan().any() for weight in model.parameters())
    assert "stays plain" in caplog.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_are_left_alone(dtype: torch.dtype) -> None:
    """Only float32 is packed."""
    assert PackedLinears(layers().to(dtype)).num_layers == 0


def test_a_closed_runner_leaves_the_model_as_it_was() -> None:
    """A runner packs by default, not if told not to, and gives the weights back at its end."""
    model = tiny_model("llama")
    tokens = random_tokens(np.random.default_rng(0), 9)
    before, names = full_logits(model, tokens), {name: p.detach().clone() for name, p in model.named_parameters()}
    with HFRunner.load(model, num_blocks=10, block_tokens=8, num_threads=1):
        assert any(weight.isnan().any() for weight in model.parameters())
    assert all(torch.equal(p, names[name]) for name, p in model.named_parameters())
    assert torch.equal(full_logits(model, tokens), before)
    with HFRunner.load(model, num_blocks=10, block_tokens=8, num_threads=1, pack_linears=False):
        assert not any(weight.isnan().any() for weight in model.parameters())
