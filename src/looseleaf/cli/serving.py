"""An app behind a real socket: in the foreground until it is stopped, or in a thread beside its client."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType

import uvicorn
from fastapi import FastAPI

from looseleaf.errors import ConfigError, LifecycleError

GRACE_SECONDS = 5
"""How long requests that run may go on after the server was told to stop."""
START_SECONDS = 30.0
MAX_PORT = 65_535


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one.

    Raises:
        ConfigError: host or port cannot be had.
    """
    if not 0 <= port <= MAX_PORT:
        raise ConfigError(f"port {port} does not exist; ports go from 0 to {MAX_PORT}", "port 0 takes a free one")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            "choose another --host or --port; port 0 takes a free one",
        ) from error


def url_of(listening: socket.socket) -> str:
    """The base URL of a listening socket, as a client on this machine reaches it."""
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """Calls `on_ready` once requests are taken."""

    def __init__(self, app: FastAPI, on_ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_SECONDS)
        )
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()


def serve_until_stopped(app: FastAPI, listening: socket.socket, on_ready: Callable[[], None]) -> bool:
    """Serve until SIGINT or SIGTERM; requests that run get `GRACE_SECONDS` to end. False if it could not start."""
    server = _Server(app, on_ready)
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:  # uvicorn raises the signal again after it has shut down
        pass
    finally:
        listening.close()
    return server.started


class BackgroundServer:
    """An app on a free port of 127.0.0.1, served from a thread, for a `with` block."""

    def __init__(self, app: FastAPI) -> None:
        self._socket = open_socket("127.0.0.1", 0)
        self.url = url_of(self._socket)
        self._ready = threading.Event()
        self._server = _Server(app, self._ready.set)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="looseleaf-http", daemon=True
        )

    def __enter__(self) -> BackgroundServer:
        """Start it.

        Raises:
            LifecycleError: it does not start; uvicorn has logged why.
        """
        self._thread.start()
        deadline = time.monotonic() + START_SECONDS
        while not self._ready.wait(0.05):
            if not self._thread.is_alive() or time.monotonic() > deadline:
                self._server.should_exit = True
                raise LifecycleError("the server did not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it and wait for its end."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
