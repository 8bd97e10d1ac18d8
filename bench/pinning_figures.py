"""What a run of the pinning bench gave: answers as the clients saw them, steps as the engine saw them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from looseleaf.core.manager import CacheManager
from looseleaf.core.pin_record import Pin
from pinning_load import FLOOD, Item, Load


@dataclass(frozen=True)
class Answer:
    """One answered item, in seconds of the run's clock."""

    item: Item
    sent_at: float
    first_token_seconds: float
    seconds: float
    num_cached_tokens: int

    @property
    def ended_at(self) -> float:
        """When it was complete."""
        return self.sent_at + self.seconds


@dataclass(frozen=True)
class Step:
    """One forward pass, at its end."""

    at: float
    seconds: float
    num_running: int
    num_waiting: int
    pinned_blocks: int
    hard_pinned_blocks: int


@dataclass
class StepLog:
    """An engine's observer that keeps every step and passes everything on to `inner`. `clock` as the clients' own."""

    cache: CacheManager
    inner: Any
    clock: Callable[[], float]
    steps: list[Step] = field(default_factory=list)
    preempted_at: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def on_step(self, *, num_running: int, num_waiting: int, seconds: float, **others: Any) -> None:
        """See `EngineObserver`."""
        stats = self.cache.stats()
        step = Step(self.clock(), seconds, num_running, num_waiting, stats.pinned_blocks, stats.hard_pinned_blocks)
        with self.lock:
            self.steps.append(step)
        self.inner.on_step(num_running=num_running, num_waiting=num_waiting, seconds=seconds, **others)

    def on_preempt(self, **values: Any) -> None:
        """See `EngineObserver`."""
        with self.lock:
            self.preempted_at.append(self.clock())
        self.inner.on_preempt(**values)

    def __getattr__(self, name: str) -> Any:
        """What it does not record goes on unseen."""
        return getattr(self.inner, name)


def run_figures(load: Load, answers: Sequence[Answer], log: StepLog) -> dict[str, Any]:
    """The figures of one run: over what is measured, and of the pins over all of it."""
    measured = [answer for answer in answers if answer.item.is_measured]
    start, end = min(answer.sent_at for answer in measured), max(answer.ended_at for answer in measured)
    # While the last requests run out, nobody sends new ones: that is no time of full load.
    last_sent = max(answer.sent_at for answer in measured)
    steps = [step for step in log.steps if start < step.at <= last_sent] or list(log.steps)
    weights = np.array([step.seconds for step in steps])
    running = np.array([step.num_running for step in steps])
    stats, pins = log.cache.stats(), log.cache.pins()
    flood_blocks = log.cache.plan.blocks_for(_mean_tokens(load), _mean_tokens(load))
    prompt_tokens = sum(answer.item.prompt_tokens for answer in measured)
    figures: dict[str, Any] = {
        "requests": len(measured),
        "seconds": round(end - start, 3),
        "requests_per_second": round(len(measured) / (end - start), 3),
        "hit_rate": round(sum(answer.num_cached_tokens for answer in measured) / prompt_tokens, 4),
        "running_mean": round(float(np.average(running, weights=weights)), 2),
        "running_max": int(running.max()),
        "waiting_mean": round(float(np.average([step.num_waiting for step in steps], weights=weights)), 2),
        "preemptions": sum(start < at <= end for at in log.preempted_at),
        "pool_blocks": stats.num_blocks,
        "pinned_blocks_mean": round(float(np.average([step.pinned_blocks for step in steps], weights=weights)), 1),
        "pinned_blocks_max": max(step.pinned_blocks for step in steps),
        "fit": (stats.num_blocks - max(step.hard_pinned_blocks for step in steps)) // flood_blocks,
    }
    for kind in sorted({answer.item.kind for answer in measured}):
        figures[kind] = _kind_figures([answer for answer in measured if answer.item.kind == kind])
    figures["pins"] = _pin_figures(load, answers, log, pins)
    return figures


