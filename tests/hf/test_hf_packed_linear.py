"""Packed linear layers give what plain ones give, cost no memory but where weights are shared, and can be undone."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hf_models import full_logits, random_tokens, tiny_model
from torch import nn

from looseleaf.hf import packed_linear
from looseleaf.hf.packed_linear import PackedLinears, is_known_processor
from looseleaf.hf.runner import HFRunner

pytestmark = pytest.mark.skipif(not is_known_processor(), reason="nothing is packed on this processor")


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


@torch.inference_mode()
@pytest.mark.parametrize("num_outputs", [5, 16, 200])
@pytest.mark.parametrize("is_half", [True, False])
def test_a_row_never_depends_on_the_others(num_outputs: int, is_half: bool) -> None:
    """A row's numbers are the same bits alone and beside any number of rows, on any number of threads."""
    torch.manual_seed(1)
    layer = nn.Linear(50, num_outputs).eval()
    layer.weight.data = layer.weight.bfloat16().float() if is_half else layer.weight.data
    rows = torch.randn(130, 50)
    PackedLinears(layer_in := nn.Sequential(layer))
    alone = torch.cat([layer_in(row[None]) for row in rows])
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for count in (*range(1, 20), 47, 48, 49, 97, 130):
                assert torch.equal(layer_in(rows[:count]), alone[:count])
    finally:
        torch.set_num_threads(threads)


@torch.inference_mode()
def test_bfloat16_numbers_take_half_the_memory() -> None:
    """A weight of bfloat16 numbers is kept in 16 bits, and one more digit anywhere makes it 32; both restored alike."""
    layer = nn.Linear(48, 32, bias=False).eval()
    weight = layer.weight.detach().bfloat16().float()
    for changed, dtype in ((0.0, torch.bfloat16), (1e-7, torch.float32)):
        layer.weight.data = weight.clone()
        layer.weight.data[31, 47] += changed
        before = layer.weight.detach().clone()
        packed = PackedLinears(nn.Sequential(layer))
        assert [each.panels.dtype for each in packed._layers] == [dtype]
        packed.restore()
        assert torch.equal(layer.weight, before)


@torch.inference_mode()
def test_rows_in_any_order_of_memory() -> None:
    """Rows that are a view, a slice or transposed; rows of another dtype are refused, not misread."""
    model = nn.Sequential(nn.Linear(40, 30)).eval()
    rows = torch.randn(40, 12)
    wide = torch.randn(9, 100)
    wanted = [model(rows.T), model(wide[:, 30:70]), model(wide[::2, :40])]
    PackedLinears(model)
    for found, want in zip([model(rows.T), model(wide[:, 30:70]), model(wide[::2, :40])], wanted, strict=True):
        torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-4)
    with pytest.raises(TypeError, match="float64"):
        model(torch.randn(3, 40, dtype=torch.float64))


@torch.inference_mode()
def test_a_weight_that_lies_transposed() -> None:
    """A weight whose numbers do not lie row by row is packed as any other."""
    layer = nn.Linear(48, 32, bias=False).eval()
    layer.weight.data = torch.randn(48, 32).T
    rows, model = torch.randn(5, 48), nn.Sequential(layer)
    wanted = model(rows)
    assert PackedLinears(model).num_layers == 1
    torch.testing.assert_close(model(rows), wanted, atol=1e-5, rtol=1e-4)


def test_what_does_not_compile_stays_plain(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A product that cannot be compiled costs speed and a line in the log, not the model."""

    def fails(self: object, dtype: torch.dtype) -> None:
        raise RuntimeError("the product does not compile: for the test")

    monkeypatch.setattr(packed_linear.Multiplier, "prepare", fails)
    model = layers()
    assert PackedLinears(model).num_layers == 0
    assert not any(weight.isnan().any() for weight in model.parameters())
    assert "for the test" in caplog.text


def test_without_numba_layers_stay_plain(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """No compiled product: nothing is packed, and the log says what to install."""
    monkeypatch.setitem(sys.modules, "looseleaf.hf.matrix_kernel", None)
    assert PackedLinears(layers()).num_layers == 0
    assert "pip install" in caplog.text


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
    assert packed.extra_bytes == 64 * 8 * 4  # panels are whole
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
