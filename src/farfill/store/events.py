"""The store machine's closed unions: what happened (events) and what to do (effects). Pure data.

An *operation* is one request of one connection (or of one control call): the shell numbers it, and the machine
answers it by that number exactly once. Only the shell knows connections and buffers.
"""

from dataclasses import dataclass
from typing import NewType

from farfill.store.protocol import Get, Have, Put, Release, Renew, Reserve, Verified

OpId = NewType("OpId", int)


@dataclass(frozen=True, slots=True)
class ChunkHandle:
    """Names one chunk's buffer in the shell. The epoch makes it unique over a transfer id's leases."""

    transfer_id: str
    epoch: int
    index: int


# ---- events


@dataclass(frozen=True, slots=True)
class ReserveAsked:
    op: OpId
    peer: str
    request: Reserve


@dataclass(frozen=True, slots=True)
class RenewAsked:
    op: OpId
    peer: str
    request: Renew


@dataclass(frozen=True, slots=True)
class ReleaseAsked:
    op: OpId
    peer: str
    request: Release


@dataclass(frozen=True, slots=True)
class PutBegan:
    """A put's header is here, its payload not yet. Answered by Receive or Refuse, perhaps later."""

    op: OpId
    peer: str
    message: Put


@dataclass(frozen=True, slots=True)
class PutReceived:
    """The payload of a put that was told to `Receive` is here; `checksum` was computed over what arrived."""

    op: OpId
    checksum: int


@dataclass(frozen=True, slots=True)
class PutAborted:
    """The put's connection is gone before its end; nobody writes to its buffer any more."""

    op: OpId


@dataclass(frozen=True, slots=True)
class GetAsked:
    op: OpId
    peer: str
    message: Get


@dataclass(frozen=True, slots=True)
class GetEnded:
    """Nobody reads the get's buffer any more: it was sent, or its connection is gone (also while it was parked)."""

    op: OpId


@dataclass(frozen=True, slots=True)
class HaveAsked:
    op: OpId
    peer: str
    message: Have


@dataclass(frozen=True, slots=True)
class VerifiedReported:
    op: OpId
    peer: str
    message: Verified


@dataclass(frozen=True, slots=True)
class DrainBegan:
    """No reservation is granted any more."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The deadline has come."""


StoreEvent = (
    ReserveAsked
    | RenewAsked
    | ReleaseAsked
    | PutBegan
    | PutReceived
    | PutAborted
    | GetAsked
    | GetEnded
    | HaveAsked
    | VerifiedReported
    | DrainBegan
    | Tick
)

# ---- effects


@dataclass(frozen=True, slots=True)
class Grant:
    """Answers ReserveAsked."""

    op: OpId
    transfer_id: str
    epoch: int
    lease_s: float


@dataclass(frozen=True, slots=True)
class ConfirmRenewed:
    """Answers RenewAsked."""

    op: OpId
    transfer_id: str
    epoch: int
    lease_s: float


@dataclass(frozen=True, slots=True)
class ConfirmReleased:
    """Answers ReleaseAsked."""

    op: OpId
    transfer_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Take the put's payload into a new buffer under `handle`; None: the store has it, only check what comes.

    The shell then reports PutReceived or PutAborted.
    """

    op: OpId
    handle: ChunkHandle | None
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class StopWriter:
    """Cut the connection of this put: a newer put of the same chunk waits until it is known stopped."""

    op: OpId


@dataclass(frozen=True, slots=True)
class AnswerStored:
    """Answers a put for good."""

    op: OpId
    transfer_id: str
    epoch: int
    index: int


@dataclass(frozen=True, slots=True)
class SendChunk:
    """Answers a get with the buffer's bytes. The shell reports GetEnded when it no longer reads them."""

    op: OpId
    handle: ChunkHandle
    payload_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class AnswerPresent:
    """Answers HaveAsked. `verified`: all of them, and the consumer has said so."""

    op: OpId
    transfer_id: str
    epoch: int
    indices: tuple[int, ...]
    verified: bool


@dataclass(frozen=True, slots=True)
class AcceptVerified:
    """Ends a VerifiedReported operation; nothing is sent."""

    op: OpId


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answers any operation. A put that is refused before `Receive` still has its payload on the wire: skip it."""

    op: OpId
    code: str
    detail: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget the buffer: no writer, no reader, no lease."""

    handle: ChunkHandle


@dataclass(frozen=True, slots=True)
class DrainCompleted:
    """Draining, and no lease is live any more."""


StoreEffect = (
    Grant
    | ConfirmRenewed
    | ConfirmReleased
    | Receive
    | StopWriter
    | AnswerStored
    | SendChunk
    | AnswerPresent
    | AcceptVerified
    | Refuse
    | Drop
    | DrainCompleted
)
