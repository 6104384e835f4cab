"""The link to a store in this very process: lanes, each a thread that seals and opens, where TCP has connections.

Not here: sockets, sessions, frames. The store's machine, its checks and its answers are the same.
"""

import queue
import threading
from collections.abc import Callable

from farfill.errors import LocalProtocolError
from farfill.store.local import LocalStore
from farfill.store.protocol import Chunk, Present, Refused, ServerMessage, Stored
from farfill.transfer.link import Prepare, TransferEnd, guarding, next_connection_id


class Lane:
    """One slot's connection; it lives as long as the link."""

    def __init__(self, store: LocalStore, number: int) -> None:
        self.id = next_connection_id()
        self._store = store
        self._steps: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"farfill-lane-{number}", daemon=True)
        self._thread.start()

    def ask(self, end: TransferEnd, prepare: Prepare) -> None:
        self._steps.put(lambda: self._ask(end, prepare))

    def close(self, code: str, detail: str) -> None:
        """Nothing to do: what is damaged in this process's own memory comes no better another way, and the machine's
        few attempts end soon."""

    def stop(self) -> None:
        self._steps.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            step()

    def _ask(self, end: TransferEnd, prepare: Prepare) -> None:
        with guarding(end):
            request = prepare()
            if request is not None:
                message, payload = request
                self._store.ask(message, payload, lambda *answer: self._answered(end, *answer))

    def _answered(
        self, end: TransferEnd, message: ServerMessage, sealed: memoryview | None, give_back: Callable[[], None] | None
    ) -> None:
        """In whichever thread the store answers; opening chunks is left to the lane's."""
        if isinstance(message, Chunk):
            assert sealed is not None
            assert give_back is not None
            self._steps.put(lambda: self._take(end, message, sealed, give_back))
        else:
            assert isinstance(message, Stored | Present | Refused)
            end.answered(self, message)

    def _take(self, end: TransferEnd, message: Chunk, sealed: memoryview, give_back: Callable[[], None]) -> None:
        try:
            with guarding(end):
                end.take_chunk(self, message, sealed)
        finally:
            give_back()


class LaneLink:
    """The link to a local store. Lanes start when they are first used."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._lanes: dict[int, Lane] = {}
        self._ends: dict[tuple[str, int, bool], TransferEnd] = {}
        self._is_closed = False

    def attach(self, end: TransferEnd) -> None:
        if self._ends.setdefault(end.key, end) is not end:
            raise LocalProtocolError(f"transfer {end.key[0]} is already under way here")

    def detach(self, end: TransferEnd) -> None:
        self._ends.pop(end.key, None)

    def open(self, slot: int, end: TransferEnd) -> None:
        with self._lock:
            lane = None if self._is_closed else self._lanes.get(slot)
            if lane is None and not self._is_closed:
                lane = self._lanes[slot] = Lane(self._store, slot)
        if lane is None:
            end.connection_refused(slot, "connection_lost", "this process stops")
        else:
            end.connection_opened(slot, lane)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.stop()
