"""A store on loopback, and clients of it."""

import threading
from collections.abc import Callable, Iterator

import pytest
from store_kit import WAIT_S, RawClient

from farfill.store.machine import StoreLimits
from farfill.store.protocol import Reserve
from farfill.store.server import Security, StoreServer, StoreSettings


@pytest.fixture
def store() -> Iterator[StoreServer]:
    """Without TLS, so `peer` of a session is whom the test says. It must end balanced and without threads."""
    before = set(threading.enumerate())
    store = StoreServer(
        StoreSettings("127.0.0.1", 0, Security.LOOPBACK, "http://127.0.0.1:1", StoreLimits(10_000)), first_epoch=100
    )
    yield store
    ledger = store.memory.ledger()
    assert ledger.free_bytes + ledger.held_bytes + ledger.quarantined_bytes == ledger.total_bytes
    store.stop()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), f"{thread.name} is left behind"


@pytest.fixture
def connect(store: StoreServer) -> Iterator[Callable[..., RawClient]]:
    clients: list[RawClient] = []

    def open_client(peer: str = "p", nonce: bytes | None = None) -> RawClient:
        clients.append(RawClient(store, peer, nonce))
        return clients[-1]

    yield open_client
    for client in clients:
        client.sock.close()


@pytest.fixture
def epoch(store: StoreServer) -> int:
    """Of a lease for transfer "t": 5,000 bytes, 10 chunks, producer p, consumer c, reserved by gateway."""
    request = Reserve("t", "p", "c", 5000, 10, 600.0)
    return store.reserve("gateway", request).result(WAIT_S).epoch
