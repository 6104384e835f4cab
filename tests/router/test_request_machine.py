"""The request machine: its rules by example, its table exhaustively, its invariants under random orders of events."""

import typing

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from request_world import ERRORS, LOCAL, REMOTE, TRANSFER, RuleBroken, World, new_world

from farfill.errors import (
    ClientError,
    FailureClass,
    FarfillError,
    LocalProtocolError,
    OperationError,
    OverloadError,
)
from farfill.router import messages
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
from farfill.router.policy import Path
from farfill.router.request import RequestMachine
from farfill.router.states import HEAD_SENT, TERMINAL, TRANSITIONS, RequestState

CUT = OperationError("connection_lost", "cut")
GRANT = ReserveGranted(3, 9.0)


def run(world: World, *events: Event) -> list[object]:
    """Feeds the events; returns the last one's effects."""
    effects: list[object] = []
    for event in events:
        effects = list(world.feed(event))
    return effects


def fell_back(error: FarfillError, following: str = "d0") -> FellBack:
    """What the log gets of a remote request's first fallback."""
    assert error.failure_class is not None
    return FellBack(error, error.failure_class, Path.REMOTE, "p0", "d0", following)


def outcome(world: World) -> RecordOutcome:
    assert world.outcome is not None
    return world.outcome


# --- a request's life -----------------------------------------------------------------------------------------------


def test_a_remote_request_goes_through_the_states_in_order() -> None:
    world = new_world()
    seen = [world.machine.state]
    for event in (
        PathChosen(REMOTE),
        GRANT,
        PrefillLegAccepted(),
        PrefillLegDone(),
        DecodeLegStarted(0, 4096),
        DecodeLegOutput(0, b"a"),
        DecodeLegOutput(0, b"b"),
        DecodeLegDone(0),
    ):
        world.feed(event)
        if world.machine.state is not seen[-1]:
            seen.append(world.machine.state)
    assert [state.value for state in seen] == [
        "choosing", "reserved", "prefilling", "transferring", "verified", "decoding", "done",
    ]  # fmt: skip
    assert world.forwarded == [b"a", b"b"]
    assert outcome(world) == RecordOutcome(
        "done", Path.REMOTE, "above_threshold", None, (), TRANSFER, 4096, started=True, duration_s=0.0
    )


def test_both_legs_start_at_once_when_the_store_grants() -> None:
    world = new_world()
    assert run(world, PathChosen(REMOTE)) == [Reserve(TRANSFER)]
    assert run(world, GRANT) == [StartPrefillLeg("p0", TRANSFER, 3), StartDecodeLeg(0, "d0", 3)]


def test_a_local_request_reserves_nothing() -> None:
    world = new_world(choice=LOCAL)
    assert run(world, PathChosen(LOCAL)) == [StartDecodeLeg(0, "d0", None)]
    assert run(world, DecodeLegStarted(0)) == [SendHead(Path.LOCAL, "below_threshold", None, 0)]
    effects = run(world, DecodeLegOutput(0, b"x"), DecodeLegDone(0))
    assert effects[0] == EndResponse()
    assert outcome(world).transfer_id is None


def test_the_stream_does_not_wait_for_the_prefill_legs_answer() -> None:
    world = new_world()
    effects = run(world, PathChosen(REMOTE), GRANT, PrefillLegAccepted(), DecodeLegStarted(0, 1))
    assert effects == [SendHead(Path.REMOTE, "above_threshold", TRANSFER, 1)]
    assert run(world, DecodeLegOutput(0, b"x")) == [Forward(b"x")]


def test_once_verified_a_failure_of_the_prefill_leg_harms_nobody_and_frees_the_staging() -> None:
    world = new_world()
    run(world, PathChosen(REMOTE), GRANT, PrefillLegAccepted(), DecodeLegStarted(0, 1), DecodeLegOutput(0, b"x"))
    assert run(world, PrefillLegFailed(CUT)) == [ReleaseLease(TRANSFER, 3)]
    assert world.machine.state is RequestState.DECODING
    run(world, DecodeLegDone(0))
    assert (outcome(world).state, outcome(world).fallbacks) == ("done", ())


def test_staging_is_freed_at_verified_where_the_prefill_leg_has_answered() -> None:
    world = new_world()
    effects = run(world, PathChosen(REMOTE), GRANT, PrefillLegAccepted(), PrefillLegDone(), DecodeLegStarted(0, 1))
    assert effects[1:] == [ReleaseLease(TRANSFER, 3)]


