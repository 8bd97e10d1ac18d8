"""Where the time of a step goes, on the demo model: schedule, inputs, attention, linears, sampling, text, HTTP.

    python bench/step_split.py [--sides reference,looseleaf] [--output FILE] [--plot FILE.png]

Two batches that decode (16 and 32 requests, contexts of 1,024 tokens of which three quarters are common), and a step
that decodes 16 and computes a cold prompt of 512 tokens beside them. Medians over steps. Sides: as it is served
(looseleaf), and with torch's own linear layers and the reference attention, which gathers (reference).

schedule    plan and batch, with the cache's part of it        linears    modules with a matrix (attention's and MLPs'
commit      what was written becomes shareable                            projections, the last one over the vocabulary)
inputs      step plan to tensors; checks of what is read        sampling   logits to tokens
attention   keys and values written, and attended               text       tokens to deltas: detokenizer, stop strings
other       the rest of the model: norms, activations, rotary   HTTP       a step's deltas as events of streams

Attention is timed around `AttentionBackend.attend` and `KVMemory.write`, linears around every module that holds a
matrix, or whose namesake in the plain model does, so other backends and packed linears fall in the same parts. Timing
costs itself: `untimed_ms` is the step without it. HTTP is worked out apart, on deltas of the same number of requests:
formatting and encoding, no socket.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from looseleaf.cli.build import LoadedModel, MemorySettings, ModelSettings, Stack, build_stack, load_model
from looseleaf.cli.machine import provenance
from looseleaf.engine import engine as engine_module
from looseleaf.engine.config import EngineConfig
from looseleaf.engine.request import GenerationRequest, OutputDelta
from looseleaf.engine.sampling import SamplingParams
from looseleaf.hf import runner as runner_module
from looseleaf.hf.attention_backend import GatherBackend
from looseleaf.hf.demo_model import demo_model_dir
from looseleaf.hf.runner import HFRunner
from looseleaf.hf.tokenizer import HFTokenizer
from looseleaf.server.answering import _event
from looseleaf.server.formats import CompletionFormat
from looseleaf.server.generation import ChoiceDelta
from looseleaf.server.schemas import CompletionBody

PARTS = ("schedule", "commit", "inputs", "attention", "linears", "other", "sampling", "text", "HTTP")
CHUNK_TOKENS = 512
NUM_STEPS = 20


class Stopwatch:
    """Time spent in functions, without that of timed functions inside them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner: list[float] = []

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time counts for `part`."""

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                taken = time.perf_counter() - start
                self.seconds[part] = self.seconds.get(part, 0.0) + taken - self._inner.pop()
                if self._inner:
                    self._inner[-1] += taken

        return call

    def take(self) -> dict[str, float]:
        """Seconds by part since the last call."""
        seconds, self.seconds = self.seconds, {}
        return seconds


@contextlib.contextmanager
def patched(owners: list[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    """Attributes of objects replaced, and as before afterwards."""
    former = [(owner, name, name in vars(owner), getattr(owner, name)) for owner, name, _ in owners]
    try:
        for owner, name, replacement in owners:
            setattr(owner, name, replacement)
        yield
    finally:
        for owner, name, was_own, value in reversed(former):
            if was_own:
                setattr(owner, name, value)
            else:
                delattr(owner, name)


def places(stack: Stack) -> list[tuple[Any, str, str]]:
    """What is timed: owner, attribute, part."""
    engine, runner = stack.engine.engine, stack.model.runner
    model: torch.nn.Module = runner._model  # type: ignore[attr-defined]
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(model.config)
    names = {name for name, module in plain.named_modules() if _has_matrix(module)}
    matrices = [module for name, module in model.named_modules() if name in names or _has_matrix(module)]
    named: list[tuple[Any, str, str]] = [
        (engine._scheduler, "plan", "schedule"),
        (engine._cache, "maintain", "schedule"),
        (engine, "_take_in", "schedule"),
        (engine_module, "build_batch", "schedule"),
        (engine, "_commit", "commit"),
        (engine, "_give_out", "text"),
        (runner, "execute", "inputs"),
        (runner._attention.backend, "attend", "attention"),  # type: ignore[attr-defined]
        (runner.memory, "write", "attention"),  # type: ignore[attr-defined]
        (model, "forward", "other"),
        (runner_module, "sample", "sampling"),
    ]
    return named + [(module, "forward", "linears") for module in matrices if not isinstance(module, torch.nn.Embedding)]


def _has_matrix(module: torch.nn.Module) -> bool:
    return any(value.dim() == 2 for value in module.parameters(recurse=False))


def request(name: str, prompt: list[int], max_tokens: int) -> GenerationRequest:
    """A greedy request."""
    return GenerationRequest(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))


def http_seconds(stack: Stack, deltas: list[OutputDelta]) -> float:
    """Time to format and encode a step's deltas as events of streams, and to hand them to the event loop's queue."""
    body = CompletionBody.model_validate({"prompt": "a", "stream": True})
    formats = [CompletionFormat(stack.app.state.context, body, delta.request_id, [""], [[1]]) for delta in deltas]
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for one, delta in zip(formats, deltas, strict=True):
            chunk = one.chunk(ChoiceDelta(0, delta))
            if chunk is not None:
                _event(chunk).encode()
        best = min(best, time.perf_counter() - start)
    return best


class Case:
    """One kind of step over one stack."""

    def __init__(self, stack: Stack, num_rows: int, context_tokens: int, has_chunk: bool) -> None:
        self._stack, self._engine = stack, stack.engine.engine
        self._num_rows, self._context_tokens, self._has_chunk = num_rows, context_tokens, has_chunk
        self._rng = np.random.Generator(np.random.Philox(key=num_rows))
        self._num_chunks = 0

    def _tokens(self, count: int) -> list[int]:
        tokens: list[int] = self._rng.integers(1000, 200_000, count).tolist()
        return tokens

    def measure(self, num_steps: int) -> dict[str, float]:
        """Medians in milliseconds of each part, of the step, and of the step without timing."""
        num_common = self._context_tokens * 3 // 4
        common = self._tokens(num_common)
        for number in range(self._num_rows):
            own = self._tokens(self._context_tokens - num_common)
            self._engine.add(request(f"r{number}", common + own, 10 * num_steps + 50))
        while self._engine.num_running < self._num_rows or self._engine.num_waiting:
            self._engine.step()
        for _ in range(3):
            self._step()
        untimed = [self._step()[0] for _ in range(num_steps)]
        watch = Stopwatch()
        steps, in_all = [], []
        wrapped = [(owner, name, watch.timed(part, getattr(owner, name))) for owner, name, part in places(self._stack)]
        with patched(wrapped):
            for _ in range(num_steps):
                watch.take()
                seconds, deltas = self._step()
                steps.append({**watch.take(), "HTTP": http_seconds(self._stack, deltas)})
                in_all.append(seconds)
        for name in self._engine.request_ids:
            self._engine.abort(name)
        self._engine.step()
        figures = {part: 1000 * statistics.median(step.get(part, 0.0) for step in steps) for part in PARTS}
        figures["step_ms"] = 1000 * statistics.median(in_all)
        figures["untimed_ms"] = 1000 * statistics.median(untimed)
        figures["bookkeeping_share"] = (figures["schedule"] + figures["commit"]) / figures["untimed_ms"]
        return {name: round(value, 4) for name, value in figures.items()}

    def _step(self) -> tuple[float, list[OutputDelta]]:
        if self._has_chunk:
            self._num_chunks += 1
            self._engine.add(request(f"c{self._num_chunks}", self._tokens(CHUNK_TOKENS), 1))
        start = time.perf_counter()
        deltas = self._engine.step()
        return time.perf_counter() - start, deltas


def load(model: ModelSettings, memory: MemorySettings, side: str) -> LoadedModel:
    """The model as it is served, or with torch's own linear layers and the reference attention."""
    if side == "looseleaf":
        return load_model(model, memory)
    source = model.source or demo_model_dir()
    runner = HFRunner.load(
        source, kv_memory_bytes=memory.kv_bytes, dtype=model.dtype, backend=GatherBackend(), pack_linears=False
    )
    blocks = runner.memory
    return LoadedModel(side, runner, HFTokenizer.load(source), blocks.num_blocks, blocks.bytes_per_block, runner.close)


