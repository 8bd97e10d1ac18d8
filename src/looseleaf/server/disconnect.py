"""A client that leaves ends its work, whether it reads a stream or waits for one answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from looseleaf.server.errors import ApiError

T = TypeVar("T")


class ClientLeft(ApiError):
    """The connection closed before the answer was ready; nobody reads this."""

    def __init__(self) -> None:
        super().__init__("the client left", status=499)


async def _until_client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client leaves. The request's body must have been read.

    Raises:
        ClientLeft: the client left first; `work` has ended by then.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_until_client_leaves(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


class EventStreamResponse(StreamingResponse):
    """Server-sent events from an async generator.

    `close` is called exactly once when the response is over, in whatever way: all sent, client gone, server stopping,
    also if not a byte was sent. (Starlette's own leaves a generator that is suspended in a `yield` to the garbage
    collector.)
    """

    def __init__(
        self, events: AsyncGenerator[str, None], close: Callable[[], None], headers: Mapping[str, str]
    ) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no", **headers}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client leaves."""
        del scope
        try:
            with contextlib.suppress(ClientLeft, OSError):  # the socket closed under a write: the same as leaving
                await unless_client_leaves(receive, self.stream_response(send))
        finally:
            self._close()
            await self._events.aclose()
