"""The sender machine's rules, one by one, and any order of cuts and losses against a store of a few lines."""

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
from farfill.transfer.sender import (
    ChunkReady,
    Complete,
    ReleaseChunk,
    SenderEffect,
    SenderMachine,
    SendPut,
    StoredReceived,
)
from farfill.transfer.spec import Clocks

A, B, C, D = (ConnectionId(number) for number in range(1, 5))
CLOCKS = Clocks(setup_s=5.0, stall_s=10.0, transfer_s=100.0)
ONE = LinkSettings(slots=1, window_chunks=2, retries_max=2, backoff_s=1.0, corrupt_max=1)
TWO = LinkSettings(slots=2, window_chunks=2, retries_max=2, backoff_s=1.0)
LOST = "connection_lost"


def machine(chunks: int = 4, link: LinkSettings = ONE, *, ready: int = 0, opened: int = 1) -> SenderMachine:
    """Started at 0, with so many connections open and the first `ready` chunks of 100 bytes ready."""
    sender = SenderMachine(chunks, CLOCKS, link)
    assert sender.handle(Started(), 0.0) == [OpenConnection(slot) for slot in range(link.slots)]
    for slot in range(opened):
        sender.handle(ConnectionOpened(slot, ConnectionId(slot + 1)), 0.0)
    for index in range(ready):
        sender.handle(ChunkReady(index, 100), 0.0)
    return sender


def failure(effects: list[SenderEffect]) -> str:
    assert isinstance(effects[-1], Fail), effects
    return effects[-1].code


def test_chunks_go_out_as_they_become_ready_in_any_order() -> None:
    sender = machine()
    assert sender.handle(ChunkReady(2, 100), 1.0) == [SendPut(A, 2)]
    assert sender.handle(ChunkReady(0, 100), 1.0) == [SendPut(A, 0)]
    assert sender.handle(ChunkReady(1, 100), 1.0) == []  # the window is full
    assert sender.handle(StoredReceived(A, 2), 1.0) == [ReleaseChunk(2), SendPut(A, 1)]


def test_what_is_ready_before_any_connection_waits_for_one() -> None:
    sender = machine(ready=3, opened=0)
    assert sender.handle(ConnectionOpened(0, A), 1.0) == [SendPut(A, 0), SendPut(A, 1)]


def test_two_connections_share_the_work() -> None:
    sender = machine(6, TWO, ready=0, opened=2)
    sent = [effect for index in range(5) for effect in sender.handle(ChunkReady(index, 100), 1.0)]
    assert sent == [SendPut(A, 0), SendPut(B, 1), SendPut(A, 2), SendPut(B, 3)]


def test_the_window_is_bounded_in_bytes_too_but_one_chunk_always_goes() -> None:
    sender = machine(4, LinkSettings(slots=1, window_chunks=8, window_bytes=250))
    sent = [effect for index in range(3) for effect in sender.handle(ChunkReady(index, 100), 0.0)]
    assert sent == [SendPut(A, 0), SendPut(A, 1)]
    sender = machine(4, LinkSettings(slots=1, window_chunks=8, window_bytes=250))
    assert sender.handle(ChunkReady(0, 10_000), 0.0) == [SendPut(A, 0)]


def test_it_is_complete_when_every_chunk_is_acknowledged_and_not_before() -> None:
    sender = machine(3, ready=3)
    assert Complete() not in sender.handle(StoredReceived(A, 0), 1.0)
    assert Complete() not in sender.handle(StoredReceived(A, 1), 1.0)
    assert sender.handle(StoredReceived(A, 2), 1.0) == [ReleaseChunk(2), Complete()]
    assert sender.deadline is None
    assert sender.handle(Tick(), 1e9) == []


def test_an_acknowledgement_that_nobody_waits_for_changes_nothing() -> None:
    sender = machine(3, ready=1)
    assert sender.handle(StoredReceived(A, 1), 1.0) == []
    assert sender.handle(StoredReceived(B, 0), 1.0) == []
    assert sender.handle(StoredReceived(A, 0), 1.0) == [ReleaseChunk(0)]
    assert sender.handle(StoredReceived(A, 0), 1.0) == []


