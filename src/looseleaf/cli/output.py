"""What the commands print: JSON for programs, plain lines and tables for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console


def print_json(value: Any) -> None:
    """One JSON document on stdout, in a readable layout; a reader behind a pipe has it at once."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def stdout_console() -> Console:
    """Console for tables and text. Brackets are just brackets: people may name their things so."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=False, markup=False)


def stderr_console() -> Console:
    """Console for progress. Bound to the stream of now: it keeps working where stderr is redirected."""
    return Console(file=sys.stderr, highlight=False)


def format_bytes(num_bytes: float) -> str:
    """`1.5 GiB`, `128.0 MiB`, `18.0 KiB`, `12 B`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_span(seconds: float) -> str:
    """`42 s`, `17 min`, `5 h`, `3 d`; 0 s for what is over."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def print_facts(answer: Mapping[str, Any], indent: str = "") -> None:
    """An answer of a server for people: a line for each value, and below its name what an object or a list has."""
    for name, value in answer.items():
        if isinstance(value, (dict, list)):
            print(f"{indent}{name.replace('_', ' ')}:" + ("" if value else " none"))
            rows = value if isinstance(value, dict) else {str(place): row for place, row in enumerate(value, 1)}
            print_facts(rows, indent + "  ")
        elif name != "object":
            print(f"{indent}{name.replace('_', ' ')}: {format(value, '.4g') if isinstance(value, float) else value}")
