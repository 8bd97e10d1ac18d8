"""A client that leaves ends its work, whether it reads a stream or waits for one answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class ClientLeft(Exception):
    """The connection closed before the answer was ready."""


async def wait_until_client_leaves(receive: Receive) -> None:
    """Return when the connection closes. The request's body must have been read."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client leaves.

    Raises:
        ClientLeft: the client left first; `work` has ended by then.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(wait_until_client_leaves(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft
    finally:
        await _end(working, watching)


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStreamResponse(Response):
    """Server-sent events from an async generator.

    `close` is called exactly once when the response is over, in whatever way: all sent, client gone, server
    stopping, also if not a byte was sent. (Starlette's own streaming response leaves a generator that is
    suspended in a `yield` to the garbage collector.)
    """

    def __init__(
        self,
        events: AsyncGenerator[str, None],
        close: Callable[[], None],
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(
            status_code=200,
            headers={"cache-control": "no-store", "x-accel-buffering": "no", **(headers or {})},
        )
        del self.headers["content-length"]
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client leaves."""
        del scope
        sending = asyncio.ensure_future(self._send_all(send))
        watching = asyncio.ensure_future(wait_until_client_leaves(receive))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                with contextlib.suppress(OSError):  # the socket closed under a write: the same as leaving
                    sending.result()
        finally:
            self._close()
            await _end(sending, watching)
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
