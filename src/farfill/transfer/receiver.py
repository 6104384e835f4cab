"""The receiver's machine: which chunk to ask for and when, and when the transfer is VERIFIED or has failed.

Not here: opening of sealed chunks, reading of manifest and closing record, buffers, sockets.

Rules
1. The manifest comes first; no data is asked for before it has been checked against what this side derived itself.
2. Asked ahead per connection: bounded. What a lost connection owed is asked for again; what is here is not.
3. A chunk that does not open is asked for again over a new connection, a few times; then the transfer fails.
4. VERIFIED: every data chunk of the plan this machine was made with has been opened, but for those that this side
   holds already, and the closing record, opened too, names exactly their tags. Nothing less.
5. Setup, stall, produce, verify and the whole have their own clocks. Stall and produce run from the first data chunk
   on: how long prefill may take before that is not the transfer's matter.
6. A store that is silent because prefill is slow is not a stall. When nothing has come for half of the stall clock the
   store is asked what it has: an answer that names nothing that is owed starts the stall clock anew, and only the
   produce clock goes on.
"""

import heapq
from collections.abc import Sequence
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
class ChunkArrived:
    """The chunk's sealed bytes are here, unopened."""

    connection: ConnectionId
    index: int


@dataclass(frozen=True, slots=True)
class ManifestChecked:
    """Chunk 0 has been opened and agrees with what this side derived."""

    connection: ConnectionId


@dataclass(frozen=True, slots=True)
class ManifestRefused:
    """Chunk 0 has been opened and does not agree."""

    connection: ConnectionId
    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class ChunkOpened:
    """A data chunk's AEAD tag held; `tag` is it."""

    connection: ConnectionId
    index: int
    tag: bytes


@dataclass(frozen=True, slots=True)
class ClosingOpened:
    """The closing record has been opened and read: the tags of data chunks 1..n, in order."""

    connection: ConnectionId
    tags: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ClosingRefused:
    """The closing record has been opened and cannot be this transfer's."""

    connection: ConnectionId
    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class ChunkBad:
    """The chunk (of any kind) did not open or has the wrong size."""

    connection: ConnectionId
    index: int
    detail: str


ReceiverEvent = (
    Started
    | ConnectionOpened
    | ConnectionRefused
    | ConnectionLost
    | ChunkArrived
    | ManifestChecked
    | ManifestRefused
    | ChunkOpened
    | ClosingOpened
    | ClosingRefused
    | ChunkBad
    | PresentReceived
    | RefusedReceived
    | Cancelled
    | Tick
)

# ---- effects


@dataclass(frozen=True, slots=True)
class SendGet:
    connection: ConnectionId
    index: int


@dataclass(frozen=True, slots=True)
class SendVerified:
    """Tell the store that it may free the bytes."""

    connection: ConnectionId


@dataclass(frozen=True, slots=True)
class Verify:
    """VERIFIED; the last effect."""


ReceiverEffect = OpenConnection | CloseConnection | AskHave | SendGet | SendVerified | Verify | Fail


