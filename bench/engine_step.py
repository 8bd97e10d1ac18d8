"""What the engine adds to a decode step of 256 requests, in milliseconds, over a model that costs nothing.

    python bench/engine_step.py

Prints JSON: medians and 95th percentiles of scheduling (plan and batch) and of the whole step (with commit and text),
for greedy and for sampled requests, for a model with one full lane and five lanes of window layers, and with 10,000
requests that wait. `schedule_engine`: of scheduling what is not spent in the cache's `append_many`.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np

from looseleaf.cli.machine import provenance
from looseleaf.core.config import LayerGroup
from looseleaf.engine.config import EngineConfig
from looseleaf.engine.runner import StepBatch, StepOutput
from looseleaf.testing.engine_kit import EngineKit, sample_prompt

NUM_ROWS = 256
NUM_STEPS = 300


def free_model(batch: StepBatch) -> StepOutput:
    """The same token for everybody."""
    num_sampled = len(batch.sampled)
    return StepOutput(np.full(num_sampled, 65, np.int64), (None,) * num_sampled)


def measure(params: dict[str, Any], groups: tuple[LayerGroup, ...], num_waiting: int = 0) -> dict[str, float]:
    """Figures of `NUM_STEPS` decode steps with these sampling parameters and layer groups."""
    config = EngineConfig(max_running_requests=NUM_ROWS, max_step_tokens=100_000, share_in_flight=False)
    num_blocks = 16_384 * sum(group.num_lanes for group in groups)
    kit = EngineKit(num_blocks, block_tokens=16, blocks_per_page=16, groups=groups, config=config)
    kit.runner.execute = free_model  # type: ignore[method-assign]
    for number in range(NUM_ROWS):
        kit.add(f"r{number}", sample_prompt(150 + number % 100, seed=number), NUM_STEPS + 50, **params)
    kit.engine.step()
    for number in range(num_waiting):
        kit.add(f"w{number}", sample_prompt(30, seed=number % 50), 8)
    append_many, spent = kit.cache.append_many, []

    def timed(leases: Any, tokens: Any) -> Any:
        start = time.perf_counter()
        slots = append_many(leases, tokens)
        spent.append(time.perf_counter() - start)
        return slots

    kit.cache.append_many = timed  # type: ignore[method-assign]
    for _ in range(NUM_STEPS):
        kit.engine.step()
    steps = kit.observer.named("on_step")[1:]
    for step, seconds in zip(steps, spent, strict=True):
        step["schedule_engine_seconds"] = step["schedule_seconds"] - seconds
    figures = {}
    for key in ("schedule_seconds", "schedule_engine_seconds", "commit_seconds", "seconds"):
        median, high = np.percentile([1000 * step[key] for step in steps], [50, 95])
        name = key.removesuffix("seconds").rstrip("_") or "step"
        figures |= {f"{name}_p50_ms": round(median, 3), f"{name}_p95_ms": round(high, 3)}
    return figures


if __name__ == "__main__":
    full, window = LayerGroup("full"), LayerGroup("window", window_tokens=512, num_lanes=5)
    figures = {
        "greedy": measure({}, (full,)),
        "sampled": measure({"temperature": 1.0, "seed": 3}, (full,)),
        "greedy, full + window": measure({}, (full, window)),
        "greedy, 10,000 waiting": measure({}, (full,), 10_000),
    }
    print(json.dumps({"provenance": provenance(), **figures}, indent=2))
