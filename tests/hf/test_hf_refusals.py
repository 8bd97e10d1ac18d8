"""What cannot be served is refused by name, at load time, and leaves nothing behind."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hf_driver import HandDriver
from hf_models import FAMILIES, tiny_model
from transformers import AttentionInterface, AutoModelForCausalLM, BloomConfig, LlamaForCausalLM, MambaConfig, T5Config
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral import modeling_mistral

from looseleaf import LayerGroup
from looseleaf.errors import ConfigError, ModelError, UnsupportedModel
from looseleaf.hf import attention, loading, selftest, step_plan
from looseleaf.hf.attention_backend import AttentionCall, GatherBackend
from looseleaf.hf.runner import HFRunner
from looseleaf.hf.step_plan import PrefillChunk
from looseleaf.tensors import KVMemory


def load(model: object, **settings: object) -> HFRunner:
    return HFRunner.load(model, num_blocks=8, block_tokens=8, num_threads=1, **settings)  # type: ignore[arg-type]


def all_registered() -> set[str]:
    return {name for name in AttentionInterface._global_mapping if name.startswith("looseleaf")}


@pytest.fixture
def registered() -> Callable[[], set[str]]:
    """Names registered since the test began."""
    before = all_registered()
    return lambda: all_registered() - before


@pytest.mark.parametrize("family_name", FAMILIES)
def test_families_pass_their_self_test(family_name: str, registered: Callable[[], set[str]]) -> None:
    """The families promised are accepted, and closing gives the model its attention back."""
    model = tiny_model(family_name)
    former = model.config._attn_implementation
    with load(model) as runner:
        assert model.config._attn_implementation != former
        assert runner.num_blocks == 8
    assert model.config._attn_implementation == former
    assert not registered()


def test_a_state_instead_of_keys_is_refused() -> None:
    """[P11] A recurrent model is refused by name: its state cannot live in blocks."""
    model = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2))
    with pytest.raises(UnsupportedModel, match=r"mamba.*state"):
        load(model)


def test_encoder_decoder_is_refused() -> None:
    """An encoder-decoder is refused from its configuration alone."""
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        loading.refuse_by_config(T5Config())


def test_no_positions_is_refused() -> None:
    """A model whose forward takes no positions (ALiBi of Bloom) cannot be packed."""
    model = AutoModelForCausalLM.from_config(BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=2))
    with pytest.raises(UnsupportedModel, match=r"BloomForCausalLM.*position_ids"):
        load(model)


def test_what_is_in_the_mask_only_is_found(registered: Callable[[], set[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that cuts attention by its mask only, in a way that is not known here, would be silently wrong; the
    self-test says so.
    """
    monkeypatch.setattr(attention, "history_of", lambda *_: LayerGroup())
    with pytest.raises(UnsupportedModel, match=r"Llama4ForCausalLM.*differ.*attention_chunk_size 20"):
        load(tiny_model("llama4_text"))
    assert not registered()


