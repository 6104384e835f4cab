"""One request inside the engine, seen from the event loop: its events as an asynchronous iterator.

Not here: what the events mean to a client (`stream`, `responses`) or to a transfer (`legs`).
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from farfill.engines.api import (
    Engine,
    EngineEvent,
    GenerationRequest,
    OnEvent,
    PrefillRequest,
    RequestAborted,
    RequestFailed,
    RequestFinished,
    RequestStarted,
)
from farfill.errors import OperationError, OverloadError

T = TypeVar("T")


async def settled(future: "Future[T]") -> T:
    """Waits for a future that other threads settle. Being cancelled here does not cancel it, as `wrap_future` would."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def wake(_: "Future[T]") -> None:
        # The loop is closed only when the process is going down, and then nobody waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(wake)
    await done.wait()
    return future.result()


class EngineCall:
    """Events of one accepted request. Events wait here without a bound: the model's maximum length bounds them."""

    def __init__(self, engine: Engine, request_id: str) -> None:
        self._engine = engine
        self._request_id = request_id
        self._loop = asyncio.get_running_loop()
        self._events: deque[EngineEvent] = deque()
        self._arrived = asyncio.Event()
        self._ended = False

    def _on_event(self, event: EngineEvent) -> None:
        """On the engine's thread. The loop is woken only for the first of several events that it has not seen yet."""
        self._events.append(event)
        if len(self._events) == 1 or isinstance(event, RequestFinished | RequestFailed | RequestAborted):
            # The loop is closed only when the process is going down, and then nobody waits for the event.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._arrived.set)

    def abort(self) -> None:
        """Makes the engine drop the request, unless it has ended; never blocks."""
        if not self._ended:
            self._engine.abort(self._request_id)

    async def next(self) -> EngineEvent:
        """The next event; after a terminal one there is none.

        Raises:
            FarfillError: the engine's own, where the request failed; `draining` where it was aborted by somebody else.
        """
        while not self._events:
            self._arrived.clear()
            if not self._events:
                await self._arrived.wait()
        event = self._events.popleft()
        match event:
            case RequestFinished():
                self._ended = True
            case RequestFailed(error):
                self._ended = True
                raise error
            case RequestAborted():
                self._ended = True
                raise OverloadError("draining", "the engine stopped before the request was done")
            case _:
                pass
        return event

    async def started(self, queue_s: float) -> None:
        """Waits until the engine is at work on the request.

        Raises:
            OperationError: `queue_timeout` after `queue_s` seconds.
        """
        try:
            async with asyncio.timeout(queue_s):
                event = await self.next()
        except TimeoutError:
            raise OperationError(
                "queue_timeout", f"the engine has not come to this request within {queue_s} s"
            ) from None
        assert isinstance(event, RequestStarted), f"the first event was {event}"

    async def __aiter__(self) -> AsyncIterator[EngineEvent]:
        while not self._ended:
            yield await self.next()


@contextlib.contextmanager
def generation(engine: Engine, request: GenerationRequest) -> Iterator[EngineCall]:
    """A generation that is aborted if the block is left before its end."""
    with _call(engine, request.request_id, lambda on_event: engine.generate(request, on_event)) as call:
        yield call


@contextlib.contextmanager
def prefill(engine: Engine, request: PrefillRequest) -> Iterator[EngineCall]:
    """A prefill that is aborted if the block is left before its end."""
    with _call(engine, request.request_id, lambda on_event: engine.prefill(request, on_event)) as call:
        yield call


@contextlib.contextmanager
def _call(engine: Engine, request_id: str, start: Callable[[OnEvent], None]) -> Iterator[EngineCall]:
    call = EngineCall(engine, request_id)
    start(call._on_event)
    try:
        yield call
    finally:
        call.abort()
