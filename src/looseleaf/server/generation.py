"""From requests to text: submit to the engine, merge several choices, end what is not wanted any more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from starlette.types import Receive

from looseleaf.engine.async_engine import AsyncEngine, OutputStream
from looseleaf.engine.request import FinishReason, GenerationRequest, OutputDelta
from looseleaf.errors import LooseleafError
from looseleaf.ids import RequestId
from looseleaf.server.disconnect import unless_client_leaves
from looseleaf.server.errors import ApiError


@dataclass(frozen=True)
class ChoiceDelta:
    """A delta of choice number `index`."""

    index: int
    delta: OutputDelta


@dataclass
class Given:
    """What was given out of one choice so far: pieces of text, and their tokens."""

    request_id: RequestId
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


class Generation:
    """The choices of one HTTP request, running in the engine. `given`: what came of each so far. Belongs to the event
    loop."""

    def __init__(self, engine: AsyncEngine, samples: Sequence[Sequence[GenerationRequest]]) -> None:
        """Submit all, or none. `samples`: for each prompt the requests that share it; choices are numbered through.

        Raises:
            PromptTooLong, InvalidTokens, DuplicateRequest, LifecycleError: as `AsyncEngine.submit_samples`.
        """
        self._streams: list[OutputStream] = []
        try:
            for requests in samples:
                self._streams += engine.submit_samples(requests)
        except BaseException:
            self.close()
            raise
        self.given = [Given(stream.request_id) for stream in self._streams]

    def close(self) -> None:
        """Abort the choices that have not ended."""
        for stream in self._streams:
            stream.abort()

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """The deltas of all choices as they come; those of one choice in order.

        Raises:
            LooseleafError: the engine failed one of the choices.
        """
        merged: asyncio.Queue[ChoiceDelta | Exception] = asyncio.Queue()
        readers = [asyncio.ensure_future(_read(index, stream, merged)) for index, stream in enumerate(self._streams)]
        num_running = len(readers)
        try:
            while num_running:
                item = await merged.get()
                if isinstance(item, Exception):
                    raise item
                if item.delta.finish_reason is not None:
                    num_running -= 1
                given = self.given[item.index]
                given.texts.append(item.delta.text)
                given.token_ids += item.delta.token_ids
                yield item
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def collect(self, receive: Receive) -> list[list[OutputDelta]]:
        """The deltas of each choice, finished. If it does not come to that, what is left is aborted.

        Raises:
            LooseleafError: the engine failed one of the choices.
            ApiError: 503, the engine was stopped meanwhile.
            ClientLeft: `receive` told that the client left.
        """
        try:
            return await unless_client_leaves(receive, self._collect())
        finally:
            self.close()

    async def _collect(self) -> list[list[OutputDelta]]:
        collected: list[list[OutputDelta]] = [[] for _ in self._streams]
        async with contextlib.aclosing(self.deltas()) as deltas:
            async for choice in deltas:
                if choice.delta.finish_reason is FinishReason.ABORT:
                    raise ApiError("the request was aborted: the server is stopping", status=503, code="aborted")
                collected[choice.index].append(choice.delta)
        return collected


async def _read(index: int, stream: OutputStream, merged: asyncio.Queue[ChoiceDelta | Exception]) -> None:
    """Put the deltas of one choice into `merged`, or the error that it ends with."""
    try:
        async for delta in stream:
            if delta.finish_reason is FinishReason.ERROR:
                raise delta.error or LooseleafError(f"request {delta.request_id!r} failed in the engine")
            merged.put_nowait(ChoiceDelta(index, delta))
            if delta.finish_reason is not None:
                return
        raise LooseleafError(f"choice {index} ended without a finish reason")
    except Exception as error:
        merged.put_nowait(error)