def test_a_prefill_leg_that_still_runs_when_the_answer_is_complete_is_aborted() -> None:
    world = new_world()
    run(world, PathChosen(REMOTE), GRANT, DecodeLegStarted(0, 1), DecodeLegOutput(0, b"x"))
    effects = run(world, DecodeLegDone(0))
    assert effects[:3] == [AbortPrefillLeg(), ReleaseLease(TRANSFER, 3), EndResponse()]


def test_a_response_that_moved_nothing_does_not_say_remote() -> None:
    world = new_world()
    effects = run(world, PathChosen(REMOTE), GRANT, PrefillLegDone(), DecodeLegStarted(0, 0))
    assert effects[0] == SendHead(Path.LOCAL, "nothing_moved", None, 0)


# --- one transaction, one release -----------------------------------------------------------------------------------


def test_the_first_failure_of_a_leg_cancels_the_other_and_releases_before_the_fallback_starts() -> None:
    world = new_world()
    effects = run(world, PathChosen(REMOTE), GRANT, PrefillLegAccepted(), PrefillLegFailed(CUT))
    assert effects == [fell_back(CUT), AbortDecodeLeg(0), ReleaseLease(TRANSFER, 3), StartDecodeLeg(1, "d0", None)]
    assert run(world, DecodeLegStarted(1)) == [SendHead(Path.LOCAL, "fallback:transport", None, 0)]


def test_a_decode_leg_that_failed_cancels_the_prefill_leg() -> None:
    world = new_world()
    effects = run(world, PathChosen(REMOTE), GRANT, DecodeLegFailed(0, CUT))
    assert effects == [fell_back(CUT), AbortPrefillLeg(), ReleaseLease(TRANSFER, 3), StartDecodeLeg(1, "d0", None)]


@pytest.mark.parametrize("how_far", range(6))
def test_a_client_that_leaves_at_any_moment_frees_everything(how_far: int) -> None:
    world = new_world()
    steps: list[Event] = [
        PathChosen(REMOTE), GRANT, PrefillLegAccepted(), DecodeLegStarted(0, 9), DecodeLegOutput(0, b"x"),
    ]  # fmt: skip
    run(world, *steps[:how_far], ClientGone())
    assert outcome(world).state == "cancelled"
    assert outcome(world).code == "client_gone"
    assert world.released == (1 if how_far >= 2 else 0)
    assert not world.endings


def test_a_grant_that_comes_after_the_end_is_given_back() -> None:
    world = new_world()
    run(world, PathChosen(REMOTE), ClientGone())
    assert run(world, GRANT) == [ReleaseLease(TRANSFER, 3)]
    assert world.machine.lease_status is LeaseStatus.GONE


def test_a_grant_that_comes_after_the_fallback_is_given_back() -> None:
    world = new_world()
    run(world, PathChosen(REMOTE))
    world.next_time()
    assert world.machine.state is RequestState.PREFILLING
    assert run(world, GRANT) == [ReleaseLease(TRANSFER, 3)]
    run(world, DecodeLegStarted(1), DecodeLegOutput(1, b"x"), DecodeLegDone(1))
    assert outcome(world).reason == "fallback:timeout"


def test_what_an_abandoned_leg_still_says_is_not_forwarded() -> None:
    world = new_world()
    run(world, PathChosen(REMOTE), GRANT, PrefillLegFailed(CUT), DecodeLegStarted(1))
    assert run(world, DecodeLegOutput(1, b"right")) == [Forward(b"right")]
    assert world.machine.handle(DecodeLegOutput(0, b"wrong"), 0.0) == []
    assert world.machine.handle(DecodeLegFailed(0, CUT), 0.0) == []
    assert world.forwarded == [b"right"]


# --- fallback -------------------------------------------------------------------------------------------------------

BY_CLASS = {error.failure_class: error for error in ERRORS if error.failure_class is not None}


def test_the_examples_name_every_failure_class() -> None:
    assert set(BY_CLASS) == set(FailureClass)


@pytest.mark.parametrize("failure_class", list(FailureClass))
@pytest.mark.parametrize("answer", ["local", "fail"])
def test_the_policy_decides_by_class(failure_class: FailureClass, answer: typing.Literal["local", "fail"]) -> None:
    world = new_world(policy=FallbackPolicy({failure_class: answer}))
    error = BY_CLASS[failure_class]
    run(world, PathChosen(REMOTE), GRANT, PrefillLegFailed(error))
    if answer == "local":
        assert world.decodes[1].consuming is False
        assert world.machine.fallbacks == (failure_class,)
        run(world, DecodeLegStarted(1), DecodeLegOutput(1, b"x"), DecodeLegDone(1))
        assert outcome(world).reason == f"fallback:{failure_class.value}"
    else:
        assert outcome(world).code == error.code
        assert isinstance(world.endings[0], SendErrorBeforeHead)


