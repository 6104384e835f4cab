"""One thread that calls back when deadlines come. Not a scheduler of work: callbacks post a Tick and return."""

import threading
import time
from collections.abc import Callable, Hashable


class DeadlineTimer:
    """Holds one deadline per key, on `time.monotonic`. The thread starts with the first deadline.

    Args:
        name: the thread's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._condition = threading.Condition()
        self._deadlines: dict[Hashable, tuple[float, Callable[[], None]]] = {}
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    def set(self, key: Hashable, deadline: float | None, callback: Callable[[], None]) -> None:
        """Replaces the key's deadline; None removes it. The callback is called once, from the timer's thread."""
        with self._condition:
            if self._is_stopped:
                return
            if deadline is None:
                self._deadlines.pop(key, None)
                return
            former = self._deadlines.get(key)
            self._deadlines[key] = (deadline, callback)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            elif former is None or deadline < former[0]:
                self._condition.notify()

    def stop(self) -> None:
        """Ends the thread; no callback is called after this returns (unless called from one)."""
        with self._condition:
            self._is_stopped = True
            self._deadlines.clear()
            self._condition.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                if self._is_stopped:
                    return
                now = time.monotonic()
                due = [key for key, (deadline, _) in self._deadlines.items() if deadline <= now]
                callbacks = [self._deadlines.pop(key)[1] for key in due]
                if not callbacks:
                    soonest = min((deadline for deadline, _ in self._deadlines.values()), default=None)
                    self._condition.wait(None if soonest is None else max(0.0, soonest - now))
            for callback in callbacks:
                callback()
