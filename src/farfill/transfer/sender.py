"""The sender's machine: which chunk goes over which connection, what is sent again, when to give up.

Not here: sealing, buffers, sockets, and the chunks' contents; chunks are named by index and size.

Rules
1. A chunk is done when the store says Stored or, asked, Present; what was written to a socket is not a fact.
2. An acknowledged chunk is never sent again.
3. After a connection is lost, what was in flight on it is uncertain: it is sent again only once the store, asked,
   does not have it.
4. The transfer is complete when every chunk, the closing record included, is done. Not before.
5. A refusal ends the transfer at once, except a damaged arrival, which is tried again over a new connection.
6. Setup, stall and the whole have their own clocks; the stall clock runs only while something waits for the store.
"""

import heapq
from dataclasses import dataclass
from typing import assert_never

from farfill.transfer.events import (
    FATAL_CODES,
    AskHave,
    Cancelled,
    CloseConnection,
    ConnectionId,
    ConnectionLost,
    ConnectionOpened,
    ConnectionRefused,
    Fail,
    LinkSettings,
    OpenConnection,
    PresentReceived,
    RefusedReceived,
    Started,
    Tick,
)
from farfill.transfer.slots import ConnectionSlots
from farfill.transfer.spec import Clocks
from farfill.transfer.waits import Waits

# ---- events


@dataclass(frozen=True, slots=True)
class ChunkReady:
    """A sealed chunk exists and stays readable until ReleaseChunk. Each index once, in any order."""

    index: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class StoredReceived:
    connection: ConnectionId
    index: int


SenderEvent = (
    Started
    | ChunkReady
    | ConnectionOpened
    | ConnectionRefused
    | ConnectionLost
    | StoredReceived
    | PresentReceived
    | RefusedReceived
    | Cancelled
    | Tick
)

# ---- effects


@dataclass(frozen=True, slots=True)
class SendPut:
    connection: ConnectionId
    index: int


@dataclass(frozen=True, slots=True)
class ReleaseChunk:
    """The store has it; its buffer is free. (After Complete or Fail all of them are.)"""

    index: int


@dataclass(frozen=True, slots=True)
class Complete:
    """The store has every chunk; the last effect."""


SenderEffect = OpenConnection | CloseConnection | AskHave | SendPut | ReleaseChunk | Complete | Fail


