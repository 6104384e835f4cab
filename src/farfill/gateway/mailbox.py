"""Where a request's tasks leave what has happened, and work that outlives its request. No rules, no HTTP."""

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from typing import Any, Final

from farfill.router.messages import Event, Tick

_log = logging.getLogger(__name__)

# Pieces of output that may wait for a slow client, in each request; then the decode leg's connection is not read.
_EVENTS_MAX: Final = 16


class Mailbox:
    """Events of one request, bounded for output; and its timer."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Future[None] | None = None
        self._room = asyncio.Event()
        self._room.set()
        self._crash: BaseException | None = None

    async def put(self, event: Event) -> None:
        while len(self._events) >= _EVENTS_MAX:
            self._room.clear()
            await self._room.wait()
        self.put_now(event)

    def put_now(self, event: Event) -> None:
        self._events.append(event)
        self._wake()

    def crash(self, error: BaseException) -> None:
        """A bug in one of the request's tasks ends the request."""
        self._crash = error
        self._wake()

    def take_all(self) -> list[Event]:
        """What has come and was not read; nobody will wait for more."""
        events = list(self._events)
        self._events.clear()
        self._room.set()
        return events

    async def get(self, deadline: float | None) -> Event:
        """The next event, or `Tick` once the deadline has come."""
        while True:
            if self._crash is not None:
                raise self._crash
            if deadline is not None and self._loop.time() >= deadline:
                return Tick()
            if self._events:
                event = self._events.popleft()
                if len(self._events) < _EVENTS_MAX:
                    self._room.set()
                return event
            self._arrived = self._loop.create_future()
            timer = None if deadline is None else self._loop.call_at(deadline, self._wake)
            try:
                await self._arrived
            finally:
                self._arrived = None
                if timer is not None:
                    timer.cancel()

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)


class Background:
    """Work that outlives the request that began it: releasing leases, taking late grants back."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def finish(self) -> None:
        """Returns when all of it is done; each piece has its own time limit."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s ended by a bug", task.get_name(), exc_info=error)
