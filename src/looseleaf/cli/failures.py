"""Errors as people see them: facts, a hint, an exit code; never a traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from looseleaf.errors import CapacityError, ConfigError, IntegrityError, LooseleafError, RequestError

BAD_INPUT = 2
"""Exit code where the command line is at fault."""
FAILED = 1
"""Exit code where the world is at fault."""


@contextmanager
def friendly_errors() -> Iterator[None]:
    """Turn an error of ours into a message on stderr and an exit code.

    Raises:
        typer.Exit: with 2 for bad input, 1 for anything else that is no bug. Bugs go through.
    """
    try:
        yield
    except IntegrityError:
        raise
    except LooseleafError as error:
        is_bad_input = isinstance(error, (ConfigError, RequestError, CapacityError))
        say_error(error.facts, error.hint)
        raise typer.Exit(BAD_INPUT if is_bad_input else FAILED) from error


def say_error(facts: str, hint: str | None = None) -> None:
    """Write `error: …` and `hint: …` to stderr."""
    print(f"error: {facts}", file=sys.stderr)
    if hint is not None:
        print(f"hint: {hint}", file=sys.stderr)