@pytest.mark.parametrize("error", [*ERRORS[:-1]], ids=lambda error: error.code)
def test_a_reservation_that_is_refused_falls_back_without_a_release(error: FarfillError) -> None:
    world = new_world()
    assert run(world, PathChosen(REMOTE), ReserveFailed(error)) == [fell_back(error), StartDecodeLeg(1, "d0", None)]
    assert world.released == 0


def test_no_fallback_after_the_head() -> None:
    world = new_world()
    effects = run(world, PathChosen(REMOTE), GRANT, DecodeLegStarted(0, 1), DecodeLegFailed(0, CUT, reached=False))
    assert effects[:-1] == [AbortPrefillLeg(), ReleaseLease(TRANSFER, 3), SendErrorEvent(CUT)]
    assert outcome(world).state == "failed"
    assert outcome(world).started


def test_a_clients_error_is_passed_on() -> None:
    error = ClientError("context_length_exceeded", "too long")
    world = new_world()
    effects = run(world, PathChosen(REMOTE), GRANT, DecodeLegFailed(0, error))
    assert SendErrorBeforeHead(error, Path.REMOTE, "above_threshold") in effects
    assert world.machine.fallbacks == ()


def test_the_budget_is_shared_and_says_when_to_come_back() -> None:
    budget = FallbackBudget(burst=1, per_s=0.1)
    first, second = new_world(budget=budget), new_world(budget=budget)
    run(first, PathChosen(REMOTE), GRANT, PrefillLegFailed(CUT))
    assert first.machine.fallbacks == (FailureClass.TRANSPORT,)
    run(second, PathChosen(REMOTE), GRANT, PrefillLegFailed(CUT))
    error = typing.cast(SendErrorBeforeHead, second.endings[0]).error
    assert error.code == "fallback_exhausted"
    assert error.retry_after_s == pytest.approx(10.0)
    assert isinstance(error, OverloadError)
    assert "connection_lost" in error.message


def test_a_decode_worker_that_cannot_be_reached_is_replaced_by_the_next() -> None:
    world = new_world()
    effects = run(world, PathChosen(REMOTE), GRANT, DecodeLegFailed(0, CUT, reached=False))
    assert effects[-1] == StartDecodeLeg(1, "d1", None)
    run(world, DecodeLegFailed(1, CUT, reached=False))
    assert outcome(world).code == "connection_lost"


def test_a_decode_worker_that_takes_nobody_is_not_asked_a_second_time() -> None:
    for code in ("draining", "queue_full"):
        refusal = OverloadError(code, "no")
        world = new_world()
        effects = run(world, PathChosen(REMOTE), GRANT, DecodeLegFailed(0, refusal))
        assert effects[-1] == StartDecodeLeg(1, "d1", None)
        run(world, DecodeLegFailed(1, refusal))
        assert outcome(world).code == code


def test_a_local_request_moves_to_the_next_worker_while_there_is_one() -> None:
    world = new_world(choice=LOCAL)
    full = OverloadError("queue_full", "full")
    assert run(world, PathChosen(LOCAL), DecodeLegFailed(0, full)) == [
        FellBack(full, FailureClass.OVERLOAD, Path.LOCAL, None, "d0", "d1"),
        StartDecodeLeg(1, "d1", None),
    ]
    run(world, DecodeLegFailed(1, full))
    assert outcome(world).code == "queue_full"


# --- clocks and the lease -------------------------------------------------------------------------------------------


def test_the_setup_clock_bounds_reserving_and_reaching_the_prefill_worker() -> None:
    world = new_world()
    run(world, PathChosen(REMOTE))
    assert world.machine.deadline == 5.0
    world.now = 4.0
    run(world, GRANT)
    # the lease of 9 s is to be renewed at 7
    assert world.machine.deadline == 7.0
    world.now = 9.0
    assert run(world, Tick())[-1] == StartDecodeLeg(1, "d0", None)
    assert world.machine.fallbacks == (FailureClass.TIMEOUT,)


def test_the_transfer_clock_bounds_the_wait_for_verified() -> None:
    world = new_world(budget_tokens=0)
    run(world, PathChosen(REMOTE), ReserveGranted(3, 300.0), PrefillLegAccepted(), PrefillLegDone())
    assert world.machine.deadline == 20.0
    world.next_time()
    error = typing.cast(SendErrorBeforeHead, world.endings[0]).error
    assert error.code == "fallback_exhausted"
    assert "transfer_timeout" in error.message


