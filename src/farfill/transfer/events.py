"""Events and effects that sender and receiver machines share: connections, refusals, time, the end. Pure data.

A *slot* is a place for one connection to the store; a *connection* is one life of it. The driver numbers
connections and never uses a number twice within a machine. Every event names the connection it came from.
"""

from dataclasses import dataclass
from typing import Final, NewType

ConnectionId = NewType("ConnectionId", int)


# ---- events


@dataclass(frozen=True, slots=True)
class Started:
    """The first event; clocks run from it."""


@dataclass(frozen=True, slots=True)
class ConnectionOpened:
    """Answers OpenConnection: attached and ready."""

    slot: int
    connection: ConnectionId


@dataclass(frozen=True, slots=True)
class ConnectionRefused:
    """Answers OpenConnection: it did not come about. `code` says why (`peer_unreachable`, `stale_epoch`, ...)."""

    slot: int
    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """An open connection is gone, for whatever reason; nothing more comes from it."""

    connection: ConnectionId
    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class RefusedReceived:
    """The store refuses (`store.protocol.Refused`)."""

    connection: ConnectionId
    index: int | None
    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class PresentReceived:
    """Answers AskHave. `indices`: of the chunks that the store has. `verified`: the consumer has had everything."""

    connection: ConnectionId
    indices: frozenset[int]
    verified: bool


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Whoever started the transfer wants no more of it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """The deadline has come."""


# ---- effects


@dataclass(frozen=True, slots=True)
class OpenConnection:
    """Connect this slot to the store; answer with ConnectionOpened or ConnectionRefused."""

    slot: int


@dataclass(frozen=True, slots=True)
class AskHave:
    """Ask the store which chunks it has; it answers with PresentReceived."""

    connection: ConnectionId


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """What came over it cannot be trusted; close it. The machine has already forgotten it."""

    connection: ConnectionId
    code: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The terminal failure; the last effect of a machine."""

    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """How a machine uses its connections.

    Attributes:
        slots: connections at once.
        window_chunks, window_bytes: in flight per connection, whichever is reached first; one chunk always goes.
        retries_max: connection attempts of one slot in a row without any progress, before it gives up.
        backoff_s: before the second attempt; doubles with each.
        jitter: 0 to 1, drawn by the driver; stretches the back-off, so that peers do not come back in step.
        corrupt_max: how often one chunk may arrive damaged before the transfer fails.
    """

    slots: int = 2
    window_chunks: int = 8
    window_bytes: int = 16 * 1024**2
    retries_max: int = 4
    backoff_s: float = 0.1
    jitter: float = 0.0
    corrupt_max: int = 2

    def backoff_of(self, attempt: int) -> float:
        """Seconds to wait before attempt 1, 2, ... after the first (0)."""
        doubled: float = self.backoff_s * 2.0 ** (attempt - 1)
        return doubled * (1.0 + self.jitter)


# Codes after which connecting again cannot help. Not `peer_unauthenticated`: a store that is killed right after a TLS
# handshake looks like one that refuses our certificate.
FATAL_CODES: Final = frozenset({"stale_epoch", "wire_version_unsupported"})
