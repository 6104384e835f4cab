"""One request from its path to its end: `RequestMachine`, pure.

Not here: the choice of the path (`policy`), HTTP (the gateway's driver), bytes of KV (`farfill.transfer`).

    CHOOSING -> RESERVED -> PREFILLING -> TRANSFERRING -> VERIFIED -> DECODING -> DONE | FAILED | CANCELLED

Rule 1: the legs are one transaction. Both start together; the first failure cancels the other.
Rule 2: whatever ends a request, or its transfer, releases the lease: once.
Rule 3: a request falls back to local prefill before its head is sent, never after; only for a class of failure that the
    policy answers with `local`, only while the shared budget lasts, and never without saying so.
Rule 4: only VERIFIED may decode. On the local path that is the decode worker's own prefill; its response head says so.
Rule 5: the client's stream never waits for the prefill leg's answer, and once VERIFIED its failure harms nobody.
Rule 6: a client's error (no failure class) is passed on; recomputing would not help.
Rule 7: every wait has its clock: setup (reserving; reaching the prefill worker), transfer (from the reservation to
    VERIFIED), request.
Rule 8: one terminal state, one outcome; what comes later changes nothing, but a late grant is given back.
Rule 9: a response that says remote moved bytes.
"""

from dataclasses import dataclass, field
from typing import assert_never

from farfill.errors import FailureClass, FarfillError, LocalProtocolError, OperationError, OverloadError
from farfill.kv.spec import TransferId
from farfill.router.budget import FallbackBudget, FallbackPolicy
from farfill.router.lease import LeaseStatus, RequestLease
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
from farfill.router.policy import Choice, Path
from farfill.router.states import HEAD_SENT, TERMINAL, TRANSITIONS, RequestState

_S = RequestState


@dataclass(frozen=True, slots=True)
class RequestClocks:
    """Seconds. `transfer_s` is a backstop: the decode worker has its own clocks for the same wait."""

    setup_s: float = 5.0
    transfer_s: float = 300.0
    request_s: float = 600.0


@dataclass(frozen=True, slots=True)
class RequestRules:
    """What an operator sets, and whether the answer is a stream.

    The answer to a request that does not stream comes in one piece after the last token, so its head does not tell when
    the transfer was verified: only the decode worker's clocks bound that wait, and the request clock.
    """

    policy: FallbackPolicy = field(default_factory=FallbackPolicy)
    clocks: RequestClocks = RequestClocks()
    streaming: bool = True


@dataclass(slots=True)
class _Legs:
    """The legs that run now. `attempt` counts decode legs; `worker` indexes `Choice.decode_workers`."""

    prefill_open: bool = False
    decode_open: bool = False
    attempt: int = 0
    worker: int = 0
    consuming: bool = False  # the current decode leg consumes a transfer


