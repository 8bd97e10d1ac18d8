"""From a name or folder to a transformers model: device, dtype, refusals by name, facts of the model."""

from __future__ import annotations

import inspect
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from looseleaf.errors import ConfigError, ModelError, UnsupportedModel

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Names of `--dtype`."""

KV_DTYPES = {**DTYPES, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Names of `--kv-dtype`; the last two with a scale per token and head."""

STATEFUL_LAYER_TYPES = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "gated_delta", "hybrid")
"""Layer types that keep a running state instead of keys and values; a block cannot hold one."""

POSITIONS_THAT_DEPEND_ON_LENGTH = ("dynamic", "longrope")
"""Rotary kinds whose angles change with the longest sequence of the pass, beyond the original length."""


def resolve_device(device: str) -> torch.device:
    """The device of `--device`: `auto` is CUDA if there is any, else the CPU. ConfigError if there is none such."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device {device!r} is unknown to torch", "use auto, cpu, cuda or cuda:N") from error
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {device!r} was asked for, but torch sees no CUDA device", "use --device cpu")
    return resolved


def resolve_dtype(dtype: str | torch.dtype, names: Mapping[str, torch.dtype] = DTYPES) -> torch.dtype | None:
    """The torch dtype of `--dtype` or `--kv-dtype`, None for `auto`. ConfigError if it is none of `names`."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return None
    if dtype not in names:
        raise ConfigError(f"dtype {dtype!r} is unknown", f"use auto, {', '.join(names)}")
    return names[dtype]


def dtype_for(saved: torch.dtype | None, device: torch.device) -> torch.dtype | None:
    """The dtype of `auto` for a model saved in `saved`: that one, but float32 where half precision is emulated.

    That is on x86 processors without AVX-512: they multiply bfloat16 matrices several times slower than float32 ones;
    there the memory for twice the bytes is the smaller price.
    """
    is_half = saved in (torch.bfloat16, torch.float16)
    is_x86 = device.type == "cpu" and platform.machine().lower() in ("x86_64", "amd64", "i686")
    emulates = is_half and is_x86 and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")
    return torch.float32 if emulates else saved


def set_num_threads(num_threads: int | None) -> int:
    """Set torch's thread count for this process (None: the processors it may use); gives the count that holds.

    Only if it differs: each change rebuilds thread pools.
    """
    if num_threads is None:
        num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
    return num_threads


def load_model(
    model_id: str | Path, device: torch.device, dtype: torch.dtype | None, revision: str | None
) -> PreTrainedModel:
    """Load a decoder-only model from a folder or hub id onto `device`, for inference.

    Raises:
        UnsupportedModel: its configuration shows that it cannot be served; found before any weight is read.
        ModelError: nothing is found there, or it cannot be loaded.
    """
    source = str(model_id)
    try:
        config = AutoConfig.from_pretrained(source, revision=revision)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"no model can be read from {source!r}: {error}", "give a folder with config.json or a hub id"
        ) from error
    refuse_by_config(config)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=dtype or dtype_for(config.dtype, device) or "auto", revision=revision
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot load {architecture_of(config)} from {source!r}: {error}") from error
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(architecture_of(config), f"{type(model).__name__} is not a transformers model")
    torch.nn.Module.to(model, device)  # the same call, without the wrapper whose annotations mypy cannot follow
    torch.nn.Module.train(model, False)
    return model


def architecture_of(config: PretrainedConfig) -> str:
    """The name under which an architecture is refused or shown: the class if known, else the model type."""
    architectures = getattr(config, "architectures", None)
    return str(architectures[0]) if architectures else str(getattr(config, "model_type", type(config).__name__))


def refuse_by_config(config: PretrainedConfig) -> None:
    """Refuse what its configuration already rules out.

    Raises:
        UnsupportedModel: encoder-decoder, or layers with a running state (recurrent, convolution, linear attention).
    """
    architecture = architecture_of(config)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(architecture, "it is an encoder-decoder; only decoder-only models are served")
    layer_types = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    stateful = sorted({str(kind) for kind in layer_types if any(word in str(kind) for word in STATEFUL_LAYER_TYPES)})
    if stateful:
        raise UnsupportedModel(
            architecture, f"its layers of type {', '.join(stateful)} keep a running state, not keys and values"
        )


def refuse_by_signature(model: PreTrainedModel) -> None:
    """Refuse a model whose forward pass cannot take a packed step (UnsupportedModel)."""
    taken = inspect.signature(model.forward).parameters
    missing = [name for name in ("position_ids", "logits_to_keep") if name not in taken]
    if missing:
        raise UnsupportedModel(
            type(model).__name__,
            f"its forward pass takes no {' and no '.join(missing)}, so sequences cannot be packed into one pass",
        )


def max_model_tokens(config: PretrainedConfig) -> int:
    """Positions the model was made for; 2048 if it does not say.

    With rotary angles that depend on the length of the pass, the length up to which they do not: beyond it, the keys of
    one sequence would depend on its neighbours.
    """
    text = config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length")
    limits = [getattr(text, name, None) for name in names]
    longest = next((limit for limit in limits if isinstance(limit, int) and limit > 0), 2048)
    parameters = getattr(text, "rope_parameters", None) or {}
    for rotary in [parameters] if "rope_type" in parameters else parameters.values():  # one, or one per layer type
        if isinstance(rotary, Mapping) and rotary.get("rope_type") in POSITIONS_THAT_DEPEND_ON_LENGTH:
            original = rotary.get("original_max_position_embeddings")
            original = original or getattr(text, "original_max_position_embeddings", None)
            longest = min(longest, original) if isinstance(original, int) else longest
    return longest


def eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Every token that ends a sequence according to the generation configuration and the configuration."""
    found: set[int] = set()
    for config in (model.generation_config, model.config.get_text_config(decoder=True), model.config):
        value = getattr(config, "eos_token_id", None)
        if isinstance(value, int):
            found.add(value)
        elif isinstance(value, Iterable):
            found.update(int(token) for token in value)
    return frozenset(found)
