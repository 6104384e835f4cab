"""The receiving end of a transfer: opens chunks into memory as they come, drives ReceiverMachine.

Not here: what to ask for and when it is VERIFIED (`receiver`), nor how it gets here (`connections`, `lanes`).
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import assert_never

from farfill.errors import FarfillError, LocalProtocolError, PeerError
from farfill.kv.fingerprint import Fingerprint
from farfill.kv.manifest import check_closing, check_manifest, decode_closing, decode_manifest
from farfill.kv.plan import closing_index, sealed_bytes_max
from farfill.kv.sealing import MANIFEST_IDENTITY, SEAL_OVERHEAD_BYTES, Sealer, closing_identity, data_identity
from farfill.kv.spec import CacheLayout, ChunkIndex, ChunkSpec
from farfill.store.protocol import Chunk, Get, Have, Present, Refused, Stored, Verified, indices_in
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
from farfill.transfer.receiver import (
    ChunkArrived,
    ChunkBad,
    ChunkOpened,
    ClosingOpened,
    ClosingRefused,
    ManifestChecked,
    ManifestRefused,
    ReceiverEffect,
    ReceiverEvent,
    ReceiverMachine,
    SendGet,
    SendVerified,
    Verify,
)
from farfill.transfer.spec import TransferSpec
from farfill.transfer.timer import DeadlineTimer

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ReceivedCache:
    """A VERIFIED transfer; an `ImportedCache` for the engine. Times are of `time.monotonic`.

    Attributes:
        plan: every data chunk, as this side derived it. held: indices of those that it had already; they did not come.
        prefix_tokens: tokens whose cache it is. cached_tokens: how many the prefill side found in its own cache.
        bytes_moved: sealed bytes that came, all chunks, repeats included.
        started_at, first_byte_at, verified_at: when it was asked for, when its first data chunk had come, when it was
            complete and checked.
    """

    plan: Sequence[ChunkSpec]
    prefix_tokens: int
    cached_tokens: int
    bytes_moved: int
    started_at: float
    first_byte_at: float
    verified_at: float
    _payloads: dict[int, bytearray] = field(repr=False)
    held: frozenset[int] = frozenset()

    def payload(self, index: ChunkIndex) -> memoryview:
        """The plaintext of data chunk `index`: `plan[index - 1].payload_bytes` bytes.

        KeyError after `release`, and for one that did not come because this side held it.
        """
        return memoryview(self._payloads[index])

    def release(self) -> None:
        """Forgets the payloads. Idempotent; views that were handed out stay valid."""
        self._payloads.clear()


def held_chunks(plan: Sequence[ChunkSpec], held_tokens: int) -> frozenset[int]:
    """Indices of the chunks that who has the rows of the first `held_tokens` tokens does without. States never."""
    return frozenset(chunk.index for chunk in plan if not chunk.is_state and chunk.token_stop <= held_tokens)


class Incoming:
    """One transfer's receiving end. Every method may be called from any thread.

    Attributes:
        future: ReceivedCache once VERIFIED, or the FarfillError that ended the transfer. Its callbacks run in the data
            plane's threads and must not block.
    """

    def __init__(
        self,
        spec: TransferSpec,
        plan: Sequence[ChunkSpec],
        *,
        layout: CacheLayout,
        fingerprint: Fingerprint,
        prefix_token_ids: Sequence[int],
        link: Link,
        timer: DeadlineTimer,
        settings: LinkSettings,
        held_tokens: int = 0,
    ) -> None:
        self.future: Future[ReceivedCache] = Future()
        self._spec = spec
        self._plan = plan
        self._expectation = _Expectation(layout, fingerprint, prefix_token_ids)
        self._sealer = Sealer(spec.key, spec.transfer_id, spec.epoch)
        self._link, self._timer = link, timer
        sealed_bytes = [chunk.payload_bytes + SEAL_OVERHEAD_BYTES for chunk in plan]
        self._held = held_chunks(plan, held_tokens)
        self._machine = ReceiverMachine(sealed_bytes, spec.clocks, settings, held=self._held)
        self._mailbox: Mailbox[ReceiverEvent] = Mailbox(self._handle, self.failed)
        self._connections: dict[ConnectionId, Connection] = {}
        self._got = _Got(started_at=time.monotonic())
        link.attach(self)
        self._mailbox.post(Started())

    @property
    def key(self) -> tuple[str, int, bool]:
        return self._spec.transfer_id, self._spec.epoch, False

    def cancel(self, reason: str = "cancelled by the receiver") -> None:
        """Ends the transfer with `transfer_cancelled`, if nothing has ended it yet."""
        self._mailbox.post(Cancelled(reason))

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
            case Present():
                present = frozenset(indices_in(message.bitmap))
                self._mailbox.post(PresentReceived(connection.id, present, message.verified))
            case Refused():
                self._mailbox.post(RefusedReceived(connection.id, message.index, message.code, message.detail))
            case Stored():
                pass  # the store's word on Verified: nobody waits for it
            case _:
                assert_never(message)

    def is_expected(self, connection: Connection, message: Chunk) -> bool:
        return self._machine.is_over or self._machine.is_expected(connection.id, message.index)

    def take_chunk(self, connection: Connection, message: Chunk, sealed: memoryview) -> None:
        """In a connection's reading thread, so that chunks of several connections are opened at once."""
        if self.future.done():
            return
        post, index, plan = self._mailbox.post, message.index, self._plan
        self._got.bytes_moved += sealed.nbytes
        post(ChunkArrived(connection.id, index))
        try:
            if sealed.nbytes > sealed_bytes_max(plan, index):
                raise PeerError("chunk_corrupt", f"chunk {index} has {sealed.nbytes} bytes, more than it may have")
            if index == 0:
                post(self._open_manifest(connection.id, sealed))
            elif index == closing_index(plan):
                post(self._open_closing(connection.id, sealed))
            else:
                post(self._open_data(connection.id, index, sealed))
        except PeerError as error:
            post(ChunkBad(connection.id, index, error.message))

    def failed(self, bug: Exception) -> None:
        _log.critical("receiving transfer %s failed by a bug", self._spec.transfer_id, exc_info=bug)
        self._end(LocalProtocolError(f"receiving failed by a bug: {bug!r}"))

    def _open_manifest(self, connection: ConnectionId, sealed: memoryview) -> ReceiverEvent:
        plain, _ = self._sealer.open(MANIFEST_IDENTITY, sealed)
        try:
            check_manifest(
                decode_manifest(plain),
                layout=self._expectation.layout,
                fingerprint=self._expectation.fingerprint,
                prefix_token_ids=self._expectation.prefix_token_ids,
                transfer_id=self._spec.transfer_id,
                epoch=self._spec.epoch,
                chunk_tokens=self._spec.chunk_tokens,
            )
        except PeerError as error:  # it is authentic: asking again would bring the same
            return ManifestRefused(connection, error.code, error.message)
        return ManifestChecked(connection)

    def _open_closing(self, connection: ConnectionId, sealed: memoryview) -> ReceiverEvent:
        plain, _ = self._sealer.open(closing_identity(closing_index(self._plan)), sealed)
        try:
            record = decode_closing(plain)
            check_closing(  # all but the tags, which the machine compares with those it was told of
                record,
                plan=self._plan,
                tags=record.tags if len(record.tags) == len(self._plan) else [b""] * len(self._plan),
                prefix_tokens=self._spec.prefix_tokens,
                transfer_id=self._spec.transfer_id,
                epoch=self._spec.epoch,
            )
        except PeerError as error:
            return ClosingRefused(connection, error.code, error.message)
        self._got.cached_tokens = record.cached_tokens
        return ClosingOpened(connection, record.tags)

    def _open_data(self, connection: ConnectionId, index: int, sealed: memoryview) -> ReceiverEvent:
        if self._got.first_byte_at is None:
            self._got.first_byte_at = time.monotonic()
        chunk = self._plan[index - 1]
        payload = bytearray(chunk.payload_bytes)
        tag = self._sealer.open_into(data_identity(chunk), sealed, payload)
        self._got.opened[connection, index] = payload
        return ChunkOpened(connection, index, tag)

    # ---- in the mailbox

    def _handle(self, event: ReceiverEvent) -> None:
        if isinstance(event, ChunkOpened):
            payload = self._got.opened.pop((event.connection, event.index))
            if self._machine.is_awaited(event.connection, event.index):
                self._got.payloads[event.index] = payload
        for effect in self._machine.handle(event, time.monotonic()):
            self._carry_out(effect)
        if isinstance(event, ConnectionLost):
            self._connections.pop(event.connection, None)
        self._timer.set(self, self._machine.deadline, self._tick)

    def _tick(self) -> None:
        self._mailbox.post(Tick())

    def _carry_out(self, effect: ReceiverEffect) -> None:
        transfer_id, epoch = self._spec.transfer_id, self._spec.epoch
        match effect:
            case OpenConnection():
                self._link.open(effect.slot, self)
            case CloseConnection():
                self._connections[effect.connection].close(effect.code, "what came over it was damaged")
            case AskHave():
                have = Have(transfer_id, epoch)
                self._connections[effect.connection].ask(self, lambda: (have, None))
            case SendGet():
                get = Get(transfer_id, epoch, effect.index)
                self._connections[effect.connection].ask(self, lambda: (get, None))
            case SendVerified():
                verified = Verified(transfer_id, epoch)
                self._connections[effect.connection].ask(self, lambda: (verified, None))
            case Verify():
                self._end(None)
            case Fail():
                self._end(error_for(effect.code, effect.detail))
            case _:
                assert_never(effect)

    def _end(self, failure: FarfillError | None) -> None:
        if self.future.done():
            return
        self._timer.set(self, None, self._tick)
        self._link.detach(self)
        got = self._got
        if failure is not None:
            self.future.set_exception(failure)
            got.payloads.clear()
            return
        now = time.monotonic()
        self.future.set_result(
            ReceivedCache(
                plan=self._plan,
                prefix_tokens=self._spec.prefix_tokens,
                cached_tokens=got.cached_tokens,
                bytes_moved=got.bytes_moved,
                started_at=got.started_at,
                first_byte_at=now if got.first_byte_at is None else got.first_byte_at,
                verified_at=now,
                held=self._held,
                _payloads=got.payloads,
            )
        )


@dataclass(frozen=True, slots=True)
class _Expectation:
    """What this side knows by itself, and the manifest must agree with."""

    layout: CacheLayout
    fingerprint: Fingerprint
    prefix_token_ids: Sequence[int]


@dataclass(slots=True)
class _Got:
    """What has come so far.

    Attributes:
        opened: payloads on their way from a reading thread to the machine. payloads: those that it has taken.
    """

    started_at: float
    first_byte_at: float | None = None
    bytes_moved: int = 0
    cached_tokens: int = 0
    opened: dict[tuple[ConnectionId, int], bytearray] = field(default_factory=dict)
    payloads: dict[int, bytearray] = field(default_factory=dict)