def test_without_streaming_only_the_request_clock_bounds_the_answer() -> None:
    world = new_world(streaming=False)
    run(world, PathChosen(REMOTE), ReserveGranted(3, 300.0), PrefillLegAccepted(), PrefillLegDone())
    assert world.machine.deadline == 60.0


def test_the_request_clock_ends_everything_and_is_no_reason_to_fall_back() -> None:
    for head_sent in (False, True):
        world = new_world()
        run(world, PathChosen(REMOTE), ReserveGranted(3, 600.0), PrefillLegAccepted())
        if head_sent:
            run(world, DecodeLegStarted(0, 1))
        world.now = 60.0
        run(world, Tick())
        assert outcome(world).code == "request_timeout"
        assert type(world.endings[0]) is (SendErrorEvent if head_sent else SendErrorBeforeHead)


def test_the_lease_is_renewed_three_times_a_term_and_not_twice_at_once() -> None:
    world = new_world(streaming=False)
    run(world, PathChosen(REMOTE), GRANT, PrefillLegAccepted())
    world.now = 3.0
    assert run(world, Tick()) == [RenewLease(TRANSFER, 3)]
    world.now = 4.0
    assert run(world, Tick()) == []
    run(world, LeaseRenewed(9.0))
    assert world.machine.deadline == 7.0


def test_a_renewal_that_failed_is_tried_again_until_the_lease_is_over() -> None:
    world = new_world(streaming=False)
    run(world, PathChosen(REMOTE), GRANT, PrefillLegAccepted())
    for at in (3.0, 6.0):
        world.now = at
        assert run(world, Tick()) == [RenewLease(TRANSFER, 3)]
        assert run(world, LeaseNotRenewed(CUT)) == []
    world.now = 9.0
    effects = run(world, Tick())
    assert isinstance(effects[0], FellBack)
    assert (effects[0].error.code, effects[0].prefill_worker) == ("lease_expired", "p0")
    assert effects[1:] == [AbortPrefillLeg(), AbortDecodeLeg(0), StartDecodeLeg(1, "d0", None)]
    assert world.machine.fallbacks == (FailureClass.MISS,)


def test_a_lease_that_is_gone_is_a_miss_before_verified_and_nothing_after() -> None:
    gone = OperationError("lease_unknown", "reaped")
    for verified in (False, True):
        world = new_world()
        run(world, PathChosen(REMOTE), GRANT, PrefillLegAccepted())
        if verified:
            run(world, DecodeLegStarted(0, 1))
        world.now = 3.0
        run(world, Tick(), LeaseNotRenewed(gone))
        assert world.machine.fallbacks == (() if verified else (FailureClass.MISS,))


# --- the table ------------------------------------------------------------------------------------------------------


def test_the_table_names_every_state_and_only_events() -> None:
    assert set(TRANSITIONS) == set(RequestState)
    events = set(typing.get_args(messages.Event))
    for state, row in TRANSITIONS.items():
        assert set(row) <= events
        for event, following in row.items():
            assert following, (state, event)
            if state in HEAD_SENT:
                assert following <= HEAD_SENT | TERMINAL, "no way back once the head is out"


def test_terminal_states_lead_nowhere() -> None:
    assert all(TRANSITIONS[state] == {} for state in TERMINAL)


