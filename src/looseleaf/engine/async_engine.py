"""The engine in a thread of its own, read from asyncio."""

from __future__ import annotations

from types import TracebackType

from looseleaf.engine.engine import Engine
from looseleaf.engine.request import GenerationRequest, OutputDelta


class OutputStream:
    """Async iterator over the deltas of one request; ends after the delta with a `finish_reason`.

    Leaving it early ends the request: `aclose()`, `async with`, a cancelled `__anext__`, or dropping the last reference.
    After the last delta none of these does anything.
    """

    @property
    def request_id(self) -> str:
        """The request that this stream belongs to."""
        raise RuntimeError("not written yet")

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> OutputDelta:
        """The next delta.

        Raises:
            StopAsyncIteration: the last delta was given.
            asyncio.CancelledError: this wait was cancelled; the request is aborted.
        """
        raise RuntimeError("not written yet")

    def abort(self) -> bool:
        """End the request at the next step; a last delta with ABORT follows. False if it has ended already."""
        raise RuntimeError("not written yet")

    async def aclose(self) -> None:
        """Leave: abort unless the last delta was produced. Nothing more is given."""
        raise RuntimeError("not written yet")

    async def __aenter__(self) -> OutputStream:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncEngine:
    """Runs an `Engine` in one thread; the event loop never waits for a step.

    `with AsyncEngine(engine) as running:` starts and stops it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def engine(self) -> Engine:
        """The engine inside: its `num_running`, `num_waiting`, `max_model_tokens` may be read from any thread."""
        return self._engine

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine's thread, if it died; None in normal life (also after `stop`)."""
        raise RuntimeError("not written yet")

    def start(self) -> None:
        """Start the thread; a second call does nothing.

        Raises:
            LifecycleError: it was stopped before.
        """
        raise RuntimeError("not written yet")

    def stop(self) -> None:
        """Finish the step that runs, abort what is left (each stream gets a last delta), end the thread. Idempotent."""
        raise RuntimeError("not written yet")

    def submit(self, request: GenerationRequest) -> OutputStream:
        """Queue a request; callable from any thread and from an event loop; does not wait.

        Raises:
            PromptTooLong, InvalidTokens, DuplicateRequest: as `Engine.add`, at once.
            LifecycleError: the engine is stopped or died.
        """
        raise RuntimeError("not written yet")

    def abort(self, request_id: str) -> bool:
        """As `Engine.abort`."""
        raise RuntimeError("not written yet")

    def __enter__(self) -> AsyncEngine:
        self.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