class ReceiverMachine:
    """See the module's rules.

    Args:
        sealed_bytes: expected size of each data chunk of the plan, 1..n in order; the manifest is 0 and the closing
            record n + 1.
        clocks: all but `queue_s` are used.
        settings: connections, windows, retries.
        held: indices of data chunks that this side has already and does not ask for.
    """

    def __init__(
        self,
        sealed_bytes: Sequence[int],
        clocks: Clocks,
        settings: LinkSettings,
        *,
        held: frozenset[int] = frozenset(),
    ) -> None:
        self._sizes = (0, *sealed_bytes, 0)
        assert all(self._is_data(index) for index in held)
        self._held = held
        self._settings = settings
        self._slots = ConnectionSlots(settings)
        self._wanted = [index for index in range(len(self._sizes)) if index not in held]  # a heap: what to ask for
        self._asked: dict[int, ConnectionId] = {}
        self._arrived: dict[int, ConnectionId] = {}  # here, being opened
        self._tags: dict[int, bytes] = {}  # of opened data chunks
        self._closing: tuple[bytes, ...] | None = None
        self._is_manifest_checked = False
        self._bad: dict[int, int] = {}
        self._waits = Waits(clocks)
        self._probed: ConnectionId | None = None  # rule 6: who was asked since the last progress
        self._is_over = False

    @property
    def deadline(self) -> float | None:
        waits = self._waits
        if waits.started_at is None or self._is_over:
            return None
        ends = [waits.transfer_ends, self._slots.deadline, waits.verify_ends]
        if not self._slots.was_open:
            ends.append(waits.setup_ends)
        if waits.verify_ends is None:
            ends += [waits.stall_ends, waits.produce_ends]
            if self._probed is None and self._slots.open_connections:
                ends.append(waits.probe_due)
        return min(end for end in ends if end is not None)

    @property
    def is_over(self) -> bool:
        return self._is_over

    def is_expected(self, connection: ConnectionId, index: int) -> bool:
        """Whether this chunk was asked for on this connection and is still owed."""
        return not self._is_over and self._asked.get(index) == connection

    def is_awaited(self, connection: ConnectionId, index: int) -> bool:
        """Whether this chunk's opening, on this connection, is what the machine waits for; other openings are void."""
        return not self._is_over and self._arrived.get(index) == connection

    def handle(self, event: ReceiverEvent, now: float) -> list[ReceiverEffect]:
        if self._is_over:
            return []
        effects: list[ReceiverEffect] = []
        match event:
            case Started():
                assert self._waits.started_at is None
                self._waits.started_at = now
                effects += self._slots.open_all()
            case ConnectionOpened():
                self._slots.opened(event.slot, event.connection)
            case ConnectionRefused():
                self._slots.refused(event.slot, event.code, event.detail, now)
                if event.code in FATAL_CODES:
                    return [self._fail(event.code, event.detail)]
            case ConnectionLost():
                self._lose(event.connection, event.code, event.detail, now)
            case ChunkArrived():
                if self._asked.get(event.index) == event.connection:
                    del self._asked[event.index]
                    self._arrived[event.index] = event.connection
            case ManifestChecked():
                if self._take(event.connection, 0):
                    self._is_manifest_checked = True
                    self._slots.progressed()
            case ManifestRefused():
                if self._take(event.connection, 0):
                    return [self._fail(event.code, event.detail)]
            case ChunkOpened():
                if self._is_data(event.index) and self._take(event.connection, event.index):
                    self._tags[event.index] = event.tag
                    self._waits.progress_at = self._waits.produced_at = now
                    self._probed = None
                    self._slots.progressed()
            case ClosingOpened():
                if self._take(event.connection, len(self._sizes) - 1):
                    self._closing = event.tags
                    self._slots.progressed()
            case ClosingRefused():
                if self._take(event.connection, len(self._sizes) - 1):
                    return [self._fail(event.code, event.detail)]
            case ChunkBad():
                if self._take(event.connection, event.index):
                    effects += self._retry(event, now)
            case PresentReceived():
                if event.connection == self._probed and not self._owes(event.indices):
                    self._waits.progress_at = now
                    self._probed = None
            case RefusedReceived():
                if event.connection in self._slots.open_connections:
                    return [self._fail(event.code, event.detail)]
            case Cancelled():
                return [self._fail("transfer_cancelled", event.reason)]
            case Tick():
                pass
            case _:
                assert_never(event)
        if self.is_over:
            return effects
        if self._is_complete():
            return effects + self._conclude()
        self._note_all_here(now)
        late = self._late(now)
        if late is not None:
            return [*effects, late]
        return effects + self._slots.open_due(now) + self._probe(now) + self._pump()

    # ---- the checks, each by itself

    def _is_complete(self) -> bool:
        """Rule 4, its first half: all of it is here and open."""
        missing = len(self._sizes) - 2 - len(self._held) - len(self._tags)
        return self._is_manifest_checked and self._closing is not None and missing == 0

    def _closing_agrees(self, closing: tuple[bytes, ...]) -> bool:
        """Rule 4, its second half."""
        return all(closing[index - 1] == opened for index, opened in self._tags.items())

    def _may_ask(self, index: int) -> bool:
        """Rule 1."""
        return index == 0 or self._is_manifest_checked

    def _late(self, now: float) -> Fail | None:
        """Rule 5, and slots that have given up."""
        waits, clocks = self._waits, self._waits.clocks
        if now >= waits.transfer_ends:
            return self._fail("transfer_timeout", f"not verified after {clocks.transfer_s} s")
        if waits.verify_ends is not None:
            if now >= waits.verify_ends:
                return self._fail("verify_timeout", f"not verified {clocks.verify_s} s after the last chunk came")
            return None  # no connection is needed any more
        if self._slots.is_exhausted:
            return self._fail(self._slots.last_code, self._slots.last_detail)
        if not self._slots.was_open and now >= waits.setup_ends:
            return self._fail("setup_timeout", f"no connection to the store after {clocks.setup_s} s")
        if waits.stall_ends is not None and now >= waits.stall_ends:
            return self._fail("transfer_stalled", f"nothing came from the store for {clocks.stall_s} s")
        if waits.produce_ends is not None and now >= waits.produce_ends:
            return self._fail("transfer_stalled", f"prefill has made no new chunk for {clocks.produce_s} s")
        return None

    def _owes(self, present: frozenset[int]) -> bool:
        """Rule 6: whether the store has something that was asked for and has not come."""
        return any(index in present for index in self._asked)

    # ---- steps

    def _is_data(self, index: int) -> bool:
        return 0 < index < len(self._sizes) - 1

    def _take(self, connection: ConnectionId, index: int) -> bool:
        """Whether this is the answer that was waited for; it is no longer."""
        if self._arrived.get(index) != connection:
            return False
        del self._arrived[index]
        return True

    def _lose(self, connection: ConnectionId, code: str, detail: str, now: float) -> None:
        if self._slots.lost(connection, code, detail, now):
            if self._probed == connection:
                self._probed = None
            for index in [index for index, owner in self._asked.items() if owner == connection]:
                del self._asked[index]
                heapq.heappush(self._wanted, index)

    def _probe(self, now: float) -> list[ReceiverEffect]:
        """Rule 6."""
        due, connections = self._waits.probe_due, self._slots.open_connections
        if self._waits.all_here_at is not None or self._probed is not None or due is None or now < due:
            return []
        if not connections:
            return []
        self._probed = connections[0]
        return [AskHave(self._probed)]

    def _retry(self, event: ChunkBad, now: float) -> list[ReceiverEffect]:
        """Rule 3."""
        self._waits.all_here_at = None
        self._bad[event.index] = self._bad.get(event.index, 0) + 1
        if self._bad[event.index] > self._settings.corrupt_max:
            return [self._fail("chunk_corrupt", f"chunk {event.index}: {event.detail}")]
        heapq.heappush(self._wanted, event.index)
        is_open = event.connection in self._slots.open_connections  # else an earlier bad chunk of it has closed it
        self._lose(event.connection, "chunk_corrupt", event.detail, now)
        return [CloseConnection(event.connection, "chunk_corrupt")] if is_open else []

    def _note_all_here(self, now: float) -> None:
        if self._is_manifest_checked and not self._wanted and not self._asked and self._waits.all_here_at is None:
            self._waits.all_here_at = now

    def _conclude(self) -> list[ReceiverEffect]:
        assert self._closing is not None
        if len(self._closing) != len(self._sizes) - 2:
            detail = f"the closing record names {len(self._closing)} chunks, the plan has {len(self._sizes) - 2}"
            return [self._fail("manifest_incomplete", detail)]
        if not self._closing_agrees(self._closing):
            return [self._fail("manifest_invalid", "the closing record does not name the chunks that came")]
        self._is_over = True
        told: list[ReceiverEffect] = [SendVerified(connection) for connection in self._slots.open_connections[:1]]
        return [*told, Verify()]

    def _fail(self, code: str, detail: str) -> Fail:
        self._is_over = True
        return Fail(code, detail)

    def _pump(self) -> list[ReceiverEffect]:
        """Rule 2: fills the connections' windows in index order, the emptiest connection first."""
        effects: list[ReceiverEffect] = []
        counts = dict.fromkeys(self._slots.open_connections, 0)
        loads = dict(counts)
        for index, connection in (*self._asked.items(), *self._arrived.items()):
            if connection in loads:
                counts[connection] += 1
                loads[connection] += self._sizes[index]
        while self._wanted and loads and self._may_ask(self._wanted[0]):
            connection = min(loads, key=lambda c: (loads[c], counts[c], c))
            index = self._wanted[0]
            size = self._sizes[index]
            if counts[connection] and (
                counts[connection] >= self._settings.window_chunks
                or loads[connection] + size > self._settings.window_bytes
            ):
                del loads[connection]
                continue
            heapq.heappop(self._wanted)
            self._asked[index] = connection
            counts[connection] += 1
            loads[connection] += size
            effects.append(SendGet(connection, index))
        return effects
