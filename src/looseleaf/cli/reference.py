"""`docs/CLI.md`, written from the commands themselves: `python -m looseleaf.cli.reference > docs/CLI.md`."""

from __future__ import annotations

import sys
from typing import Any

import typer.main

from looseleaf.cli.main import app

_HEAD = """\
# The command line

Written by `python -m looseleaf.cli.reference > docs/CLI.md`; a test compares. Every command has `--json`. Exit codes: 0
done, 1 the world is at fault (no server, no model), 2 the command line is. Errors are facts and a hint on stderr.
"""


def render_reference() -> str:
    """The whole page."""
    root: Any = typer.main.get_command(app)
    parts = [_HEAD]
    for name, command in root.commands.items():
        parts += _sections(f"looseleaf {name}", command)
    return "\n".join(parts)


def _sections(name: str, command: Any) -> list[str]:
    """One section for a command; for a group one for each of its commands."""
    if hasattr(command, "commands"):
        return [text for sub, inner in command.commands.items() for text in _sections(f"{name} {sub}", inner)]
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    names = [argument.name.upper() + ("..." if argument.nargs == -1 else "") for argument in arguments]
    words = [name if argument.required else f"[{name}]" for name, argument in zip(names, arguments, strict=True)]
    rows = [_row(f"`{word}`", argument) for word, argument in zip(words, arguments, strict=True)]
    rows += [_row(", ".join(f"`{flag}`" for flag in option.opts), option) for option in options]
    table = ["| | default | |", "| --- | --- | --- |", *rows]
    usage = " ".join([name, *words, "[OPTIONS]"])
    return [f"## {name}\n", f"{command.help}\n", f"```\n{usage}\n```\n", "\n".join(table) + "\n"]


def _row(shown: str, parameter: Any) -> str:
    default = parameter.default
    text = "" if default in (None, False) or parameter.required else f"`{default}`"
    variable = f" Also from `{parameter.envvar}`." if parameter.envvar else ""
    return f"| {shown} | {text} | {parameter.help or ''}{variable} |"


if __name__ == "__main__":
    sys.stdout.write(render_reference())
