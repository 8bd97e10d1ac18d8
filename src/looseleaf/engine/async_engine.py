"""The engine in a thread of its own, read from asyncio.

    any thread, event loop                        engine thread
    submit: Engine.add, mailbox, notify  ----->   step, step, step ... (waits only while there is no request)
    OutputStream <- mailbox <- call_soon_threadsafe <-- deltas, one call per event loop and step

The event loop never waits for a step: the locks it takes are held for bookkeeping only.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from looseleaf.core.moving import ResizeResult
from looseleaf.engine.engine import Engine
from looseleaf.engine.request import FinishReason, GenerationRequest, OutputDelta, Usage
from looseleaf.errors import DuplicateRequest, LifecycleError, LooseleafError, ModelError


class _Mailbox:
    """Deltas of one request between the two threads. The engine's side holds this, never the stream: so a stream that
    is dropped can be noticed."""

    __slots__ = ("deltas", "is_complete", "loop", "request_id", "waiter")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.deltas: deque[OutputDelta] = deque()
        self.is_complete = False
        self.loop: asyncio.AbstractEventLoop | None = None
        self.waiter: asyncio.Future[None] | None = None

    def put(self, delta: OutputDelta) -> None:
        """Engine's thread: add a delta."""
        self.deltas.append(delta)
        self.is_complete = delta.finish_reason is not None

    async def wait(self) -> None:
        """Event loop's thread: until woken, unless there is something already."""
        self.loop = asyncio.get_running_loop()
        self.waiter = self.loop.create_future()
        try:
            if not self.deltas:  # looked at after loop and waiter are set: a put from now on wakes us
                await self.waiter
        finally:
            self.waiter = None


class OutputStream:
    """Async iterator over the deltas of one request; ends after the delta with a `finish_reason`.

    Leaving it early ends the request: `aclose()`, `async with`, a cancelled `__anext__`, or dropping the last
    reference; after the last delta was produced none of these does anything. One reader at a time.
    """

    def __init__(self, engine: AsyncEngine, mailbox: _Mailbox) -> None:
        self.request_id = mailbox.request_id
        self._engine = engine
        self._mailbox = mailbox
        self._is_closed = False

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> OutputDelta:
        """The next delta.

        Raises:
            StopAsyncIteration: the last delta was given.
            asyncio.CancelledError: this wait was cancelled; the request is aborted.
        """
        while not self._is_closed:
            if self._mailbox.deltas:
                delta = self._mailbox.deltas.popleft()
                self._is_closed = delta.finish_reason is not None
                return delta
            try:
                await self._mailbox.wait()
            except asyncio.CancelledError:
                self._leave()
                raise
        raise StopAsyncIteration

    def abort(self) -> bool:
        """End the request at the next step; a last delta with ABORT follows. False if it has ended already."""
        return not self._is_closed and not self._mailbox.is_complete and self._engine.abort(self.request_id)

    async def aclose(self) -> None:
        """Leave: abort unless the last delta was produced. Nothing more is given."""
        self._leave()

    async def __aenter__(self) -> OutputStream:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._leave()

    def __del__(self) -> None:
        self._leave()

    def _leave(self) -> None:
        self.abort()
        self._is_closed = True


