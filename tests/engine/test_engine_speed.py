"""Scheduling is array work: what a decode step costs besides the model."""

from __future__ import annotations

import numpy as np
import pytest

from looseleaf.engine.config import EngineConfig
from looseleaf.engine.runner import StepOutput
from looseleaf.testing.engine_kit import EngineKit
from looseleaf.testing.engine_kit import sample_prompt as prompt_of

NUM_ROWS = 256


def decoding_kit():
    """256 requests, all decoding, over a model that costs nothing."""
    config = EngineConfig(max_running_requests=NUM_ROWS, max_step_tokens=100_000)
    kit = EngineKit(num_blocks=16_384, block_tokens=16, blocks_per_page=16, config=config)
    kit.runner.execute = lambda batch: StepOutput(
        np.full(len(batch.sampled), 65, np.int64), (None,) * len(batch.sampled)
    )
    for i in range(NUM_ROWS):
        kit.add(f"r{i}", prompt_of(150 + i % 100, seed=i), 500)
    kit.engine.step()
    assert kit.engine.num_running == NUM_ROWS
    return kit


def test_a_decode_step_is_two_calls_of_the_cache():
    """However many rows decode, tokens are appended in one call and committed in one; no look-up, no reservation."""
    kit = decoding_kit()
    calls = []
    for name in ("lease", "match", "stats", "append_many", "commit_many", "maintain"):
        method = getattr(kit.cache, name)
        setattr(
            kit.cache, name, lambda *args, _name=name, _method=method, **kw: calls.append(_name) or _method(*args, **kw)
        )
    kit.engine.step()
    assert calls == ["maintain", "append_many", "commit_many"]


def test_scheduling_time_of_256_decodes(record_property):
    """A plan and batch of 256 decodes takes about 1 ms; the limit leaves room for a busy machine."""
    kit = decoding_kit()
    for _ in range(50):
        kit.engine.step()
    steps = kit.observer.named("on_step")[1:]
    milliseconds = sorted(1000 * step["schedule_seconds"] for step in steps)
    record_property("schedule_ms_p50", milliseconds[len(milliseconds) // 2])
    assert milliseconds[0] < 10
    assert all(step["num_scheduled_tokens"] == NUM_ROWS for step in steps)


@pytest.mark.heavy
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3}])
def test_print_step_times(params, capsys):
    """Prints medians for the notes; run it with -s on a quiet machine."""
    kit = decoding_kit()
    for i in range(NUM_ROWS):
        kit.engine.abort(f"r{i}")
    kit.engine.step()
    for i in range(NUM_ROWS):
        kit.add(f"s{i}", prompt_of(150 + i % 100, seed=i), 500, **params)
    for _ in range(300):
        kit.engine.step()
    steps = kit.observer.named("on_step")[2:]
    with capsys.disabled():
        for key in ("schedule_seconds", "seconds"):
            values = [1000 * step[key] for step in steps]
            median, high = np.percentile(values, [50, 95])
            print(f"\n{params or 'greedy'}: {key} p50 {median:.2f} ms, p95 {high:.2f} ms")
