"""Who may come in: requests in flight, their bound, and the drain. Not the engine's own queue."""

import asyncio
import contextlib
from collections.abc import Iterator

from farfill.errors import OverloadError


class Admission:
    """Counts requests in flight. Once closed it lets nobody in, and `idle` says when the last one has gone."""

    def __init__(self, requests_max: int) -> None:
        self._requests_max = requests_max
        self._requests = 0
        self._is_closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def requests(self) -> int:
        return self._requests

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """One request's stay.

        Raises:
            OverloadError: `draining` once closed, `queue_full` at the bound.
        """
        if self._is_closed:
            raise OverloadError("draining", "this worker is stopping and accepts no more requests", retry_after_s=1.0)
        if self._requests >= self._requests_max:
            raise OverloadError(
                "queue_full", f"this worker already has {self._requests} requests, its limit", retry_after_s=1.0
            )
        self._requests += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._requests -= 1
            if self._requests == 0:
                self._idle.set()

    def close(self) -> None:
        self._is_closed = True

    async def idle(self) -> None:
        """Returns as soon as nobody is in."""
        await self._idle.wait()
