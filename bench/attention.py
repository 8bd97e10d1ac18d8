"""Milliseconds of attention per layer at decode: gathered, in place row by row, in place with shared runs read once.

    python bench/attention.py [--batch 32] [--context-tokens 4096] [--private-tokens 64] [--output FILE]

One layer's K and V in blocks in random order, as the engine leaves them. *shared*: all of the context but the last
private tokens is the same blocks for every row; *unshared*: nothing is. Shapes: K/V heads x query heads of each x
numbers. All sides take turns, round by round, on the same memory; median and least of the rounds are given, because
others may use the machine. Working out who shares what is timed apart: once per step and group, not per layer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from looseleaf import LayerGroup
from looseleaf.cli.machine import provenance
from looseleaf.engine.runner import GroupBatch, StepBatch
from looseleaf.hf import cpu_backend
from looseleaf.hf.attention_backend import AttentionBackend, AttentionCall, GatherBackend
from looseleaf.hf.cpu_backend import CpuBackend, backend_for
from looseleaf.hf.loading import DTYPES, set_num_threads
from looseleaf.hf.runner import group_tokens_for
from looseleaf.hf.step_plan import StepPlan, slots_of
from looseleaf.tensors import KVLayout, KVMemory, LayerShape, plan_lanes

BLOCK_TOKENS = 16
CPU = torch.device("cpu")


class RowByRow:
    """The compiled backend as if nothing were shared."""

    def __init__(self, backend: CpuBackend) -> None:
        self._backend = backend

    def attend(self, call: AttentionCall, plan: StepPlan, memory: KVMemory) -> torch.Tensor:
        before, cpu_backend.MIN_SAVED_TOKENS = cpu_backend.MIN_SAVED_TOKENS, 1 << 40
        try:
            return self._backend.attend(call, plan, memory)
        finally:
            cpu_backend.MIN_SAVED_TOKENS = before


def memory_for(shape: LayerShape, dtype: torch.dtype, num_blocks: int) -> KVMemory:
    lanes = plan_lanes([LayerGroup()], [shape])
    memory = KVMemory(KVLayout((shape,), lanes, dtype, BLOCK_TOKENS), num_blocks=num_blocks, device=CPU)
    for tensor in memory.in_place(0) or ():
        for rows in tensor.split(1 << 14):
            rows.copy_(torch.randn(rows.shape))
    return memory


def plan_for(memory: KVMemory, batch: int, context: int, private: int, is_shared: bool) -> StepPlan:
    """A decode step of `batch` rows behind `context` tokens each."""
    per_row = context // BLOCK_TOKENS + 1
    order = np.random.default_rng(0).permutation(memory.num_blocks)[: batch * per_row]
    tables = order.reshape(batch, per_row).astype(np.int32)
    if is_shared:
        common = (context - private) // BLOCK_TOKENS
        tables[:, :common] = tables[0, :common]
    slots = [slots_of(table[:, None], 0, np.array([context]), BLOCK_TOKENS) for table in tables]
    step = GroupBatch(np.concatenate(slots, axis=1), tuple(t[:, None] for t in tables), np.zeros(batch, np.int32))
    rows = StepBatch(
        request_ids=tuple(map(str, range(batch))),
        token_ids=np.zeros(batch, np.int64),
        positions=np.full(batch, context),
        query_starts=np.arange(batch + 1, dtype=np.int32),
        num_context_tokens=np.full(batch, context, dtype=np.int32),
        groups=(step,),
        sampled=np.arange(batch, dtype=np.int32),
        sampling=(),
    )
    limit = group_tokens_for(memory)
    return StepPlan(rows, memory.layout.lanes, BLOCK_TOKENS, CPU, torch.float32, keep_exact=True, group_tokens=limit)


def in_turns(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """Median and least milliseconds of each side, in turns, after one run of each."""
    for call in sides.values():
        call()
    took: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, call in sides.items():
            started = time.perf_counter()
            call()
            took[side].append((time.perf_counter() - started) * 1e3)
    return {s: {"median": round(statistics.median(t), 3), "least": round(min(t), 3)} for s, t in took.items()}


def measure(shape: LayerShape, sharing: int, dtype: torch.dtype, options: argparse.Namespace) -> list[dict[str, Any]]:
    backend = backend_for(CPU, dtype)
    if not isinstance(backend, CpuBackend):
        raise SystemExit("numba is needed for this comparison")
    batch, context = options.batch, options.context_tokens
    memory = memory_for(shape, dtype, batch * (context // BLOCK_TOKENS + 1))
    num_heads = shape.num_kv_heads * sharing
    new = torch.zeros(batch, shape.num_kv_heads, shape.key_dim)
    call = AttentionCall(0, torch.randn(batch, num_heads, shape.key_dim), new, new, None, None, None)
    rows = []
    for is_shared in (True, False):
        backends: dict[str, AttentionBackend] = {
            "gather": GatherBackend(),
            "in_place": RowByRow(backend),
            "shared_once": backend,
        }
        sides: dict[str, Callable[[], object]] = {}
        for name, each in backends.items():
            plan = plan_for(memory, batch, context, options.private_tokens, is_shared)
            sides[name] = lambda each=each, plan=plan: each.attend(call, plan, memory)
        wanted = sides["gather"]()
        for name, side in sides.items():
            torch.testing.assert_close(side(), wanted, atol=1e-4, rtol=1e-3, msg=f"{name} is wrong")
        sides["plan"] = lambda is_shared=is_shared: backend._record(
            plan_for(memory, batch, context, options.private_tokens, is_shared).for_layer(0), BLOCK_TOKENS, 32
        )
        took = in_turns(sides, options.rounds)
        heads = f"{shape.num_kv_heads}x{sharing}x{shape.key_dim}"
        rows.append({"shape": heads, "dtype": str(dtype), "context": "shared" if is_shared else "unshared", **took})
        told = "  ".join(f"{side} {ms['median']:8.2f} (least {ms['least']:.2f})" for side, ms in took.items())
        print(f"{heads:<10} {dtype!s:<15} {rows[-1]['context']:<9} ms: {told}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context-tokens", type=int, default=4096)
    parser.add_argument("--private-tokens", type=int, default=64)
    parser.add_argument("--shapes", nargs="+", default=["1x4x256", "4x4x64"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=[*DTYPES])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    threads = set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for text in options.shapes:
            heads, sharing, dim = map(int, text.split("x"))
            for dtype in options.dtypes:
                rows += measure(LayerShape(heads, dim, dim), sharing, DTYPES[dtype], options)
    result = {
        "batch": options.batch,
        "context_tokens": options.context_tokens,
        "private_tokens": options.private_tokens,
        "rounds": options.rounds,
        "threads": threads,
        "milliseconds_per_layer": rows,
        **provenance(),
    }
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
