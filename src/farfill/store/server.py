"""A store that others reach: its memory, its sessions, and the listener of its data plane.

Not here: its control API (`store.control`), which a process adds to its own HTTP server.
"""

import contextlib
import logging
import socket
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from farfill.errors import ConfigurationError, FarfillError
from farfill.kv.spec import WIRE_VERSION
from farfill.store.connection import DataConnection
from farfill.store.events import (
    ConfirmReleased,
    ConfirmRenewed,
    Grant,
    Refuse,
    ReleaseAsked,
    RenewAsked,
    ReserveAsked,
)
from farfill.store.local import LocalStore
from farfill.store.machine import StoreLimits
from farfill.store.memory import MemoryStore, OpEffect
from farfill.store.protocol import (
    Granted,
    OpenSession,
    Release,
    Released,
    Renew,
    Renewed,
    Reserve,
    Session,
    StoreStatus,
)
from farfill.store.sessions import SessionTable
from farfill.tls import is_loopback
from farfill.transfer.failures import error_for
from farfill.transfer.frames import ATTACH_BYTES, AttachStatus, encode_attach_reply
from farfill.transfer.sockets import receive_exactly, shut_down, tune
from farfill.transfer.spec import StoreAddress

_log = logging.getLogger(__name__)

# Two threads each. A site with 100 workers that keep 4 connections open needs 400.
CONNECTIONS_MAX: Final = 1024
_ATTACH_S: Final = 5.0  # for the attach record of a new connection
_BACKLOG: Final = 128


