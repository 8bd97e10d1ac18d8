"""looseleaf's and transformers' sides of `serving.py`: serving_ours.py looseleaf|transformers SETTINGS (JSON)."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation import ContinuousBatchingConfig, GenerationConfig

from looseleaf.cli.build import MemorySettings, ModelSettings, build_stack, load_model
from looseleaf.engine.config import EngineConfig
from looseleaf.engine.request import GenerationRequest
from looseleaf.engine.sampling import SamplingParams
from serving_driver import Progress, answer

TRANSFORMERS_PAGE_TOKENS = 16
"""Like the blocks of the others (its default, 256, shares less)."""

TRANSFORMERS_STEP_TOKENS = 512
"""Its masks have a column for each token that the cache can hold: with more rows they do not fit in memory."""


class LooseleafSide:
    """The engine of `looseleaf serve`, stepped here, without HTTP."""

    def __init__(self, settings: dict[str, Any]) -> None:
        memory = MemorySettings(kv_bytes=settings["kv_gib"] * 2**30)
        model = load_model(ModelSettings(settings["model"], dtype=settings["dtype"]), memory)
        torch.set_num_threads(settings["threads"])
        limits = EngineConfig(settings["batch"], settings["step_tokens"], settings["max_model_tokens"])
        self._engine = build_stack(model, memory, limits).engine.engine

    def submit(self, request_id: str, tokens: list[int], max_tokens: int) -> None:
        """See `Side`."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._engine.add(GenerationRequest(request_id, tokens, params))

    def step(self) -> list[Progress]:
        """See `Side`."""
        given = []
        for delta in self._engine.step():
            if delta.error is not None:
                raise delta.error
            is_finished = delta.finish_reason is not None
            given.append(Progress(delta.request_id, list(delta.token_ids), is_finished, delta.usage.num_cached_tokens))
        return given


class TransformersSide:
    """transformers' continuous batching. It does not tell how much of a prompt it found."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        dtype = getattr(torch, settings["dtype"])
        model: Any = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype, attn_implementation="sdpa")
        config = model.config
        per_token = 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize * config.num_hidden_layers
        num_blocks = settings["kv_gib"] * 2**30 // (per_token * TRANSFORMERS_PAGE_TOKENS)
        batching = ContinuousBatchingConfig(
            page_size=TRANSFORMERS_PAGE_TOKENS,
            num_blocks=num_blocks,
            max_batch_tokens=min(settings["step_tokens"], TRANSFORMERS_STEP_TOKENS),
            max_memory_percent=0.95,
            max_requests_per_batch=settings["batch"],
            allow_block_sharing=True,
        )
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=64)
        self._manager = model.init_continuous_batching(generation, batching)
        self._manager.start()
        self._num_given: dict[str, int] = {}

    def submit(self, request_id: str, tokens: list[int], max_tokens: int) -> None:
        """See `Side`."""
        self._num_given[request_id] = 0
        self._manager.add_request(list(tokens), request_id, max_tokens, streaming=True, eos_token_id=-1)

    def step(self) -> list[Progress]:
        """See `Side`."""
        output = self._manager.get_result(timeout=600)
        if output is None or output.error is not None:
            raise RuntimeError(f"transformers gave no result: {output and output.error}")
        tokens = list(output.generated_tokens)
        new = tokens[self._num_given[output.request_id] :]
        self._num_given[output.request_id] = len(tokens)
        return [Progress(output.request_id, new, output.is_finished())]


def main() -> None:
    """Start with the settings of the command line and answer."""
    side = {"looseleaf": LooseleafSide, "transformers": TransformersSide}[sys.argv[1]]
    answer(side(json.loads(sys.argv[2])))


if __name__ == "__main__":
    main()
