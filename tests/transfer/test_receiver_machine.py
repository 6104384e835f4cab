"""The receiver machine's rules, one by one, and any order of arrivals and losses."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from farfill.transfer.spec import Clocks

A, B, C = (ConnectionId(number) for number in range(1, 4))
CLOCKS = Clocks(setup_s=5.0, stall_s=10.0, produce_s=60.0, transfer_s=100.0, verify_s=3.0)
ONE = LinkSettings(slots=1, window_chunks=2, retries_max=2, backoff_s=1.0, corrupt_max=1)
LOST = "connection_lost"


def tag(index: int) -> bytes:
    return bytes([index]) * 16


def tags(chunks: int) -> tuple[bytes, ...]:
    return tuple(tag(index) for index in range(1, chunks + 1))


def machine(
    chunks: int = 3, link: LinkSettings = ONE, *, manifest: bool = True, clocks: Clocks = CLOCKS
) -> ReceiverMachine:
    """Started at 0 with one connection open, and the manifest checked, if so wanted."""
    receiver = ReceiverMachine([100] * chunks, clocks, link)
    assert receiver.handle(Started(), 0.0) == [OpenConnection(slot) for slot in range(link.slots)]
    assert receiver.handle(ConnectionOpened(0, A), 0.0) == [SendGet(A, 0)]
    if manifest:
        receiver.handle(ChunkArrived(A, 0), 0.0)
        receiver.handle(ManifestChecked(A), 0.0)
    return receiver


def opened(receiver: ReceiverMachine, index: int, now: float = 1.0, at: ConnectionId = A) -> list[ReceiverEffect]:
    effects = receiver.handle(ChunkArrived(at, index), now)
    return effects + receiver.handle(ChunkOpened(at, index, tag(index)), now)


def closed(receiver: ReceiverMachine, names: tuple[bytes, ...], index: int = 4) -> list[ReceiverEffect]:
    receiver.handle(ChunkArrived(A, index), 1.0)
    return receiver.handle(ClosingOpened(A, names), 1.0)


def failure(effects: list[ReceiverEffect]) -> str:
    assert isinstance(effects[-1], Fail), effects
    return effects[-1].code


def test_nothing_is_asked_for_before_the_manifest_is_checked() -> None:
    receiver = machine(manifest=False)
    assert receiver.handle(ChunkArrived(A, 0), 0.1) == []
    assert receiver.handle(ManifestChecked(A), 0.2) == [SendGet(A, 1), SendGet(A, 2)]


def test_a_manifest_that_does_not_agree_ends_it() -> None:
    receiver = machine(manifest=False)
    receiver.handle(ChunkArrived(A, 0), 0.1)
    assert failure(receiver.handle(ManifestRefused(A, "fingerprint_mismatch", "why"), 0.2)) == "fingerprint_mismatch"


def test_as_many_are_asked_for_as_the_window_holds() -> None:
    receiver = machine(10)
    assert opened(receiver, 1) == [SendGet(A, 3)]
    assert receiver.handle(ConnectionOpened(0, B), 1.0) == [SendGet(B, 4), SendGet(B, 5)]


def test_the_window_is_bounded_in_bytes_too() -> None:
    receiver = machine(10, LinkSettings(slots=1, window_chunks=50, window_bytes=250))
    assert opened(receiver, 1) == [SendGet(A, 3)]


def test_verified_is_every_chunk_of_the_plan_and_a_closing_record_that_names_them() -> None:
    receiver = machine(3)
    opened(receiver, 2)
    opened(receiver, 1)
    opened(receiver, 3)
    assert closed(receiver, tags(3)) == [SendVerified(A), Verify()]
    assert receiver.deadline is None
    assert receiver.handle(Tick(), 1e9) == []


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_without_one_chunk_it_is_not_verified(missing: int) -> None:
    receiver = machine(3, LinkSettings(slots=1, window_chunks=9))
    for index in (1, 2, 3):
        if index != missing:
            opened(receiver, index)
    assert closed(receiver, tags(3)) == []
    assert opened(receiver, missing) == [SendVerified(A), Verify()]


def test_what_this_side_holds_is_not_asked_for_and_all_else_is_needed() -> None:
    receiver = ReceiverMachine([100] * 4, CLOCKS, LinkSettings(slots=1, window_chunks=9), held=frozenset({1, 3}))
    receiver.handle(Started(), 0.0)
    receiver.handle(ConnectionOpened(0, A), 0.0)
    receiver.handle(ChunkArrived(A, 0), 0.0)
    asked = [effect.index for effect in receiver.handle(ManifestChecked(A), 0.0) if isinstance(effect, SendGet)]
    assert asked == [2, 4, 5]
    opened(receiver, 2)
    assert closed(receiver, tags(4), 5) == []
    assert opened(receiver, 4) == [SendVerified(A), Verify()]


def test_a_closing_record_is_compared_where_this_side_holds_a_chunk_too() -> None:
    receiver = ReceiverMachine([100] * 3, CLOCKS, ONE, held=frozenset({1}))
    receiver.handle(Started(), 0.0)
    receiver.handle(ConnectionOpened(0, A), 0.0)
    receiver.handle(ChunkArrived(A, 0), 0.0)
    receiver.handle(ManifestChecked(A), 0.0)
    opened(receiver, 2)
    opened(receiver, 3)
    assert failure(closed(receiver, (tag(1), tag(3), tag(3)))) == "manifest_invalid"


def test_without_the_closing_record_it_is_not_verified() -> None:
    receiver = machine(3, LinkSettings(slots=1, window_chunks=9))
    assert [effect for index in (1, 2, 3) for effect in opened(receiver, index)] == []
    assert failure(receiver.handle(Tick(), 11.0)) == "transfer_stalled"


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (tags(2), "manifest_incomplete"),
        (tags(4), "manifest_incomplete"),
        ((), "manifest_incomplete"),
        ((tag(1), tag(3), tag(2)), "manifest_invalid"),
        ((tag(1), tag(2), tag(9)), "manifest_invalid"),
    ],
)
def test_a_closing_record_that_names_others_ends_it(names: tuple[bytes, ...], code: str) -> None:
    receiver = machine(3, LinkSettings(slots=1, window_chunks=9))
    for index in (1, 2, 3):
        opened(receiver, index)
    assert failure(closed(receiver, names)) == code


def test_a_closing_record_that_cannot_be_this_transfers_ends_it() -> None:
    receiver = machine(3, LinkSettings(slots=1, window_chunks=9))
    receiver.handle(ChunkArrived(A, 4), 1.0)
    assert failure(receiver.handle(ClosingRefused(A, "manifest_invalid", ""), 1.0)) == "manifest_invalid"


def test_what_was_not_asked_for_changes_nothing() -> None:
    receiver = machine(3)
    assert opened(receiver, 3) == []  # beyond the window
    assert opened(receiver, 1, at=B) == []  # on another connection
    assert receiver.handle(ChunkOpened(A, 1, tag(1)), 1.0) == []  # it has not arrived
    assert not receiver.is_expected(A, 3)
    assert receiver.is_expected(A, 1)
    opened(receiver, 1)
    assert opened(receiver, 1) == []  # again
    assert not receiver.is_expected(A, 1)


def test_a_chunk_event_cannot_stand_for_manifest_or_closing_record() -> None:
    receiver = machine(1, manifest=False)
    receiver.handle(ChunkArrived(A, 0), 0.0)
    assert receiver.handle(ChunkOpened(A, 0, tag(0)), 0.0) == []
    receiver = machine(1)
    opened(receiver, 1)
    receiver.handle(ChunkArrived(A, 2), 1.0)
    assert receiver.handle(ChunkOpened(A, 2, tag(2)), 1.0) == []
    assert not receiver.is_over


def test_after_a_cut_only_what_is_missing_is_asked_for() -> None:
    receiver = machine(4)
    opened(receiver, 1)  # asked: 2, 3
    receiver.handle(ChunkArrived(A, 2), 1.0)  # here, being opened
    assert receiver.handle(ConnectionLost(A, LOST, ""), 2.0) == []
    assert receiver.handle(ChunkOpened(A, 2, tag(2)), 2.1) == []  # what is here counts
    assert receiver.handle(Tick(), 3.0) == [OpenConnection(0)]
    assert receiver.handle(ConnectionOpened(0, B), 3.0) == [SendGet(B, 3), SendGet(B, 4)]


def test_a_chunk_that_does_not_open_is_asked_for_over_a_new_connection_and_then_given_up() -> None:
    receiver = machine(3)
    receiver.handle(ChunkArrived(A, 1), 1.0)
    assert receiver.handle(ChunkBad(A, 1, "tag"), 1.0) == [CloseConnection(A, "chunk_corrupt")]
    receiver.handle(Tick(), 2.0)
    assert receiver.handle(ConnectionOpened(0, B), 2.0) == [SendGet(B, 1), SendGet(B, 2)]
    receiver.handle(ChunkArrived(B, 1), 2.0)
    assert failure(receiver.handle(ChunkBad(B, 1, "tag"), 2.0)) == "chunk_corrupt"


def test_a_manifest_that_does_not_open_is_asked_for_again() -> None:
    receiver = machine(3, manifest=False)
    receiver.handle(ChunkArrived(A, 0), 1.0)
    assert receiver.handle(ChunkBad(A, 0, "tag"), 1.0) == [CloseConnection(A, "chunk_corrupt")]
    receiver.handle(Tick(), 2.0)
    assert receiver.handle(ConnectionOpened(0, B), 2.0) == [SendGet(B, 0)]


@pytest.mark.parametrize("code", ["lease_unknown", "lease_expired", "stale_epoch", "transfer_cancelled", "queue_full"])
def test_a_refusal_ends_it_at_once(code: str) -> None:
    assert failure(machine().handle(RefusedReceived(A, 1, code, ""), 1.0)) == code


def test_a_refusal_of_a_connection_that_is_gone_changes_nothing() -> None:
    receiver = machine()
    receiver.handle(ConnectionLost(A, LOST, ""), 1.0)
    assert receiver.handle(RefusedReceived(A, 1, "lease_expired", ""), 1.0) == []


def test_connections_that_cannot_be_had_end_it() -> None:
    receiver = ReceiverMachine([100], CLOCKS, ONE)
    receiver.handle(Started(), 0.0)
    for now, then in ((0.0, 1.0), (1.0, 3.0)):
        assert receiver.handle(ConnectionRefused(0, "peer_unreachable", ""), now) == []
        assert receiver.deadline == then
        assert receiver.handle(Tick(), then) == [OpenConnection(0)]
    effects = receiver.handle(ConnectionRefused(0, "peer_unreachable", ""), 3.0)
    assert failure(effects) == "peer_unreachable"


def test_cancelling_ends_it() -> None:
    assert failure(machine().handle(Cancelled("gone"), 1.0)) == "transfer_cancelled"


def test_setup_has_a_clock() -> None:
    receiver = ReceiverMachine([100], CLOCKS, ONE)
    receiver.handle(Started(), 0.0)
    assert receiver.deadline == 5.0
    assert failure(receiver.handle(Tick(), 5.0)) == "setup_timeout"


def test_stall_has_a_clock_from_the_first_data_chunk_on() -> None:
    receiver = machine()
    assert receiver.deadline == 100.0  # prefill may take its time
    opened(receiver, 1, now=40.0)
    assert receiver.deadline == 45.0
    opened(receiver, 2, now=44.0)
    assert receiver.deadline == 49.0
    assert receiver.handle(Tick(), 49.0) == [AskHave(A)]
    assert receiver.deadline == 54.0
    assert failure(receiver.handle(Tick(), 54.0)) == "transfer_stalled"


def test_a_store_that_answers_and_owes_nothing_is_no_stall() -> None:
    """Rule 6: prefill is slow, the link is not."""
    receiver = machine()
    opened(receiver, 1, now=40.0)
    now = 40.0
    while now < 95.0:
        now += 5.0
        assert receiver.handle(Tick(), now) == [AskHave(A)]
        assert receiver.handle(PresentReceived(A, frozenset({0, 1}), False), now) == []
    opened(receiver, 2, now=99.0)
    opened(receiver, 3, now=99.0)
    assert closed(receiver, tags(3)) == [SendVerified(A), Verify()]


def test_a_store_that_owes_what_does_not_come_is_a_stall() -> None:
    receiver = machine()
    opened(receiver, 1, now=40.0)
    assert receiver.handle(Tick(), 45.0) == [AskHave(A)]
    assert receiver.handle(PresentReceived(A, frozenset({0, 1, 2}), False), 46.0) == []
    assert receiver.deadline == 50.0
    assert failure(receiver.handle(Tick(), 50.0)) == "transfer_stalled"


def test_a_prefill_that_makes_nothing_more_has_a_clock_of_its_own() -> None:
    receiver = machine(clocks=msgspec.structs.replace(CLOCKS, produce_s=12.0))
    opened(receiver, 1, now=40.0)
    for now in (45.0, 50.0):
        assert receiver.handle(Tick(), now) == [AskHave(A)]
        assert receiver.handle(PresentReceived(A, frozenset({0, 1}), False), now) == []
    assert receiver.deadline == 52.0
    assert failure(receiver.handle(Tick(), 52.0)) == "transfer_stalled"


def test_a_probe_that_its_connection_took_with_it_is_asked_again() -> None:
    receiver = machine()
    opened(receiver, 1, now=40.0)
    assert receiver.handle(Tick(), 45.0) == [AskHave(A)]
    receiver.handle(ConnectionLost(A, LOST, ""), 45.5)
    assert receiver.deadline == 46.5  # the next attempt to connect; nobody is there to be asked
    assert receiver.handle(Tick(), 46.5) == [OpenConnection(0)]
    assert receiver.handle(ConnectionOpened(0, B), 47.0) == [AskHave(B), SendGet(B, 2), SendGet(B, 3)]
    assert receiver.handle(PresentReceived(A, frozenset(), False), 47.5) == []  # not whom it asked
    assert receiver.deadline == 50.0


def test_verifying_has_a_clock_from_the_last_arrival_on() -> None:
    receiver = machine(1)
    opened(receiver, 1, now=1.0)
    receiver.handle(ChunkArrived(A, 2), 2.0)
    assert receiver.deadline == 5.0
    assert receiver.handle(ConnectionLost(A, LOST, ""), 3.0) == []  # no connection is needed any more
    assert failure(receiver.handle(Tick(), 5.0)) == "verify_timeout"


def test_the_whole_has_a_clock() -> None:
    assert failure(machine().handle(Tick(), 100.0)) == "transfer_timeout"


def test_a_cache_without_data_chunks_is_manifest_and_closing_record() -> None:
    receiver = machine(0)
    assert closed(receiver, (), index=1) == [SendVerified(A), Verify()]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    chunks=st.integers(1, 7),
    slots=st.integers(1, 3),
    window=st.integers(1, 3),
    script=st.lists(
        st.tuples(st.sampled_from(["deliver", "open", "cut", "bad", "stray"]), st.integers(0, 99)), max_size=80
    ),
)
def test_verified_comes_exactly_when_everything_was_opened_once(
    chunks: int, slots: int, window: int, script: list[tuple[str, int]]
) -> None:
    receiver = ReceiverMachine(
        [100] * chunks,
        Clocks(stall_s=1e6, transfer_s=1e6, setup_s=1e6, verify_s=1e6),
        LinkSettings(slots=slots, window_chunks=window, corrupt_max=99, retries_max=99),
    )
    now, connections = 0.0, 0
    open_slots: set[ConnectionId] = set()
    owed: dict[int, ConnectionId] = {}
    here: dict[int, ConnectionId] = {}
    opened_once: set[int] = set()
    is_verified = False

    def carry_out(effects: list[ReceiverEffect]) -> None:
        nonlocal connections, is_verified
        for effect in effects:
            match effect:
                case OpenConnection(slot):
                    connections += 1
                    open_slots.add(ConnectionId(connections))
                    carry_out(receiver.handle(ConnectionOpened(slot, ConnectionId(connections)), now))
                case SendGet(connection, index):
                    assert connection in open_slots
                    assert index not in opened_once, "asked for a chunk that was opened already"
                    assert index not in owed, "asked for twice at once"
                    owed[index] = connection
                    assert sum(owner == connection for owner in owed.values()) <= window
                case CloseConnection(connection):
                    cut(connection)
                case Verify():
                    assert opened_once == set(range(chunks + 2)), "VERIFIED without every chunk"
                    is_verified = True
                case SendVerified():
                    pass
                case _:
                    raise AssertionError(effect)

    def cut(connection: ConnectionId) -> None:
        open_slots.discard(connection)
        for index in [index for index, owner in owed.items() if owner == connection]:
            del owed[index]
        carry_out(receiver.handle(ConnectionLost(connection, LOST, ""), now))

    def deliver(index: int) -> None:
        here[index] = owed.pop(index)
        carry_out(receiver.handle(ChunkArrived(here[index], index), now))

    def open_chunk(index: int) -> None:
        connection = here.pop(index)
        opened_once.add(index)
        event: ReceiverEvent = ChunkOpened(connection, index, tag(index))
        if index == 0:
            event = ManifestChecked(connection)
        elif index == chunks + 1:
            event = ClosingOpened(connection, tags(chunks))
        carry_out(receiver.handle(event, now))

    def heal() -> None:
        nonlocal now
        if not open_slots and receiver.deadline is not None:
            now = max(now, receiver.deadline)
            carry_out(receiver.handle(Tick(), now))

    carry_out(receiver.handle(Started(), now))
    for what, number in script:
        if is_verified:
            break
        if what == "deliver" and owed:
            deliver(sorted(owed)[number % len(owed)])
        elif what == "open" and here:
            open_chunk(sorted(here)[number % len(here)])
        elif what == "bad" and here:
            index = sorted(here)[number % len(here)]
            carry_out(receiver.handle(ChunkBad(here.pop(index), index, "tag"), now))
        elif what == "cut" and open_slots:
            cut(sorted(open_slots)[number % len(open_slots)])
        elif what == "stray":
            carry_out(receiver.handle(ChunkOpened(ConnectionId(9999), number % (chunks + 2), b"x"), now))
        heal()
    for _ in range(1000):
        if is_verified:
            break
        heal()
        if owed:
            deliver(min(owed))
        elif here:
            open_chunk(min(here))
    assert is_verified
