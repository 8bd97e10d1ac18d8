"""The figures of one run, and what they say side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from looseleaf.cli.demo.load import Outcome
from looseleaf.cli.demo.recorder import MemoryRecorder


@dataclass(frozen=True)
class RunFigures:
    """What one run of the workload gave. Shares from 0 to 1; times in seconds, as the clients saw them.

    waste: see `MemoryRecorder`. hit_rate: cached prompt tokens / prompt tokens. ttft: time to first token, by the kind
    of request. prefill_tokens: prompt tokens computed. running_requests: at the same time, on average.
    """

    requests: int
    seconds: float
    requests_per_second: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    hit_rate: float
    prefill_tokens: int
    waste: float
    running_requests: float
    preemptions: int
    ttft_short_p50_seconds: float
    ttft_short_p95_seconds: float
    ttft_long_p50_seconds: float
    ttft_long_p95_seconds: float
    ttft_one_off_p50_seconds: float
    ttft_one_off_p95_seconds: float


@dataclass(frozen=True)
class Run:
    """One run: its answers in the order of the workload, and its figures."""

    outcomes: tuple[Outcome, ...]
    figures: RunFigures


def figures_of(outcomes: Sequence[Outcome], seconds: float, recorder: MemoryRecorder) -> RunFigures:
    """The figures of a run that took `seconds`."""
    prompt_tokens = sum(outcome.num_prompt_tokens for outcome in outcomes)
    cached_tokens = sum(outcome.num_cached_tokens for outcome in outcomes)
    times = {
        kind: [outcome.first_token_seconds for outcome in outcomes if outcome.request.kind == kind]
        for kind in ("short", "long", "one-off")
    }
    return RunFigures(
        requests=len(outcomes),
        seconds=seconds,
        requests_per_second=len(outcomes) / seconds,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        output_tokens=sum(outcome.num_output_tokens for outcome in outcomes),
        hit_rate=cached_tokens / prompt_tokens,
        prefill_tokens=recorder.num_prefill_tokens,
        waste=recorder.waste,
        running_requests=recorder.mean_running_requests,
        preemptions=recorder.num_preemptions,
        ttft_short_p50_seconds=percentile(times["short"], 50),
        ttft_short_p95_seconds=percentile(times["short"], 95),
        ttft_long_p50_seconds=percentile(times["long"], 50),
        ttft_long_p95_seconds=percentile(times["long"], 95),
        ttft_one_off_p50_seconds=percentile(times["one-off"], 50),
        ttft_one_off_p95_seconds=percentile(times["one-off"], 95),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile of `values`, linear between neighbours; NaN for none."""
    return float(np.percentile(values, percent)) if values else float("nan")


def num_different_answers(plain: Run, looseleaf: Run) -> int:
    """Requests whose texts differ between the two runs."""
    pairs = zip(plain.outcomes, looseleaf.outcomes, strict=True)
    return sum(one.text != other.text for one, other in pairs)