class AsyncEngine:
    """Runs an `Engine` in one thread; `with AsyncEngine(engine) as running:` starts and stops it.

    `engine`: the engine inside; its `num_running`, `num_waiting`, `max_model_tokens` may be read from any thread.
    `failure`: what ended the engine's thread, if it died; None in normal life (also after `stop`).
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failure: BaseException | None = None
        self._changed = threading.Condition()  # its lock is re-entrant: a stream may be dropped anywhere
        self._mailboxes: dict[str, _Mailbox] = {}
        self._thread: threading.Thread | None = None
        self._is_stopping = False

    def start(self) -> None:
        """Start the thread; a second call does nothing.

        Raises:
            LifecycleError: it was stopped before.
        """
        with self._changed:
            if self._is_stopping:
                raise LifecycleError("the engine was stopped", "make a new AsyncEngine")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="looseleaf-engine", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Finish the step that runs, abort what is left (each stream gets a last delta), end the thread. Idempotent."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        elif self.engine.has_work:  # never started: what was submitted ends here
            self._abort_all()

    def submit(self, request: GenerationRequest) -> OutputStream:
        """Queue a request; callable from any thread and from an event loop; does not wait.

        Raises:
            PromptTooLong, InvalidTokens, DuplicateRequest: as `Engine.add`, at once.
            LifecycleError: the engine is stopped or died.
        """
        return self.submit_samples([request])[0]

    def submit_samples(self, requests: Sequence[GenerationRequest]) -> list[OutputStream]:
        """Queue several requests whose common prompt is computed once, all or none; a stream each.

        Raises:
            RequestError, PromptTooLong, InvalidTokens, DuplicateRequest: as `Engine.add_samples`, at once.
            LifecycleError: the engine is stopped or died.
        """
        mailboxes = {request.request_id: _Mailbox(request.request_id) for request in requests}
        with self._changed:
            self._check_alive()
            for request_id in mailboxes:
                if request_id in self._mailboxes:  # its last delta is still on the way
                    raise DuplicateRequest(request_id)
            self.engine.add_samples(requests)
            self._mailboxes |= mailboxes
            self._changed.notify_all()
        return [OutputStream(self, mailbox) for mailbox in mailboxes.values()]

    def resize(self, num_pages: int) -> Future[ResizeResult]:
        """As `Engine.resize`; an idle engine wakes up for it.

        Raises:
            ConfigError: as `Engine.resize`.
            LifecycleError: the engine is stopped or died.
        """
        with self._changed:
            self._check_alive()
            future = self.engine.resize(num_pages)
            self._changed.notify_all()
        return future

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise LifecycleError(f"the engine died: {type(self.failure).__name__}: {self.failure}")
        if self._is_stopping:
            raise LifecycleError("the engine is stopped")

    def abort(self, request_id: str) -> bool:
        """As `Engine.abort`."""
        return self.engine.abort(request_id)

    def __enter__(self) -> AsyncEngine:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    # -- the engine's thread --

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._deliver(self.engine.step())
            self._abort_all()
        except BaseException as error:
            self._die(error)

    def _wait_for_work(self) -> bool:
        """Sleep until a request is there; False when it is time to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopping or self.engine.has_work)
            return not self._is_stopping

    def _abort_all(self) -> None:
        for request_id in self.engine.request_ids:
            self.engine.abort(request_id)
        self._deliver(self.engine.step())

    def _die(self, error: BaseException) -> None:
        """Tell everybody who waits; the engine's state can't be trusted any more."""
        cause = error if isinstance(error, LooseleafError) else ModelError(f"the engine died: {error!r}")
        with self._changed:
            self.failure = error
            left = list(self._mailboxes)
            self.engine.refuse_resizes(cause)
        usage = Usage(0, 0, 0)
        self._deliver([OutputDelta(name, "", (), (), FinishReason.ERROR, usage, cause) for name in left])

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        to_wake: dict[asyncio.AbstractEventLoop, list[_Mailbox]] = {}
        with self._changed:
            for delta in deltas:
                mailbox = self._mailboxes.get(delta.request_id)
                if mailbox is None:  # added to the engine directly: nobody reads it here
                    continue
                if delta.finish_reason is not None:
                    del self._mailboxes[delta.request_id]
                mailbox.put(delta)
                if mailbox.loop is not None:
                    to_wake.setdefault(mailbox.loop, []).append(mailbox)
        for loop, mailboxes in to_wake.items():
            self._wake(loop, mailboxes)

    def _wake(self, loop: asyncio.AbstractEventLoop, mailboxes: list[_Mailbox]) -> None:
        try:
            loop.call_soon_threadsafe(_wake_all, mailboxes)
        except RuntimeError:  # that event loop is closed: nobody reads these any more
            for mailbox in mailboxes:
                self.engine.abort(mailbox.request_id)


def _wake_all(mailboxes: list[_Mailbox]) -> None:
    """Event loop's thread: let the readers look again."""
    for mailbox in mailboxes:
        if mailbox.waiter is not None and not mailbox.waiter.done():
            mailbox.waiter.set_result(None)
