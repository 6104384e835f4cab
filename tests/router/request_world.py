"""A small world around one `RequestMachine`: what a correct driver could do, in any order; and it checks the rules.

Not the simulator: no time model, no second machine. It only knows which events may come next.
"""

from dataclasses import dataclass, field

from farfill.errors import ClientError, FailureClass, FarfillError, OperationError, OverloadError
from farfill.kv.spec import TransferId
from farfill.router.budget import FallbackBudget, FallbackPolicy
from farfill.router.lease import LeaseStatus
from farfill.router.messages import (
    AbortDecodeLeg,
    AbortPrefillLeg,
    ChoosingFailed,
    ClientGone,
    DecodeLegDone,
    DecodeLegFailed,
    DecodeLegOutput,
    DecodeLegStarted,
    Effect,
    EndResponse,
    Event,
    FellBack,
    Forward,
    LeaseNotRenewed,
    LeaseRenewed,
    PathChosen,
    PrefillLegAccepted,
    PrefillLegDone,
    PrefillLegFailed,
    RecordOutcome,
    ReleaseLease,
    RenewLease,
    Reserve,
    ReserveFailed,
    ReserveGranted,
    SendErrorBeforeHead,
    SendErrorEvent,
    SendHead,
    StartDecodeLeg,
    StartPrefillLeg,
    Tick,
)
from farfill.router.policy import Choice, Path, Placement
from farfill.router.request import RequestClocks, RequestMachine, RequestRules
from farfill.router.states import TERMINAL

TRANSFER = TransferId("00" * 16)
LOCAL = Choice(Path.LOCAL, "below_threshold", ("d0", "d1"))
REMOTE = Choice(Path.REMOTE, "above_threshold", ("d0", "d1"), "p0", Placement.PRODUCER)
ERRORS: tuple[FarfillError, ...] = (
    OperationError("connection_lost", "cut"),
    OperationError("lease_unknown", "gone"),
    OperationError("chunk_corrupt", "bad tag"),
    OperationError("fingerprint_mismatch", "dtype"),
    OperationError("transfer_stalled", "slow"),
    OverloadError("store_full", "full"),
    ClientError("context_length_exceeded", "too long"),
)


class RuleBroken(AssertionError):
    """A checker saw what must not happen."""


def check(condition: bool, rule: str) -> None:
    if not condition:
        raise RuleBroken(rule)


@dataclass
class DecodeLeg:
    attempt: int
    consuming: bool
    started: bool = False
    ended: bool = False
    aborted: bool = False


