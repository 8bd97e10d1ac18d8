"""What layers look back on and what they keep, from a model's configuration alone: sizes before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from looseleaf.core.config import LayerGroup
from looseleaf.tensors import LayerShape, token_bytes


@dataclass(frozen=True)
class GroupBytes:
    """Bytes per token of the `num_layers` layers that look back on `history`.

    `served_bytes_per_token`: K and V as transformers' attention gets them, which is what blocks hold.
    `latent_bytes_per_token`: of the one latent vector and the rotary part from which both can be computed again, where
    an architecture has such (multi-head latent attention); None elsewhere.
    """

    history: LayerGroup
    num_layers: int
    served_bytes_per_token: int
    latent_bytes_per_token: int | None


def bytes_by_group(config: PretrainedConfig, dtype: torch.dtype) -> tuple[GroupBytes, ...]:
    """What each group of layers keeps of a token, stored as `dtype` (8 bits: with scales), in order of first layers."""
    text = config.get_text_config(decoder=True)
    members: dict[LayerGroup, list[int]] = {}
    for layer in range(int(text.num_hidden_layers)):
        members.setdefault(history_of(text, layer, _window_of_all(text)), []).append(layer)
    latent = None
    if (rank := getattr(text, "kv_lora_rank", None)) is not None:
        latent = token_bytes(rank + text.qk_rope_head_dim, 1, dtype)
    return tuple(
        GroupBytes(
            history,
            len(layers),
            sum(
                token_bytes(s.numbers_per_token, s.num_kv_heads, dtype)
                for s in (_shape(text.per_layer_config[layer]) for layer in layers)
            ),
            None if latent is None else latent * len(layers),
        )
        for history, layers in members.items()
    )


def history_of(config: PretrainedConfig | None, layer: object, window: int | None = None) -> LayerGroup:
    """What layer number `layer` looks back on: by the `window` it asks for, else by its layer type in `config`.

    Some models put window or chunk in the mask only and never tell their attention; the layer type is what they go by.
    """
    kinds = getattr(config, "layer_types", None) or ()
    kind = kinds[layer] if isinstance(layer, int) and layer < len(kinds) else None
    if window is None and kind == "sliding_attention":
        window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None) if kind == "chunked_attention" else None
    if window is not None:
        return LayerGroup("window", window_tokens=window)
    return LayerGroup() if chunk is None else LayerGroup("chunked", chunk_tokens=chunk)


def _window_of_all(text: PretrainedConfig) -> int | None:
    """The window of every layer, for a model that does not tell its layers apart."""
    return None if getattr(text, "layer_types", None) else getattr(text, "sliding_window", None)


def _shape(config: PretrainedConfig) -> LayerShape:
    """K and V of one layer as its attention function gets them, from the layer's own configuration."""
    num_heads = int(config.num_attention_heads)
    if getattr(config, "kv_lora_rank", None) is not None:
        return LayerShape(num_heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return LayerShape(getattr(config, "num_key_value_heads", None) or num_heads, head_dim, head_dim)
