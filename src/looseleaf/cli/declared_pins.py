"""Pins that a file declares: read and checked before a server starts, computed and pinned once it is up."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.types import Message

from looseleaf.cli.extras import import_extra
from looseleaf.cli.pin_files import prompt_of
from looseleaf.core.settings import unknown_setting
from looseleaf.errors import ConfigError, LifecycleError, LooseleafError
from looseleaf.server.auth import Caller
from looseleaf.server.context import ServerContext
from looseleaf.server.errors import ApiError
from looseleaf.server.routes.pins import create_pin
from looseleaf.server.schemas import PinBody

SOURCES = ("text", "file", "messages", "messages_file", "tokens", "tokens_file")
_OTHER_KEYS = {"salt", *PinBody.model_fields} - {"cache_salt", "request_id", "part", "wait"}
OWNER = "pins.toml"


@dataclass(frozen=True)
class DeclaredPin:
    """One pin of a file: `name` says which, for messages."""

    name: str
    body: PinBody


def load_pins(path: Path) -> list[DeclaredPin]:
    """The pins that a TOML file declares, one `[[pin]]` each, in order; docs/PINNING.md says what they may contain.

    Raises:
        ConfigError: the file or one that it names cannot be read, or a pin has an unknown key (the hint is the nearest
            name), a value that cannot be, or not exactly one of `SOURCES`.
    """
    toml = import_extra("tomllib" if sys.version_info >= (3, 11) else "tomli", "cli")
    try:
        content = toml.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, toml.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    for key in content:
        if key != "pin":
            raise unknown_setting(key, ["pin"], str(path))
    entries = content.get("pin", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{path}: pin is no list of tables", "begin each pin with a line [[pin]]")
    return [_pin(entry, f"{path.name}, pin {number}", path.parent) for number, entry in enumerate(entries, 1)]


def _pin(entry: Mapping[str, Any], name: str, folder: Path) -> DeclaredPin:
    for key in entry:
        if key not in SOURCES and key not in _OTHER_KEYS:
            raise unknown_setting(key, {*SOURCES, *_OTHER_KEYS}, name)
    source = {key: value for key, value in entry.items() if key in SOURCES}
    if len(source) != 1:
        raise ConfigError(f"{name} has {' and '.join(source) or 'nothing to pin'}", f"give one of {', '.join(SOURCES)}")
    options = {key: value for key, value in entry.items() if key not in source}
    if "salt" in options:
        options["cache_salt"] = options.pop("salt")
    try:
        body = PinBody(**{"owner": OWNER, **options, **prompt_of(source, folder)}, wait=True)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise ConfigError(f"{name}: {where}: {problem['msg']}") from error
    ((key, value),) = source.items()
    return DeclaredPin(f"{name} ({value if key.endswith('file') else key})", body)


async def warm_pins(context: ServerContext, pins: Sequence[DeclaredPin], say: Callable[[str], None]) -> None:
    """Compute and pin one after the other, as `POST /v1/pins` with `wait` does, on the server's own event loop. What
    cannot be pinned is said, and the rest go on; ends early if the server stops."""
    caller = Caller("pins.toml", key_namespace=None, is_admin=True)
    for number, pin in enumerate(pins, 1):
        started = time.monotonic()
        place = f"{number} of {len(pins)}: {pin.name}"
        try:
            answer = await create_pin(Request({"type": "http"}, _stays), pin.body, context, caller)
        except (LooseleafError, ApiError) as error:
            if isinstance(error, LifecycleError) or getattr(error, "status", None) == 503:
                return
            say(f"pin {place}: not pinned: {error}")
        else:
            held, asked = answer["num_pinned_tokens"], answer["num_tokens"]
            say(f"pin {place}: {held:,} of {asked:,} tokens held, after {time.monotonic() - started:.1f} s")


async def _stays() -> Message:
    """A client that neither sends anything nor leaves."""
    left: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await left
