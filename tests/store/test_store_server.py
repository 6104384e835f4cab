"""The store's data plane over real TCP: attaching, broken frames, peers that vanish, limits, stopping."""

import contextlib
import socket
import threading
import zlib
from collections.abc import Callable

import pytest
from store_kit import WAIT_S, RawClient

from farfill.errors import ConfigurationError, FarfillError, OperationError, OverloadError
from farfill.kv.spec import WIRE_VERSION
from farfill.store import connection as connection_module
from farfill.store import server as server_module
from farfill.store.machine import StoreLimits
from farfill.store.memory import MemoryStore, new_first_epoch
from farfill.store.protocol import (
    Chunk,
    Get,
    Have,
    LedgerSnapshot,
    OpenSession,
    Present,
    Put,
    Refused,
    Release,
    Renew,
    Reserve,
    Stored,
    Verified,
    indices_in,
)
from farfill.store.server import Security, StoreServer, StoreSettings
from farfill.store.sessions import NONCES_MAX, SESSIONS_PER_PEER_MAX, SessionTable
from farfill.transfer import sockets as sockets_module
from farfill.transfer.frames import ATTACH_BYTES, AttachStatus, encode_attach, new_nonce

Connect = Callable[..., RawClient]
PAYLOAD = b"sealed chunk"
CRC = zlib.crc32(PAYLOAD)


def put(epoch: int, index: int, payload: bytes = PAYLOAD, checksum: int | None = None) -> tuple[Put, bytes]:
    return Put("t", epoch, index, len(payload), zlib.crc32(payload) if checksum is None else checksum), payload


def settle(store: StoreServer, holds: Callable[[LedgerSnapshot], bool]) -> LedgerSnapshot:
    return store.memory.when(holds).result(WAIT_S)


def test_a_chunk_is_put_listed_got_and_verified(store: StoreServer, connect: Connect, epoch: int) -> None:
    producer, consumer = connect("p"), connect("c")
    consumer.say(Get("t", epoch, 2))  # before it is there
    settle(store, lambda ledger: ledger.gets_parked == 1)
    producer.say(*put(epoch, 2))
    assert producer.hear() == (Stored("t", epoch, 2), b"")
    assert consumer.hear() == (Chunk("t", epoch, 2, len(PAYLOAD), CRC), PAYLOAD)
    producer.say(Have("t", epoch))
    present, _ = producer.hear()
    assert isinstance(present, Present)
    assert list(indices_in(present.bitmap)) == [2]
    consumer.say(Verified("t", epoch))
    settle(store, lambda ledger: ledger.free_bytes == ledger.total_bytes)
    producer.say(Have("t", epoch))
    present, _ = producer.hear()
    assert isinstance(present, Present)
    assert present.verified


def test_a_refused_put_is_skipped_and_the_connection_goes_on(store: StoreServer, connect: Connect, epoch: int) -> None:
    producer = connect("p")
    producer.say(*put(epoch - 1, 1))
    producer.say(*put(epoch, 99))
    producer.say(*put(epoch, 1))
    answers = [producer.hear()[0] for _ in range(3)]
    assert [answer.code for answer in answers if isinstance(answer, Refused)] == ["stale_epoch", "over_reservation"]
    assert answers[2] == Stored("t", epoch, 1)


def test_a_duplicated_put_is_stored_again_and_another_content_is_a_conflict(
    store: StoreServer, connect: Connect, epoch: int
) -> None:
    producer = connect("p")
    producer.say(*put(epoch, 1))
    producer.say(*put(epoch, 1))
    producer.say(*put(epoch, 1, b"another text"))
    assert producer.hear()[0] == producer.hear()[0] == Stored("t", epoch, 1)
    refusal = producer.hear()[0]
    assert isinstance(refusal, Refused)
    assert (refusal.code, refusal.request, refusal.index) == ("chunk_conflict", "put", 1)


