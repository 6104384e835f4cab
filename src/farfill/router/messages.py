"""What `RequestMachine` is told and what it answers: events are past participles, effects imperatives.

Not here: any rule (`request`), any I/O (the gateway's driver, the simulator's world).

`attempt` numbers the decode legs of one request: 0 is the first, each fallback starts the next. What a leg that was
given up still says carries an old number and changes nothing.
"""

from dataclasses import dataclass

from farfill.errors import FailureClass, FarfillError
from farfill.kv.spec import TransferId
from farfill.router.policy import Choice, Path

# --- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PathChosen:
    choice: Choice


@dataclass(frozen=True, slots=True)
class ChoosingFailed:
    """No path: no worker, or the prompt could not be tokenised. The policy of fallback is not asked."""

    error: FarfillError


@dataclass(frozen=True, slots=True)
class ReserveGranted:
    """The store holds the bytes; `epoch` is at least 1, `lease_s` counts from now."""

    epoch: int
    lease_s: float


@dataclass(frozen=True, slots=True)
class ReserveFailed:
    error: FarfillError


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    lease_s: float


@dataclass(frozen=True, slots=True)
class LeaseNotRenewed:
    """One renewal failed; of the class MISS: the lease is gone."""

    error: FarfillError


@dataclass(frozen=True, slots=True)
class PrefillLegAccepted:
    """Connected, and the request is on its way."""


@dataclass(frozen=True, slots=True)
class PrefillLegDone:
    """The worker answered: every chunk is in the store's hands."""


@dataclass(frozen=True, slots=True)
class PrefillLegFailed:
    error: FarfillError


@dataclass(frozen=True, slots=True)
class DecodeLegStarted:
    """Response head 200 and the first body bytes: on the remote path the transfer was VERIFIED.

    `kv_bytes`: bytes of KV cache that the worker says came over the link for this request.
    """

    attempt: int
    kv_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DecodeLegOutput:
    attempt: int
    data: bytes


@dataclass(frozen=True, slots=True)
class DecodeLegDone:
    """The body is complete."""

    attempt: int


@dataclass(frozen=True, slots=True)
class DecodeLegFailed:
    """`reached`: the worker itself said so. False: it could not be reached, or broke off; another may still serve."""

    attempt: int
    error: FarfillError
    reached: bool = True


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client closed its connection, or the gateway gives the request up for it."""


@dataclass(frozen=True, slots=True)
class Tick:
    """`deadline` has come."""


Event = (
    PathChosen
    | ChoosingFailed
    | ReserveGranted
    | ReserveFailed
    | LeaseRenewed
    | LeaseNotRenewed
    | PrefillLegAccepted
    | PrefillLegDone
    | PrefillLegFailed
    | DecodeLegStarted
    | DecodeLegOutput
    | DecodeLegDone
    | DecodeLegFailed
    | ClientGone
    | Tick
)

# --- effects --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ask the store of the chosen placement; answer with `ReserveGranted` or `ReserveFailed`."""

    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class RenewLease:
    """Answer with `LeaseRenewed` or `LeaseNotRenewed`."""

    transfer_id: TransferId
    epoch: int


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    """No answer. If it does not arrive, the lease runs out on its own."""

    transfer_id: TransferId
    epoch: int


@dataclass(frozen=True, slots=True)
class StartPrefillLeg:
    worker: str
    transfer_id: TransferId
    epoch: int


@dataclass(frozen=True, slots=True)
class StartDecodeLeg:
    """`epoch`: of the transfer that it consumes; None: it prefills itself and gets no transfer."""

    attempt: int
    worker: str
    epoch: int | None


@dataclass(frozen=True, slots=True)
class AbortPrefillLeg:
    """No answer needed; a late one is ignored."""


@dataclass(frozen=True, slots=True)
class AbortDecodeLeg:
    attempt: int


@dataclass(frozen=True, slots=True)
class FellBack:
    """For the log: this failure is why the request starts again on the local path, at `next_worker`.

    Attributes:
        path: the one that failed; `prefill_worker` is None where that was local already.
        decode_worker: the one whose leg was given up; it may be the next one too.
    """

    error: FarfillError
    failure_class: FailureClass
    path: Path
    prefill_worker: str | None
    decode_worker: str
    next_worker: str


@dataclass(frozen=True, slots=True)
class SendHead:
    """The response's head may go to the client now. `transfer_id` is None where no transfer fed this response."""

    path: Path
    reason: str
    transfer_id: TransferId | None
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class Forward:
    data: bytes


@dataclass(frozen=True, slots=True)
class EndResponse:
    """The response is complete."""


@dataclass(frozen=True, slots=True)
class SendErrorBeforeHead:
    """Nothing was sent yet: a plain error response. `path` is None where none was chosen."""

    error: FarfillError
    path: Path | None
    reason: str


@dataclass(frozen=True, slots=True)
class SendErrorEvent:
    """The head is out: an error event in the stream, which then ends without its end mark."""

    error: FarfillError


@dataclass(frozen=True, slots=True)
class RecordOutcome:
    """The last effect of every request, exactly once.

    Attributes:
        state: "done", "failed" or "cancelled".
        code: the error's stable code, None for "done".
        fallbacks: the classes of failure that made it fall back, in order.
        transfer_id: of the transfer that was reserved, if one was, even if it failed.
        kv_bytes: bytes of KV that came over the link into the answer.
        started: the head was sent.
        duration_s: from the machine's start.
    """

    state: str
    path: Path | None
    reason: str
    code: str | None
    fallbacks: tuple[FailureClass, ...]
    transfer_id: TransferId | None
    kv_bytes: int
    started: bool
    duration_s: float


Effect = (
    Reserve
    | RenewLease
    | ReleaseLease
    | StartPrefillLeg
    | StartDecodeLeg
    | AbortPrefillLeg
    | AbortDecodeLeg
    | FellBack
    | SendHead
    | Forward
    | EndResponse
    | SendErrorBeforeHead
    | SendErrorEvent
    | RecordOutcome
)
