"""Connections to a store over TCP: opened when asked for, kept and shared, closed when idle. Two threads each.

Not here: when to open one and what to send (the machines decide), nor what is in a chunk (`outgoing`, `incoming`).
"""

import contextlib
import logging
import queue
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, assert_never

from farfill.errors import FarfillError, LocalProtocolError, OperationError, PeerError
from farfill.store.control import fetch_session
from farfill.store.protocol import Chunk, Present, Refused, ServerMessage, Session, Stored
from farfill.transfer.frames import (
    ATTACH_REPLY_BYTES,
    AttachStatus,
    FrameDecoder,
    FrameEncoder,
    Keys,
    decode_attach_reply,
    encode_attach,
    new_nonce,
)
from farfill.transfer.link import Prepare, TransferEnd, guarding, key_of_refused, next_connection_id
from farfill.transfer.mailbox import Mailbox
from farfill.transfer.sockets import FrameReader, receive_exactly, send_frame, shut_down, tune
from farfill.transfer.spec import StoreAddress

_log = logging.getLogger(__name__)

IDLE_S: Final = 60.0  # shorter than the store's, so that it is the client who closes
_CONNECT_S: Final = 5.0  # for each step of connecting


class TcpConnection:
    """One attached connection: `serve` reads, a second thread writes."""

    def __init__(self, link: "TcpLink", sock: socket.socket, keys: Keys) -> None:
        self.id = next_connection_id()
        self._link = link
        self._sock = sock
        self._encoder = FrameEncoder(keys.client)
        decoder: FrameDecoder[ServerMessage] = FrameDecoder(keys.server, ServerMessage)
        self._reader = FrameReader(sock, decoder, lambda: True)  # the writing thread closes an idle connection
        self._requests: queue.SimpleQueue[tuple[TransferEnd, Prepare] | None] = queue.SimpleQueue()
        self._scratch = memoryview(bytearray(1024**2))
        self._closed_because: tuple[str, str] | None = None

    def ask(self, end: TransferEnd, prepare: Prepare) -> None:
        self._requests.put((end, prepare))

    def close(self, code: str, detail: str) -> None:
        self._closed_because = (code, detail)
        shut_down(self._sock)

    def serve(self) -> tuple[str, str]:
        """Runs until the connection ends; why it ended, as (code, detail). No thread of it is left then."""
        writer = threading.Thread(target=self._write, name=f"farfill-data-write-{self.id}", daemon=True)
        writer.start()
        ended = ("connection_lost", "the store closed the connection")
        try:
            while (message := self._reader.read_message()) is not None:
                self._take(message)
        except FarfillError as error:
            ended = (error.code, error.message)
        except OSError as error:
            ended = ("connection_lost", f"the connection to the store broke: {error}")
        finally:
            shut_down(self._sock)
            self._requests.put(None)
            writer.join()
            self._sock.close()
        return self._closed_because or ended

    def _take(self, message: ServerMessage) -> None:
        match message:
            case Stored() | Present():
                end = self._link.find((message.transfer_id, message.epoch, True))
            case Refused():
                end = self._link.find(key_of_refused(message))
            case Chunk():
                end = self._link.find((message.transfer_id, message.epoch, False))
                self._take_chunk(end, message)
                return
            case _:
                assert_never(message)
        if end is not None:  # else the transfer has ended here meanwhile
            end.answered(self, message)

    def _take_chunk(self, end: TransferEnd | None, message: Chunk) -> None:
        if end is not None and not end.is_expected(self, message):
            raise PeerError("protocol_violation", f"the store sent chunk {message.index}, which was not asked for")
        if self._scratch.nbytes < message.payload_bytes:
            self._scratch = memoryview(bytearray(message.payload_bytes))
        sealed = self._scratch[: message.payload_bytes]
        if message.payload_bytes:
            self._reader.read_payload(sealed, checksum=False)  # its AEAD tag says more than a CRC
        if end is not None:
            with guarding(end):
                end.take_chunk(self, message, sealed)

    def _write(self) -> None:
        while True:
            try:
                item = self._requests.get(timeout=IDLE_S)
            except queue.Empty:
                if self._link.is_idle:
                    self.close("connection_lost", "closed after an idle time")
                continue
            if item is None:
                return
            end, prepare = item
            request = None
            with guarding(end):
                request = prepare()
            if request is None:
                continue
            message, payload = request
            try:
                send_frame(self._sock, self._encoder.encode(message), payload)
            except OSError as error:
                self._closed_because = self._closed_because or ("connection_lost", f"writing to the store: {error}")
                shut_down(self._sock)


@dataclass(slots=True)
class _Slot:
    connection: TcpConnection | None = None
    waiting: list[TransferEnd] = field(default_factory=list)
    thread: threading.Thread | None = None