def test_after_a_cut_it_asks_and_sends_only_what_the_store_lacks() -> None:
    sender = machine(5, ready=4)
    sender.handle(StoredReceived(A, 0), 1.0)  # in flight now: 1 and 2
    assert sender.handle(ConnectionLost(A, LOST, ""), 2.0) == []
    assert sender.deadline == 3.0
    assert sender.handle(Tick(), 3.0) == [OpenConnection(0)]
    assert sender.handle(ConnectionOpened(0, B), 3.5) == [AskHave(B), SendPut(B, 3)]  # 3 was never sent: no doubt
    assert sender.handle(PresentReceived(B, frozenset({0, 1}), False), 4.0) == [ReleaseChunk(1), SendPut(B, 2)]


def test_with_another_connection_open_it_asks_there_at_once() -> None:
    sender = machine(6, TWO, ready=2, opened=2)
    assert sender.handle(ConnectionLost(A, LOST, ""), 1.0) == [AskHave(B)]
    assert sender.handle(PresentReceived(B, frozenset(), False), 1.1) == [SendPut(B, 0)]


def test_what_is_lost_while_an_answer_is_awaited_is_asked_about_again() -> None:
    """The answer may be older than the loss: it says nothing about what was lost after the question."""
    three = LinkSettings(slots=3, window_chunks=2, backoff_s=1.0)
    sender = machine(8, three, ready=3, opened=3)  # 0 on A, 1 on B, 2 on C
    assert sender.handle(ConnectionLost(A, LOST, ""), 1.0) == [AskHave(B)]
    assert sender.handle(ConnectionLost(C, LOST, ""), 1.1) == []
    assert sender.handle(PresentReceived(B, frozenset({0}), False), 1.2) == [ReleaseChunk(0), AskHave(B)]
    assert sender.handle(PresentReceived(B, frozenset(), False), 1.3) == [SendPut(B, 2)]


def test_if_the_asked_connection_is_lost_it_asks_on_the_next() -> None:
    sender = machine(6, TWO, ready=2, opened=2)
    assert sender.handle(ConnectionLost(A, LOST, ""), 1.0) == [AskHave(B)]
    assert sender.handle(ConnectionLost(B, LOST, ""), 1.1) == []
    sender.handle(Tick(), 2.0)
    assert sender.handle(ConnectionOpened(0, C), 2.1) == [OpenConnection(1), AskHave(C)]
    assert sender.handle(PresentReceived(B, frozenset(), False), 2.2) == []  # not whom it asked
    assert sender.handle(PresentReceived(C, frozenset({0, 1}), False), 2.3) == [ReleaseChunk(0), ReleaseChunk(1)]


def test_a_consumer_that_has_everything_completes_the_sender() -> None:
    sender = machine(3, ready=3)
    sender.handle(ConnectionLost(A, LOST, ""), 1.0)
    sender.handle(Tick(), 2.0)
    assert sender.handle(ConnectionOpened(0, B), 2.0)[0] == AskHave(B)
    assert sender.handle(PresentReceived(B, frozenset(), True), 2.1) == [Complete()]


def test_attempts_are_spaced_and_stop() -> None:
    sender = machine(3, opened=0, ready=1)
    now, times = 0.0, []
    effects: list[SenderEffect] = []
    for _ in range(10):
        effects = sender.handle(ConnectionRefused(0, "peer_unreachable", "refused"), now)
        if effects:
            break
        assert sender.deadline is not None
        times.append(sender.deadline - now)
        now = sender.deadline
        assert sender.handle(Tick(), now) == [OpenConnection(0)]
    assert times == [1.0, 2.0]
    assert failure(effects) == "peer_unreachable"


