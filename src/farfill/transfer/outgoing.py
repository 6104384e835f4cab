"""The sending end of a transfer: takes an engine's chunks, seals them when their turn comes, drives SenderMachine.

Not here: when a chunk goes and whether again (`sender`), nor how it gets there (`connections`, `lanes`).
"""

import logging
import threading
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import assert_never

from farfill.errors import FarfillError, LocalProtocolError
from farfill.kv.manifest import ClosingRecord, encode_closing
from farfill.kv.plan import closing_index
from farfill.kv.sealing import (
    MANIFEST_IDENTITY,
    SEAL_OVERHEAD_BYTES,
    ChunkIdentity,
    Sealer,
    closing_identity,
    data_identity,
)
from farfill.kv.spec import ChunkIndex, ChunkSpec
from farfill.store.protocol import Chunk, ClientMessage, Have, Present, Put, Refused, Stored, indices_in
from farfill.transfer.events import (
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
from farfill.transfer.failures import error_for
from farfill.transfer.link import Connection, Link
from farfill.transfer.mailbox import Mailbox
from farfill.transfer.room import Room
from farfill.transfer.sender import (
    ChunkReady,
    Complete,
    ReleaseChunk,
    SenderEffect,
    SenderEvent,
    SenderMachine,
    SendPut,
    StoredReceived,
)
from farfill.transfer.spec import TransferSpec
from farfill.transfer.timer import DeadlineTimer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SendReport:
    """What a complete send took. Bytes are sealed bytes; `sent_bytes` counts what was sent again too."""

    transfer_id: str
    chunks: int
    sealed_bytes: int
    sent_bytes: int
    resent_chunks: int
    elapsed_s: float


class _OutgoingChunk:
    """A chunk until it is acknowledged: plain, then sealed once; the same bytes however often they are sent."""

    __slots__ = ("_lock", "_plain", "_sealed", "checksum", "identity", "sealed_bytes", "tag", "times_sent")

    def __init__(self, identity: ChunkIdentity, plain: memoryview) -> None:
        self.identity = identity
        self.sealed_bytes = plain.nbytes + SEAL_OVERHEAD_BYTES
        self.tag: bytes | None = None
        self.checksum = 0
        self.times_sent = 0
        self._lock = threading.Lock()
        self._plain: memoryview | None = plain
        self._sealed: memoryview | None = None

    def seal(self, sealer: Sealer) -> tuple[memoryview, bool]:
        """The sealed bytes, and whether this call sealed them."""
        with self._lock:
            if self._sealed is not None:
                return self._sealed, False
            assert self._plain is not None
            sealed = memoryview(bytearray(self.sealed_bytes))
            self.tag = sealer.seal_into(self.identity, self._plain, sealed)
            self.checksum = zlib.crc32(sealed)
            self._sealed, self._plain = sealed, None
            return sealed, True


class Outgoing:
    """One transfer's sending end; a `ChunkSink` for the engine. Every method may be called from any thread.

    Attributes:
        future: SendReport when the store has every chunk, or the FarfillError that ended the transfer. Its callbacks
            run in the data plane's threads and must not block.
    """

    def __init__(
        self,
        spec: TransferSpec,
        plan: Sequence[ChunkSpec],
        manifest: bytes,
        *,
        link: Link,
        timer: DeadlineTimer,
        room: Room,
        settings: LinkSettings,
    ) -> None:
        self.future: Future[SendReport] = Future()
        self._spec = spec
        self._plan = plan
        self._sealer = Sealer(spec.key, spec.transfer_id, spec.epoch)
        self._link, self._timer, self._room = link, timer, room
        self._machine = SenderMachine(len(plan) + 2, spec.clocks, settings)
        self._mailbox: Mailbox[SenderEvent] = Mailbox(self._handle, self.failed)
        self._connections: dict[ConnectionId, Connection] = {}
        self._chunks: dict[int, _OutgoingChunk] = {}
        self._book = _Book(len(plan))
        self._started_at = time.monotonic()
        link.attach(self)
        self._add(0, _OutgoingChunk(MANIFEST_IDENTITY, memoryview(manifest)), first=Started())

    @property
    def key(self) -> tuple[str, int, bool]:
        return self._spec.transfer_id, self._spec.epoch, True

    # ---- the engine's side

    def publish(self, spec: ChunkSpec, payload: memoryview) -> None:
        """Takes one data chunk, in any order; `payload` is read-only from now on and kept until it is acknowledged.

        Returns at once, except while this process holds more than its bound of chunks that no store has yet.

        Raises:
            FarfillError: the one that has ended the transfer. LocalProtocolError: not a chunk of the plan, not its
                size, or published before.
        """
        if not 1 <= spec.index <= len(self._plan) or self._plan[spec.index - 1] != spec:
            raise LocalProtocolError(f"chunk {spec.index} is not of this transfer's plan")
        if payload.nbytes != spec.payload_bytes:
            raise LocalProtocolError(f"chunk {spec.index} has {payload.nbytes} bytes, not {spec.payload_bytes}")
        self._raise_failure()
        self._book.publish(spec.index)
        self._room.take(payload.nbytes, self.future.done)
        self._add(spec.index, _OutgoingChunk(data_identity(spec), payload.cast("B")))
        if self.future.done():  # then nobody else may forget it
            self._forget(spec.index)
            self._raise_failure()

    def finish(self, cached_tokens: int) -> None:
        """Every chunk has been published; `cached_tokens` of the prefix were not computed but found in a cache.

        Raises:
            FarfillError: the one that has ended the transfer. LocalProtocolError: a chunk is missing.
        """
        self._raise_failure()
        self._close_if(self._book.finish(cached_tokens))

    def cancel(self, reason: str) -> None:
        """Ends the transfer with `transfer_cancelled`, if nothing has ended it yet."""
        self._mailbox.post(Cancelled(reason))

    def _raise_failure(self) -> None:
        if self.future.done() and (failure := self.future.exception()) is not None:
            raise failure

    def _add(self, index: int, chunk: _OutgoingChunk, first: Started | None = None) -> None:
        self._chunks[index] = chunk
        if first is not None:
            self._mailbox.post(first)
        self._mailbox.post(ChunkReady(index, chunk.sealed_bytes))

    def _close_if(self, tags: tuple[bytes, ...] | None) -> None:
        if tags is None:
            return
        record = ClosingRecord(self._spec.transfer_id, self._spec.epoch, tags, self._book.cached_tokens)
        index = closing_index(self._plan)
        self._add(index, _OutgoingChunk(closing_identity(index), memoryview(encode_closing(record))))

    # ---- the link's side

    def connection_opened(self, slot: int, connection: Connection) -> None:
        self._connections[connection.id] = connection
        self._mailbox.post(ConnectionOpened(slot, connection.id))

    def connection_refused(self, slot: int, code: str, detail: str) -> None:
        self._mailbox.post(ConnectionRefused(slot, code, detail))

    def connection_lost(self, connection: Connection, code: str, detail: str) -> None:
        self._mailbox.post(ConnectionLost(connection.id, code, detail))

    def answered(self, connection: Connection, message: Stored | Present | Refused) -> None:
        match message:
            case Stored():
                self._mailbox.post(StoredReceived(connection.id, message.index))
            case Present():
                present = frozenset(indices_in(message.bitmap))
                self._mailbox.post(PresentReceived(connection.id, present, message.verified))
            case Refused():
                self._mailbox.post(RefusedReceived(connection.id, message.index, message.code, message.detail))
            case _:
                assert_never(message)

    def is_expected(self, connection: Connection, message: Chunk) -> bool:
        return False

    def take_chunk(self, connection: Connection, message: Chunk, sealed: memoryview) -> None:
        raise LocalProtocolError("a sender takes no chunks")

    def failed(self, bug: Exception) -> None:
        _log.critical("sending transfer %s failed by a bug", self._spec.transfer_id, exc_info=bug)
        self._end(LocalProtocolError(f"sending failed by a bug: {bug!r}"))

    def _prepare(self, index: int) -> tuple[ClientMessage, memoryview | None] | None:
        """In a connection's writing thread: seals, where it is the first time."""
        chunk = self._chunks.get(index)
        if chunk is None:
            return None
        sealed, is_first = chunk.seal(self._sealer)
        if is_first and 1 <= index <= len(self._plan):
            assert chunk.tag is not None
            self._close_if(self._book.sealed(index, chunk.tag))
        self._book.sent(chunk.sealed_bytes, is_again=chunk.times_sent > 0)
        chunk.times_sent += 1
        return Put(self._spec.transfer_id, self._spec.epoch, index, chunk.sealed_bytes, chunk.checksum), sealed

    # ---- in the mailbox

    def _handle(self, event: SenderEvent) -> None:
        for effect in self._machine.handle(event, time.monotonic()):
            self._carry_out(effect)
        if isinstance(event, ConnectionLost):
            self._connections.pop(event.connection, None)
        self._timer.set(self, self._machine.deadline, self._tick)

    def _tick(self) -> None:
        self._mailbox.post(Tick())

    def _carry_out(self, effect: SenderEffect) -> None:
        match effect:
            case OpenConnection():
                self._link.open(effect.slot, self)
            case CloseConnection():
                self._connections[effect.connection].close(effect.code, "what came over it was damaged")
            case AskHave():
                have = Have(self._spec.transfer_id, self._spec.epoch)
                self._connections[effect.connection].ask(self, lambda: (have, None))
            case SendPut():
                self._connections[effect.connection].ask(self, partial(self._prepare, effect.index))
            case ReleaseChunk():
                self._forget(effect.index)
            case Complete():
                self._end(None)
            case Fail():
                self._end(error_for(effect.code, effect.detail))
            case _:
                assert_never(effect)

    def _forget(self, index: int) -> None:
        chunk = self._chunks.pop(index, None)
        if chunk is not None and 1 <= index <= len(self._plan):
            self._room.give_back(chunk.sealed_bytes - SEAL_OVERHEAD_BYTES)

    def _end(self, failure: FarfillError | None) -> None:
        if self.future.done():
            return
        self._timer.set(self, None, self._tick)
        self._link.detach(self)
        if failure is None:
            self.future.set_result(self._book.report(self._spec.transfer_id, time.monotonic() - self._started_at))
        else:
            self.future.set_exception(failure)
        # Only now, so that a publish that waits for room sees the end, or leaves a chunk that is forgotten here.
        for index in list(self._chunks):
            self._forget(index)
        self._room.look_again()


class _Book:
    """What was published, sealed and sent. Thread-safe."""

    def __init__(self, chunks: int) -> None:
        self.cached_tokens = 0
        self._chunks = chunks
        self._lock = threading.Lock()
        self._published: set[ChunkIndex] = set()
        self._tags: dict[int, bytes] = {}
        self._is_finished = False
        self._sent_bytes = 0
        self._sealed_bytes = 0
        self._resent_chunks = 0

    def publish(self, index: ChunkIndex) -> None:
        with self._lock:
            if index in self._published or self._is_finished:
                raise LocalProtocolError(f"chunk {index} was published before, or after the end")
            self._published.add(index)

    def finish(self, cached_tokens: int) -> tuple[bytes, ...] | None:
        """The tags in order, if the closing record is due now."""
        with self._lock:
            if self._is_finished or len(self._published) != self._chunks:
                raise LocalProtocolError(f"finish: {len(self._published)} of {self._chunks} chunks were published")
            self._is_finished, self.cached_tokens = True, cached_tokens
            return self._all_tags()

    def sealed(self, index: int, tag: bytes) -> tuple[bytes, ...] | None:
        """The tags in order, if the closing record is due now."""
        with self._lock:
            self._tags[index] = tag
            return self._all_tags() if self._is_finished else None

    def _all_tags(self) -> tuple[bytes, ...] | None:
        if len(self._tags) != self._chunks:
            return None
        return tuple(self._tags[index] for index in range(1, self._chunks + 1))

    def sent(self, sealed_bytes: int, *, is_again: bool) -> None:
        with self._lock:
            self._sent_bytes += sealed_bytes
            self._resent_chunks += is_again
            self._sealed_bytes += 0 if is_again else sealed_bytes

    def report(self, transfer_id: str, elapsed_s: float) -> SendReport:
        with self._lock:
            return SendReport(
                transfer_id, self._chunks + 2, self._sealed_bytes, self._sent_bytes, self._resent_chunks, elapsed_s
            )
