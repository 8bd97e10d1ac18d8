"""`looseleaf pins quota` and `looseleaf pins auto`: how much may be pinned, and what the cache pins by itself."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from looseleaf.cli.auto_pin import number_or_off
from looseleaf.cli.client import DEFAULT_URL, JsonOption, KeyOption, ServerClient, UrlOption
from looseleaf.cli.failures import friendly_errors
from looseleaf.cli.output import print_facts, print_json
from looseleaf.errors import ConfigError

ShareArgument = Annotated[
    float | None, typer.Argument(help="Set it: the share of all blocks that pins may hold, 0 to 1.")
]
ModeArgument = Annotated[str | None, typer.Argument(help="Switch it: on, off, or dry-run (only report it).")]
MinTokensOption = Annotated[str | None, typer.Option(help="Prefixes of more tokens are candidates; off for no such.")]
MinRateOption = Annotated[
    str | None, typer.Option(help="So are those asked for by more requests a second; off for no such.")
]


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


def _show(answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(answer)
    else:
        print_facts(answer)
