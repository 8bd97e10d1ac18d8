"""`looseleaf pins`: see, make and undo pins of a running server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Table

from looseleaf.cli.client import DEFAULT_URL, JsonOption, KeyOption, ServerClient, UrlOption
from looseleaf.cli.failures import friendly_errors
from looseleaf.cli.output import print_json, stdout_console
from looseleaf.errors import ConfigError

pins_app = typer.Typer(help="See, make and undo pins of a running server.", no_args_is_help=True)


@pins_app.command("list")
def list_pins(url: UrlOption = DEFAULT_URL, key: KeyOption = None, as_json: JsonOption = False) -> None:
    """List the live pins."""
    with friendly_errors():
        answer = ServerClient(url, key).call("GET", "/v1/pins")
        if as_json:
            print_json(answer)
        elif answer["data"]:
            stdout_console().print(_table(answer["data"]))
        else:
            print("no pins")


@pins_app.command("add")
def add_pin(
    request_id: Annotated[str | None, typer.Option(help="Pin what this live or finished request computed.")] = None,
    text: Annotated[str | None, typer.Option(help="Pin prompts that begin with this text.")] = None,
    file: Annotated[Path | None, typer.Option(help="The same, with the text of this file.")] = None,
    salt: Annotated[str | None, typer.Option(help="The cache_salt of the requests that share the text.")] = None,
    owner: Annotated[str, typer.Option(help="Who the pin is for.")] = "cli",
    level: Annotated[str, typer.Option(help="hard: never evicted; soft: evicted last.")] = "hard",
    ttl_seconds: Annotated[float | None, typer.Option(help="Seconds until it expires. Default: never.")] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Count --ttl-seconds anew at each use.")] = False,
    partial: Annotated[bool, typer.Option("--partial", help="Pin what fits under the quota.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Compute the text first, so that it is held at once.")] = False,
    url: UrlOption = DEFAULT_URL,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Pin a text, a file or what a request computed."""
    with friendly_errors():
        body = {
            **_what(request_id, text, file),
            **({} if salt is None else {"cache_salt": salt}),
            **({} if ttl_seconds is None else {"ttl_seconds": ttl_seconds}),
            "owner": owner,
            "level": level,
            "refresh": refresh,
            "partial": partial,
            "wait": wait,
        }
        pin = ServerClient(url, key).call("POST", "/v1/pins", body)
        if as_json:
            print_json(pin)
            return
        print(f"{pin['id']}: {pin['num_pinned_tokens']} of {pin['num_tokens']} tokens held, {pin['level']}")


@pins_app.command("rm")
def remove_pin(
    pin_id: Annotated[str, typer.Argument(help="The id that `pins list` shows.")],
    url: UrlOption = DEFAULT_URL,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Undo a pin."""
    with friendly_errors():
        answer = ServerClient(url, key).call("DELETE", f"/v1/pins/{quote(pin_id, safe='')}")
        if as_json:
            print_json(answer)
        else:
            print(f"{pin_id} is gone")


def _what(request_id: str | None, text: str | None, file: Path | None) -> dict[str, str]:
    """The body's part that says what to pin.

    Raises:
        ConfigError: none or several of the three given, or the file cannot be read.
    """
    if sum(value is not None for value in (request_id, text, file)) != 1:
        raise ConfigError("say what to pin with one of --request-id, --text, --file")
    if request_id is not None:
        return {"request_id": request_id}
    if text is not None:
        return {"text": text}
    assert file is not None  # the only one left
    try:
        return {"text": file.read_text(encoding="utf-8")}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error


def _table(pins: list[dict[str, Any]]) -> Table:
    table = Table("id", "owner", "level", "held", "of tokens", "expires")
    for pin in pins:
        expires = "never" if pin["expires_at"] is None else f"in {max(0.0, pin['expires_at'] - time.time()):.0f} s"
        table.add_row(
            pin["id"], pin["owner"], pin["level"], str(pin["num_pinned_tokens"]), str(pin["num_tokens"]), expires
        )
    return table
