"""One step of a model on blocks against the same step of plain transformers: prefill tokens/s, decode ms/step.

    python bench/attention_step.py [--model DIR] [--dtype auto] [--context-tokens 512] [--output FILE]

Both sides run in the same process, on the same weights, alternately; the median of the repeats
counts. Plain transformers runs its forward pass with its own cache (that of `generate`, without the overhead of
generate's loop) and greedy choice; looseleaf runs `HFRunner.execute`. Without --model it takes the demo model.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from looseleaf.cli.machine import provenance
from looseleaf.engine.runner import StepBatch
from looseleaf.engine.sampling import SamplingParams, SamplingRow
from looseleaf.hf.demo_model import demo_model_dir
from looseleaf.hf.loading import load_model, resolve_device, resolve_dtype, set_num_threads
from looseleaf.hf.runner import HFRunner

BLOCK_TOKENS = 16
GREEDY = SamplingRow(SamplingParams(temperature=0.0), 0.0, np.zeros(0, np.int32), np.zeros(0, np.int32))


def step_batch(
    tokens: np.ndarray, num_context: int, tables: np.ndarray, copies: tuple[tuple[int, int], ...] = ()
) -> StepBatch:
    """A step of equal sequences: `tokens` [S, q] behind `num_context` tokens in blocks `tables` [S, n]."""
    num_sequences, num_query = tokens.shape
    at = np.arange(num_context, num_context + num_query)
    slots = tables[:, at // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS + at % BLOCK_TOKENS
    return StepBatch(
        request_ids=tuple(str(i) for i in range(num_sequences)),
        token_ids=tokens.reshape(-1).astype(np.int64),
        positions=np.tile(at, num_sequences),
        slots=slots.reshape(-1),
        query_starts=(np.arange(num_sequences + 1) * num_query).astype(np.int32),
        num_context_tokens=np.full(num_sequences, num_context, dtype=np.int32),
        block_tables=tuple(tables.astype(np.int32)),
        sampled=np.arange(num_sequences, dtype=np.int32),
        sampling=(GREEDY,) * num_sequences,
        copies=copies,
    )


class Paged:
    """looseleaf's side: blocks in random order, so that nothing is contiguous by luck."""

    def __init__(self, runner: HFRunner, context: np.ndarray, max_batch: int) -> None:
        self.runner, self.context = runner, context
        per_sequence = len(context) // BLOCK_TOKENS + 1
        order = np.random.default_rng(0).permutation(per_sequence * max_batch)
        self.tables = order.reshape(max_batch, per_sequence)

    def prefill(self) -> None:
        self.runner.execute(step_batch(self.context[None], 0, self.tables[:1]))

    def spread(self) -> None:
        """Give every sequence the context of the first."""
        self.prefill()
        pairs = [(int(a), int(b)) for row in self.tables[1:] for a, b in zip(self.tables[0], row, strict=True)]
        self.runner.memory.copy_blocks(pairs)

    def decode(self, batch_size: int) -> None:
        tokens = np.full((batch_size, 1), 7)
        self.runner.execute(step_batch(tokens, len(self.context), self.tables[:batch_size]))


class Plain:
    """transformers' side: forward passes with its own cache."""

    def __init__(self, model: PreTrainedModel, context: np.ndarray) -> None:
        self.model, self.ids = model, torch.from_numpy(context)[None].to(model.device)
        self.cache: DynamicCache | None = None

    @torch.inference_mode()
    def prefill(self) -> None:
        cache = DynamicCache(config=self.model.config)
        self.model(self.ids, cache=cache, use_cache=True, logits_to_keep=1).logits.argmax(dim=-1)
        self.cache = cache

    def spread(self, batch_size: int) -> DynamicCache:
        if self.cache is None:
            self.prefill()
        cache = copy.deepcopy(self.cache)
        cache.batch_repeat_interleave(batch_size)
        return cache

    @torch.inference_mode()
    def decode(self, cache: DynamicCache, batch_size: int) -> None:
        ids = torch.full((batch_size, 1), 7, device=self.model.device)
        self.model(ids, cache=cache, use_cache=True, logits_to_keep=1).logits.argmax(dim=-1)


def in_turns(sides: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median seconds of each side, measured alternately after one run of each to warm up."""
    for call in sides.values():
        call()
    measured: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(repeats):
        for side, call in sides.items():
            started = time.perf_counter()
            call()
            measured[side].append(time.perf_counter() - started)
    return {side: statistics.median(times) for side, times in measured.items()}


def measure(plain: Plain, paged: Paged, batch_sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    """One row per task; both sides in turns."""
    took = in_turns({"plain": plain.prefill, "looseleaf": paged.prefill}, repeats)
    rate = {side: round(len(paged.context) / time, 1) for side, time in took.items()}
    rows: list[dict[str, Any]] = [{"task": f"prefill {len(paged.context)} tokens", "unit": "tokens/s", **rate}]
    paged.spread()
    for size in batch_sizes:
        cache = plain.spread(size)
        took = in_turns(
            {
                "plain": lambda cache=cache, size=size: plain.decode(cache, size),
                "looseleaf": lambda size=size: paged.decode(size),
            },
            repeats,
        )
        milliseconds = {side: round(time * 1e3, 2) for side, time in took.items()}
        rows.append({"task": f"decode, batch {size}", "unit": "ms/step", **milliseconds})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a model (default: the demo model)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context-tokens", type=int, default=512)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    threads = set_num_threads(options.threads)
    source = options.model or demo_model_dir()
    model = load_model(source, resolve_device(options.device), resolve_dtype(options.dtype), None)
    context = np.random.default_rng(1).integers(0, model.config.get_text_config().vocab_size, options.context_tokens)
    blocks = (options.context_tokens // BLOCK_TOKENS + 1) * max(options.batch_sizes)
    plain = Plain(copy.deepcopy(model), context)
    with HFRunner.load(model, num_blocks=blocks, block_tokens=BLOCK_TOKENS, num_threads=threads) as runner:
        rows = measure(plain, Paged(runner, context, max(options.batch_sizes)), options.batch_sizes, options.repeats)
    result = {
        "dtype": str(model.dtype),
        "device": str(model.device),
        "threads": threads,
        "context_tokens": options.context_tokens,
        "plain_attention": plain.model.config._attn_implementation,
        "rows": rows,
        **provenance(),
    }
    for row in rows:
        print(
            f"{row['task']:<24} plain {row['plain']:>9} {row['unit']:<9} looseleaf {row['looseleaf']:>9} {row['unit']}"
        )
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
