"""One step of a model on blocks against the same step of plain transformers: prefill tokens/s, decode ms/step.

    python bench/attention_step.py [--model DIR] [--dtype auto] [--context-tokens 512] [--shared] [--output FILE]

Three sides in one process, on the same weights, in turns; the median of the repeats counts, the best is told too,
because others may use the machine. *plain*: transformers' forward pass with its own cache (that of `generate`, without
the overhead of generate's loop) and greedy choice. *before*: `HFRunner.execute` with the reference attention and plain
linear layers. *looseleaf*: as it is served. With --shared all sequences have all whole blocks of the context in common;
without, none. Without --model it takes the demo model.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from looseleaf.cli.machine import provenance
from looseleaf.engine.runner import GroupBatch, StepBatch
from looseleaf.engine.sampling import SamplingParams, SamplingRow
from looseleaf.hf.attention_backend import GatherBackend
from looseleaf.hf.demo_model import demo_model_dir
from looseleaf.hf.loading import load_model, resolve_device, resolve_dtype, set_num_threads
from looseleaf.hf.runner import HFRunner
from looseleaf.hf.step_plan import oldest_visible, slots_of

BLOCK_TOKENS = 16
GREEDY = SamplingRow(SamplingParams(temperature=0.0), 0.0, np.zeros(0, np.int32), np.zeros(0, np.int32))


class Paged:
    """looseleaf's side: blocks in random order, so that nothing is contiguous by luck. Tables [S, blocks, lanes]."""

    def __init__(self, runner: HFRunner, context: np.ndarray, max_batch: int, is_shared: bool) -> None:
        self.runner, self.context = runner, context
        lanes = runner.memory.layout.lanes
        whole = len(context) // BLOCK_TOKENS
        order = np.random.default_rng(0).permutation((whole + 1) * max_batch * lanes.num_lanes)
        self.tables = order.reshape(max_batch, whole + 1, lanes.num_lanes).astype(np.int32)
        if is_shared:
            self.tables[:, :whole] = self.tables[0, :whole]
        self.groups = [(group, group.num_lanes) for group in lanes.groups]

    def batch(self, tokens: np.ndarray, num_context: int) -> StepBatch:
        """A step of equal sequences: `tokens` [S, q] behind `num_context` tokens."""
        num_sequences, num_query = tokens.shape
        at = np.arange(num_context, num_context + num_query)
        groups, lane = [], 0
        for group, num_lanes in self.groups:
            first = int(oldest_visible(group, num_context)) // BLOCK_TOKENS
            tables = self.tables[:num_sequences, :, lane : lane + num_lanes]
            slots = [slots_of(table, 0, at, BLOCK_TOKENS) for table in tables]
            firsts = np.full(num_sequences, first, dtype=np.int32)
            groups.append(GroupBatch(np.concatenate(slots, axis=1), tuple(t[first:] for t in tables), firsts))
            lane += num_lanes
        return StepBatch(
            request_ids=tuple(str(i) for i in range(num_sequences)),
            token_ids=tokens.reshape(-1).astype(np.int64),
            positions=np.tile(at, num_sequences),
            query_starts=(np.arange(num_sequences + 1) * num_query).astype(np.int32),
            num_context_tokens=np.full(num_sequences, num_context, dtype=np.int32),
            groups=tuple(groups),
            sampled=np.arange(num_sequences, dtype=np.int32),
            sampling=(GREEDY,) * num_sequences,
        )

    def prefill(self) -> None:
        self.runner.execute(self.batch(self.context[None], 0))

    def spread(self) -> None:
        """Give every sequence the context of the first."""
        self.prefill()
        pairs = [
            (int(a), int(b))
            for table in self.tables[1:]
            for a, b in zip(self.tables[0].reshape(-1), table.reshape(-1), strict=True)
            if a != b
        ]
        self.runner.memory.copy_blocks(pairs)

    def decode(self, batch_size: int) -> None:
        self.runner.execute(self.batch(np.full((batch_size, 1), 7), len(self.context)))


