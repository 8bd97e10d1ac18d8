"""A transformers model as the engine's `ModelRunner`."""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import AttentionInterface, PreTrainedModel

from looseleaf.engine.runner import ModelInfo, StepBatch, StepOutput
from looseleaf.errors import ConfigError, UnsupportedModel
from looseleaf.hf.attention import LayerTraits, PagedAttention
from looseleaf.hf.attention_backend import AttentionBackend, GatherBackend
from looseleaf.hf.cpu_backend import backend_for
from looseleaf.hf.loading import (
    KV_DTYPES,
    architecture_of,
    eos_token_ids,
    load_model,
    max_model_tokens,
    refuse_by_config,
    refuse_by_signature,
    resolve_device,
    resolve_dtype,
    set_num_threads,
)
from looseleaf.hf.packed_linear import PackedLinears
from looseleaf.hf.sampling import sample
from looseleaf.hf.selftest import check_against_own_forward
from looseleaf.hf.step_plan import StepPlan, oldest_visible
from looseleaf.tensors import KVLayout, KVMemory, num_blocks_for_bytes, plan_lanes

_LOG = logging.getLogger(__name__)

NAME_PREFIX = "looseleaf-"
"""Attention implementations of runners are registered under names that begin so."""

GATHER_BYTES = 1 << 20
"""K and V gathered for one decode group, per thread; about what a core's own caches hold."""


@dataclass(frozen=True)
class MemorySettings:
    """KV memory to take: `num_blocks`, or as many whole pages as `kv_memory_bytes` hold. `dtype` None: the model's."""

    num_blocks: int | None
    kv_memory_bytes: int | None
    block_tokens: int
    page_tokens: int
    dtype: torch.dtype | None

    def allocate(self, traits: Sequence[LayerTraits], model: PreTrainedModel) -> KVMemory:
        """Memory for layers of `traits` where the model is. ConfigError if none or both sizes are given, or no page."""
        shapes = tuple(layer.shape for layer in traits)
        lanes = plan_lanes([layer.history for layer in traits], shapes)
        layout = KVLayout(shapes, lanes, self.dtype or model.dtype, self.block_tokens)
        if self.num_blocks is not None and self.kv_memory_bytes is None:
            num_blocks = self.num_blocks
        elif self.kv_memory_bytes is not None and self.num_blocks is None:
            num_blocks = num_blocks_for_bytes(
                self.kv_memory_bytes, layout.lane_bytes_per_token, self.block_tokens, self.page_tokens
            )
        else:
            raise ConfigError("give the KV memory either as num_blocks or as kv_memory_bytes")
        return KVMemory(layout, num_blocks=num_blocks, device=model.device)