class SenderMachine:
    """See the module's rules.

    Args:
        chunks: how many there are, manifest (0) and closing record (the last) included.
        clocks: `setup_s`, `stall_s` and `transfer_s` are used; they run from `Started`.
        settings: connections, windows, retries.
    """

    def __init__(self, chunks: int, clocks: Clocks, settings: LinkSettings) -> None:
        assert chunks >= 2
        self._chunks = chunks
        self._settings = settings
        self._slots = ConnectionSlots(settings)
        self._sizes: dict[int, int] = {}  # of chunks that are ready and not done
        self._queue: list[int] = []  # a heap of the indices to send
        self._in_flight: dict[ConnectionId, set[int]] = {}
        self._uncertain: set[int] = set()
        self._asked: tuple[ConnectionId, frozenset[int]] | None = None  # whom, and about which uncertain ones
        self._done: set[int] = set()
        self._damaged: dict[int, int] = {}
        self._waits = Waits(clocks)
        self._is_over = False

    @property
    def deadline(self) -> float | None:
        waits = self._waits
        if waits.started_at is None or self._is_over:
            return None
        ends = [waits.transfer_ends, self._slots.deadline]
        if not self._slots.was_open:
            ends.append(waits.setup_ends)
        elif self._sizes:
            ends.append(waits.stall_ends)
        return min(end for end in ends if end is not None)

    @property
    def is_over(self) -> bool:
        return self._is_over

    def handle(self, event: SenderEvent, now: float) -> list[SenderEffect]:
        if self._is_over:
            return []
        effects: list[SenderEffect] = []
        match event:
            case Started():
                assert self._waits.started_at is None
                self._waits.started_at = self._waits.progress_at = now
                effects += self._slots.open_all()
            case ChunkReady():
                self._add(event, now)
            case ConnectionOpened():
                self._slots.opened(event.slot, event.connection)
                self._in_flight[event.connection] = set()
            case ConnectionRefused():
                self._slots.refused(event.slot, event.code, event.detail, now)
                if event.code in FATAL_CODES:
                    return [self._fail(event.code, event.detail)]
            case ConnectionLost():
                self._lose(event.connection, event.code, event.detail, now)
            case StoredReceived():
                if event.index in self._in_flight.get(event.connection, ()):
                    self._in_flight[event.connection].discard(event.index)
                    effects += self._finish([event.index], now)
            case PresentReceived():
                effects += self._learn(event, now)
            case RefusedReceived():
                if event.connection in self._in_flight:
                    effects += self._refused(event, now)
            case Cancelled():
                return [self._fail("transfer_cancelled", event.reason)]
            case Tick():
                pass
            case _:
                assert_never(event)
        if self.is_over:
            return effects
        if self._is_complete():
            self._is_over = True
            return [*effects, Complete()]
        late = self._late(now)
        if late is not None:
            return [*effects, late]
        return effects + self._slots.open_due(now) + self._pump()

    # ---- the checks, each by itself

    def _is_complete(self) -> bool:
        """Rule 4."""
        return len(self._done) == self._chunks

    def _may_resend(self, index: int, present: frozenset[int]) -> bool:
        """Rule 3."""
        return index not in present

    def _late(self, now: float) -> Fail | None:
        """Rule 6, and slots that have given up."""
        waits, clocks = self._waits, self._waits.clocks
        if now >= waits.transfer_ends:
            return self._fail("transfer_timeout", f"not complete after {clocks.transfer_s} s")
        if self._slots.is_exhausted:
            return self._fail(self._slots.last_code, self._slots.last_detail)
        if not self._slots.was_open:
            if now >= waits.setup_ends:
                return self._fail("setup_timeout", f"no connection to the store after {clocks.setup_s} s")
        elif self._sizes and waits.stall_ends is not None and now >= waits.stall_ends:
            return self._fail("transfer_stalled", f"the store has acknowledged nothing for {clocks.stall_s} s")
        return None

    # ---- steps

    def _add(self, event: ChunkReady, now: float) -> None:
        index = event.index
        assert 0 <= index < self._chunks
        assert index not in self._sizes
        assert index not in self._done
        if not self._sizes:
            self._waits.progress_at = now  # nothing waited for the store until now
        self._sizes[index] = event.payload_bytes
        heapq.heappush(self._queue, index)

    def _lose(self, connection: ConnectionId, code: str, detail: str, now: float) -> None:
        if not self._slots.lost(connection, code, detail, now):
            return
        self._uncertain |= self._in_flight.pop(connection)
        if self._asked is not None and self._asked[0] == connection:
            self._asked = None

    def _finish(self, indices: list[int], now: float) -> list[SenderEffect]:
        for index in indices:
            self._done.add(index)
            del self._sizes[index]
        if indices:
            self._waits.progress_at = now
            self._slots.progressed()
        return [ReleaseChunk(index) for index in indices]

    def _learn(self, event: PresentReceived, now: float) -> list[SenderEffect]:
        if self._asked is None or self._asked[0] != event.connection:
            return []
        asked, self._asked = self._asked[1], None
        if event.verified:
            self._is_over = True
            return [Complete()]
        self._uncertain -= asked
        resend = sorted(index for index in asked if self._may_resend(index, event.indices))
        for index in resend:
            heapq.heappush(self._queue, index)
        return self._finish(sorted(asked.difference(resend)), now)

    def _refused(self, event: RefusedReceived, now: float) -> list[SenderEffect]:
        index = event.index
        if event.code == "chunk_corrupt" and index is not None and index in self._in_flight[event.connection]:
            self._damaged[index] = self._damaged.get(index, 0) + 1
            if self._damaged[index] <= self._settings.corrupt_max:
                self._in_flight[event.connection].discard(index)
                heapq.heappush(self._queue, index)
                self._lose(event.connection, event.code, event.detail, now)
                return [CloseConnection(event.connection, event.code)]
        return [self._fail(event.code, event.detail)]

    def _fail(self, code: str, detail: str) -> Fail:
        self._is_over = True
        return Fail(code, detail)

    def _pump(self) -> list[SenderEffect]:
        """Asks about what is uncertain, then fills the connections' windows, the emptiest first."""
        effects: list[SenderEffect] = []
        connections = self._slots.open_connections
        if self._uncertain and self._asked is None and connections:
            self._asked = (connections[0], frozenset(self._uncertain))
            effects.append(AskHave(connections[0]))
        loads = {connection: self._load(connection) for connection in connections}
        while self._queue and loads:
            connection = min(loads, key=lambda c: (loads[c], c))
            index = self._queue[0]
            size = self._sizes[index]
            flying = self._in_flight[connection]
            if flying and (
                len(flying) >= self._settings.window_chunks or loads[connection] + size > self._settings.window_bytes
            ):
                del loads[connection]
                continue
            heapq.heappop(self._queue)
            flying.add(index)
            loads[connection] += size
            effects.append(SendPut(connection, index))
        return effects

    def _load(self, connection: ConnectionId) -> int:
        return sum(self._sizes[index] for index in self._in_flight[connection])