def test_bypassing_the_interface_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose layers never call the registered function is refused."""

    def forward(self: LlamaAttention, hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        return self.o_proj(self.q_proj(hidden_states)), None

    monkeypatch.setattr(LlamaAttention, "forward", forward)
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM: no layer calls"):
        load(tiny_model("llama"))


def test_two_calls_per_layer_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that attends twice in one pass would overwrite its own keys; refused."""
    once = LlamaAttention.forward

    def twice(self: LlamaAttention, *args: object, **kwargs: object) -> object:
        once(self, *args, **kwargs)
        return once(self, *args, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", twice)
    with pytest.raises(UnsupportedModel, match="several times"):
        load(tiny_model("llama"))


def test_a_missing_call_in_a_later_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is skipped in some pass is noticed there: its keys would be missing for ever."""
    with load(tiny_model("llama"), self_test=False) as runner:
        model = runner._model
        assert isinstance(model, LlamaForCausalLM)
        skipped = model.model.layers[1].self_attn
        monkeypatch.setattr(skipped, "forward", lambda hidden_states, **_: (hidden_states, None))
        driver = HandDriver(runner, np.random.default_rng(0))
        with pytest.raises(UnsupportedModel, match="layer"):
            driver.step([(driver.sequence(np.arange(3, 9)), 6)])


@pytest.mark.parametrize("shift", [-1, 1])
def test_the_self_test_looks_beyond_the_window(monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    """[H95] With a small window the test sequences are longer than it, so a window off by one token is found."""
    right = step_plan.oldest_visible
    monkeypatch.setattr(step_plan, "oldest_visible", lambda group, at: np.maximum(right(group, at) + shift, 0))
    with pytest.raises(UnsupportedModel, match="MistralForCausalLM"):
        load(tiny_model("mistral"))


class LooksFurtherBack(GatherBackend):
    """A backend with a fault: it reads the block before the window too, and hides it."""

    def prefill(self, call: AttentionCall, chunk: PrefillChunk, memory: KVMemory, output: torch.Tensor) -> None:
        super().prefill(call, chunk, memory, output)
        if chunk.skip_tokens or chunk.first_slot:
            output[chunk.rows.first_row] += 0 * memory.read_run(call.layer, 0, 10**6, call.query.dtype).keys.sum()


def test_blocks_that_slid_out_are_spoiled_in_the_self_test() -> None:
    """[H101] By the time a window slid over them, blocks hold NaN: who still reads them is found."""
    with pytest.raises(UnsupportedModel, match=r"MistralForCausalLM.*nan"):
        load(tiny_model("mistral"), backend=LooksFurtherBack())


def test_half_precision_weights_come_back_unchanged() -> None:
    """A small bfloat16 model is tested in float32 and served in bfloat16 with the very same weights."""
    model = tiny_model("qwen3").to(torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with load(model) as runner:
        assert runner.memory.dtype == torch.bfloat16
        after = model.state_dict()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_half_precision_that_is_too_large_to_widen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large half-precision models are tested as they are: good ones pass, chunked ones still fail."""
    monkeypatch.setattr(selftest, "MAX_WIDENED_BYTES", 0)
    load(tiny_model("qwen3").to(torch.bfloat16)).close()
    monkeypatch.setattr(attention, "history_of", lambda *_: LayerGroup())
    with pytest.raises(UnsupportedModel, match="Llama4"):
        load(tiny_model("llama4_text").to(torch.bfloat16))


def test_the_memory_is_clean_after_the_self_test() -> None:
    """The self-test leaves no token readable in the runner's blocks."""
    with load(tiny_model("llama")) as runner:
        assert int(runner.memory._num_written.max()) == 0


def test_several_runners_in_one_process(registered: Callable[[], set[str]]) -> None:
    """Two runners keep to their own memory, and closing one leaves the other working."""
    first, second = load(tiny_model("llama")), load(tiny_model("gpt2"))
    drivers = [HandDriver(r, np.random.default_rng(0)) for r in (first, second)]
    sequences = [d.sequence(np.arange(3, 20)) for d in drivers]
    for driver, s in zip(drivers, sequences, strict=True):
        driver.step([(s, 10)])
    first.close()
    first.close()
    assert len(registered()) == 1
    assert drivers[1].step([(sequences[1], 7)]).shape == (1, 211)
    second.close()


def test_one_model_has_one_runner() -> None:
    """A model that is served already is not taken over by a second runner; after closing it can be served again."""
    model = tiny_model("llama")
    with load(model), pytest.raises(ConfigError, match="another runner"):
        load(model)
    load(model).close()


def test_a_dropped_runner_lets_go(registered: Callable[[], set[str]]) -> None:
    """A runner that nobody closes unregisters when it is collected, so its memory does not stay for ever."""
    runner = load(tiny_model("llama"))
    assert len(registered()) == 1
    del runner
    gc.collect()
    assert not registered()


def test_nothing_there() -> None:
    """A path without a model is a ModelError that names it."""
    with pytest.raises(ModelError, match="/nowhere/at/all"):
        load("/nowhere/at/all")


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"device": "abacus"}, "abacus"),
        ({"dtype": "int3"}, "int3"),
        ({"kv_dtype": torch.int16}, "int16"),
        ({"kv_dtype": "int3"}, "int3"),
        ({"kv_dtype": torch.float8_e5m2}, "float8_e5m2"),
        ({"kv_memory_bytes": 1000}, "either"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], word: str) -> None:
    """A setting that cannot be is refused with its value."""
    calls = {
        "device": lambda value: loading.resolve_device(value),
        "dtype": lambda value: loading.resolve_dtype(value),
        "kv_dtype": lambda value: load(tiny_model("llama"), kv_dtype=value),
        "kv_memory_bytes": lambda value: load(tiny_model("llama"), kv_memory_bytes=value),
    }
    ((name, value),) = settings.items()
    with pytest.raises(ConfigError, match=word):
        calls[name](value)