def test_a_damaged_payload_is_refused_and_not_served(store: StoreServer, connect: Connect, epoch: int) -> None:
    producer, consumer = connect("p"), connect("c")
    consumer.say(Get("t", epoch, 1))
    producer.say(*put(epoch, 1, b"sealed chunX", checksum=CRC))
    refusal = producer.hear()[0]
    assert isinstance(refusal, Refused)
    assert refusal.code == "chunk_corrupt"
    producer.say(*put(epoch, 1))
    assert producer.hear()[0] == Stored("t", epoch, 1)
    assert consumer.hear()[1] == PAYLOAD


def test_a_put_that_breaks_off_leaves_nothing(store: StoreServer, connect: Connect, epoch: int) -> None:
    producer = connect("p")
    producer.sock.sendall(producer.frame(*put(epoch, 1))[:-4])
    producer.sock.close()
    again = connect("p")
    again.say(*put(epoch, 1))
    assert again.hear()[0] == Stored("t", epoch, 1)
    store.release("gateway", Release("t", epoch)).result(WAIT_S)
    settle(store, lambda ledger: ledger.free_bytes == ledger.total_bytes)


def test_a_newer_put_takes_over_from_a_connection_that_hangs(store: StoreServer, connect: Connect, epoch: int) -> None:
    hanging = connect("p")
    hanging.sock.sendall(hanging.frame(*put(epoch, 1))[:-4])
    lease = store.memory._machine._leases["t"]
    settle(store, lambda _: 1 in lease.writing)  # it came first
    newer = connect("p")
    newer.say(*put(epoch, 1))
    assert newer.hear()[0] == Stored("t", epoch, 1)
    assert hanging.is_closed_by_store()


def test_a_put_in_flight_when_its_lease_ends_is_refused_and_leaves_nothing(
    store: StoreServer, connect: Connect, epoch: int
) -> None:
    producer = connect("p")
    frame = producer.frame(*put(epoch, 1))
    producer.sock.sendall(frame[:-4])
    store.release("gateway", Release("t", epoch)).result(WAIT_S)
    producer.sock.sendall(frame[-4:])
    refusal = producer.hear()[0]
    assert isinstance(refusal, Refused)
    assert refusal.code == "transfer_cancelled"
    settle(store, lambda ledger: ledger.free_bytes == ledger.total_bytes)


def test_a_consumer_that_vanishes_while_it_waits_is_forgotten(store: StoreServer, connect: Connect, epoch: int) -> None:
    consumer = connect("c")
    for index in range(5):
        consumer.say(Get("t", epoch, index))
    settle(store, lambda ledger: ledger.gets_parked == 5)
    consumer.sock.close()
    settle(store, lambda ledger: ledger.gets_parked == 0)


@pytest.mark.parametrize("how", ["flipped", "repeated", "moved", "truncated", "oversized", "noise"])
def test_a_frame_that_is_not_right_closes_the_connection_and_harms_nothing(
    store: StoreServer, connect: Connect, epoch: int, how: str
) -> None:
    producer = connect("p")
    first, second = producer.frame(*put(epoch, 1)), producer.frame(*put(epoch, 2))
    flipped = bytearray(first)
    flipped[10] ^= 1
    bad = {
        "flipped": bytes(flipped),
        "repeated": first + first,
        "moved": second + first,
        "truncated": first[:-40] + second,
        "oversized": b"\xfa\x17\xff\xff",
        "noise": b"GET / HTTP/1.1\r\n\r\n",
    }[how]
    producer.sock.sendall(bad)
    with contextlib.suppress(OSError):  # the store may have closed it by now, which is what the next line asks for
        producer.sock.shutdown(socket.SHUT_WR)
    assert producer.is_closed_by_store()
    other = connect("p")
    other.say(Have("t", epoch))
    present, _ = other.hear()
    assert isinstance(present, Present)
    assert list(indices_in(present.bitmap)) == ([1] if how == "repeated" else [])


# ---- attaching


def test_a_connection_that_says_nothing_or_nonsense_is_closed(store: StoreServer) -> None:
    address = (store.address.host, store.address.data_port)
    with socket.create_connection(address, timeout=WAIT_S) as sock:
        sock.sendall(b"x" * ATTACH_BYTES)
        assert sock.recv(1) == b""
    with socket.create_connection(address, timeout=WAIT_S) as sock:
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""


