"""A load of the pinning bench through the real scheduler and cache, with a clock that a cost model moves.

The load is written as a prefix-trace/1 and read back, so that the same file can be replayed by anybody. No model runs:
a step takes as long as its tokens take at a given rate, and never less than reading the weights does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from looseleaf import CacheConfig, CacheManager, LayerGroup
from looseleaf.engine.config import EngineConfig
from looseleaf.engine.engine import Engine
from looseleaf.engine.observer import SilentObserver
from looseleaf.engine.request import GenerationRequest
from looseleaf.engine.runner import ModelInfo, StepBatch, StepOutput
from looseleaf.engine.sampling import SamplingParams
from looseleaf.ids import Int32Array
from looseleaf.lab.traces import Trace, TraceRequest, load_trace
from looseleaf.testing.clock import ManualClock
from looseleaf.testing.fake_tokenizer import FakeTokenizer
from pinning_figures import Answer, StepLog, run_figures
from pinning_load import Item, Load
from pinning_server import MAX_RUNNING, PIN_QUOTA, Mode

BLOCK_TOKENS, PAGE_TOKENS = 16, 256
OUTPUT_TOKEN = 65
FILLER_TOKEN = 2**31 - 2
"""Minus the request's number: fills the part of its last block that the trace tells nothing about."""


@dataclass(frozen=True)
class Machine:
    """What is imagined: `prefill_rate` tokens/s, `step_seconds` for a step that computes few, `decode_row_seconds` for
    each token of a decode, `pool_tokens` of memory."""

    name: str
    prefill_rate: float
    step_seconds: float
    pool_tokens: int
    step_tokens: int
    groups: tuple[LayerGroup, ...] = (LayerGroup("full"),)
    decode_row_seconds: float = 0.0

    def seconds(self, batch: StepBatch) -> float:
        """How long a step takes: bound by the weights or by the tokens."""
        lengths = np.diff(batch.query_starts)
        num_decoded = int(np.count_nonzero(lengths == 1))
        num_prefilled = int(lengths.sum()) - num_decoded
        busy = num_prefilled / self.prefill_rate + num_decoded * max(self.decode_row_seconds, 1 / self.prefill_rate)
        return max(self.step_seconds, busy)


class ClockRunner:
    """A `ModelRunner` that computes nothing and lets the clock go on instead."""

    def __init__(self, machine: Machine, clock: ManualClock) -> None:
        self._machine, self._clock = machine, clock
        self.info = ModelInfo(machine.name, 2**31 - 1, 2**20, 1, frozenset(), "", machine.groups)

    def execute(self, batch: StepBatch) -> StepOutput:
        """The same token for everybody, after the step's time."""
        self._clock.advance(self._machine.seconds(batch))
        num_sampled = len(batch.sampled)
        return StepOutput(np.full(num_sampled, OUTPUT_TOKEN, np.int64), (None,) * num_sampled)

    def resize(self, num_blocks: int, copies: Sequence[tuple[int, int]]) -> None:
        """Not asked for here."""
        raise RuntimeError(f"nobody resizes here ({num_blocks} blocks, {len(copies)} copies)")


def write_trace(path: Path, name: str, load: Load, requests_per_second: float) -> None:
    """`load` as prefix-trace/1, in its order at even intervals."""
    first: dict[tuple[str, int], int] = {}
    lines = [json.dumps({"format": "prefix-trace/1", "block_size": BLOCK_TOKENS, "name": name})]
    for number, item in enumerate(load.items):
        ref, num_shared = -1, 0
        if item.subject is not None:
            ref = first.setdefault((item.kind, item.subject), number)
            ref, num_shared = (-1, 0) if ref == number else (ref, item.shared_tokens // BLOCK_TOKENS)
        num_blocks = -(-item.prompt_tokens // BLOCK_TOKENS)
        at_ms = round(1000 * number / requests_per_second)
        lines.append(json.dumps([at_ms, item.prompt_tokens, item.output_tokens, ref, num_shared, num_blocks]))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def prompt_of(request: TraceRequest, number: int) -> Int32Array:
    """int32 [num_input_tokens]: each whole block filled with its id, the rest with a token of the request's own."""
    tokens = np.full(request.num_input_tokens, FILLER_TOKEN - number, np.int32)
    whole = np.array(request.blocks[: request.num_input_tokens // BLOCK_TOKENS], np.int32)
    tokens[: BLOCK_TOKENS * len(whole)] = np.repeat(whole, BLOCK_TOKENS)
    return tokens


@dataclass(frozen=True)
class ReplayScene:
    """One imagined machine, and a load with the trace that was made of it."""

    machine: Machine
    load: Load
    trace: Trace

    @classmethod
    def of(cls, machine: Machine, load: Load, path: Path) -> ReplayScene:
        """Write the trace to `path` and read it back."""
        write_trace(path, path.stem, load, 10.0)
        return cls(machine, load, load_trace(path))

    def run(self, mode: Mode, on_done: Callable[[Answer], None] | None = None) -> dict[str, Any]:
        """Serve the load with a fresh cache; the figures, in seconds of the imagined machine."""
        clock, machine = ManualClock(), self.machine
        num_lanes = sum(group.num_lanes for group in machine.groups)
        cache = CacheManager(
            CacheConfig(
                num_lanes * machine.pool_tokens // PAGE_TOKENS,
                PAGE_TOKENS,
                BLOCK_TOKENS,
                pin_quota=PIN_QUOTA,
                groups=machine.groups,
                auto_pin=mode.auto,
            ),
            clock=clock,
        )
        log = StepLog(cache, SilentObserver(), clock)
        config = EngineConfig(max_running_requests=MAX_RUNNING, max_step_tokens=machine.step_tokens)
        engine = Engine(cache, ClockRunner(machine, clock), FakeTokenizer(), config, observer=log, clock=clock)
        prompts = [prompt_of(request, number) for number, request in enumerate(self.trace.requests)]
        if mode.level is not None:
            for subject, num_tokens in self.load.subjects.items():
                number = next(number for number, item in enumerate(self.load.items) if item.subject == subject)
                cache.pin(tokens=prompts[number][:num_tokens], owner="bench", level=mode.level)
        answers = _serve(engine, clock, self.load, prompts, on_done)
        return run_figures(self.load, answers, log)


def _serve(
    engine: Engine,
    clock: ManualClock,
    load: Load,
    prompts: Sequence[Int32Array],
    on_done: Callable[[Answer], None] | None,
) -> list[Answer]:
    """Work through the load with its clients; answers in the order of their ends."""
    queue: Iterator[tuple[int, Item]] = iter(enumerate(load.items))
    live: dict[str, tuple[Item, float]] = {}
    first: dict[str, float] = {}
    answers: list[Answer] = []

    def send_next() -> None:
        number, item = next(queue, (-1, None))
        if item is None:
            return
        params = SamplingParams(item.output_tokens, temperature=0.0, ignore_eos=True)
        engine.add(GenerationRequest(str(number), prompts[number], params))
        live[str(number)] = (item, clock())

    for _ in range(load.num_clients):
        send_next()
    while live:
        for delta in engine.step():
            name = delta.request_id
            item, sent_at = live[name]
            if delta.token_ids:
                first.setdefault(name, clock())
            if delta.finish_reason is None:
                continue
            if delta.error is not None:
                raise delta.error
            del live[name]
            ttft = first.pop(name) - sent_at
            answers.append(Answer(item, sent_at, ttft, clock() - sent_at, delta.usage.num_cached_tokens))
            if on_done is not None:
                on_done(answers[-1])
            send_next()
    return answers
