"""Sizes from a configuration alone are those of the memory that is really taken."""

from __future__ import annotations

import pytest
import torch
from hf_models import CHUNK, LATENT, WINDOW, tiny_model
from transformers import CONFIG_MAPPING

from looseleaf import LayerGroup
from looseleaf.hf.demo_model import demo_model_config
from looseleaf.hf.loading import KV_DTYPES
from looseleaf.hf.runner import HFRunner
from looseleaf.hf.sizing import bytes_by_group

FAMILIES = (
    "llama",
    "gpt2",
    "mistral",
    "gemma3_text",
    "gemma4_text",
    "gpt_oss",
    "llama4_text",
    "deepseek_v2",
    "deepseek_v3",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_those_of_the_memory(family: str) -> None:
    """Bytes per token and histories from the configuration equal those of a loaded runner, in every dtype."""
    model = tiny_model(family)
    for name in ("float32", "bfloat16", "int8", "fp8"):
        with HFRunner.load(model, num_blocks=1, num_threads=1, self_test=False, kv_dtype=name) as runner:
            groups = bytes_by_group(model.config, KV_DTYPES[name])
            assert sum(group.served_bytes_per_token for group in groups) == runner.info.bytes_per_token
            told = {(g.history.kind, g.history.window_tokens, g.history.chunk_tokens) for g in groups}
            assert told == {(g.kind, g.window_tokens, g.chunk_tokens) for g in runner.info.groups}
            assert sum(group.num_layers for group in groups) == len(runner.memory.layout.shapes)


def test_latent_form() -> None:
    """[MLA] DeepSeek V3: 128 heads of K and V are served, 4.88 MiB a token; the latent form has 576 numbers a layer."""
    config = CONFIG_MAPPING["deepseek_v3"]()
    (group,) = bytes_by_group(config, torch.bfloat16)
    assert group.num_layers == 61
    assert group.served_bytes_per_token == 61 * 128 * (192 + 128) * 2
    assert group.latent_bytes_per_token == 61 * 576 * 2
    (group,) = bytes_by_group(config, torch.int8)
    assert group.latent_bytes_per_token == 61 * (576 + 2 * 2)
    (tiny,) = bytes_by_group(tiny_model("deepseek_v2").config, torch.float32)
    assert tiny.latent_bytes_per_token == 3 * (LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]) * 4
    assert bytes_by_group(tiny_model("llama").config, torch.float32)[0].latent_bytes_per_token is None


def test_groups_of_known_models() -> None:
    """The demo model keeps all of 3 layers and 512 tokens of 15; chunks and windows come from layer types."""
    full, window = sorted(bytes_by_group(demo_model_config(), torch.bfloat16), key=lambda group: group.num_layers)
    assert (full.num_layers, full.served_bytes_per_token) == (3, 3 * 1024)
    assert (window.num_layers, window.served_bytes_per_token) == (15, 15 * 1024)
    assert window.history == LayerGroup("window", window_tokens=512)
    kinds = {group.history.chunk_tokens for group in bytes_by_group(tiny_model("llama4_text").config, torch.float32)}
    assert kinds == {None, CHUNK}
    assert bytes_by_group(tiny_model("mistral").config, torch.float32)[0].history.window_tokens == WINDOW
