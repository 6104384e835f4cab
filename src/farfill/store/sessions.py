"""Who may attach a data connection: sessions opened over the control API, their keys, and the nonces that were used.

Not here: how a peer proves who it is when it asks for a session (`store.control`, by its certificate).
"""

import secrets
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from farfill.store.protocol import Session
from farfill.transfer.frames import KEY_BYTES, SESSION_ID_BYTES, AttachStatus, Keys, attach_holds, decode_attach

SESSION_S: Final = 3600.0  # for attaching; connections that are attached stay
SESSIONS_PER_PEER_MAX: Final = 64  # one per worker process and store; more are forgotten restarts
SESSIONS_MAX: Final = 4096
NONCES_MAX: Final = 4096  # connections of one session; a client that needs more asks for another session


@dataclass(slots=True)
class _Entry:
    peer: str
    key: bytes
    expires_at: float
    nonces: set[bytes] = field(default_factory=set)


class SessionTable:
    """Thread-safe. The oldest session goes where there is no room for a new one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def open(self, peer: str) -> Session:
        """A new session for an authenticated peer."""
        session_id, key = secrets.token_hex(SESSION_ID_BYTES), secrets.token_bytes(KEY_BYTES)
        now = time.monotonic()
        with self._lock:
            for old in [name for name, entry in self._entries.items() if entry.expires_at <= now]:
                del self._entries[old]
            own = [name for name, entry in self._entries.items() if entry.peer == peer]
            for old in own[: max(0, len(own) - SESSIONS_PER_PEER_MAX + 1)]:
                del self._entries[old]
            if len(self._entries) >= SESSIONS_MAX:
                self._entries.popitem(last=False)
            self._entries[session_id] = _Entry(peer, key, now + SESSION_S)
        return Session(session_id, key, SESSION_S)

    def attach(self, record: bytes) -> tuple[AttachStatus, str, bytes | None, Keys | None]:
        """(status, peer, session key, connection keys) for an attach record; keys only where it is accepted.

        Raises:
            PeerError: `protocol_violation`, for other bytes than an attach record.
        """
        session_id, nonce = decode_attach(record)
        with self._lock:
            entry = self._entries.get(session_id)
            if entry is None or entry.expires_at <= time.monotonic() or not attach_holds(record, entry.key):
                return AttachStatus.UNKNOWN_SESSION, "", None, None
            if nonce in entry.nonces or len(entry.nonces) >= NONCES_MAX:
                return AttachStatus.REFUSED, "", entry.key, None
            entry.nonces.add(nonce)
        return AttachStatus.ACCEPTED, entry.peer, entry.key, Keys(entry.key, nonce)
