"""Frozen configuration that answers a misspelt setting with the nearest right name."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Iterable
from typing import Any, TypeVar

from looseleaf.errors import ConfigError

T = TypeVar("T")


def unknown_setting(key: str, known: Iterable[str], owner: str) -> ConfigError:
    """The error for a setting that does not exist, with the nearest name as its hint."""
    names = sorted(known)
    near = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known settings: {', '.join(names)}"
    return ConfigError(f"{owner} has no setting {key!r}", hint)


def strict_settings(cls: type[T]) -> type[T]:
    """Class decorator for a dataclass: an unknown keyword raises `ConfigError` instead of `TypeError`."""
    known = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]  # T is a dataclass
    original = cls.__init__

    @functools.wraps(original)
    def init(self: T, *args: Any, **kwargs: Any) -> None:
        for key in kwargs:
            if key not in known:
                raise unknown_setting(key, known, cls.__name__)
        original(self, *args, **kwargs)

    cls.__init__ = init  # type: ignore[assignment]  # same signature, checked above
    return cls