def _mean_tokens(load: Load) -> int:
    """Prompt and answer of the flood's mean request."""
    lengths = [item.prompt_tokens + item.output_tokens for item in load.items if item.kind == FLOOD]
    return round(float(np.mean(lengths)))


def _kind_figures(answers: Sequence[Answer]) -> dict[str, Any]:
    first = [answer.first_token_seconds for answer in answers]
    whole = [answer.seconds for answer in answers]
    prompt_tokens = sum(answer.item.prompt_tokens for answer in answers)
    return {
        "requests": len(answers),
        "hit_rate": round(sum(answer.num_cached_tokens for answer in answers) / prompt_tokens, 4),
        **{f"ttft_p{p}_seconds": round(float(np.percentile(first, p)), 4) for p in (50, 95)},
        "ttft_mean_seconds": round(float(np.mean(first)), 4),
        **{f"latency_p{p}_seconds": round(float(np.percentile(whole, p)), 4) for p in (50, 95)},
    }


def _pin_figures(load: Load, answers: Sequence[Answer], log: StepLog, pins: Sequence[Pin]) -> dict[str, Any]:
    """What was pinned in all, and how fast: questions asked before the first pin, and before all subjects were held.

    off_target: automatic pins, past or live, shorter than every subject: of something else, or of a part of one.
    """
    automatic = [pin for pin in pins if pin.is_automatic]
    past = [one for one in log.cache.past_pins() if one.pin.is_automatic and one.end != "refused"]
    block_tokens = log.cache.plan.block_tokens
    shortest = (min(load.subjects.values()) - 1) // block_tokens * block_tokens
    made = [*automatic, *(one.pin for one in past)]
    first = next((step.at for step in log.steps if step.pinned_blocks), None)
    asked = [answer for answer in answers if answer.item.kind != FLOOD]
    uses = dict.fromkeys(load.subjects, 0)
    hits_from = {}
    for answer in sorted(asked, key=lambda one: one.sent_at):
        subject = answer.item.subject
        assert subject is not None  # only the flood has none
        uses[subject] += 1
        if answer.num_cached_tokens < answer.item.shared_tokens - 2 * block_tokens:
            hits_from[subject] = uses[subject] + 1  # from the use on after which it always hit
    return {
        "live": len(pins),
        "held_tokens": sum(pin.num_pinned_tokens for pin in pins),
        "served_tokens": sum(pin.served_tokens for pin in pins),
        "cost_tokens": round(sum(pin.cost_tokens for pin in pins)),
        "made_automatically": len(made),
        "lapsed": sum(one.end == "lapsed" for one in past),
        "off_target": sum(pin.num_tokens < shortest for pin in made),
        "first_after_questions": None if first is None else sum(answer.sent_at < first for answer in asked),
        "always_hit_from_use": [hits_from.get(subject, 1) for subject in sorted(load.subjects)][:20],
    }


def against(base: dict[str, Any], run: dict[str, Any], kind: str) -> dict[str, float]:
    """How a run differs from the one without pins, as shares: -0.85 is 85% less."""
    pairs = {
        "ttft_p50": (base[kind]["ttft_p50_seconds"], run[kind]["ttft_p50_seconds"]),
        "ttft_p95": (base[kind]["ttft_p95_seconds"], run[kind]["ttft_p95_seconds"]),
        "flood_ttft_p50": (base[FLOOD]["ttft_p50_seconds"], run[FLOOD]["ttft_p50_seconds"]),
        "flood_latency_p50": (base[FLOOD]["latency_p50_seconds"], run[FLOOD]["latency_p50_seconds"]),
        "running_mean": (base["running_mean"], run["running_mean"]),
        "running_max": (base["running_max"], run["running_max"]),
        "fit": (base["fit"], run["fit"]),
        "requests_per_second": (base["requests_per_second"], run["requests_per_second"]),
    }
    return {name: round(float(after / before - 1), 4) for name, (before, after) in pairs.items()}