class Plain:
    """transformers' side: forward passes with its own cache."""

    def __init__(self, model: PreTrainedModel, context: np.ndarray) -> None:
        self.model, self.ids = model, torch.from_numpy(context)[None].to(model.device)
        self.cache: DynamicCache | None = None

    @torch.inference_mode()
    def prefill(self) -> None:
        cache = DynamicCache(config=self.model.config)
        self.model(self.ids, cache=cache, use_cache=True, logits_to_keep=1).logits.argmax(dim=-1).cpu()
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
        self.model(ids, cache=cache, use_cache=True, logits_to_keep=1).logits.argmax(dim=-1).cpu()


def in_turns(sides: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each side, measured in turns after one run of each to warm up."""
    for call in sides.values():
        call()
    measured: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(repeats):
        for side, call in sides.items():
            started = time.perf_counter()
            call()
            measured[side].append(time.perf_counter() - started)
    return measured


def measure(plain: Plain, paged: dict[str, Paged], batch_sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    """One row per task; all sides in turns."""
    num_tokens = len(plain.ids[0])
    took = in_turns({"plain": plain.prefill, **{side: each.prefill for side, each in paged.items()}}, repeats)
    rows: list[dict[str, Any]] = [{"task": f"prefill {num_tokens} tokens", "unit": "tokens/s", "sides": {}}]
    for side, seconds in took.items():
        rates = {"median": statistics.median(seconds), "best": min(seconds)}
        rows[0]["sides"][side] = {name: round(num_tokens / value, 1) for name, value in rates.items()}
    for each in paged.values():
        each.spread()
    for size in batch_sizes:
        cache = plain.spread(size)
        sides: dict[str, Callable[[], None]] = {"plain": lambda cache=cache, size=size: plain.decode(cache, size)}
        sides.update({side: lambda each=each, size=size: each.decode(size) for side, each in paged.items()})
        row: dict[str, Any] = {"task": f"decode, batch {size}", "unit": "ms/step", "sides": {}}
        for side, seconds in in_turns(sides, repeats).items():
            row["sides"][side] = {
                "median": round(statistics.median(seconds) * 1e3, 2),
                "best": round(min(seconds) * 1e3, 2),
            }
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a model (default: the demo model)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context-tokens", type=int, default=512)
    parser.add_argument("--shared", action="store_true", help="all sequences share the whole blocks of the context")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16, 32])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    threads = set_num_threads(options.threads)
    source = options.model or demo_model_dir()
    model = load_model(source, resolve_device(options.device), resolve_dtype(options.dtype), None)
    context = np.random.default_rng(1).integers(0, model.config.get_text_config().vocab_size, options.context_tokens)
    plain = Plain(copy.deepcopy(model), context)
    most = max(options.batch_sizes)
    wishes: dict[str, dict[str, Any]] = {"before": {"backend": GatherBackend(), "pack_linears": False}, "looseleaf": {}}
    with ExitStack() as stack:
        paged: dict[str, Paged] = {}
        for side, wish in wishes.items():
            few = HFRunner.load(
                copy.deepcopy(model),
                num_blocks=1,
                block_tokens=BLOCK_TOKENS,
                self_test=False,
                num_threads=threads,
                **wish,
            )
            runner = stack.enter_context(few)
            lanes = runner.memory.layout.lanes.num_lanes
            runner.resize((options.context_tokens // BLOCK_TOKENS + 1) * most * lanes)
            paged[side] = Paged(runner, context, most, options.shared)
        rows = measure(plain, paged, options.batch_sizes, options.repeats)
    result = {
        "dtype": str(model.dtype),
        "device": str(model.device),
        "threads": threads,
        "context_tokens": options.context_tokens,
        "shared": options.shared,
        "plain_attention": plain.model.config._attn_implementation,
        "rows": rows,
        **provenance(),
    }
    for row in rows:
        told = "  ".join(f"{side} {of['median']:>8} (best {of['best']})" for side, of in row["sides"].items())
        print(f"{row['task']:<22} {row['unit']:<9} {told}")
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