def test_every_event_in_every_state_is_in_the_table_late_or_a_loud_bug() -> None:
    """From each live state, each kind of event: never anything that the table does not allow, never a silent change."""
    paths: dict[RequestState, list[Event]] = {
        RequestState.CHOOSING: [],
        RequestState.RESERVED: [PathChosen(REMOTE), GRANT],
        RequestState.PREFILLING: [PathChosen(REMOTE), GRANT, PrefillLegAccepted()],
        RequestState.TRANSFERRING: [PathChosen(REMOTE), GRANT, PrefillLegDone()],
        RequestState.VERIFIED: [PathChosen(REMOTE), GRANT, DecodeLegStarted(0, 1)],
        RequestState.DECODING: [PathChosen(REMOTE), GRANT, DecodeLegStarted(0, 1), DecodeLegOutput(0, b"x")],
        RequestState.DONE: [PathChosen(LOCAL), DecodeLegStarted(0), DecodeLegDone(0)],
        RequestState.FAILED: [ChoosingFailed(CUT)],
        RequestState.CANCELLED: [ClientGone()],
    }
    events: list[Event] = [
        PathChosen(REMOTE), ChoosingFailed(CUT), GRANT, ReserveFailed(CUT), LeaseRenewed(9.0), LeaseNotRenewed(CUT),
        PrefillLegAccepted(), PrefillLegDone(), PrefillLegFailed(CUT), DecodeLegStarted(0, 1),
        DecodeLegOutput(0, b"x"), DecodeLegDone(0), DecodeLegFailed(0, CUT), ClientGone(), Tick(),
    ]  # fmt: skip
    assert {type(event) for event in events} == set(typing.get_args(messages.Event))
    assert set(paths) == set(RequestState)
    loud = 0
    for state, path in paths.items():
        for event in events:
            machine = new_world().machine
            for step in path:
                machine.handle(step, 0.0)
            assert machine.state is state
            allowed = TRANSITIONS[state].get(type(event))
            try:
                effects = machine.handle(event, 0.0)
            except LocalProtocolError:
                assert allowed is None or (state is RequestState.CHOOSING and isinstance(event, PathChosen))
                loud += 1
                continue
            if allowed is None or machine.state not in allowed:
                assert machine.state is state, "late: changes nothing"
                assert effects == []
    assert loud == 19, "a change of this number is a change of the table: look at it"


def test_output_before_the_head_is_a_bug_of_the_driver_and_loud() -> None:
    world = new_world()
    run(world, PathChosen(REMOTE), GRANT)
    with pytest.raises(LocalProtocolError):
        world.machine.handle(DecodeLegOutput(0, b"x"), 0.0)


# --- random orders --------------------------------------------------------------------------------------------------


def play(world: World, data: st.DataObject, steps: int = 40) -> None:
    """Random legal events with random pauses, then time only: everything must end."""
    for _ in range(steps):
        kind = data.draw(st.sampled_from(world.pending()))
        world.feed(data.draw(st.sampled_from(kind)))
        world.now += data.draw(st.sampled_from([0.0, 0.0, 0.5, 4.0]))
    for _ in range(60):
        if world.machine.state in TERMINAL:
            break
        world.next_time()
    assert world.machine.state in TERMINAL, "it does not end by its clocks alone"
    # what was asked of the store before the end may still be granted
    if world.reserve_asked:
        world.feed(GRANT)
        assert world.released == 1


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_under_any_order_of_events_the_rules_hold(data: st.DataObject) -> None:
    world = new_world(
        choice=data.draw(st.sampled_from([LOCAL, REMOTE])),
        budget_tokens=data.draw(st.integers(0, 2)),
        streaming=data.draw(st.booleans()),
    )
    play(world, data)
    assert world.machine.fallbacks == outcome(world).fallbacks


class ForgetsThatTheHeadIsOut(RequestMachine):
    def _may_fall_back(self, error: FarfillError) -> bool:
        return error.failure_class is not None


class ListensToAbandonedLegs(RequestMachine):
    def _is_late(self, event: Event) -> bool:
        if isinstance(event, DecodeLegOutput):
            return self.state in TERMINAL
        return super()._is_late(event)


class SaysRemoteWhateverMoved(RequestMachine):
    def _may_say_remote(self) -> bool:
        return self._legs.consuming


class ReleasesAgain(RequestMachine):
    def _release(self) -> list[messages.Effect]:
        return [ReleaseLease(TRANSFER, 3)] if self._lease.status is not LeaseStatus.NONE else []


class NeverReleases(RequestMachine):
    def _release(self) -> list[messages.Effect]:
        return []


CUT_WHILE_BOTH_RUN: list[Event] = [PathChosen(REMOTE), GRANT, PrefillLegFailed(CUT)]


@pytest.mark.parametrize(
    ("mutant", "start"),
    [
        (ForgetsThatTheHeadIsOut, []),
        (ListensToAbandonedLegs, CUT_WHILE_BOTH_RUN),
        (SaysRemoteWhateverMoved, [PathChosen(REMOTE), GRANT]),
        (ReleasesAgain, []),
        (NeverReleases, []),
    ],
)
def test_a_machine_without_one_of_its_guards_is_caught(mutant: type[RequestMachine], start: list[Event]) -> None:
    """The checkers of the random test can fail: each planted bug is found within the same effort."""

    @settings(
        max_examples=400, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        report_multiple_bugs=False,
    )  # fmt: skip
    @given(st.data())
    def hunt(data: st.DataObject) -> None:
        world = new_world(choice=REMOTE, machine_class=mutant)
        run(world, *start)
        play(world, data)

    with pytest.raises((RuleBroken, LocalProtocolError, AssertionError)):
        hunt()