def test_a_session_that_is_unknown_or_whose_key_is_not_known_is_refused(store: StoreServer, connect: Connect) -> None:
    client = connect()
    for session_id, key in ((client.session.session_id, bytes(32)), ("00" * 16, client.session.key)):
        with socket.create_connection((store.address.host, store.address.data_port), timeout=WAIT_S) as sock:
            sock.sendall(encode_attach(session_id, key, new_nonce()))
            reply = sock.recv(100)
            assert reply[8] == AttachStatus.UNKNOWN_SESSION.value
            assert sock.recv(1) == b""


def test_a_nonce_is_taken_once(store: StoreServer, connect: Connect) -> None:
    client = connect()
    assert client.status is AttachStatus.ACCEPTED
    client.sock.close()
    client.sock = socket.create_connection((store.address.host, store.address.data_port), timeout=WAIT_S)
    assert client.attach() is AttachStatus.REFUSED  # a recorded attach record, replayed
    assert client.is_closed_by_store()


def test_sessions_and_nonces_are_bounded() -> None:
    table = SessionTable()
    first = table.open("p")
    other = table.open("q")
    for _ in range(SESSIONS_PER_PEER_MAX):
        table.open("p")
    assert table.attach(encode_attach(first.session_id, first.key, new_nonce()))[0] is AttachStatus.UNKNOWN_SESSION
    for number in range(NONCES_MAX):
        nonce = number.to_bytes(16, "big")
        status, peer, _, keys = table.attach(encode_attach(other.session_id, other.key, nonce))
        assert (status, peer) == (AttachStatus.ACCEPTED, "q")
        assert keys is not None
    assert table.attach(encode_attach(other.session_id, other.key, new_nonce()))[0] is AttachStatus.REFUSED


def test_a_session_is_for_this_life_of_the_store_and_this_wire_version(store: StoreServer) -> None:
    with pytest.raises(FarfillError) as error:
        store.open_session("p", OpenSession("another life", WIRE_VERSION))
    assert error.value.code == "stale_epoch"
    with pytest.raises(FarfillError) as error:
        store.open_session("p", OpenSession(store.address.instance, WIRE_VERSION + 1))
    assert error.value.code == "wire_version_unsupported"
    assert "key=..." in repr(store.open_session("p", OpenSession(store.address.instance, WIRE_VERSION)))


