"""The shelf of receive buffers: used again by exact size, never more than the ledger's free bytes."""

import zlib

from store_kit import WAIT_S, RawClient

from farfill.store.protocol import Put, Release, Reserve, Stored
from farfill.store.server import StoreServer
from farfill.store.shelf import BufferShelf


def test_a_buffer_is_used_again_for_the_same_size_only() -> None:
    shelf = BufferShelf()
    first = shelf.take(100)
    shelf.put_back(first, 1000)
    assert shelf.lying_bytes == 100
    assert shelf.take(99) is not first
    assert shelf.take(100) is first
    assert shelf.lying_bytes == 0
    assert shelf.take(100) is not first


def test_it_keeps_no_more_than_it_may() -> None:
    shelf = BufferShelf()
    for size in (100, 100, 50):
        shelf.put_back(memoryview(bytearray(size)), 210)
    assert shelf.lying_bytes == 200
    shelf.trim(120)
    assert shelf.lying_bytes == 100
    shelf.trim(0)
    assert shelf.lying_bytes == 0


def test_a_store_reuses_buffers_and_shelf_and_leases_together_stay_within_its_bytes(store: StoreServer) -> None:
    shelf = store.memory.shelf

    def used() -> int:
        return shelf.lying_bytes + store.memory.ledger().held_bytes

    def run(transfer_id: str, total: int, sizes: tuple[int, ...]) -> None:
        request = Reserve(transfer_id, "p", "c", total, 10, 600.0)
        epoch = store.reserve("gateway", request).result(WAIT_S).epoch
        assert used() <= 10_000
        client = RawClient(store, "p")
        for index, size in enumerate(sizes):
            payload = bytes([index]) * size
            client.say(Put(transfer_id, epoch, index, size, zlib.crc32(payload)), payload)
            assert client.hear()[0] == Stored(transfer_id, epoch, index)
        store.release("gateway", Release(transfer_id, epoch)).result(WAIT_S)
        assert used() <= 10_000
        client.sock.close()

    run("a", 9000, (3000, 3000, 3000))
    assert shelf.lying_bytes == 9000
    run("b", 9000, (3000,))  # most of the shelf has to go for the reservation
    assert shelf.lying_bytes == 3000
    run("c", 10_000, (10_000,))
    assert shelf.lying_bytes == 10_000
