"""The demo's result for people (a table and what to do next) and for programs (a dictionary)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from looseleaf.cli.demo.figures import Run, RunFigures, num_different_answers
from looseleaf.cli.demo.scene import Scene


@dataclass(frozen=True)
class _Row:
    """One line of the table. `better`: which direction is."""

    title: str
    name: str
    show: Callable[[float], str]
    better: Literal["less", "more"]


def _share(value: float) -> str:
    return f"{value:.1%}"


def _seconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{value * 1000:,.0f} ms" if value < 1 else f"{value:.2f} s"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _rate(value: float) -> str:
    return f"{value:.2f}"


_ROWS = (
    _Row("memory held but empty", "waste", _share, "less"),
    _Row("prompt tokens found in the cache", "hit_rate", _share, "more"),
    _Row("prompt tokens computed", "prefill_tokens", _count, "less"),
    _Row("short requests: first token, p50", "ttft_short_p50_seconds", _seconds, "less"),
    _Row("short requests: first token, p95", "ttft_short_p95_seconds", _seconds, "less"),
    _Row("long requests: first token, p50", "ttft_long_p50_seconds", _seconds, "less"),
    _Row("long requests: first token, p95", "ttft_long_p95_seconds", _seconds, "less"),
    _Row("requests per second", "requests_per_second", _rate, "more"),
    _Row("whole workload", "seconds", _seconds, "less"),
)


def print_report(console: Console, plain: Run, looseleaf: Run, scene: Scene, saved_as: str) -> None:
    """The table, an example, how the answers compare, and how to go on."""
    table = Table(title=f"The same {plain.figures.requests} requests, served twice", title_justify="left")
    table.add_column("")
    table.add_column("plain", justify="right")
    table.add_column("looseleaf", justify="right", style="bold")
    table.add_column("change", justify="right")
    for row in _ROWS:
        before, after = getattr(plain.figures, row.name), getattr(looseleaf.figures, row.name)
        table.add_row(row.title, row.show(before), row.show(after), change(before, after, row.better))
    console.print(table)
    console.print(explanation(scene), markup=False, soft_wrap=True)
    console.print(f"\n{answers_sentence(plain, looseleaf)}", markup=False, soft_wrap=True)
    console.print(_how_to_go_on(scene.model_name, saved_as), markup=False, soft_wrap=True)


def change(before: float, after: float, better: Literal["less", "more"]) -> str:
    """What changed, in words: `3.1x less`, `2.0x more`, `none`; `from 0` where there is no ratio."""
    if math.isnan(before) or math.isnan(after):
        return "-"
    low, high = sorted((before, after))
    if low == high:
        return "none"
    went = "less" if after < before else "more"
    mark = "" if went == better else " (worse)"
    return f"from 0{mark}" if before == 0 else f"to 0{mark}" if after == 0 else f"{high / low:.1f}x {went}{mark}"


def explanation(scene: Scene) -> str:
    """What the two columns are."""
    return (
        "plain: every prompt computed in full, room for the prompt and max_tokens "
        f"({scene.max_answer_tokens}) set aside for each request.\n"
        "looseleaf: blocks as tokens come, prefixes reused, the shared policy pinned.\n"
        f"Both: {scene.model_name}, {scene.num_clients} clients, {scene.memory_tokens:,} tokens of KV memory; "
        f"the burst of one-off letters in the middle has {scene.burst_tokens:,}.\n"
        "Memory held but empty: token places given to running requests in which nothing is written, over time."
    )


def answers_sentence(plain: Run, looseleaf: Run) -> str:
    """How many answers differ, and why that can be."""
    different, total = num_different_answers(plain, looseleaf), len(plain.outcomes)
    if different == 0:
        return f"All {total} answers are the same in both runs."
    return (
        f"{different} of {total} answers differ between the runs: other requests shared their steps, so sums were "
        "rounded in another order, and where two tokens are about equally likely that can decide. "
        "Neither is the better answer."
    )


def _how_to_go_on(model_name: str, saved_as: str) -> str:
    return (
        f"\nSaved: {saved_as}\n"
        "Go on:\n"
        "  looseleaf serve                                  the same model, to talk to\n"
        "  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\\n"
        f'    -d \'{{"model": "{model_name}", "max_tokens": 48, "stop": "\\n",\n'
        '         "messages": [{"role": "user", "content": "What is a harbour?"}]}\'\n'
        "  http://127.0.0.1:8000/dashboard                  what the memory holds, as you talk\n"
        "  http://127.0.0.1:8000/metrics                    the same for Prometheus\n"
        "  looseleaf explain REQUEST_ID                     why a request hit or missed"
    )


def as_dict(plain: Run, looseleaf: Run, scene: Scene, provenance: dict[str, Any]) -> dict[str, Any]:
    """Everything that the table says and where it comes from, ready for JSON. Figures without a value are null."""
    return {
        "format": "looseleaf-demo/1",
        **provenance,
        "scene": asdict(scene),
        "plain": _figures(plain.figures),
        "looseleaf": _figures(looseleaf.figures),
        "answers": {
            "num_different": num_different_answers(plain, looseleaf),
            "requests": [
                {"name": one.request.name, "kind": one.request.kind, "plain": one.text, "looseleaf": other.text}
                for one, other in zip(plain.outcomes, looseleaf.outcomes, strict=True)
            ],
        },
    }


def _figures(figures: RunFigures) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in asdict(figures).items()}
