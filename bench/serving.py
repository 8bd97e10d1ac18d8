"""Serving beside peers: the same requests, model, dtype, limits, threads and KV memory, in the same run.

    python bench/serving.py --vllm-python VENV/bin/python --conversations FILE --repeats 5 --output FILE
    python bench/serving.py --peers looseleaf --workloads a,c --scale 0.25          # a short look

a  32 requests: a common prefix of 1,024 tokens and 64 of their own; 64 tokens out
b  the same with a prefix of 8,192 tokens
c  64 requests of 256 to 1,024 tokens that share nothing; 64 tokens out
d  conversations of agents (JSON lines of `{"messages": [...]}`), 8 at a time, each turn sent when the last is answered

Requests a to c are all there from the start; 16 run at once. In d a turn goes on from what the engine itself generated,
and gives as many tokens as the recorded answer, from 8 to 64; with `--parts N` a repeat serves an Nth of the
conversations, the next one other ones. Each side is a process of its own; all are there during the whole run, and take
turns: workload by workload, repeat by repeat, each repeat with other tokens. Memory: the most that all processes of a
side have resident together, sampled while it serves (what they share counts for each; PSS would be fairer, but reading
it stops the process for long).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np

from looseleaf.cli.machine import provenance
from looseleaf.hf.demo_model import demo_model_dir
from looseleaf.hf.tokenizer import HFTokenizer
from serving_driver import RESULT, Turn, Workload

FOLDER = Path(__file__).parent
OUT_TOKENS = 64
MIN_ANSWER_TOKENS = 8
WORKLOADS = ("a", "b", "c", "d")
PEERS = ("looseleaf", "vllm", "transformers")
SAMPLE_SECONDS = 0.2


class SideProcess:
    """One side, in a process that answers workloads."""

    def __init__(self, command: list[str], name: str) -> None:
        started = time.perf_counter()
        self.name = name
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()
        self.start_seconds = time.perf_counter() - started

    def serve(self, workload: Workload) -> dict[str, Any]:
        """Figures of one run, with its peak of memory."""
        with peak_memory(self._process.pid) as peak:
            cast(Any, self._process.stdin).write(json.dumps(workload.to_json()) + "\n")
            cast(Any, self._process.stdin).flush()
            figures = self._answer()
        return {**figures, "peak_bytes": peak[0]}

    def close(self) -> None:
        """End it."""
        cast(Any, self._process.stdin).close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        for line in cast(Any, self._process.stdout):
            if line.startswith(RESULT):
                found: dict[str, Any] = json.loads(line.removeprefix(RESULT))
                return found
        raise RuntimeError(f"{self.name} ended with {self._process.wait()}")


@contextlib.contextmanager
def peak_memory(pid: int) -> Iterator[list[int]]:
    """A list whose one entry is, at the end, the largest memory of a process and its children, in bytes."""
    peak, stop = [0], threading.Event()

    def sample() -> None:
        while not stop.wait(SAMPLE_SECONDS):
            peak[0] = max(peak[0], sum(_resident_bytes(member) for member in _family(pid)))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def _family(pid: int) -> list[int]:
    members = [pid]
    for member in members:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{member}/task"):
                children = Path(f"/proc/{member}/task/{task}/children").read_text()
                members += [int(child) for child in children.split() if int(child) not in members]
    return members


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


class Workloads:
    """Makes the workloads; each repeat has tokens of its own. `scale` below 1 takes fewer requests; each repeat takes
    one of `parts` parts of the conversations."""

    def __init__(self, tokenizer: HFTokenizer, conversations: Path | None, scale: float, parts: int) -> None:
        self._scale, self._parts = scale, parts
        self._tokenizer = tokenizer
        self._conversations = [] if conversations is None else self._read(conversations)

    def make(self, name: str, repeat: int) -> Workload:
        """Workload `name` of one repeat; the same at every call."""
        rng = random.Random(f"{name}{repeat}")

        def tokens(count: int) -> list[int]:
            return [rng.randrange(1000, 200_000) for _ in range(count)]

        if name == "d":
            head = tokens(16)  # so that the system prompt of another repeat is not found
            part = self._conversations[repeat % self._parts :: self._parts]
            chosen = part[: self._count(len(part))]
            talks = [[Turn(head + turns[0].tokens, turns[0].max_tokens), *turns[1:]] for turns in chosen]
            return Workload(name, talks, num_clients=8)
        if name == "c":
            prompts = [tokens(rng.randrange(256, 1025)) for _ in range(self._count(64))]
        else:
            prefix = tokens({"a": 1024, "b": 8192}[name])
            prompts = [prefix + tokens(64) for _ in range(self._count(32))]
        return Workload(name, [[Turn(prompt, OUT_TOKENS)] for prompt in prompts])

    def warm_up(self) -> Workload:
        """A few short requests."""
        rng = random.Random(0)
        prompts = [[rng.randrange(1000, 200_000) for _ in range(200)] for _ in range(4)]
        return Workload("warm-up", [[Turn(prompt, 8)] for prompt in prompts])

    def _count(self, number: int) -> int:
        return max(1, round(number * self._scale))

    def _read(self, path: Path) -> list[list[Turn]]:
        with path.open(encoding="utf-8") as lines:
            return [turns for line in lines if (turns := self._turns(json.loads(line)["messages"]))]

    def _turns(self, messages: list[dict[str, Any]]) -> list[Turn]:
        """For each recorded answer what comes in before it. Turns are framed as text, since answers are another's."""
        turns, text = [], ""
        for message in messages:
            said = (message.get("content") or "") + "".join(
                json.dumps(call.get("function")) for call in message.get("tool_calls") or []
            )
            if message["role"] != "assistant":
                text += f"{message['role'].capitalize()}: {said}\n"
                continue
            if text:
                num_said = len(self._tokenizer.encode(said, add_special_tokens=False))
                asked = self._tokenizer.encode(f"\n{text}Assistant:", add_special_tokens=not turns)
                turns.append(Turn(asked, min(OUT_TOKENS, max(MIN_ANSWER_TOKENS, num_said))))
                text = ""
        return turns


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the repeats of one workload on one side; times to first token of all repeats together."""
    firsts = np.concatenate([run["first_token_seconds"] for run in runs])
    whole = np.concatenate([run["request_seconds"] for run in runs])
    rates = [run["output_tokens"] / run["seconds"] for run in runs]

    def cached() -> float | None:
        known = [run["cached_tokens"] for run in runs if run["cached_tokens"] is not None]
        return statistics.median(known) if known else None

    return {
        "output_tokens_per_second": round(statistics.median(rates), 2),
        "of_each_repeat": [round(rate, 2) for rate in rates],
        "requests_per_second": round(statistics.median(run["requests"] / run["seconds"] for run in runs), 3),
        "ttft_p50_seconds": round(float(np.percentile(firsts, 50)), 3),
        "ttft_p95_seconds": round(float(np.percentile(firsts, 95)), 3),
        "request_p50_seconds": round(float(np.percentile(whole, 50)), 3),
        "requests": runs[0]["requests"],
        "prompt_tokens": runs[0]["prompt_tokens"],
        "output_tokens": runs[0]["output_tokens"],
        "cached_tokens": cached(),
        "peak_bytes": max(run["peak_bytes"] for run in runs),
    }


def compare(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """looseleaf against each peer: the median over repeats of the ratio of output tokens per second."""
    ratios: dict[str, Any] = {}
    for name, sides in results.items():
        ours = sides.get("looseleaf")
        for peer, figures in sides.items():
            if ours is not None and peer != "looseleaf":
                pairs = zip(ours["of_each_repeat"], figures["of_each_repeat"], strict=True)
                ratios.setdefault(name, {})[peer] = round(statistics.median(a / b for a, b in pairs), 3)
    return ratios


def parse_arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", default=",".join(PEERS), help="of these: looseleaf,vllm,transformers")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--vllm-python", help="interpreter in which vLLM is installed")
    parser.add_argument("--conversations", type=Path, help="JSON lines of conversations; without it no d")
    parser.add_argument("--model", help="folder in Hugging Face format; without it the demo model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=16, help="requests that run at once")
    parser.add_argument("--step-tokens", type=int, default=2048, help="tokens of one forward pass")
    parser.add_argument("--max-model-tokens", type=int, default=16_384)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-gib", type=int, default=2, help="GiB of keys and values")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the requests")
    parser.add_argument("--parts", type=int, default=1, help="d: parts of the conversations, one for each repeat")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def commands(arguments: argparse.Namespace, model: str) -> dict[str, list[str]]:
    """How to start each side that is asked for."""
    names = ("dtype", "batch", "step_tokens", "max_model_tokens", "threads", "kv_gib")
    settings = json.dumps({"model": model, **{name: getattr(arguments, name) for name in names}})
    known = {
        name: [sys.executable, str(FOLDER / "serving_ours.py"), name, settings]
        for name in ("looseleaf", "transformers")
    }
    if arguments.vllm_python:
        known["vllm"] = [arguments.vllm_python, str(FOLDER / "serving_vllm.py"), settings]
    return {peer: known[peer] for peer in arguments.peers.split(",") if peer in known}


def outcome(
    arguments: argparse.Namespace, sides: list[SideProcess], runs: dict[str, dict[str, list[dict[str, Any]]]]
) -> str:
    """All figures so far, as JSON."""
    results = {name: {side.name: summary(runs[name][side.name]) for side in sides} for name in runs}
    result = {
        "provenance": provenance(),
        "settings": {name: value for name, value in vars(arguments).items() if isinstance(value, (int, float, str))},
        "start_seconds": {side.name: round(side.start_seconds, 2) for side in sides},
        "results": results,
        "looseleaf_to_peer": compare(results),
    }
    result["settings"].pop("vllm_python", None)
    return json.dumps(result, indent=2)


def main() -> int:
    """Run all workloads on all sides; print or save the figures."""
    arguments = parse_arguments()
    model = arguments.model or str(demo_model_dir())
    workloads = Workloads(HFTokenizer.load(model), arguments.conversations, arguments.scale, arguments.parts)
    names = [name for name in arguments.workloads.split(",") if name != "d" or arguments.conversations]
    sides: list[SideProcess] = []
    report = ""
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {name: {} for name in names}
    try:
        for peer, command in commands(arguments, model).items():
            sides.append(SideProcess(command, peer))
            print(f"{peer} started in {sides[-1].start_seconds:.1f} s", file=sys.stderr, flush=True)
        for side in sides:
            side.serve(workloads.warm_up())
        for repeat in range(arguments.repeats):
            for name in names:
                for side in sides[repeat % len(sides) :] + sides[: repeat % len(sides)]:
                    figures = side.serve(workloads.make(name, repeat))
                    runs[name].setdefault(side.name, []).append(figures)
                    rate = figures["output_tokens"] / figures["seconds"]
                    print(f"{name} {repeat} {side.name:12} {rate:8.1f} output tokens/s", file=sys.stderr, flush=True)
            report = outcome(arguments, sides, runs)
            if arguments.output:  # after each repeat: a run that is cut off has told what it knows
                arguments.output.write_text(report + "\n", encoding="utf-8")
    finally:
        for side in sides:
            side.close()
    print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