class HFRunner:
    """Runs an unmodified transformers model on keys and values in blocks. Made by `load`; one thread calls it.

    The model is led to this runner's own attention function by a name registered for it alone, so several runners may
    live in one process. `close` (or the end of a `with` block) gives the model its former attention back; the memory is
    freed with the runner, closed or not. `info`: facts of the model. `memory`: the tensors behind the blocks.
    """

    def __init__(self, model: PreTrainedModel, attention: PagedAttention, memory: KVMemory, info: ModelInfo) -> None:
        self.info = info
        self.memory = memory
        self._model = model
        self._attention = attention
        self._names = ("", "")  # of the model's former attention, and of this one
        self._group_tokens = group_tokens_for(memory)
        self._closer: weakref.finalize[[PreTrainedModel, str, str, PackedLinears | None], HFRunner] | None = None

    @classmethod
    def load(
        cls,
        model: str | Path | PreTrainedModel,
        *,
        num_blocks: int | None = None,
        kv_memory_bytes: int | None = None,
        block_tokens: int = 16,
        page_tokens: int = 256,
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        kv_dtype: str | torch.dtype = "auto",
        revision: str | None = None,
        num_threads: int | None = None,
        extra_eos_token_ids: Iterable[int] = (),
        self_test: bool = True,
        backend: AttentionBackend | None = None,
        pack_linears: bool = True,
    ) -> HFRunner:
        """Load a model from a folder or hub id (or take a loaded one), give it KV memory, check how it is served.

        `dtype` is the model's, `kv_dtype` the memory's (auto: the model's; also int8 and fp8).
        `extra_eos_token_ids` are added to those of the model's configuration; a tokenizer knows more. `self_test=False`
        skips the check, for a model known to pass. `backend` None: the fastest for the device (`backend_for`).
        `pack_linears`: see `PackedLinears`. A model that is loaded already stays on its device and in its dtype.

        Raises:
            UnsupportedModel: this architecture cannot be served; the message names it and what differs.
            ModelError: nothing can be loaded from there.
            ConfigError: a setting that cannot be.
        """
        set_num_threads(num_threads)
        if isinstance(model, PreTrainedModel):
            refuse_by_config(model.config)
        else:
            model = load_model(model, resolve_device(device), resolve_dtype(dtype), revision)
        refuse_by_signature(model)
        stored = resolve_dtype(kv_dtype, KV_DTYPES)
        fastest = backend or backend_for(model.device, stored or model.dtype)
        attention = PagedAttention(type(model).__name__, fastest)
        settings = MemorySettings(num_blocks, kv_memory_bytes, block_tokens, page_tokens, stored)
        runner = cls._serve(model, attention, settings, frozenset(extra_eos_token_ids), pack_linears)
        if self_test:
            runner._check(may_fall_back=backend is None)
        return runner

    @classmethod
    def _serve(
        cls,
        model: PreTrainedModel,
        attention: PagedAttention,
        settings: MemorySettings,
        extra_eos: frozenset[int],
        pack_linears: bool,
    ) -> HFRunner:
        """Lead the model's attention here, or leave the model as it was if that fails."""
        former = model.config._attn_implementation
        if former.startswith(NAME_PREFIX):
            raise ConfigError("this model is served by another runner already", "close that one first, or load twice")
        if not model._can_set_attn_implementation():
            raise UnsupportedModel(
                type(model).__name__, "its attention is written into the model and cannot be led through blocks"
            )
        name = f"{NAME_PREFIX}{id(model):x}"
        AttentionInterface.register(name, attention)
        packed: PackedLinears | None = None
        try:
            model.set_attn_implementation(name)
            attention.survey(model)
            memory = settings.allocate(attention.traits, model)
            runner = cls(model, attention, memory, _facts(model, memory, extra_eos))
            packed = PackedLinears(model, pack=pack_linears)
        except BaseException:
            _restore(model, former, name, packed)
            raise
        runner._closer = weakref.finalize(runner, _restore, model, former, name, packed)
        runner._closer.atexit = False  # at the end of the process nobody calls the model any more
        runner._names = (former, name)
        return runner

    def _check(self, *, may_fall_back: bool) -> None:
        """Run the self-test; if it fails on a backend that nobody asked for, once more on the reference.

        Raises:
            UnsupportedModel: it failed; the model is as it was before.
        """
        attention, layout = self._attention, self.memory.layout
        check = partial(check_against_own_forward, self._model, *self._names, attention.traits, layout, self._compute)
        try:
            try:
                check()
            except UnsupportedModel as error:
                if not may_fall_back or isinstance(attention.backend, GatherBackend):
                    raise
                backend, attention.backend = attention.backend, GatherBackend()
                check()
                _LOG.warning(
                    "%s is served by the reference attention: with %s, %s",
                    *(self.info.name, type(backend).__name__, error),
                )
        except BaseException:
            self.close()
            raise

    @property
    def num_blocks(self) -> int:
        """Blocks of KV memory; the cache manager must have no more."""
        return self.memory.num_blocks

    def execute(self, batch: StepBatch) -> StepOutput:
        """Do the copies, compute the step, sample. IntegrityError if blocks or slots are not what they should be."""
        return sample(self.logits(batch), batch.sampling)

    def logits(self, batch: StepBatch) -> torch.Tensor:
        """Like `execute`, but give the logits [N, vocab] of the sampled sequences' last tokens."""
        return self._compute(batch, self.memory)

    @torch.inference_mode()
    def _compute(self, batch: StepBatch, memory: KVMemory) -> torch.Tensor:
        lanes, num_context = memory.layout.lanes, batch.num_context_tokens.astype(np.int64)
        memory.copy_blocks(batch.copies)
        for step in batch.groups:
            memory.mark_written(step.slots)
        for group, step in zip(lanes.groups, batch.groups, strict=True):
            stops = num_context + np.diff(batch.query_starts)
            memory.require_written(step.block_tables, step.first_blocks, oldest_visible(group, num_context), stops)
        plan = StepPlan(
            batch,
            lanes,
            block_tokens=memory.block_tokens,
            device=memory.device,
            dtype=self._model.dtype,
            keep_exact=memory.dtype == self._model.dtype,
            group_tokens=self._group_tokens,
        )
        last_rows = batch.query_starts[1:][batch.sampled].astype(np.int64) - 1
        with self._attention.step(plan, memory):
            logits: torch.Tensor = self._model(
                input_ids=plan.tensor(batch.token_ids)[None],
                position_ids=plan.positions[None],
                use_cache=False,
                logits_to_keep=plan.tensor(last_rows),
            ).logits
        return logits[0]

    def resize(self, num_blocks: int, copies: Sequence[tuple[int, int]] = ()) -> None:
        """See `ModelRunner.resize`; at its peak one layer's K or V is there twice. CapacityError: nothing changed."""
        self.memory.resize(num_blocks, copies)

    def close(self) -> None:
        """Give the model its former attention back; nothing can be computed any more. Twice does nothing more."""
        if self._closer is not None:
            self._closer()

    def __enter__(self) -> HFRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def group_tokens_for(memory: KVMemory) -> int | None:
    """Keys of one decode group that stay in the processor's caches between gathering and attending; None: no limit.

    Gathered beyond the caches, keys and values go through main memory three times instead of once.
    """
    if memory.device.type != "cpu":
        return None
    largest = max(shape.numbers_per_token for shape in memory.layout.shapes) * memory.dtype.itemsize
    return max(1, GATHER_BYTES * torch.get_num_threads() // largest)


def _restore(model: PreTrainedModel, former: str, name: str, packed: PackedLinears | None) -> None:
    """Give the model its former attention and weights back; unregister ours so that the memory behind it is freed."""
    if packed is not None:
        packed.restore()
    if model.config._attn_implementation == name:
        model.set_attn_implementation(former)
    # There is no public call for it: `register` writes into this mapping of the class.
    AttentionInterface._global_mapping.pop(name, None)


def _facts(model: PreTrainedModel, memory: KVMemory, extra_eos: frozenset[int]) -> ModelInfo:
    return ModelInfo(
        name=model.config.name_or_path or architecture_of(model.config),
        vocab_size=int(model.config.get_text_config(decoder=True).vocab_size),
        max_model_tokens=max_model_tokens(model.config),
        bytes_per_token=memory.layout.bytes_per_token,
        eos_token_ids=eos_token_ids(model) | extra_eos,
        kv_layout=_fingerprint(model, memory),
        groups=memory.layout.lanes.groups,
    )


def _fingerprint(model: PreTrainedModel, memory: KVMemory) -> str:
    """Fingerprint of what blocks hold: memory layout, configuration and revision of the model, some of its weights."""
    digest = hashlib.sha256(memory.layout.fingerprint.encode())
    config = model.config.to_json_string(use_diff=False)
    digest.update("\n".join(line for line in config.splitlines() if "attn_implementation" not in line).encode())
    digest.update(str(getattr(model.config, "_commit_hash", None)).encode())
    for name, weight in model.named_parameters():
        sampled = weight.detach().reshape(-1)[:: max(1, weight.numel() // 64)][:64]
        digest.update(name.encode())
        digest.update(sampled.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:32]
