"""A small HTTP client for a running looseleaf server."""

from __future__ import annotations

from typing import Annotated, Any

import httpx
import typer

from looseleaf.errors import ConfigError, LooseleafError

DEFAULT_URL = "http://127.0.0.1:8000"

UrlOption = Annotated[str, typer.Option("--url", envvar="LOOSELEAF_URL", help="Base URL of the server.")]
KeyOption = Annotated[
    str | None,
    typer.Option("--key", envvar="LOOSELEAF_ADMIN_KEY", help="API key or admin key, where the server needs one."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]


class ServerError(LooseleafError):
    """The server answered with an error, or did not answer."""

    code = "server_error"


class ServerClient:
    """Calls one server. `url` without a path."""

    def __init__(self, url: str, key: str | None, transport: httpx.BaseTransport | None = None) -> None:
        """`transport` replaces the network.

        Raises:
            ConfigError: `url` is no http URL.
        """
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is no URL of a server", f"write it as {DEFAULT_URL}")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._transport = transport

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON answer of one call.

        Raises:
            ServerError: no connection, or an error answer; its message and hint are the server's.
        """
        timeout = httpx.Timeout(10.0, read=600.0)
        try:
            with httpx.Client(headers=self._headers, timeout=timeout, transport=self._transport) as http:
                response = http.request(method, self._url + path, json=body)
        except httpx.HTTPError as error:
            raise ServerError(
                f"no answer from {self._url}: {error}", "is it running? start it with: looseleaf serve"
            ) from error
        try:
            answer = response.json()
        except ValueError as error:
            raise ServerError(
                f"{self._url}{path} answered {response.status_code} without JSON", "is this a looseleaf server?"
            ) from error
        if response.is_success and isinstance(answer, dict):
            return answer
        raise _error_of(response.status_code, answer)


def _error_of(status: int, answer: Any) -> ServerError:
    error = answer.get("error") if isinstance(answer, dict) else None
    message = str(error.get("message")) if isinstance(error, dict) else str(answer)
    facts, _, hint = message.partition("\nhint: ")
    return ServerError(f"{facts} (HTTP {status})", hint or None)
