"""`looseleaf pins`: see, make, limit and undo pins of a running server."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer
from rich.table import Table

from looseleaf.cli.auto_pin import number_or_off
from looseleaf.cli.client import DEFAULT_URL, JsonOption, KeyOption, ServerClient, UrlOption
from looseleaf.cli.failures import friendly_errors
from looseleaf.cli.output import format_span, print_facts, print_json, stdout_console
from looseleaf.cli.pin_files import prompt_of
from looseleaf.errors import ConfigError

pins_app = typer.Typer(help="See, make, limit and undo pins of a running server.", no_args_is_help=True)

LabelOption = Annotated[list[str] | None, typer.Option("--label", help="With this label, key=value; may come again.")]
RequestOption = Annotated[str | None, typer.Option(help="Pin what this live or finished request computed.")]
PartOption = Annotated[str, typer.Option(help="Of a request: all, or prompt (without the answer).")]
LastTokenOption = Annotated[int | None, typer.Option(help="Pin the first so many tokens only.")]
FileOption = Annotated[Path | None, typer.Option(help="The same, with the text of this file.")]
MessagesOption = Annotated[Path | None, typer.Option(help="Pin chats that begin with this JSON file's messages.")]
TokensOption = Annotated[Path | None, typer.Option(help="Pin the token ids in this JSON file.")]
SaltOption = Annotated[str | None, typer.Option(help="The cache_salt of the requests that share it.")]
TtlOption = Annotated[float | None, typer.Option("--ttl", "--ttl-seconds", help="Seconds until it expires.")]
MaxTtlOption = Annotated[float | None, typer.Option("--max-ttl", help="Seconds until it expires, however refreshed.")]
ShareArgument = Annotated[
    float | None, typer.Argument(help="Set it: the share of all blocks that pins may hold, 0 to 1.")
]
ModeArgument = Annotated[str | None, typer.Argument(help="Switch it: on, off, or dry-run (only report it).")]
MinTokensOption = Annotated[str | None, typer.Option(help="Prefixes of more tokens are candidates; off for no such.")]
MinRateOption = Annotated[
    str | None, typer.Option(help="So are those asked for by more requests a second; off for no such.")
]


@pins_app.command("list")
def list_pins(
    owner: Annotated[str | None, typer.Option(help="Of this owner.")] = None,
    label: LabelOption = None,
    past: Annotated[bool, typer.Option("--past", help="Pins that ended or were refused, and how.")] = False,
    url: UrlOption = DEFAULT_URL,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the live pins, or the last that ended: who holds what, since when, what it served and what it cost."""
    with friendly_errors():
        labels = [f"{name}:{value}" for name, value in labels_of(label).items()]
        query = urlencode({**_given({"owner": owner}), "label": labels, "past": past}, doseq=True)
        answer = ServerClient(url, key).call("GET", f"/v1/pins?{query}")
        if as_json:
            print_json(answer)
        elif answer["data"]:
            stdout_console().print(_table(answer["data"], past=past))
        else:
            print("no pins")


