"""One machine, many threads: events are handled one at a time, by whichever thread brings one. No thread of its own.

Not a queue to wait on: `post` returns at once where another thread is at it, and that thread handles the event. An
event posted while handling (by an effect, in the same thread) comes after the present one.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

EventT = TypeVar("EventT")


class Mailbox(Generic[EventT]):
    """Serialises calls of `handle`.

    Args:
        handle: takes one event and must not block. What it raises is a bug of ours.
        on_bug: told of that exception, once; the mailbox takes no event after it.
    """

    def __init__(self, handle: Callable[[EventT], None], on_bug: Callable[[Exception], None]) -> None:
        self._handle = handle
        self._on_bug = on_bug
        self._lock = threading.Lock()
        self._events: deque[EventT] = deque()
        self._is_running = False
        self._is_broken = False

    def post(self, event: EventT) -> None:
        with self._lock:
            if self._is_broken:
                return
            self._events.append(event)
            if self._is_running:
                return
            self._is_running = True
        while True:
            with self._lock:
                if not self._events:
                    self._is_running = False
                    return
                current = self._events.popleft()
            try:
                self._handle(current)
            except Exception as bug:  # noqa: BLE001 - a bug ends its owner loudly, in `on_bug`
                with self._lock:
                    self._is_broken = True
                    self._events.clear()
                self._on_bug(bug)
                return
