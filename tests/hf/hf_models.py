"""Tiny random models, made from configurations: no download, float32, the same weights each time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GPT2Config, PreTrainedModel

VOCAB = 211
WINDOW = 24
CHUNK = 20
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "gpt2")

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}

SPECIAL: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "gemma3_text": {
        "sliding_window": WINDOW,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 16,
    },
    "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    "gpt_oss": {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {
        "num_hidden_layers": 4,
        "attention_chunk_size": CHUNK,
        "num_local_experts": 1,
        "intermediate_size_mlp": 96,
        "floor_scale": 16,
    },
    "gemma4_text": {
        "sliding_window": WINDOW,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    },
    "deepseek_v2": LATENT,
    "deepseek_v3": {**LATENT, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1},
}


def tiny_model(family: str, seed: int = 0, max_positions: int = 2304, **overrides: Any) -> PreTrainedModel:
    """A random model of 3 layers with strong weights, so that attention decides what comes out."""
    if family == "gpt2":
        config: Any = GPT2Config(
            vocab_size=VOCAB, n_embd=64, n_layer=3, n_head=4, n_positions=max_positions, eos_token_id=VOCAB - 1
        )
    else:
        settings: dict[str, Any] = {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": max_positions,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": VOCAB - 1,
        }
        config = CONFIG_MAPPING[family](**{**settings, **SPECIAL.get(family, {}), **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return randomised(model, seed)


def randomised(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """The same model with weights large enough that every layer matters: matrices N(0, 1/sqrt(inputs)), the
    rest near what it was.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5 * 1.5)
            else:
                parameter.add_(noise * 0.1)
    return model


def full_logits(model: PreTrainedModel, tokens: np.ndarray) -> torch.Tensor:
    """The plain model's logits [n, vocab] of one sequence alone."""
    with torch.inference_mode():
        return model(input_ids=torch.from_numpy(np.asarray(tokens, dtype=np.int64))[None], use_cache=False).logits[0]


def plain_generate(model: PreTrainedModel, prompt: np.ndarray, num_tokens: int) -> list[int]:
    """Greedy tokens of transformers' own `generate`."""
    ids = torch.from_numpy(np.asarray(prompt, dtype=np.int64))[None]
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def random_tokens(rng: np.random.Generator, length: int) -> np.ndarray:
    """Token ids int64 [length]."""
    return rng.integers(3, VOCAB - 1, size=length)