@pins_app.command("add")
def add_pin(
    request_id: RequestOption = None,
    part: PartOption = "all",
    last_token: LastTokenOption = None,
    text: Annotated[str | None, typer.Option(help="Pin prompts that begin with this text.")] = None,
    file: FileOption = None,
    messages: MessagesOption = None,
    tokens: TokensOption = None,
    salt: SaltOption = None,
    owner: Annotated[str, typer.Option(help="Who the pin is for.")] = "cli",
    label: LabelOption = None,
    level: Annotated[str, typer.Option(help="hard: never evicted; soft: evicted last.")] = "hard",
    priority: Annotated[int, typer.Option(help="Of soft pins: higher stays longer.")] = 0,
    ttl: TtlOption = None,
    max_ttl: MaxTtlOption = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Count --ttl anew at each use.")] = False,
    partial: Annotated[bool, typer.Option("--partial", help="Pin what fits under the quota.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Compute it first, so that it is held at once.")] = False,
    url: UrlOption = DEFAULT_URL,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Pin a text, a chat, token ids or what a request computed."""
    with friendly_errors():
        what = {"text": text, "file": file, "messages_file": messages, "tokens_file": tokens, "request_id": request_id}
        options = {"level": level, "priority": priority, "owner": owner, "labels": labels_of(label)}
        limits = {"last_token": last_token, "cache_salt": salt, "ttl_seconds": ttl, "max_ttl_seconds": max_ttl}
        flags = {"refresh": refresh, "partial": partial, "wait": wait}
        body = _what(_given(what), part) | options | _given(limits) | flags
        pin = ServerClient(url, key).call("POST", "/v1/pins", body)
        if as_json:
            print_json(pin)
            return
        print(f"{pin['id']}: {pin['num_pinned_tokens']} of {pin['num_tokens']} tokens held, {pin['level']}")


@pins_app.command("rm")
def remove_pin(
    pin_id: Annotated[str | None, typer.Argument(help="The id that `pins list` shows.")] = None,
    owner: Annotated[str | None, typer.Option(help="Undo all pins of this owner.")] = None,
    request_id: Annotated[str | None, typer.Option(help="Undo the latest pin of this request.")] = None,
    url: UrlOption = DEFAULT_URL,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Undo a pin, the latest of a request, or all of an owner."""
    with friendly_errors():
        query = _given({"owner": owner, "request_id": request_id})
        if len(query) + (pin_id is not None) != 1:
            raise ConfigError("say what to undo with one of PIN_ID, --owner, --request-id")
        path = f"/v1/pins?{urlencode(query)}" if pin_id is None else f"/v1/pins/{quote(pin_id, safe='')}"
        answer = ServerClient(url, key).call("DELETE", path)
        if as_json:
            print_json(answer)
        else:
            ids = [pin["id"] for pin in answer.get("data", [answer])]
            print(f"{', '.join(ids) or 'no pins'} {'is' if len(ids) == 1 else 'are'} gone")


@pins_app.command("quota")
def show_quota(
    share: ShareArgument = None,
    salt: Annotated[str | None, typer.Option(help="Set that of the pins with this cache_salt, within all.")] = None,
    url: UrlOption = DEFAULT_URL,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how much may be pinned and how much is, or set it."""
    with friendly_errors():
        if share is None and salt is not None:
            raise ConfigError("--salt says whose quota to set", "looseleaf pins quota 0.1 --salt TENANT")
        body: dict[str, Any] | None = None
        if share is not None:
            body = {"share": share, **({} if salt is None else {"cache_salt": salt})}
        _show(ServerClient(url, key).call("GET" if body is None else "PUT", "/v1/pins/quota", body), as_json=as_json)


@pins_app.command("auto")
def show_auto(
    mode: ModeArgument = None,
    min_tokens: MinTokensOption = None,
    min_rate: MinRateOption = None,
    url: UrlOption = DEFAULT_URL,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what the cache pins by itself and what that gained and lost, or switch it."""
    with friendly_errors():
        body: dict[str, Any] = {} if mode is None else {"mode": mode}
        if min_tokens is not None:
            tokens = number_or_off("--min-tokens", min_tokens)
            body["min_tokens"] = None if tokens is None else int(tokens)
        if min_rate is not None:
            body["min_requests_per_second"] = number_or_off("--min-rate", min_rate)
        _show(ServerClient(url, key).call("PUT" if body else "GET", "/v1/pins/auto", body or None), as_json=as_json)


def labels_of(given: list[str] | None) -> dict[str, str]:
    """Labels written as key=value.

    Raises:
        ConfigError: one has no key or no "=".
    """
    labels = {}
    for text in given or []:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ConfigError(f"the label {text!r} is not written as key=value")
        labels[name] = value
    return labels


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _what(given: dict[str, Any], part: str) -> dict[str, Any]:
    """The body's part that says what to pin.

    Raises:
        ConfigError: none or several are given, or the file cannot be read.
    """
    if len(given) != 1:
        raise ConfigError("say what to pin with one of --request-id, --text, --file, --messages, --tokens")
    return {**given, "part": part} if "request_id" in given else prompt_of(given)


def _show(answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(answer)
    else:
        print_facts(answer)


def _table(pins: list[dict[str, Any]], *, past: bool) -> Table:
    columns = ("id", "owner", "level", "held of asked", "served", "hits", "cost", "since", "ended" if past else "until")
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    now = time.time()
    for pin in pins:
        level = f"soft {pin['priority']}" if pin["level"] == "soft" and pin["priority"] else pin["level"]
        ended = f"{pin['end']} {format_span(now - pin['ended_at'])} ago" if past else ""
        expires = "for good" if pin["expires_at"] is None else f"in {format_span(pin['expires_at'] - now)}"
        table.add_row(
            pin["id"],
            pin["owner"],
            "automatic" if pin["is_automatic"] else level,
            f"{pin['num_pinned_tokens']}/{pin['num_tokens']}{' (quota)' if pin['is_limited'] else ''}",
            str(pin["served_tokens"]),
            str(pin["num_hits"]),
            f"{pin['cost_tokens']:.0f}",
            f"{format_span(now - pin['created_at'])} ago",
            ended or expires,
        )
    return table