def test_memory_in_whole_pages() -> None:
    """`kv_memory_bytes` gives whole pages, never more bytes than asked."""
    model = tiny_model("llama")
    per_token = 3 * 2 * (16 + 16) * 4
    asked = int(2.7 * 32 * per_token)
    with HFRunner.load(model, kv_memory_bytes=asked, block_tokens=8, page_tokens=32, num_threads=1) as runner:
        assert runner.info.bytes_per_token == per_token
        assert runner.num_blocks == 2 * 4
        assert runner.memory.num_bytes <= asked


def test_facts_of_the_model() -> None:
    """Positions, end tokens and a fingerprint that changes with weights and layout."""
    with load(tiny_model("llama"), extra_eos_token_ids=(7,)) as runner:
        assert runner.info.max_model_tokens == 2304
        assert runner.info.eos_token_ids == {210, 7}
        assert runner.info.vocab_size == 211
        layout = runner.info.kv_layout
    with load(tiny_model("llama")) as same, load(tiny_model("llama", seed=1)) as other:
        assert same.info.kv_layout == layout
        assert other.info.kv_layout != layout
    with load(tiny_model("llama"), kv_dtype="bfloat16") as narrow:
        assert narrow.info.kv_layout != layout


def test_rotary_angles_that_depend_on_length_limit_it() -> None:
    """With rotary scaling that changes beyond the original length, no sequence may become longer than that."""
    config = tiny_model("llama").config
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    config.original_max_position_embeddings = 512
    assert loading.max_model_tokens(config) == 512
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    assert loading.max_model_tokens(config) == 2304


@pytest.mark.parametrize("family_name", ["mistral", "gemma3_text", "gpt_oss", "llama4_text"])
def test_long_windows_are_tested_short(monkeypatch: pytest.MonkeyPatch, family_name: str) -> None:
    """[H95] A window or chunk of thousands of tokens is short for the time of the self-test: it passes, a window off by
    one token is found, and the configuration comes back.
    """
    span = "attention_chunk_size" if family_name == "llama4_text" else "sliding_window"
    load(tiny_model(family_name, **{span: 4096})).close()
    right = step_plan.oldest_visible
    monkeypatch.setattr(step_plan, "oldest_visible", lambda group, at: np.maximum(right(group, at) - 1, 0))
    model = tiny_model(family_name, **{span: 4096})
    with pytest.raises(UnsupportedModel, match="differ"):
        load(model)
    assert getattr(model.config, span) == 4096


def test_masks_that_do_not_follow_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose masks come from elsewhere is tested with its window as it is, and served."""
    model = tiny_model("mistral", sliding_window=4096)
    kept = copy.deepcopy(model.config)
    right = modeling_mistral.create_sliding_window_causal_mask
    monkeypatch.setattr(
        modeling_mistral,
        "create_sliding_window_causal_mask",
        lambda config, **given: right(config=sync(kept, config), **given),
    )

    def sync(kept: object, config: object) -> object:
        kept._attn_implementation = config._attn_implementation  # type: ignore[attr-defined]
        return kept

    load(model).close()
