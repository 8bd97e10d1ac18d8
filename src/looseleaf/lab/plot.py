"""A sweep as a picture: hit rate over capacity, a panel per trace, a line per policy between LRU and the optimum.

PNG, SVG, or an HTML page that needs nothing else: the drawing inline, and the figures as a table. Needs matplotlib.
"""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from looseleaf.lab.optimum import OPTIMUM
from looseleaf.lab.replay import ReplayResult
from looseleaf.lab.sweep import Outcome

SUFFIXES = (".png", ".svg", ".html")
_STYLE: dict[Any, Any] = {
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "looseleaf",
    "font.size": 10,
}
"""Names of traces are no formulas; text stays text; equal figures give equal files."""

_PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>looseleaf replay</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222; }}
svg {{ width: 100%; height: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd; }}
th:first-child, td:first-child {{ text-align: left; }}
</style></head><body><h1>Hit rate over capacity</h1>
{drawing}
<table><thead><tr>{head}</tr></thead><tbody>
{rows}
</tbody></table>
<p><code>{note}</code></p></body></html>
"""


def save_plot(
    path: Path, outcomes: Sequence[Outcome], header: Sequence[str], rows: Sequence[Sequence[str]], note: str
) -> None:
    """Write the picture.

    Args:
        path: ends in one of `SUFFIXES`, which says what is written.
        outcomes: cells, those of LRU and of the optimum among them if they are to be drawn; failed ones are left out.
        header, rows: the table of an HTML page.
        note: what stands below it: where the figures come from.

    Raises:
        OSError: it can't be written.
    """
    with mpl.rc_context(_STYLE):
        figure = _draw(outcomes)
        if path.suffix.lower() != ".html":
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
            return
        drawing = io.StringIO()
        figure.savefig(drawing, format="svg", metadata={"Date": None})
    text = drawing.getvalue()
    page = _PAGE.format(
        drawing=text[text.index("<svg") :],
        head="".join(f"<th>{html.escape(name)}</th>" for name in header),
        rows="\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows),
        note=html.escape(note),
    )
    path.write_text(page, encoding="utf-8")


def _draw(outcomes: Sequence[Outcome]) -> Figure:
    by_trace: dict[int, list[tuple[Outcome, ReplayResult]]] = {}
    for outcome in outcomes:
        if outcome.result is not None:
            by_trace.setdefault(outcome.cell.trace, []).append((outcome, outcome.result))
    columns = min(3, max(1, len(by_trace)))
    num_rows = max(1, -(-len(by_trace) // columns))
    figure = Figure(figsize=(5.2 * columns, 4 * num_rows), layout="constrained")
    panels = figure.subplots(num_rows, columns, squeeze=False).ravel().tolist()
    for panel, cells in zip(panels, by_trace.values(), strict=False):
        _draw_panel(panel, cells)
    for panel in panels[len(by_trace) :]:
        panel.set_visible(False)
    return figure


def _draw_panel(panel: Axes, cells: Sequence[tuple[Outcome, ReplayResult]]) -> None:
    sizes = {(result.page_tokens, result.block_tokens) for _, result in cells if result.policy != OPTIMUM}
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    ticks: dict[str, int] = {}
    for outcome, result in cells:
        size = f"{result.block_tokens}-token blocks"
        if result.policy != OPTIMUM:
            size += f", {result.page_tokens}-token pages"
        num_tokens = result.capacity_blocks * result.block_tokens
        line = lines.setdefault((result.policy, size if len(sizes) > 1 else ""), [])
        line.append((num_tokens, 100 * result.token_hit_rate))
        ticks.setdefault(outcome.cell.capacity, num_tokens)
    places = {key: number for number, key in enumerate(key for key in lines if key[0] not in ("lru", OPTIMUM))}
    for (policy, size), points in lines.items():
        label = " ".join(filter(None, [{OPTIMUM: "offline optimum"}.get(policy, policy), size and f"({size})"]))
        xs, ys = zip(*sorted(set(points)), strict=True)
        panel.plot(xs, ys, label=label, **_look(policy, places.get((policy, size), 0)))
    if len(sizes) == 1 and len(lines) > 1:
        _shade(panel, dict(lines.get(("lru", ""), [])), dict(lines.get((OPTIMUM, ""), [])))
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(FixedLocator(list(ticks.values())))
    panel.xaxis.set_major_formatter(FixedFormatter(list(ticks)))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_ylim(bottom=0)
    panel.set(title=cells[0][1].trace, xlabel="capacity", ylabel="hit rate, % of input tokens")
    panel.grid(visible=True, color="0.9")
    panel.legend(fontsize="small")


def _look(policy: str, place: int) -> dict[str, Any]:
    """LRU and the optimum are grey and black, what lies between has colours and marks."""
    if policy == OPTIMUM:
        return {"color": "black", "linestyle": "--", "linewidth": 1.5, "marker": "."}
    if policy == "lru":
        return {"color": "0.45", "linewidth": 1.5, "marker": "."}
    return {"color": f"C{place % 10}", "marker": "osD^v<>pX*"[place % 10], "markersize": 5}


def _shade(panel: Axes, base: dict[int, float], best: dict[int, float]) -> None:
    """The gap that a policy can close."""
    xs = sorted(base.keys() & best.keys())
    if len(xs) > 1:
        panel.fill_between(xs, [base[x] for x in xs], [best[x] for x in xs], color="0.93", zorder=0)