class TcpLink:
    """All connections of this process to one store.

    Args:
        store: its address; `instance` is checked by the store when a session is opened.
        context: a TLS client context; None only for a store on loopback.
    """

    def __init__(self, store: StoreAddress, context: ssl.SSLContext | None) -> None:
        self._store = store
        self._context = context
        self._mailbox: Mailbox[Callable[[], None]] = Mailbox(lambda step: step(), self._on_bug)
        self._slots: dict[int, _Slot] = {}
        self._ends: dict[tuple[str, int, bool], TransferEnd] = {}
        self._session_lock = threading.Lock()
        self._session: Session | None = None
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        """No transfer uses it."""
        return not self._ends

    @property
    def is_unused(self) -> bool:
        """No transfer and no connection."""
        return not self._ends and all(slot.thread is None for slot in self._slots.copy().values())

    def find(self, key: tuple[str, int, bool]) -> TransferEnd | None:
        return self._ends.get(key)

    def attach(self, end: TransferEnd) -> None:
        if self._ends.setdefault(end.key, end) is not end:
            raise LocalProtocolError(f"transfer {end.key[0]} is already under way here")

    def detach(self, end: TransferEnd) -> None:
        self._ends.pop(end.key, None)

    def open(self, slot: int, end: TransferEnd) -> None:
        self._mailbox.post(lambda: self._open(slot, end))

    def close(self) -> None:
        self._is_closed = True
        threads = []
        for slot in self._slots.copy().values():
            thread, connection = slot.thread, slot.connection
            if connection is not None:
                connection.close("connection_lost", "this process stops")
            if thread is not None:
                threads.append(thread)
        for thread in threads:
            thread.join()

    # ---- in the mailbox

    def _open(self, number: int, end: TransferEnd) -> None:
        if self._is_closed:
            end.connection_refused(number, "connection_lost", "this process stops")
            return
        slot = self._slots.setdefault(number, _Slot())
        if slot.connection is not None:
            end.connection_opened(number, slot.connection)
            return
        slot.waiting.append(end)
        if slot.thread is None:
            slot.thread = threading.Thread(
                target=self._run, args=(number,), name=f"farfill-data-read-{self._store.host}-{number}", daemon=True
            )
            try:
                slot.thread.start()
            except RuntimeError as error:  # our own shortage, not the peer's end
                self._refused(number, "connection_lost", f"this process cannot start a thread: {error}")

    def _opened(self, number: int, connection: TcpConnection) -> None:
        slot = self._slots[number]
        slot.connection = connection
        if self._is_closed:
            connection.close("connection_lost", "this process stops")
        waiting, slot.waiting = slot.waiting, []
        for end in waiting:
            end.connection_opened(number, connection)

    def _refused(self, number: int, code: str, detail: str) -> None:
        slot = self._slots[number]
        slot.thread = None
        waiting, slot.waiting = slot.waiting, []
        for end in waiting:
            end.connection_refused(number, code, detail)

    def _lost(self, number: int, connection: TcpConnection, code: str, detail: str) -> None:
        slot = self._slots[number]
        slot.connection = slot.thread = None
        for end in list(self._ends.values()):
            end.connection_lost(connection, code, detail)

    def _broken(self, number: int, bug: Exception) -> None:
        slot = self._slots[number]
        slot.connection = slot.thread = None
        self._on_bug(bug)

    def _on_bug(self, bug: Exception) -> None:
        _log.critical("a link to a store has stopped after a bug", exc_info=bug)
        for end in list(self._ends.values()):
            end.failed(bug)

    # ---- in a slot's thread

    def _run(self, number: int) -> None:
        try:
            self._connect_and_serve(number)
        except Exception as error:  # noqa: BLE001 - told, loudly, to every transfer that uses the link
            bug = error  # `error` is gone by the time another thread may run the step
            self._mailbox.post(lambda: self._broken(number, bug))

    def _connect_and_serve(self, number: int) -> None:
        try:
            connection = self._connect()
        except FarfillError as error:
            code, detail = error.code, error.message
            self._mailbox.post(lambda: self._refused(number, code, detail))
            return
        self._mailbox.post(lambda: self._opened(number, connection))
        code, detail = connection.serve()
        _log.info("a data connection to %s:%s ended: %s: %s", self._store.host, self._store.data_port, code, detail)
        self._mailbox.post(lambda: self._lost(number, connection, code, detail))

    def _connect(self) -> TcpConnection:
        """Raises FarfillError."""
        status = AttachStatus.UNKNOWN_SESSION
        for _ in range(2):  # the second time with a new session, where the store no longer knows the first
            session = self._open_session()
            status, connection = self._attach(session)
            if connection is not None:
                return connection
            self._forget_session(session)
        raise OperationError("connection_lost", f"the store does not take the connection: {status.name.lower()}")

    def _attach(self, session: Session) -> tuple[AttachStatus, TcpConnection | None]:
        host, port = self._store.host, self._store.data_port
        nonce = new_nonce()
        record = encode_attach(session.session_id, session.key, nonce)
        try:
            sock = socket.create_connection((host, port), timeout=_CONNECT_S)
        except OSError as error:
            raise OperationError("peer_unreachable", f"no connection to the store at {host}:{port}: {error}") from error
        with contextlib.ExitStack() as stack:
            stack.callback(sock.close)
            try:
                sock.sendall(record)
                reply = receive_exactly(sock, ATTACH_REPLY_BYTES)
                status = decode_attach_reply(reply, record, session.key)
                if status is not AttachStatus.ACCEPTED:
                    return status, None
                tune(sock)
            except OSError as error:
                raise OperationError("connection_lost", f"attaching to {host}:{port}: {error}") from error
            stack.pop_all()
            return status, TcpConnection(self, sock, Keys(session.key, nonce))

    def _open_session(self) -> Session:
        with self._session_lock:
            if self._session is None:
                self._session = fetch_session(self._store, self._context, _CONNECT_S)
            return self._session

    def _forget_session(self, session: Session) -> None:
        with self._session_lock:
            if self._session is session:
                self._session = None