class RequestMachine:
    """See the module's rules. Feed it the events of one request; carry out what it returns, in order.

    Args:
        transfer_id: for the transfer, if there will be one.
        rules: policy, clocks, kind of answer.
        budget: shared by all requests.
        now: when the request was accepted.
    """

    def __init__(self, transfer_id: TransferId, rules: RequestRules, budget: FallbackBudget, now: float) -> None:
        self.state = RequestState.CHOOSING
        self._transfer_id = transfer_id
        self._rules = rules
        self._budget = budget
        self._choice: Choice | None = None
        self._lease = RequestLease()
        self._legs = _Legs()
        self._fallbacks: list[FailureClass] = []
        self._kv_bytes = 0
        self._started_at = now
        self._step_at = now  # when the path was chosen, then when staging was granted

    # --- what the driver uses ---------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        if self.state in TERMINAL:
            return None
        times = [self._started_at + self._rules.clocks.request_s]
        for at in (self._lease.deadline, self._setup_deadline, self._transfer_deadline):
            if at is not None:
                times.append(at)
        return min(times)

    @property
    def lease_status(self) -> LeaseStatus:
        """For checkers: HELD or ASKED after the end is a leak."""
        return self._lease.status

    @property
    def fallbacks(self) -> tuple[FailureClass, ...]:
        return tuple(self._fallbacks)

    def handle(self, event: Event, now: float) -> list[Effect]:
        if self._is_late(event):
            return self._late(event, now)
        before = self.state
        allowed = TRANSITIONS[before].get(type(event))
        if allowed is None:
            raise LocalProtocolError(f"{type(event).__name__} in state {before}: the request's driver is wrong")
        effects = self._dispatch(event, now)
        if self.state not in allowed:
            raise LocalProtocolError(f"{type(event).__name__} led from {before} to {self.state}")
        return effects

    # --- guards: one small method for each rule that a wrong token or a leak hangs on --------------------------------

    def _may_forward(self) -> bool:
        """Rule 4: nothing goes to the client before VERIFIED."""
        return self.state in HEAD_SENT

    def _may_fall_back(self, error: FarfillError) -> bool:
        """Rules 3 and 6, all but the budget."""
        return (
            self.state not in HEAD_SENT
            and error.failure_class is not None
            and self._rules.policy.answer(error.failure_class) == "local"
        )

    def _may_say_remote(self) -> bool:
        """Rule 9."""
        return self._legs.consuming and self._kv_bytes > 0

    def _is_late(self, event: Event) -> bool:
        """Rule 8: it comes from a leg that was given up, or after the end."""
        match event:
            case DecodeLegStarted() | DecodeLegOutput() | DecodeLegDone() | DecodeLegFailed():
                return event.attempt != self._legs.attempt or not self._legs.decode_open
            case PrefillLegAccepted() | PrefillLegDone() | PrefillLegFailed():
                return not self._legs.prefill_open
            case ReserveGranted() | ReserveFailed():
                return self._lease.status is not LeaseStatus.ASKED
            case LeaseRenewed() | LeaseNotRenewed():
                return self._lease.status is not LeaseStatus.HELD
            case PathChosen() | ChoosingFailed() | ClientGone() | Tick():
                return self.state in TERMINAL
            case _:
                assert_never(event)

    # --- events -----------------------------------------------------------------------------------------------------

    def _late(self, event: Event, now: float) -> list[Effect]:
        if self._lease.status is LeaseStatus.ABANDONED:
            if isinstance(event, ReserveGranted):
                self._lease.grant(event.epoch, event.lease_s, now)
                return self._release()
            if isinstance(event, ReserveFailed):
                self._lease.refuse()
        return []

    def _dispatch(self, event: Event, now: float) -> list[Effect]:
        match event:
            case PathChosen():
                return self._chosen(event.choice, now)
            case ChoosingFailed():
                return self._fail(event.error, now)
            case ReserveGranted():
                return self._granted(event, now)
            case ReserveFailed():
                self._lease.refuse()
                return self._transfer_failed(event.error, now)
            case LeaseRenewed():
                self._lease.renewed(event.lease_s, now)
                return []
            case LeaseNotRenewed():
                lost = self._lease.not_renewed(event.error, now)
                return self._transfer_failed(event.error, now) if lost and self.state not in HEAD_SENT else []
            case PrefillLegAccepted():
                if self.state is _S.RESERVED:
                    self.state = _S.PREFILLING
                return []
            case PrefillLegDone():
                self._legs.prefill_open = False
                if self.state in HEAD_SENT:
                    return self._release()
                self.state = _S.TRANSFERRING
                return []
            case PrefillLegFailed():
                self._legs.prefill_open = False
                if self.state in HEAD_SENT:  # rule 5
                    return self._release()
                return self._transfer_failed(event.error, now)
            case DecodeLegStarted():
                return self._started(event)
            case DecodeLegOutput():
                if not self._may_forward():
                    raise LocalProtocolError(f"output in state {self.state}")
                self.state = _S.DECODING
                return [Forward(event.data)]
            case DecodeLegDone():
                self._legs.decode_open = False
                return [*self._give_up(), EndResponse(), self._end(_S.DONE, None, now)]
            case DecodeLegFailed():
                self._legs.decode_open = False
                return self._leg_failed(event, now)
            case ClientGone():
                return [*self._give_up(), self._end(_S.CANCELLED, "client_gone", now)]
            case Tick():
                return self._tick(now)
            case _:
                assert_never(event)

    def _chosen(self, choice: Choice, now: float) -> list[Effect]:
        if self._choice is not None:
            raise LocalProtocolError("a path was chosen twice")
        self._choice = choice
        self._step_at = now
        if choice.path is Path.LOCAL:
            return self._start_local()
        self._lease.ask()
        return [Reserve(self._transfer_id)]

    def _granted(self, event: ReserveGranted, now: float) -> list[Effect]:
        assert self._choice is not None
        assert self._choice.prefill_worker is not None
        self._lease.grant(event.epoch, event.lease_s, now)
        self._step_at = now
        self.state = _S.RESERVED
        self._legs = _Legs(prefill_open=True, decode_open=True, consuming=True)
        return [
            StartPrefillLeg(self._choice.prefill_worker, self._transfer_id, event.epoch),
            StartDecodeLeg(0, self._choice.decode_workers[0], event.epoch),
        ]

    def _started(self, event: DecodeLegStarted) -> list[Effect]:
        self.state = _S.VERIFIED
        if self._legs.consuming:
            self._kv_bytes = event.kv_bytes
        path, reason = self._shown()
        transfer_id = self._transfer_id if self._may_say_remote() else None
        head = SendHead(path, reason, transfer_id, self._kv_bytes)
        # The decode side has all it needs: staging is free as soon as nobody writes to it any more.
        return [head] if self._legs.prefill_open else [head, *self._release()]

    def _tick(self, now: float) -> list[Effect]:
        clocks = self._rules.clocks
        if now >= self._started_at + clocks.request_s:
            # Not asked for a fallback: there is no time left for one.
            return self._fail(
                OperationError("request_timeout", f"the request took longer than {clocks.request_s:g} s"), now
            )
        if self.state not in HEAD_SENT:
            if self._setup_deadline is not None and now >= self._setup_deadline:
                where = "the store" if self.state is _S.CHOOSING else "the prefill worker"
                return self._transfer_failed(
                    OperationError("setup_timeout", f"{where} did not answer within {clocks.setup_s:g} s"), now
                )
            if self._transfer_deadline is not None and now >= self._transfer_deadline:
                return self._transfer_failed(
                    OperationError("transfer_timeout", f"not verified within {clocks.transfer_s:g} s"), now
                )
        if self._lease.expired(now):
            self._lease.let_go()  # its owner has reaped it; there is nothing to release
            if self.state not in HEAD_SENT:
                return self._transfer_failed(
                    OperationError("lease_expired", "the lease ran out: its store did not renew it"), now
                )
            return []
        if self._lease.renewal_due(now):
            return [RenewLease(self._transfer_id, self._lease.epoch)]
        return []

    # --- failing, falling back, ending ------------------------------------------------------------------------------

    def _transfer_failed(self, error: FarfillError, now: float) -> list[Effect]:
        """The transfer failed, the decode worker did not: it can prefill itself."""
        return self._fall_back(error, self._legs.worker, now)

    def _leg_failed(self, event: DecodeLegFailed, now: float) -> list[Effect]:
        refused = event.error.code in ("draining", "queue_full")  # it would not take the request without a transfer too
        if event.reached and not refused and self._legs.consuming:
            return self._transfer_failed(event.error, now)
        # The worker is at fault, so another one has to do it, if there is one that was not tried.
        assert self._choice is not None
        following = self._legs.worker + 1
        if following < len(self._choice.decode_workers):
            return self._fall_back(event.error, following, now)
        return self._fail(event.error, now)

    def _fall_back(self, error: FarfillError, worker: int, now: float) -> list[Effect]:
        if not self._may_fall_back(error):
            return self._fail(error, now)
        if not self._budget.take(now):
            return self._fail(
                OverloadError(
                    "fallback_exhausted",
                    f"the budget of fallbacks is used up; this request failed with [{error.code}] {error.message}",
                    retry_after_s=self._budget.retry_after_s(now),
                ),
                now,
            )
        assert error.failure_class is not None
        fell_back = self._fell_back(error, error.failure_class, worker)
        given_up = self._give_up()
        self._fallbacks.append(error.failure_class)
        self._legs.worker = worker
        self._legs.attempt += 1
        return [fell_back, *given_up, *self._start_local()]

    def _fell_back(self, error: FarfillError, failure_class: FailureClass, following: int) -> FellBack:
        assert self._choice is not None
        first = not self._fallbacks  # a second one falls back from the local path
        return FellBack(
            error,
            failure_class,
            self._choice.path if first else Path.LOCAL,
            self._choice.prefill_worker if first else None,
            self._choice.decode_workers[self._legs.worker],
            self._choice.decode_workers[following],
        )

    def _start_local(self) -> list[Effect]:
        assert self._choice is not None
        legs = self._legs
        self._legs = _Legs(decode_open=True, attempt=legs.attempt, worker=legs.worker)
        self.state = _S.PREFILLING
        return [StartDecodeLeg(legs.attempt, self._choice.decode_workers[legs.worker], None)]

    def _give_up(self) -> list[Effect]:
        """Rules 1 and 2: stops what runs, frees what is held."""
        effects: list[Effect] = []
        if self._legs.prefill_open:
            effects.append(AbortPrefillLeg())
        if self._legs.decode_open:
            effects.append(AbortDecodeLeg(self._legs.attempt))
        self._legs.prefill_open = self._legs.decode_open = False
        return effects + self._release()

    def _release(self) -> list[Effect]:
        """Rule 2."""
        return [ReleaseLease(self._transfer_id, self._lease.epoch)] if self._lease.let_go() else []

    def _fail(self, error: FarfillError, now: float) -> list[Effect]:
        effects = self._give_up()
        if self.state in HEAD_SENT:
            effects.append(SendErrorEvent(error))
        else:
            path, reason = (None, "not_chosen") if self._choice is None else self._shown()
            effects.append(SendErrorBeforeHead(error, path, reason))
        return [*effects, self._end(_S.FAILED, error.code, now)]

    def _end(self, state: RequestState, code: str | None, now: float) -> RecordOutcome:
        started = self.state in HEAD_SENT
        path, reason = (None, "not_chosen") if self._choice is None else self._shown()
        self.state = state
        return RecordOutcome(
            state=state.value,
            path=path,
            reason=reason,
            code=code,
            fallbacks=self.fallbacks,
            transfer_id=None if self._lease.status is LeaseStatus.NONE else self._transfer_id,
            kv_bytes=self._kv_bytes,
            started=started,
            duration_s=now - self._started_at,
        )

    def _shown(self) -> tuple[Path, str]:
        """Path and reason as the client sees them."""
        assert self._choice is not None
        if self._fallbacks:
            return Path.LOCAL, f"fallback:{self._fallbacks[-1].value}"
        if self.state in HEAD_SENT and self._choice.path is not Path.LOCAL and not self._may_say_remote():
            return Path.LOCAL, "nothing_moved"
        return self._choice.path, self._choice.reason

    @property
    def _setup_deadline(self) -> float | None:
        waiting = self.state is _S.RESERVED or self._lease.status is LeaseStatus.ASKED
        return self._step_at + self._rules.clocks.setup_s if waiting else None

    @property
    def _transfer_deadline(self) -> float | None:
        waits = self._legs.consuming and self.state not in HEAD_SENT and self._rules.streaming
        return self._step_at + self._rules.clocks.transfer_s if waits else None
