"""From requests to text: submit to the engine, merge several choices, end what is not wanted any more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from looseleaf.engine.async_engine import AsyncEngine, OutputStream
from looseleaf.engine.request import FinishReason, GenerationRequest, OutputDelta, Usage
from looseleaf.engine.sampling import TokenLogprobs
from looseleaf.errors import LooseleafError
from looseleaf.server.errors import ApiError


@dataclass(frozen=True)
class ChoiceDelta:
    """A delta of choice number `index`."""

    index: int
    delta: OutputDelta


@dataclass(frozen=True)
class ChoiceResult:
    """A finished choice. `deltas` in order; their texts joined are `text`."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    deltas: tuple[OutputDelta, ...]
    finish_reason: FinishReason
    usage: Usage


class Generation:
    """The choices of one HTTP request, running in the engine.

    `close()` aborts what has not finished, once; after normal ends it does nothing. Belongs to the event
    loop.
    """

    def __init__(self, engine: AsyncEngine, requests: Sequence[GenerationRequest]) -> None:
        """Submit all, or none.

        Raises:
            PromptTooLong, InvalidTokens, DuplicateRequest, LifecycleError: as `AsyncEngine.submit`.
        """
        self._streams: list[OutputStream] = []
        self._running: set[int] = set()
        try:
            for index, request in enumerate(requests):
                self._streams.append(engine.submit(request))
                self._running.add(index)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Abort the choices that have not given their last delta."""
        for index in tuple(self._running):
            self._running.discard(index)
            self._streams[index].abort()

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """The deltas of all choices as they come; those of one choice in order."""
        if len(self._streams) == 1:
            async for delta in self._streams[0]:
                self._note(0, delta)
                yield ChoiceDelta(0, delta)
            return
        merged: asyncio.Queue[ChoiceDelta | BaseException] = asyncio.Queue()
        readers = [asyncio.ensure_future(self._read(index, merged)) for index in range(len(self._streams))]
        try:
            for _ in range(len(readers)):
                while True:
                    item = await merged.get()
                    if isinstance(item, BaseException):
                        raise item
                    self._note(item.index, item.delta)
                    yield item
                    if item.delta.finish_reason is not None:
                        break
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _read(self, index: int, merged: asyncio.Queue[ChoiceDelta | BaseException]) -> None:
        try:
            async for delta in self._streams[index]:
                merged.put_nowait(ChoiceDelta(index, delta))
                if delta.finish_reason is not None:
                    return
            merged.put_nowait(LooseleafError(f"choice {index} ended without a finish reason"))
        except Exception as error:
            merged.put_nowait(error)

    def _note(self, index: int, delta: OutputDelta) -> None:
        if delta.finish_reason is not None:
            self._running.discard(index)

    async def collect(self) -> list[ChoiceResult]:
        """All choices, finished, in order. Cancelling or failing aborts what is left.

        Raises:
            LooseleafError: the engine failed one of them; the others are aborted.
            ApiError: 503, the engine was stopped meanwhile.
        """
        collected: list[list[OutputDelta]] = [[] for _ in self._streams]
        try:
            async with contextlib.aclosing(self.deltas()) as deltas:
                async for choice in deltas:
                    raise_if_failed(choice.delta)
                    if choice.delta.finish_reason is FinishReason.ABORT:
                        raise ApiError("the request was aborted: the server is stopping", status=503, code="aborted")
                    collected[choice.index].append(choice.delta)
        finally:
            self.close()
        return [_result(index, deltas) for index, deltas in enumerate(collected)]


def raise_if_failed(delta: OutputDelta) -> None:
    """Raise the error of a delta that ends its request with one.

    Raises:
        LooseleafError: what the engine says went wrong.
    """
    if delta.finish_reason is FinishReason.ERROR:
        raise delta.error or LooseleafError(f"request {delta.request_id!r} failed in the engine")


def _result(index: int, deltas: list[OutputDelta]) -> ChoiceResult:
    last = deltas[-1]
    if last.finish_reason is None:
        raise LooseleafError(f"request {last.request_id!r} ended without a finish reason")
    return ChoiceResult(
        index=index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        deltas=tuple(deltas),
        finish_reason=last.finish_reason,
        usage=last.usage,
    )
