"""The progress bar over getting and loading a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


def new_progress(console: Console) -> Progress:
    """A bar with what is being done, how far it is, and for how long."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=28),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        console=console,
    )


@contextmanager
def model_progress(console: Console, source: str | None, *, is_shown: bool) -> Iterator[Callable[[str, float], None]]:
    """A bar while a model is prepared and loaded. `source` None is the demo model, which may have to be converted."""
    if not is_shown:
        yield lambda _stage, _fraction: None
        return
    with new_progress(console) as progress:
        task = progress.add_task(f"loading {source or 'the demo model'}", total=None)

        def report(stage: str, fraction: float) -> None:
            progress.update(task, description=stage, total=1.0, completed=fraction)

        yield report
        progress.update(task, total=1.0, completed=1.0)
