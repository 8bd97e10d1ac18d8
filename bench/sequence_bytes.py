"""KV bytes of one sequence, before and after layer groups, from the shapes of well-known models (no weights needed).

    python bench/sequence_bytes.py [--tokens 8192] [--step-tokens 512]

before: every layer keeps every token. after: the blocks that the cache holds at most while the sequence is computed in
steps of `--step-tokens`, and once it decodes. Sizes in bfloat16; shapes as published with the models.
"""

from __future__ import annotations

import argparse

import torch
from transformers import Gemma3TextConfig, GptOssConfig, Llama4TextConfig, MistralConfig, PretrainedConfig

from looseleaf import CacheConfig
from looseleaf.core.config import CachePlan, LayerGroup
from looseleaf.hf.sizing import history_of
from looseleaf.tensors import LayerShape, plan_lanes

BLOCK_TOKENS = 16
MODELS: dict[str, PretrainedConfig] = {
    "Gemma 3 270M": Gemma3TextConfig(
        num_hidden_layers=18, num_key_value_heads=1, head_dim=256, sliding_window=512, num_attention_heads=4
    ),
    "Gemma 3 27B": Gemma3TextConfig(
        num_hidden_layers=62, num_key_value_heads=16, head_dim=128, sliding_window=1024, num_attention_heads=32
    ),
    "gpt-oss 20B": GptOssConfig(num_hidden_layers=24, num_key_value_heads=8, head_dim=64, sliding_window=128),
    "Mistral 7B v0.1": MistralConfig(
        num_hidden_layers=32, num_key_value_heads=8, head_dim=128, sliding_window=4096, num_attention_heads=32
    ),
    "Llama 4 Scout": Llama4TextConfig(
        num_hidden_layers=48, num_key_value_heads=8, head_dim=128, attention_chunk_size=8192, num_attention_heads=40
    ),
}


def histories(config: PretrainedConfig) -> list[LayerGroup]:
    """What each layer looks back on."""
    window = None if getattr(config, "layer_types", None) else config.sliding_window
    return [history_of(config, layer, window) for layer in range(config.num_hidden_layers)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--step-tokens", type=int, default=512)
    arguments = parser.parse_args()
    print(f"| {arguments.tokens:,} tokens | lanes | before, MiB | at most, MiB | decoding, MiB | saved |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, config in MODELS.items():
        shape = LayerShape(config.num_key_value_heads, config.head_dim, config.head_dim)
        lanes = plan_lanes(histories(config), [shape] * config.num_hidden_layers)
        block_bytes = lanes.layers_per_lane * shape.numbers_per_token * torch.bfloat16.itemsize * BLOCK_TOKENS
        plan = CachePlan.of(CacheConfig(num_pages=1, groups=lanes.groups))
        before = config.num_hidden_layers * shape.numbers_per_token * torch.bfloat16.itemsize * arguments.tokens
        peak, steady = (
            block_bytes * plan.blocks_for(arguments.tokens, step) for step in (arguments.step_tokens, BLOCK_TOKENS)
        )
        cells = [f"{size / 2**20:,.1f}" for size in (before, peak, steady)]
        print(f"| {name} | {plan.num_lanes} | {' | '.join(cells)} | {1 - steady / before:.0%} |")


if __name__ == "__main__":
    main()