# ---- listening and stopping


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.invalid"])
def test_off_loopback_nobody_listens_without_tls(host: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        StoreServer(StoreSettings(host, 0, Security.LOOPBACK, "http://x", StoreLimits(1000)))
    assert error.value.code == "insecure_listener"
    assert error.value.field == "host"


def test_a_port_that_is_taken_is_told(store: StoreServer) -> None:
    settings = StoreSettings(
        "127.0.0.1", store.address.data_port, Security.LOOPBACK, "http://127.0.0.1:1", StoreLimits(1000)
    )
    with pytest.raises(ConfigurationError) as error:
        StoreServer(settings)
    assert error.value.code == "port_in_use"


def test_connections_over_the_bound_are_closed(
    store: StoreServer, connect: Connect, epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "CONNECTIONS_MAX", 2)
    connect()
    connect()
    with socket.create_connection((store.address.host, store.address.data_port), timeout=WAIT_S) as sock:
        assert sock.recv(1) == b""


def test_stopping_waits_for_leases_and_refuses_new_ones(store: StoreServer, connect: Connect, epoch: int) -> None:
    producer = connect("p")
    producer.say(*put(epoch, 1))
    assert producer.hear()[0] == Stored("t", epoch, 1)
    stopping = threading.Thread(target=store.stop, args=(WAIT_S,))
    stopping.start()
    while not store.memory.is_draining:
        stopping.join(0.001)
    with pytest.raises(OverloadError, match="draining"):
        store.reserve("gateway", Reserve("u", "p", "c", 10, 2, 60.0)).result(WAIT_S)
    producer.say(*put(epoch, 2))  # what is under way goes on
    assert producer.hear()[0] == Stored("t", epoch, 2)
    store.release("gateway", Release("t", epoch)).result(WAIT_S)
    stopping.join(WAIT_S)
    assert not stopping.is_alive()
    assert producer.is_closed_by_store()
    store.stop()  # again


def test_stopping_with_gets_and_puts_in_flight_ends_them(store: StoreServer, connect: Connect, epoch: int) -> None:
    consumer, producer = connect("c"), connect("p")
    consumer.say(Get("t", epoch, 1))
    producer.sock.sendall(producer.frame(*put(epoch, 2))[:-4])
    settle(store, lambda ledger: ledger.gets_parked == 1)
    store.stop()
    assert consumer.is_closed_by_store()
    assert producer.is_closed_by_store()


def test_control_calls_are_the_machines(store: StoreServer, epoch: int) -> None:
    assert store.renew("gateway", Renew("t", epoch, 30.0)).result(WAIT_S).lease_s == 30.0
    with pytest.raises(OperationError, match="forbidden"):
        store.renew("p", Renew("t", epoch, 30.0)).result(WAIT_S)
    with pytest.raises(OperationError, match="stale_epoch"):
        store.release("gateway", Release("t", epoch + 1)).result(WAIT_S)
    with pytest.raises(OverloadError, match="store_full") as error:
        store.reserve("gateway", Reserve("u", "p", "c", 6000, 2, 60.0)).result(WAIT_S)
    assert error.value.retry_after_s == pytest.approx(30.0, abs=5.0)
    status = store.status()
    assert (status.ledger.held_bytes, status.ledger.leases, status.draining) == (5000, 1, False)


def test_a_lease_ends_by_the_stores_own_timer(store: StoreServer) -> None:
    store.reserve("gateway", Reserve("u", "p", "c", 6000, 2, 0.05)).result(WAIT_S)
    assert settle(store, lambda ledger: ledger.leases == 0).free_bytes == 10_000


def test_epochs_of_a_later_life_are_higher_and_fit_json() -> None:
    first = new_first_epoch()
    assert first < 2**53
    memory = MemoryStore(StoreLimits(10))
    assert new_first_epoch() >= first
    memory.close()


def test_a_bug_in_the_machine_stops_the_store_loudly(
    store: StoreServer, epoch: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rule 14: what a machine knows after an unexpected exception cannot be trusted."""
    own = MemoryStore(StoreLimits(10))

    def broken(event: object, now: float) -> list[object]:
        raise ZeroDivisionError

    monkeypatch.setattr(own._machine, "handle", broken)
    told: list[object] = []
    op = own.begin(lambda effect, _: told.append(effect))
    own.post(server_module.ReserveAsked(op, "g", Reserve("u", "p", "c", 1, 2, 1.0)))
    assert [effect.code for effect in told] == ["internal_error"]  # type: ignore[attr-defined]
    with pytest.raises(FarfillError, match="after a bug"):
        own.begin(lambda effect, _: None)
    assert "stopped after a bug" in caplog.text
    own.close()


def test_an_idle_connection_is_closed_in_the_end_but_not_one_that_waits_for_a_chunk(
    store: StoreServer, connect: Connect, epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets_module, "SILENCE_S", 1)
    monkeypatch.setattr(connection_module, "SILENCE_S", 1)
    monkeypatch.setattr(connection_module, "IDLE_S", 1)
    waiting, idle = connect("c"), connect("c")
    waiting.say(Get("t", epoch, 1))
    settle(store, lambda ledger: ledger.gets_parked == 1)
    assert idle.is_closed_by_store()
    producer = connect("p")
    producer.say(*put(epoch, 1))
    assert waiting.hear()[1] == PAYLOAD


def test_a_peer_that_falls_silent_within_a_frame_is_given_up(
    store: StoreServer, connect: Connect, epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets_module, "SILENCE_S", 1)
    producer = connect("p")
    producer.sock.sendall(producer.frame(*put(epoch, 1))[:-4])
    assert producer.is_closed_by_store()
    store.release("gateway", Release("t", epoch)).result(WAIT_S)
    settle(store, lambda ledger: ledger.free_bytes == ledger.total_bytes)
