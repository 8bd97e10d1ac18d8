"""The one place that imports what an optional extra brings, and says which extra is missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from looseleaf.errors import ConfigError


def import_extra(module: str, extra: str) -> ModuleType:
    """The module of that name; also keeps `--help` quick, since torch takes seconds to import.

    Args:
        module: full name.
        extra: the extra of this package that brings what the module needs.

    Raises:
        ConfigError: something that it imports is not installed; the hint is the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == "looseleaf":
            raise
        raise ConfigError(
            f"this command needs the package {error.name}, which is not installed", f"pip install 'looseleaf[{extra}]'"
        ) from error