def test_jitter_stretches_the_back_off() -> None:
    sender = machine(3, LinkSettings(slots=1, backoff_s=1.0, jitter=0.5), opened=0)
    sender.handle(ConnectionRefused(0, "peer_unreachable", ""), 0.0)
    assert sender.deadline == 1.5


def test_progress_makes_attempts_count_from_nothing() -> None:
    sender = machine(30, ready=20)
    now = 0.0
    for number in range(1, 9):  # more cuts than retries_max; after each the store turns out to have more
        assert sender.handle(ConnectionLost(ConnectionId(number), LOST, ""), now) == []
        now += 1.0
        assert sender.handle(Tick(), now) == [OpenConnection(0)]
        assert AskHave(ConnectionId(number + 1)) in sender.handle(ConnectionOpened(0, ConnectionId(number + 1)), now)
        sender.handle(PresentReceived(ConnectionId(number + 1), frozenset(range(30)), False), now)
    assert not sender.is_over


def test_the_last_connection_that_gives_up_ends_the_transfer() -> None:
    sender = machine(3, TWO, ready=1, opened=1)
    now = 0.0
    for _ in range(3):
        sender.handle(ConnectionRefused(1, "peer_unreachable", ""), now)
        now += 4.0
        sender.handle(StoredReceived(A, 0), now)
        sender.handle(Tick(), now)
    assert not sender.is_over  # the other one works


@pytest.mark.parametrize("code", ["stale_epoch", "wire_version_unsupported"])
def test_some_refusals_of_a_connection_end_it_at_once(code: str) -> None:
    assert failure(machine(opened=0).handle(ConnectionRefused(0, code, ""), 0.1)) == code


@pytest.mark.parametrize(
    "code",
    ["lease_unknown", "lease_expired", "stale_epoch", "transfer_cancelled", "chunk_conflict", "over_reservation",
     "peer_unauthenticated"],
)  # fmt: skip
def test_a_refusal_ends_it_at_once(code: str) -> None:
    assert failure(machine(ready=1).handle(RefusedReceived(A, 0, code, "why"), 0.1)) == code


def test_a_damaged_arrival_is_sent_again_over_a_new_connection_and_then_given_up() -> None:
    sender = machine(3, ready=1)
    assert sender.handle(RefusedReceived(A, 0, "chunk_corrupt", ""), 1.0) == [CloseConnection(A, "chunk_corrupt")]
    assert sender.handle(ConnectionLost(A, "chunk_corrupt", ""), 1.0) == []  # it knows
    assert sender.handle(Tick(), 2.0) == [OpenConnection(0)]
    assert sender.handle(ConnectionOpened(0, B), 2.0) == [SendPut(B, 0)]
    assert failure(sender.handle(RefusedReceived(B, 0, "chunk_corrupt", ""), 3.0)) == "chunk_corrupt"


def test_cancelling_ends_it() -> None:
    assert failure(machine(ready=1).handle(Cancelled("gone"), 1.0)) == "transfer_cancelled"


def test_setup_has_a_clock() -> None:
    sender = machine(opened=0)
    assert sender.deadline == 5.0
    assert failure(sender.handle(Tick(), 5.0)) == "setup_timeout"


def test_stall_has_a_clock_that_runs_only_while_something_waits_for_the_store() -> None:
    sender = machine()
    assert sender.deadline == 100.0  # prefill may take its time
    sender.handle(ChunkReady(0, 100), 30.0)
    assert sender.deadline == 40.0
    sender.handle(StoredReceived(A, 0), 35.0)
    assert sender.deadline == 100.0
    sender.handle(ChunkReady(1, 100), 50.0)
    sender.handle(ChunkReady(2, 100), 55.0)
    assert sender.deadline == 60.0
    assert failure(sender.handle(Tick(), 60.0)) == "transfer_stalled"


