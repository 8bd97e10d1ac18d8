"""KV memory that one sequence holds: looseleaf before and after layer groups, transformers' continuous batching, vLLM.

    python bench/memory_per_sequence.py [MODEL_DIR] [--vllm PYTHON] [--lengths 1024 4096 16384] [--output FILE]

Each side serves a prompt of each length alone and decodes a few tokens, with the same most tokens per step. What the
request holds is read from each system's own cache manager whenever blocks were given out: the most during the prefill
(peak) and at the last token (steady), blocks times bytes per block. Prompts longer than --computed-tokens are scheduled
and accounted in the same way, but no model runs (rows say so). --vllm: a Python that has vLLM, left out if not given.
Without MODEL_DIR it takes the demo model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.requests import RequestState

from looseleaf import CacheConfig, CacheManager, LayerGroup
from looseleaf.cli.machine import provenance
from looseleaf.engine.config import EngineConfig
from looseleaf.engine.engine import Engine
from looseleaf.engine.request import GenerationRequest
from looseleaf.engine.runner import ModelInfo, StepBatch, StepOutput
from looseleaf.engine.sampling import SamplingParams
from looseleaf.hf.demo_model import demo_model_dir
from looseleaf.hf.loading import set_num_threads
from looseleaf.hf.runner import HFRunner
from looseleaf.testing.fake_tokenizer import FakeTokenizer

OUTPUT_TOKENS = 8
BLOCK_TOKENS, PAGE_TOKENS = 16, 256


class Observed:
    """A `ModelRunner` that notes at each step what the sequence holds; `runner` None computes nothing."""

    def __init__(self, info: ModelInfo, runner: HFRunner | None, cache: CacheManager) -> None:
        self.info, self._runner, self._cache = info, runner, cache
        self.held_blocks: list[int] = []

    def execute(self, batch: StepBatch) -> StepOutput:
        """Count the blocks in the tables of the step, which must be all that are held."""
        named = {int(block) for group in batch.groups for table in group.block_tables for block in table.ravel()}
        held = self._cache.stats().active_blocks
        if len(named) != held:
            raise RuntimeError(f"{held} blocks are held but the step names {len(named)}")
        self.held_blocks.append(held)
        if self._runner is not None:
            return self._runner.execute(batch)
        num_sampled = len(batch.sampled)
        return StepOutput(np.full(num_sampled, 65, np.int64), (None,) * num_sampled)

    def resize(self, *_: object) -> None:
        """Not asked for here."""
        raise RuntimeError("nobody resizes here")


def serve_here(info: ModelInfo, runner: HFRunner | None, num_blocks: int, prompt: np.ndarray, step: int) -> list[int]:
    """Blocks held at each step of one request in our engine; the last is at the last token."""
    num_pages = num_blocks * BLOCK_TOKENS // PAGE_TOKENS
    cache = CacheManager(CacheConfig(num_pages, PAGE_TOKENS, BLOCK_TOKENS, groups=info.groups))
    observed = Observed(info, runner, cache)
    engine = Engine(cache, observed, FakeTokenizer(), EngineConfig(max_step_tokens=step))
    engine.add(GenerationRequest("r", prompt, SamplingParams(OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    return observed.held_blocks


def ours(source: str, lengths: list[int], computed: int, step: int) -> list[dict[str, Any]]:
    """After (layer groups) and before (all layers keep everything, reserved at admission)."""
    num_blocks = 8 * -(-max(lengths) // PAGE_TOKENS) * PAGE_TOKENS // BLOCK_TOKENS
    rows = []
    with HFRunner.load(source, num_blocks=num_blocks, block_tokens=BLOCK_TOKENS, dtype="bfloat16") as runner:
        block_bytes = runner.memory.bytes_per_block
        plain = replace(runner.info, groups=(LayerGroup("full"),))
        num_lanes = sum(group.num_lanes for group in runner.info.groups)
        for length in lengths:
            prompt = tokens(length)
            before = serve_here(plain, None, num_blocks, prompt, step)
            rows.append(
                row("looseleaf, last release", BLOCK_TOKENS, length, before, block_bytes * num_lanes, "scheduled")
            )
            real = runner if length <= computed else None
            after = serve_here(runner.info, real, num_blocks, prompt, step)
            rows.append(row("looseleaf", BLOCK_TOKENS, length, after, block_bytes, "computed" if real else "scheduled"))
    return rows


def theirs(
    model: PreTrainedModel, lengths: list[int], computed: int, step: int, page: int | None
) -> list[dict[str, Any]]:
    """transformers' `generate_batch`, its own page size if `page` is None."""
    rows = []
    for length in lengths:
        settings = ContinuousBatchingConfig(num_blocks=2 * length // (page or 256) + 8, max_batch_tokens=step)
        if page is not None:
            settings.page_size = page
        held = (computed_there if length <= computed else scheduled_there)(model, tokens(length), settings)
        kind = "computed" if length <= computed else "scheduled"
        rows.append(row("transformers continuous batching", settings.page_size, length, held, 1, kind))
    return rows


def bytes_of(cache: PagedAttentionCache, request_id: str) -> int:
    """Bytes of all blocks that a request has in transformers' cache."""
    allocators = cache.cache_allocators.values()
    return sum(len(one.block_table.get(request_id, [])) * one.bytes_per_block for one in allocators)


def computed_there(model: PreTrainedModel, prompt: np.ndarray, settings: ContinuousBatchingConfig) -> list[int]:
    """Bytes held after each allocation of a real run."""
    held: list[int] = []
    allocate = PagedAttentionCache.can_store_request_tokens

    def watched(cache: PagedAttentionCache, state: RequestState, num_tokens: int, dry_run: bool = False) -> bool:
        done = allocate(cache, state, num_tokens, dry_run)
        if done and not dry_run:
            held.append(bytes_of(cache, state.request_id))
        return done

    PagedAttentionCache.can_store_request_tokens = watched
    try:
        generation = GenerationConfig(max_new_tokens=OUTPUT_TOKENS, do_sample=False, eos_token_id=-1)
        answers = model.generate_batch([prompt.tolist()], generation, continuous_batching_config=settings)
        model.destroy_cached_continuous_batching_manager()
    finally:
        PagedAttentionCache.can_store_request_tokens = allocate
    (answer,) = answers.values()
    if answer.error or len(answer.generated_tokens) != OUTPUT_TOKENS:
        raise RuntimeError(f"transformers gave {len(answer.generated_tokens)} tokens: {answer.error}")
    return held


def scheduled_there(model: PreTrainedModel, prompt: np.ndarray, settings: ContinuousBatchingConfig) -> list[int]:
    """Bytes held after each allocation, in the real cache object, without running the model."""
    settings.max_memory_percent = settings.max_memory_percent or 0.9
    cache = PagedAttentionCache(
        model.config.get_text_config(), settings, "cpu", DistributedHelper(None, None), model.dtype, True
    )
    state = RequestState("r", prompt.tolist())
    held = []
    while state.position_offset < len(prompt) + OUTPUT_TOKENS - 1:
        left = len(prompt) - state.position_offset
        num_tokens = min(left, settings.max_batch_tokens) if left > 0 else 1
        if not cache.can_store_request_tokens(state, num_tokens):
            raise RuntimeError("transformers' cache is too small")
        state.position_offset += num_tokens
        held.append(bytes_of(cache, "r"))
    return held


def vllm_rows(
    python: str, source: str, lengths: list[int], computed: int, step: int, block: int
) -> list[dict[str, Any]]:
    """vLLM in a process of its own Python."""
    command = [python, str(Path(__file__).with_name("memory_vllm.py")), source, "--block-tokens", str(block)]
    command += ["--step-tokens", str(step), "--output-tokens", str(OUTPUT_TOKENS), "--computed-tokens", str(computed)]
    done = subprocess.run(
        [*command, "--lengths", *map(str, lengths)], capture_output=True, text=True, check=False, timeout=3600
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"version"')]
    if len(found) != len(lengths):
        raise RuntimeError(f"vLLM failed: {done.stderr[-2000:]}")
    return [
        row(
            f"vLLM {one['version']}",
            one["block_tokens"],
            one["length"],
            one["held_blocks"],
            one["block_bytes"],
            one["kind"],
        )
        | {"groups": one["groups"]}
        for one in found
    ]


def row(system: str, block: int, length: int, held: list[int], block_bytes: int, kind: str) -> dict[str, Any]:
    """One line of the table: `held` at each step, in blocks of `block_bytes`."""
    return {
        "system": system,
        "block_tokens": block,
        "length": length,
        "peak_bytes": max(held) * block_bytes,
        "steady_bytes": held[-1] * block_bytes,
        "run": kind,
    }


def tokens(length: int) -> np.ndarray:
    """A prompt of random tokens, the same for all."""
    return np.random.default_rng(length).integers(1000, 200_000, length).astype(np.int32)


def needed_bytes(model: PreTrainedModel, length: int) -> int:
    """What attention can still see of `length` tokens and the output, to the token: no system can hold less."""
    config = model.config.get_text_config()
    per_layer = 2 * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    num_tokens = length + OUTPUT_TOKENS - 1
    return sum(
        per_layer * (num_tokens if kind == "full_attention" else min(num_tokens, config.sliding_window))
        for kind in kinds
    )


def main() -> None:
    """Measure all sides, print the table, save the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--computed-tokens", type=int, default=4096, help="longest prompt that is really computed")
    parser.add_argument("--step-tokens", type=int, default=2048, help="most tokens computed in one step")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    set_num_threads(arguments.threads)
    source = arguments.model or str(demo_model_dir())
    lengths, computed, step = arguments.lengths, arguments.computed_tokens, arguments.step_tokens
    rows = ours(source, lengths, computed, step)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    for page in (None, BLOCK_TOKENS):
        rows += theirs(model, lengths, computed, step, page)
    if arguments.vllm:
        for block in (0, BLOCK_TOKENS):
            rows += vllm_rows(arguments.vllm, source, lengths, computed, step, block)
    layer_bytes = needed_bytes(model, 1 - OUTPUT_TOKENS + 1) // model.config.get_text_config().num_hidden_layers
    for one in rows:
        needed = needed_bytes(model, one["length"])
        one |= {"needed_bytes": needed, "steady_by_needed": round(one["steady_bytes"] / needed, 4)}
        one["steady_token_layers"] = one["steady_bytes"] // layer_bytes
    rows.sort(key=lambda one: one["length"])
    print(f"{'tokens':>6} {'system':<34} {'block':>5} {'peak MiB':>9} {'steady MiB':>10} {'/ needed':>8}  run")
    for one in rows:
        print(
            f"{one['length']:>6} {one['system']:<34} {one['block_tokens']:>5} {one['peak_bytes'] / 2**20:>9.2f} "
            f"{one['steady_bytes'] / 2**20:>10.2f} {one['steady_by_needed']:>8.3f}  {one['run']}"
        )
    result = {
        "provenance": provenance(),
        "model": Path(source).name,
        "dtype": str(model.dtype),
        "step_tokens": step,
        "output_tokens": OUTPUT_TOKENS,
        "layer_bytes_per_token": layer_bytes,
        "rows": rows,
    }
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