@dataclass
class World:
    """`machine` and what the outside knows; `pending()` lists what may happen next, `feed` lets it happen."""

    machine: RequestMachine
    budget_tokens: int
    choice: Choice = REMOTE
    now: float = 0.0
    chosen: bool = False
    reserve_asked: bool = False
    granted: int = 0
    released: int = 0
    lost: bool = False
    lease_expires_at: float = float("inf")
    renewals: int = 0
    prefill: str = "none"  # none, open, accepted, ended
    prefill_aborted: bool = False
    decodes: dict[int, DecodeLeg] = field(default_factory=dict)
    head: SendHead | None = None
    head_leg: DecodeLeg | None = None
    forwarded: list[bytes] = field(default_factory=list)
    endings: list[Effect] = field(default_factory=list)
    outcome: RecordOutcome | None = None
    client_gone: bool = False

    def pending(self) -> list[list[Event]]:
        """What a correct driver could send now, by kind; what aborted legs still say is in it."""
        kinds: list[list[Event]] = [[Tick()]]
        if not self.client_gone:
            kinds.append([ClientGone()])
        if not self.chosen and self.outcome is None:
            kinds.append([PathChosen(self.choice)])
            kinds.append([ChoosingFailed(OverloadError("no_worker", "none"))])
        if self.reserve_asked:
            kinds.append([ReserveGranted(3, 9.0)])
            kinds.append([ReserveFailed(error) for error in ERRORS])
        if self.renewals:
            kinds.append([LeaseRenewed(9.0)])
            kinds.append([LeaseNotRenewed(error) for error in ERRORS[:2]])
        if self.prefill in ("open", "accepted"):
            kinds.append([PrefillLegAccepted() if self.prefill == "open" else PrefillLegDone()])
            kinds.append([PrefillLegFailed(error) for error in ERRORS])
        for leg in self.decodes.values():
            if leg.ended:
                continue
            kinds.append([DecodeLegFailed(leg.attempt, error, r) for error in ERRORS for r in (True, False)])
            if leg.started:
                kinds.append([DecodeLegOutput(leg.attempt, f"out{leg.attempt}".encode())])
                kinds.append([DecodeLegDone(leg.attempt)])
            else:
                kinds.append([DecodeLegStarted(leg.attempt, bytes_) for bytes_ in (4096, 0)])
        return kinds

    def feed(self, event: Event) -> list[Effect]:
        self._happened(event)
        effects = self.machine.handle(event, self.now)
        for effect in effects:
            self._carry_out(effect, event)
        self._check_always()
        return effects

    def _happened(self, event: Event) -> None:
        match event:
            case PathChosen() | ChoosingFailed():
                self.chosen = True
            case ReserveGranted():
                self.reserve_asked = False
                self.granted += 1
                self.lease_expires_at = self.now + event.lease_s
            case ReserveFailed():
                self.reserve_asked = False
            case LeaseRenewed() | LeaseNotRenewed():
                self.renewals -= 1
                if isinstance(event, LeaseRenewed):
                    self.lease_expires_at = self.now + event.lease_s
                if isinstance(event, LeaseNotRenewed) and event.error.failure_class is FailureClass.MISS:
                    self.lost = self.lost or self.machine.lease_status is LeaseStatus.HELD
            case PrefillLegAccepted():
                self.prefill = "accepted"
            case PrefillLegDone() | PrefillLegFailed():
                self.prefill = "ended"
            case DecodeLegStarted():
                self.decodes[event.attempt].started = True
            case DecodeLegDone() | DecodeLegFailed():
                self.decodes[event.attempt].ended = True
            case ClientGone():
                self.client_gone = True
            case Tick():
                self.lost = self.lost or self.now >= self.lease_expires_at
            case DecodeLegOutput():
                pass

    def _carry_out(self, effect: Effect, event: Event) -> None:
        check(self.outcome is None or isinstance(effect, ReleaseLease), f"{effect} after the outcome")
        match effect:
            case Reserve():
                check(self.granted == 0 and not self.reserve_asked, "reserved twice")
                self.reserve_asked = True
            case RenewLease():
                check(self.granted == 1 and self.released == 0, "renewed what it does not hold")
                self.renewals += 1
            case ReleaseLease():
                self.released += 1
                check(self.released <= self.granted, "released twice, or what was not granted")
                check(effect.epoch == 3, "released another epoch")
            case StartPrefillLeg():
                check(self.granted == 1 and self.prefill == "none", "prefill leg without a reservation, or twice")
                self.prefill = "open"
            case StartDecodeLeg():
                check(self.head is None, "a leg was started after the head was sent")
                check(effect.attempt > max(self.decodes, default=-1), "attempts are numbered upwards")
                check(all(leg.ended or leg.aborted for leg in self.decodes.values()), "two decode legs at once")
                consuming = effect.epoch is not None
                check(not consuming or (self.granted == 1 and self.released == 0), "consumes without a lease")
                self.decodes[effect.attempt] = DecodeLeg(effect.attempt, consuming)
            case AbortPrefillLeg():
                check(self.prefill in ("open", "accepted") and not self.prefill_aborted, "aborted a closed leg")
                self.prefill_aborted = True
            case AbortDecodeLeg():
                leg = self.decodes[effect.attempt]
                check(not leg.ended and not leg.aborted, "aborted a closed leg")
                leg.aborted = True
            case FellBack():
                check(self.head is None, "fell back after the head")
                check(effect.failure_class is self.machine.fallbacks[-1], "a fallback of another class than recorded")
            case SendHead():
                check(self.head is None, "two heads")
                check(isinstance(event, DecodeLegStarted), "a head without a started leg")
                assert isinstance(event, DecodeLegStarted)
                leg = self.decodes[event.attempt]
                check(not leg.aborted, "the head of a leg that was given up")
                remote = effect.path is not Path.LOCAL
                check(not remote or (leg.consuming and event.kv_bytes > 0), "says remote, and nothing moved")
                check(remote == (effect.transfer_id is not None), "transfer id and path disagree")
                self.head, self.head_leg = effect, leg
            case Forward():
                check(self.head is not None, "output before the head")
                assert isinstance(event, DecodeLegOutput)
                check(self.decodes[event.attempt] is self.head_leg, "output of another leg than the head's")
                self.forwarded.append(effect.data)
            case EndResponse() | SendErrorEvent():
                check(self.head is not None, "an end without a head")
                self.endings.append(effect)
            case SendErrorBeforeHead():
                check(self.head is None, "an error response after the head")
                self.endings.append(effect)
            case RecordOutcome():
                self.outcome = effect

    def _check_always(self) -> None:
        machine = self.machine
        check((machine.state in TERMINAL) == (self.outcome is not None), "terminal without an outcome, or the reverse")
        check((machine.deadline is None) == (machine.state in TERMINAL), "a deadline after the end, or none before")
        check(len(machine.fallbacks) <= self.budget_tokens, "more fallbacks than the budget has")
        if self.outcome is not None:
            expected = 0 if self.outcome.state == "cancelled" else 1
            check(len(self.endings) == expected, "the response ends once")
            check(self.prefill in ("none", "ended") or self.prefill_aborted, "the prefill leg is left running")
            check(all(leg.ended or leg.aborted for leg in self.decodes.values()), "a decode leg is left running")
            check(machine.lease_status is not LeaseStatus.HELD, "the lease is left held")
            check(self.released == self.granted or self.lost, "what was granted is released, or was lost")

    def next_time(self) -> None:
        """Lets the machine's deadline come."""
        if self.machine.deadline is not None:
            self.now = max(self.now, self.machine.deadline)
            self.feed(Tick())


def new_world(
    *,
    choice: Choice = REMOTE,
    budget_tokens: int = 2,
    policy: FallbackPolicy | None = None,
    streaming: bool = True,
    machine_class: type[RequestMachine] = RequestMachine,
    budget: FallbackBudget | None = None,
) -> World:
    rules = RequestRules(policy or FallbackPolicy(), RequestClocks(5.0, 20.0, 60.0), streaming)
    budget = budget or FallbackBudget(budget_tokens, 0.0)
    return World(machine_class(TRANSFER, rules, budget, 0.0), budget_tokens, choice)
