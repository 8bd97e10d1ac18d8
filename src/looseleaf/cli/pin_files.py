"""What to pin, as people write it down: texts, chats and token ids, on a command line or in files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from looseleaf.errors import ConfigError


def prompt_of(given: Mapping[str, Any], folder: Path = Path()) -> dict[str, Any]:
    """A prompt as the server takes it: its `text`, `messages` or `tokens`; what is in them the server checks.

    Args:
        given: one of `text`, `messages`, `tokens` (passed on as they are), `file`, `messages_file` and `tokens_file`
            (paths of UTF-8 files, relative to `folder`): plain text, a JSON list of messages, a JSON list of token ids.

    Raises:
        ConfigError: a file cannot be read, or is no JSON where it should be.
    """
    ((name, value),) = given.items()
    if not name.endswith("file"):
        return {name: value}
    path = folder / str(value)
    try:
        content = path.read_text(encoding="utf-8")
        return {"text": content} if name == "file" else {name.removesuffix("_file"): json.loads(content)}
    except (OSError, ValueError) as error:
        hint = None if name == "file" or isinstance(error, OSError) else "write a JSON list, as in a request's body"
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}", hint) from error