def plot(figures: Mapping[str, Mapping[str, Mapping[str, float]]], path: Path) -> None:
    """A stacked bar for each case, those of several sides beside each other."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    bars = [
        (f"{case}\n{run}" if run else case, parts) for run, cases in figures.items() for case, parts in cases.items()
    ]
    bars.sort(key=lambda bar: bar[0].split("\n")[0])
    chart, axes = pyplot.subplots(figsize=(2.2 + 1.6 * len(bars), 5))
    bottoms = np.zeros(len(bars))
    colours = pyplot.get_cmap("tab10")
    for number, part in enumerate(PARTS):
        heights = np.array([parts.get(part, 0.0) for _, parts in bars])
        axes.bar([name for name, _ in bars], heights, bottom=bottoms, label=part, color=colours(number), width=0.6)
        bottoms += heights
    axes.set_ylabel("milliseconds a step")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, reverse=True)
    axes.spines[["top", "right"]].set_visible(False)
    chart.tight_layout()
    chart.savefig(path, dpi=150)


def main() -> int:
    """Measure all cases; print or save the figures and draw them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="folder or hub id; the demo model without it")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context-tokens", type=int, default=1024, help="of each row; three quarters are common")
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path, help="PNG or SVG, by its ending")
    parser.add_argument("--sides", default="looseleaf", help="of these: reference,looseleaf")
    arguments = parser.parse_args()
    memory = MemorySettings(kv_bytes=2**30)
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for side in arguments.sides.split(","):
        model = load(ModelSettings(arguments.model, dtype=arguments.dtype), memory, side)
        torch.set_num_threads(arguments.threads)
        figures[side] = {}
        for name, num_rows, has_chunk in (
            ("decode 16", 16, False),
            ("decode 32", 32, False),
            (f"decode 16 + {CHUNK_TOKENS} tokens", 16, True),
        ):
            stack = build_stack(model, memory, EngineConfig(max_running_requests=64))
            case = Case(stack, num_rows, arguments.context_tokens, has_chunk)
            figures[side][name] = case.measure(arguments.steps)
            print(side, name, figures[side][name], file=sys.stderr, flush=True)
        model.close()
    text = json.dumps({"provenance": provenance(), "threads": arguments.threads, "milliseconds": figures}, indent=2)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    if arguments.plot:
        plot(figures, arguments.plot)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