def test_the_whole_has_a_clock() -> None:
    assert failure(machine().handle(Tick(), 100.0)) == "transfer_timeout"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    chunks=st.integers(2, 8),
    slots=st.integers(1, 3),
    window=st.integers(1, 3),
    script=st.lists(st.tuples(st.sampled_from(["ready", "ack", "cut", "lose-ack"]), st.integers(0, 99)), max_size=60),
)
def test_every_chunk_arrives_and_no_acknowledged_one_is_sent_again(
    chunks: int, slots: int, window: int, script: list[tuple[str, int]]
) -> None:
    """Connections are cut with puts in flight, stored or not; then the link heals, and it must complete."""
    sender = SenderMachine(
        chunks, Clocks(stall_s=1e6, transfer_s=1e6, setup_s=1e6), LinkSettings(slots=slots, window_chunks=window)
    )
    now, connections, unready = 0.0, 0, list(range(chunks))
    open_slots: dict[ConnectionId, int] = {}
    in_flight: dict[ConnectionId, list[int]] = {}
    questions: list[ConnectionId] = []
    stored: set[int] = set()
    told: set[int] = set()
    done = False

    def carry_out(effects: list[SenderEffect]) -> None:
        nonlocal connections, done
        for effect in effects:
            match effect:
                case OpenConnection(slot):
                    connections += 1
                    connection = ConnectionId(connections)
                    open_slots[connection], in_flight[connection] = slot, []
                    carry_out(sender.handle(ConnectionOpened(slot, connection), now))
                case SendPut(connection, index):
                    assert connection in open_slots
                    assert index not in told, "an acknowledged chunk was sent again"
                    assert index not in unready
                    assert all(index not in flying for flying in in_flight.values()), "in flight twice"
                    in_flight[connection].append(index)
                    assert len(in_flight[connection]) <= window
                case AskHave(connection):
                    questions.append(connection)
                case ReleaseChunk(index):
                    assert index in stored, "released before the store had it"
                    told.add(index)
                case Complete():
                    assert stored == set(range(chunks)), "complete without every chunk in the store"
                    done = True
                case _:
                    raise AssertionError(effect)

    def answer_questions() -> None:
        while questions:
            connection = questions.pop(0)
            if connection in open_slots:
                carry_out(sender.handle(PresentReceived(connection, frozenset(stored), False), now))

    def acknowledge(connection: ConnectionId, index: int) -> None:
        in_flight[connection].remove(index)
        stored.add(index)
        carry_out(sender.handle(StoredReceived(connection, index), now))

    carry_out(sender.handle(Started(), now))
    for what, number in script:
        if done:
            break
        flying = [(connection, index) for connection, indices in in_flight.items() for index in indices]
        if what == "ready" and unready:
            index = unready.pop(number % len(unready))
            carry_out(sender.handle(ChunkReady(index, 100), now))
        elif what == "ack" and flying:
            acknowledge(*flying[number % len(flying)])
        elif what == "lose-ack" and flying:  # stored, but the connection breaks before its answer comes
            connection, index = flying[number % len(flying)]
            stored.add(index)
            del open_slots[connection], in_flight[connection]
            carry_out(sender.handle(ConnectionLost(connection, LOST, ""), now))
        elif what == "cut" and open_slots:
            connection = sorted(open_slots)[number % len(open_slots)]
            del open_slots[connection], in_flight[connection]
            carry_out(sender.handle(ConnectionLost(connection, LOST, ""), now))
        if number % 2:
            answer_questions()
        if sender.is_over and not done:
            return  # it gave up after too many cuts in a row: allowed, and tested above
        if sender.deadline is not None and not open_slots:
            now = max(now, sender.deadline)
            carry_out(sender.handle(Tick(), now))
    while unready and not done:
        carry_out(sender.handle(ChunkReady(unready.pop(), 100), now))
    for _ in range(1000):
        if done:
            break
        answer_questions()
        for connection, indices in list(in_flight.items()):
            for index in list(indices):
                if not done:
                    acknowledge(connection, index)
        if not open_slots and sender.deadline is not None:
            now = max(now, sender.deadline)
            carry_out(sender.handle(Tick(), now))
    assert done
