"""A transformers model as the engine's `ModelRunner`."""

from __future__ import annotations

import hashlib
import inspect
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from transformers import PreTrainedModel

from looseleaf.engine.runner import ModelInfo, StepBatch, StepOutput
from looseleaf.errors import ConfigError, UnsupportedModel
from looseleaf.hf.attention import PagedAttention, register_attention, unregister_attention
from looseleaf.hf.attention_backend import AttentionBackend, GatherBackend
from looseleaf.hf.loading import (
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
from looseleaf.hf.sampling import sample
from looseleaf.hf.selftest import blocks_for, check_against_own_forward, own_answer, sequences_for, widened
from looseleaf.hf.step_plan import StepPlan
from looseleaf.tensors import KVMemory, num_blocks_for_bytes

NAME_PREFIX = "looseleaf-"
"""Attention implementations of runners are registered under names that begin so."""

GATHER_BYTES = 1 << 20
"""K and V gathered for one decode group, per thread; about what a core's own caches hold."""

SURVEY_TOKENS = 4
"""Tokens of the pass that finds out what layers a model has."""


@dataclass(frozen=True)
class MemorySize:
    """How much KV memory a runner takes: `num_blocks`, or as many whole pages as `kv_memory_bytes` hold."""

    num_blocks: int | None = None
    kv_memory_bytes: int | None = None
    block_tokens: int = 16
    page_tokens: int = 256

    def blocks(self, bytes_per_token: int) -> int:
        """Blocks for tokens of `bytes_per_token` bytes.

        Raises:
            ConfigError: none or both of the two sizes given, or less than a page.
        """
        if (self.num_blocks is None) == (self.kv_memory_bytes is None):
            raise ConfigError("give the KV memory either as num_blocks or as kv_memory_bytes")
        if self.num_blocks is not None:
            return self.num_blocks
        return num_blocks_for_bytes(self.kv_memory_bytes or 0, bytes_per_token, self.block_tokens, self.page_tokens)


class HFRunner:
    """Runs an unmodified transformers model on keys and values in blocks. Made by `load`; one thread calls
    it.

    The model is led to this runner's own attention function by a name registered for it alone, so several
    runners may live in one process. `close` (or the end of a `with` block) gives the model its former
    attention back; the memory is freed with the runner, closed or not.
    """

    def __init__(self, model: PreTrainedModel, attention: PagedAttention, memory: KVMemory, info: ModelInfo) -> None:
        self._model = model
        self._attention = attention
        self._memory = memory
        self._info = info
        self._closer: weakref.finalize[[PreTrainedModel, str, str], HFRunner] | None = None
        self._group_tokens = group_tokens_for(memory)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

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
    ) -> HFRunner:
        """Load a model from a folder or hub id (or take one that is loaded), give it KV memory, and check
        that it is served right.

        `dtype` is the model's, `kv_dtype` the memory's (auto: the model's). `extra_eos_token_ids` are added
        to those of the model's configuration; a tokenizer knows more. `self_test=False` skips the check,
        for a model known to pass. A model that is loaded already stays on its device and in its dtype.

        Raises:
            UnsupportedModel: this architecture cannot be served; the message names it and what differs.
            ModelError: nothing can be loaded from there.
            ConfigError: a setting that cannot be.
        """
        set_num_threads(num_threads)
        if isinstance(model, PreTrainedModel):
            refuse_by_config(model.config)
            loaded = model
        else:
            loaded = load_model(model, resolve_device(device), resolve_dtype(dtype), revision)
        refuse_by_signature(loaded)
        size = MemorySize(num_blocks, kv_memory_bytes, block_tokens, page_tokens)
        attention = PagedAttention(type(loaded).__name__, backend or GatherBackend())
        return cls._serve(loaded, attention, size, resolve_dtype(kv_dtype), extra_eos_token_ids, self_test)

    @classmethod
    def _serve(
        cls,
        model: PreTrainedModel,
        attention: PagedAttention,
        size: MemorySize,
        kv_dtype: torch.dtype | None,
        extra_eos: Iterable[int],
        self_test: bool,
    ) -> HFRunner:
        """Lead the model's attention here, or leave the model as it was if that fails."""
        former = model.config._attn_implementation
        if former.startswith(NAME_PREFIX):
            raise ConfigError("this model is served by another runner already", "close that one first, or load twice")
        name = f"{NAME_PREFIX}{id(model):x}"
        register_attention(name, attention)
        try:
            point_model_at(model, name)
            survey(model, attention)
            runner = cls._build(model, attention, size, kv_dtype, extra_eos)
            if self_test:
                runner._check(former, name)
        except BaseException:
            _restore(model, former, name)
            raise
        runner._closer = weakref.finalize(runner, _restore, model, former, name)
        runner._closer.atexit = False  # at the end of the process nobody calls the model any more
        return runner

    @classmethod
    def _build(
        cls,
        model: PreTrainedModel,
        attention: PagedAttention,
        size: MemorySize,
        kv_dtype: torch.dtype | None,
        extra_eos: Iterable[int],
    ) -> HFRunner:
        shapes = [layer.shape for layer in attention.traits]
        dtype = kv_dtype or model.dtype
        bytes_per_token = sum(shape.numbers_per_token for shape in shapes) * dtype.itemsize
        memory = KVMemory(
            shapes,
            num_blocks=size.blocks(bytes_per_token),
            block_tokens=size.block_tokens,
            dtype=dtype,
            device=model.device,
        )
        info = ModelInfo(
            name=model.config.name_or_path or architecture_of(model.config),
            vocab_size=int(model.config.get_text_config(decoder=True).vocab_size),
            max_model_tokens=max_model_tokens(model.config),
            bytes_per_token=memory.bytes_per_token,
            eos_token_ids=eos_token_ids(model) | frozenset(extra_eos),
            kv_layout=_fingerprint(model, memory),
        )
        attention.memory = memory
        return cls(model, attention, memory, info)

    def _check(self, own_attention: str, paged_attention: str) -> None:
        """Self-test on scratch memory; the runner's own blocks stay untouched."""
        model, memory, traits = self._model, self._memory, self._attention.traits
        sequences = sequences_for(model, memory.block_tokens, traits)
        with widened(model):
            own = own_answer(model, sequences, memory.block_tokens, own_attention)
            model.set_attn_implementation(paged_attention)
            scratch = KVMemory(
                memory.layers,
                num_blocks=blocks_for(sequences, memory.block_tokens),
                block_tokens=memory.block_tokens,
                dtype=model.dtype,
                device=memory.device,
            )
            self._memory = self._attention.memory = scratch
            try:
                check_against_own_forward(model, scratch, self.logits, own, traits)
            finally:
                self._memory = self._attention.memory = memory

    @property
    def info(self) -> ModelInfo:
        """Facts of the model; constant."""
        return self._info

    @property
    def memory(self) -> KVMemory:
        """The tensors behind the blocks, for transfer to other tiers."""
        return self._memory

    @property
    def num_blocks(self) -> int:
        """Blocks of KV memory; the cache manager must have no more."""
        return self._memory.num_blocks

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self._memory.device

    def execute(self, batch: StepBatch) -> StepOutput:
        """Do the copies, compute the step, sample. See `ModelRunner.execute`.

        Raises:
            IntegrityError: a table or slot points outside the memory, or at tokens never written.
        """
        chosen = sample(self.logits(batch), batch.sampling)
        return StepOutput(chosen.token_ids, chosen.logprobs)

    @torch.inference_mode()
    def logits(self, batch: StepBatch) -> torch.Tensor:
        """Do the copies, compute the step, and give the logits [N, vocab] of the sampled sequences' last
        tokens.

        Raises:
            IntegrityError: a table or slot points outside the memory, or at tokens never written.
        """
        memory = self._memory
        memory.copy_blocks(batch.copies)
        memory.mark_written(batch.slots)
        num_query = np.diff(batch.query_starts)
        memory.require_written(batch.block_tables, batch.num_context_tokens + num_query)
        plan = StepPlan.of(
            batch,
            block_tokens=memory.block_tokens,
            device=memory.device,
            dtype=self._model.dtype,
            keep_exact=memory.dtype == self._model.dtype,
            group_tokens=self._group_tokens,
        )
        last_rows = batch.query_starts[1:][batch.sampled].astype(np.int64) - 1
        with self._attention.step(plan):
            return self._forward(batch, torch.from_numpy(last_rows).to(memory.device))

    def _forward(self, batch: StepBatch, last_rows: torch.Tensor) -> torch.Tensor:
        device = self._memory.device
        inputs = {
            "input_ids": torch.from_numpy(np.ascontiguousarray(batch.token_ids))[None].to(device),
            "position_ids": torch.from_numpy(np.ascontiguousarray(batch.positions))[None].to(device),
            "use_cache": False,
        }
        if self._keeps_logits:
            logits: torch.Tensor = self._model(**inputs, logits_to_keep=last_rows).logits
            return logits[0]
        every: torch.Tensor = self._model(**inputs).logits
        return every[0, last_rows]

    def close(self) -> None:
        """Give the model its former attention back; nothing can be computed any more. Twice does nothing more."""
        if self._closer is not None:
            self._closer()
        self._attention.memory = None

    def __enter__(self) -> HFRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def group_tokens_for(memory: KVMemory) -> int | None:
    """Keys of one decode group that stay in the processor's caches between gathering and attending; None: no limit.

    Gathered beyond the caches, keys and values go through main memory three times instead of once.
    """
    if memory.device.type != "cpu":
        return None
    largest = max(shape.numbers_per_token for shape in memory.layers) * memory.dtype.itemsize
    return max(1, GATHER_BYTES * torch.get_num_threads() // largest)


def point_model_at(model: PreTrainedModel, name: str) -> None:
    """Make `model` call the attention registered as `name`.

    Raises:
        UnsupportedModel: the class does not go through the registry.
    """
    if not model._can_set_attn_implementation():
        raise UnsupportedModel(
            type(model).__name__, "its attention is written into the model and cannot be led through blocks"
        )
    model.set_attn_implementation(name)


@torch.inference_mode()
def survey(model: PreTrainedModel, attention: PagedAttention) -> None:
    """Run a few tokens to see which layers call the attention, with what.

    Raises:
        UnsupportedModel: no layer calls it, one calls it twice, or the pass fails.
    """
    tokens = torch.arange(SURVEY_TOKENS, device=model.device)[None]
    try:
        with attention.survey():
            model(input_ids=tokens, position_ids=tokens, use_cache=False)
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
        raise UnsupportedModel(
            type(model).__name__, f"a packed pass fails with {type(error).__name__}: {error}"
        ) from error
    if not attention.traits:
        raise UnsupportedModel(type(model).__name__, "no layer calls the registered attention function")


def _restore(model: PreTrainedModel, former: str, name: str) -> None:
    """Undo `point_model_at` and the registration."""
    if model.config._attn_implementation == name:
        model.set_attn_implementation(former)
    unregister_attention(name)


def _fingerprint(model: PreTrainedModel, memory: KVMemory) -> str:
    """Fingerprint of what blocks hold: layout of the memory, the model's configuration and revision, a
    sample of its weights.
    """
    digest = hashlib.sha256(memory.layout.encode())
    config = model.config.to_json_string(use_diff=False)
    digest.update("\n".join(line for line in config.splitlines() if "attn_implementation" not in line).encode())
    digest.update(str(getattr(model.config, "_commit_hash", None)).encode())
    for name, weight in model.named_parameters():
        sampled = weight.detach().reshape(-1)[:: max(1, weight.numel() // 64)][:64]
        digest.update(name.encode())
        digest.update(sampled.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:32]
