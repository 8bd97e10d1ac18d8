"""`looseleaf`: the command line. One file per command; this one only names them."""

from __future__ import annotations

from typing import Annotated

import typer

from looseleaf.cli.demo.command import demo
from looseleaf.cli.explain import explain
from looseleaf.cli.machine import version_of
from looseleaf.cli.pins import pins_app
from looseleaf.cli.replay import replay
from looseleaf.cli.serve import serve
from looseleaf.cli.sessions import sessions_app

app = typer.Typer(
    name="looseleaf",
    help="A KV-cache engine for large language models: paging, pinning and reuse that can explain themselves.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(version_of("looseleaf") or "not installed")
        raise typer.Exit


@app.callback()
def looseleaf(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """A KV-cache engine for large language models: paging, pinning and reuse that can explain themselves."""


app.command()(serve)
app.command()(demo)
app.command()(replay)
app.command()(explain)
app.add_typer(pins_app, name="pins")
app.add_typer(sessions_app, name="sessions")