class Security(StrEnum):
    """How peers prove who they are when they ask for a session."""

    MUTUAL_TLS = "mutual_tls"
    LOOPBACK = "loopback"  # not at all; allowed on a loopback address only


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Where a store listens (`data_port` 0: any free one), and where peers reach it.

    Attributes:
        advertise_host: the host peers are told; `host` if empty.
        control_url: base URL of the control API that this process serves.
    """

    host: str
    data_port: int
    security: Security
    control_url: str
    limits: StoreLimits
    advertise_host: str = ""


class StoreServer:
    """Listens from construction on.

    Raises:
        ConfigurationError: `insecure_listener` off loopback without mutual TLS; `port_in_use`; `config_invalid` for a
            host that cannot be listened on.
    """

    def __init__(self, settings: StoreSettings, *, first_epoch: int | None = None) -> None:
        if settings.security is not Security.MUTUAL_TLS and not is_loopback(settings.host):
            raise ConfigurationError(
                "insecure_listener",
                f"the store would listen on {settings.host} without knowing its peers; configure tls, or listen on "
                "127.0.0.1",
                field="host",
            )
        self.security = settings.security
        self._listener = _listen(settings.host, settings.data_port)
        self.memory = MemoryStore(settings.limits, first_epoch)
        self.address = StoreAddress(
            instance=self.memory.instance,
            control_url=settings.control_url,
            host=settings.advertise_host or settings.host,
            data_port=self._listener.getsockname()[1],
        )
        self._sessions = SessionTable()
        self._lock = threading.Lock()
        self._served: dict[threading.Thread, tuple[socket.socket, DataConnection | None]] = {}
        self._is_stopped = False
        self._acceptor = threading.Thread(target=self._accept, name="farfill-store-accept", daemon=True)
        self._acceptor.start()

    def local(self, identity: str) -> LocalStore:
        """Access for this process, as `identity`."""
        return LocalStore(self.memory, identity)

    # ---- control

    def reserve(self, peer: str, request: Reserve) -> "Future[Granted]":
        """Fails with OverloadError (`store_full`, `draining`) or OperationError (`invalid_request`)."""
        answer: Future[Granted] = Future()

        def on_effect(effect: OpEffect, _: memoryview | None) -> None:
            if isinstance(effect, Grant):
                answer.set_result(Granted(effect.transfer_id, effect.epoch, effect.lease_s, self.address))
            else:
                _fail(answer, effect)

        op = self.memory.begin(on_effect)
        self.memory.post(ReserveAsked(op, peer, request))
        return answer

    def renew(self, peer: str, request: Renew) -> "Future[Renewed]":
        answer: Future[Renewed] = Future()

        def on_effect(effect: OpEffect, _: memoryview | None) -> None:
            if isinstance(effect, ConfirmRenewed):
                answer.set_result(Renewed(effect.transfer_id, effect.epoch, effect.lease_s))
            else:
                _fail(answer, effect)

        op = self.memory.begin(on_effect)
        self.memory.post(RenewAsked(op, peer, request))
        return answer

    def release(self, peer: str, request: Release) -> "Future[Released]":
        answer: Future[Released] = Future()

        def on_effect(effect: OpEffect, _: memoryview | None) -> None:
            if isinstance(effect, ConfirmReleased):
                answer.set_result(Released(effect.transfer_id, effect.epoch))
            else:
                _fail(answer, effect)

        op = self.memory.begin(on_effect)
        self.memory.post(ReleaseAsked(op, peer, request))
        return answer

    def open_session(self, peer: str, request: OpenSession) -> Session:
        """Keys for the data connections of an authenticated peer.

        Raises:
            FarfillError: `wire_version_unsupported`; `stale_epoch` where the peer means another life of this store.
        """
        if request.wire_version != WIRE_VERSION:
            detail = f"the store speaks wire version {WIRE_VERSION}, not {request.wire_version}"
            raise error_for("wire_version_unsupported", detail)
        if request.instance != self.address.instance:
            raise error_for("stale_epoch", "the store has been restarted since the transfer was reserved")
        return self._sessions.open(peer)

    def status(self) -> StoreStatus:
        """Not to be called from an effect's callback."""
        return StoreStatus(self.address, self.memory.ledger(), self.memory.is_draining)

    def stop(self, drain_s: float = 0.0) -> None:
        """Grants nothing more, waits up to `drain_s` for leases to end, then closes everything. Idempotent."""
        drained = self.memory.drain()
        with contextlib.suppress(FutureTimeout):  # the leases that are left are cut off
            drained.result(timeout=drain_s)
        with self._lock:
            self._is_stopped = True
            served = list(self._served.items())
        shut_down(self._listener)
        self._listener.close()
        self._acceptor.join()
        for _, (sock, connection) in served:
            if connection is not None:
                connection.stop()
            else:
                shut_down(sock)
        for thread, _ in served:
            thread.join()
        self.memory.close()

    # ---- the listener

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                with self._lock:
                    if self._is_stopped:
                        return
                # A local shortage (files, memory) is not the peers' end: go on once a connection has left.
                _log.error("the store cannot accept a connection: %s", error)
                threading.Event().wait(0.1)
                continue
            with self._lock:
                if self._is_stopped or len(self._served) >= CONNECTIONS_MAX:
                    sock.close()
                    continue
                thread = threading.Thread(target=self._serve, args=(sock,), name="farfill-store-read", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # no more threads here: the peer may try again
                    _log.error("the store cannot serve a connection: %s", error)
                    sock.close()
                    continue
                self._served[thread] = (sock, None)

    def _serve(self, sock: socket.socket) -> None:
        thread = threading.current_thread()
        try:
            connection = self._attach(sock)
            if connection is None:
                return
            with self._lock:
                if self._is_stopped:
                    return
                self._served[thread] = (sock, connection)
            connection.serve()
        except (OSError, FarfillError) as error:
            _log.info("a data connection was not attached: %s", error)
        finally:
            sock.close()
            with self._lock:
                del self._served[thread]

    def _attach(self, sock: socket.socket) -> DataConnection | None:
        sock.settimeout(_ATTACH_S)
        record = receive_exactly(sock, ATTACH_BYTES)
        status, peer, session_key, keys = self._sessions.attach(record)
        sock.sendall(encode_attach_reply(status, record, session_key))
        if status is not AttachStatus.ACCEPTED or keys is None:
            _log.info("a data connection was refused: %s", status.name)
            return None
        tune(sock)
        return DataConnection(sock, peer, keys, self.memory)


def _fail(answer: "Future[Granted] | Future[Renewed] | Future[Released]", effect: OpEffect) -> None:
    assert isinstance(effect, Refuse), f"a control call was answered with {effect!r}"
    answer.set_exception(error_for(effect.code, effect.detail, effect.retry_after_s))


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise ConfigurationError("config_invalid", f"cannot listen on {host!r}: {error}", field="host") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            "port_in_use", f"cannot listen on {host}:{port}: {error.strerror}", field="data_port"
        ) from error
    return listener
