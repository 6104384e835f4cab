"""The small parts under the transfer shells: mailbox, timer, room, error classes, loopback addresses."""

import threading
import time

import pytest

from farfill.errors import CODES, FailureClass, LocalProtocolError, OperationError, OverloadError, PeerError
from farfill.transfer.failures import error_for
from farfill.transfer.mailbox import Mailbox
from farfill.transfer.room import Room
from farfill.transfer.timer import DeadlineTimer

WAIT_S = 60.0


def test_a_mailbox_handles_one_event_at_a_time_in_order() -> None:
    handled: list[int] = []
    inside, most = 0, 0
    done = threading.Event()

    def handle(number: int) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        handled.append(number)
        inside -= 1
        if len(handled) == 4000:
            done.set()

    mailbox: Mailbox[int] = Mailbox(handle, lambda bug: pytest.fail(str(bug)))
    threads = [
        threading.Thread(target=lambda start=start: [mailbox.post(start + n) for n in range(1000)])
        for start in (0, 1000, 2000, 3000)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done.wait(WAIT_S)
    assert most == 1
    for start in (0, 1000, 2000, 3000):
        assert [n for n in handled if start <= n < start + 1000] == list(range(start, start + 1000))


def test_an_event_posted_while_handling_comes_after() -> None:
    order: list[str] = []

    def handle(name: str) -> None:
        if name == "first":
            mailbox.post("second")
        order.append(name)

    mailbox: Mailbox[str] = Mailbox(handle, lambda bug: pytest.fail(str(bug)))
    mailbox.post("first")
    assert order == ["first", "second"]


def test_a_bug_ends_the_mailbox_and_is_told_once() -> None:
    bugs: list[Exception] = []

    def handle(number: int) -> None:
        raise ZeroDivisionError(number)

    mailbox: Mailbox[int] = Mailbox(handle, bugs.append)
    mailbox.post(1)
    mailbox.post(2)
    assert [repr(bug) for bug in bugs] == ["ZeroDivisionError(1)"]


def test_a_timer_calls_back_each_deadline_once_and_forgets_those_that_are_withdrawn(no_thread_left: None) -> None:
    called: list[str] = []
    last = threading.Event()
    timer = DeadlineTimer("test-timer")
    now = time.monotonic()
    timer.set("withdrawn", now + 0.02, lambda: called.append("withdrawn"))
    timer.set("b", now + 0.06, lambda: (called.append("b"), last.set()))  # type: ignore[func-returns-value]
    timer.set("a", now + 3600, lambda: called.append("too late"))
    timer.set("a", now + 0.03, lambda: called.append("a"))  # earlier than what it waits for
    timer.set("withdrawn", None, lambda: None)
    assert last.wait(WAIT_S)
    assert called == ["a", "b"]
    timer.stop()
    timer.set("late", now, lambda: called.append("late"))
    assert called == ["a", "b"]


def test_room_is_waited_for_and_given_back(no_thread_left: None) -> None:
    room = Room(100)
    room.take(60, lambda: False)
    taken = threading.Event()
    thread = threading.Thread(target=lambda: (room.take(60, lambda: False), taken.set()))  # type: ignore[func-returns-value]
    thread.start()
    assert room.taken_bytes == 60
    assert not taken.is_set()
    room.give_back(60)
    assert taken.wait(WAIT_S)
    thread.join()
    assert room.taken_bytes == 60


def test_a_chunk_larger_than_the_room_gets_in_alone() -> None:
    room = Room(100)
    room.take(1000, lambda: False)
    assert room.taken_bytes == 1000


def test_who_waits_for_room_in_vain_is_let_go(no_thread_left: None) -> None:
    room = Room(100)
    room.take(100, lambda: False)
    over = threading.Event()
    thread = threading.Thread(target=lambda: room.take(50, over.is_set))
    thread.start()
    over.set()
    room.look_again()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_every_code_becomes_an_error_of_the_class_that_is_at_fault() -> None:
    for code, meaning in CODES.items():
        error = error_for(code, "why", 1.0)
        assert error.code == code
        if meaning.failure_class is FailureClass.OVERLOAD:
            assert isinstance(error, OverloadError)
            assert error.retry_after_s == 1.0
        elif meaning.failure_class in (FailureClass.INTEGRITY, FailureClass.COMPATIBILITY):
            assert isinstance(error, PeerError)
    assert isinstance(error_for("connection_lost", ""), OperationError)
    assert isinstance(error_for("peer_unauthenticated", ""), PeerError)
    assert isinstance(error_for("internal_error", ""), LocalProtocolError)
    assert error_for("made_up", "").code == "protocol_violation"
