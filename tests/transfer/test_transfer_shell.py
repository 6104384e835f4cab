"""What the transfer shell does beside its machines: sessions that are forgotten, idle connections, bugs, closing."""

import threading

import pytest
from plane_kit import (
    LAYOUT,
    WAIT_S,
    Site,
    World,
    fingerprint,
    payload_of,
    publish_all,
    release,
    reserve,
    start_send,
    tokens,
    with_store,
)

from farfill.errors import FarfillError, LocalProtocolError
from farfill.kv.sealing import Sealer
from farfill.kv.spec import CacheLayout, Extent, LayerKind, LayerLayout, TensorSpec
from farfill.transfer import connections
from farfill.transfer.connections import TcpConnection
from farfill.transfer.spec import StoreAddress


def failure_of(end: object) -> FarfillError:
    failure = end.future.exception(WAIT_S)  # type: ignore[attr-defined]
    assert isinstance(failure, FarfillError)
    return failure


def move(producer: Site, consumer: Site, relay: Site, by_way_of: StoreAddress | None = None) -> None:
    spec = reserve(relay, "prefill-a", "decode-b", store=by_way_of)
    incoming = consumer.node.receive(spec, LAYOUT, fingerprint(), tokens(spec))
    outgoing, plan = start_send(producer.node, spec)
    publish_all(outgoing, plan)
    cache = incoming.future.result(WAIT_S)
    outgoing.future.result(WAIT_S)
    assert all(bytes(cache.payload(chunk.index)) == payload_of(chunk) for chunk in plan)
    release(relay, spec)


@pytest.fixture
def sites(world: World) -> tuple[Site, Site, Site]:
    return world.site("prefill-a"), world.site("decode-b"), world.site("relay-c")


def data_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("farfill-data-")]


def test_connections_outlive_transfers_and_are_used_again(world: World, sites: tuple[Site, Site, Site]) -> None:
    proxy = world.proxy(sites[2].store.address)
    for _ in range(5):
        move(*sites, by_way_of=proxy.address)
    assert proxy.connections <= 4  # two for each of two nodes
    assert len(data_threads()) <= 8


def test_a_session_that_the_store_has_forgotten_is_opened_anew(world: World, sites: tuple[Site, Site, Site]) -> None:
    move(*sites)
    store = sites[2].store
    store._sessions._entries.clear()
    for _, connection in list(store._served.values()):
        assert connection is not None
        connection.stop()
    move(*sites)


def test_an_idle_connection_is_closed_by_the_client(
    world: World, sites: tuple[Site, Site, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "IDLE_S", 0.05)
    move(*sites)
    for thread in data_threads():
        thread.join(WAIT_S)
        assert not thread.is_alive()
    move(*sites)  # opened again when there is something to do


def test_chunks_larger_than_any_socket_buffer(world: World, sites: tuple[Site, Site, Site]) -> None:
    wide = TensorSpec("recurrent", Extent.STATE, (5, 1024, 1024), "float32")  # 20 MiB
    layout = CacheLayout("wide", (LayerLayout(0, LayerKind.LINEAR, (wide,)),))
    producer, consumer, relay = sites
    spec = reserve(relay, "prefill-a", "decode-b", layout=layout, prefix_tokens=3)
    incoming = consumer.node.receive(spec, layout, fingerprint(layout=layout), tokens(spec))
    outgoing, plan = start_send(producer.node, spec, layout)
    payload = bytes(range(256)) * (plan[0].payload_bytes // 256)
    outgoing.publish(plan[0], memoryview(payload))
    outgoing.finish(0)
    assert incoming.future.result(WAIT_S).payload(plan[0].index) == payload
    outgoing.future.result(WAIT_S)
    release(relay, spec)


def test_a_bug_while_opening_ends_that_transfer_and_no_other(
    world: World, sites: tuple[Site, Site, Site], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    producer, consumer, relay = sites
    spec = reserve(relay, "prefill-a", "decode-b")
    outgoing, plan = start_send(producer.node, spec)
    publish_all(outgoing, plan)
    outgoing.future.result(WAIT_S)
    with monkeypatch.context() as patch:
        patch.setattr(Sealer, "open_into", lambda *_: 1 // 0)
        failure = failure_of(consumer.node.receive(spec, LAYOUT, fingerprint(), tokens(spec)))
    assert isinstance(failure, LocalProtocolError)
    assert "ZeroDivisionError" in failure.message
    assert "failed by a bug" in caplog.text
    release(relay, spec)
    move(*sites)


def test_a_bug_while_sealing_ends_that_transfer_and_no_other(
    world: World, sites: tuple[Site, Site, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, _, relay = sites
    spec = reserve(relay, "prefill-a", "decode-b")
    with monkeypatch.context() as patch:
        patch.setattr(Sealer, "seal_into", lambda *_: 1 // 0)
        outgoing, _ = start_send(producer.node, spec)
        assert isinstance(failure_of(outgoing), LocalProtocolError)
    release(relay, spec)
    move(*sites)


def test_a_bug_in_a_connections_thread_ends_the_transfers_that_use_it(
    world: World, sites: tuple[Site, Site, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 14: a bug is not a reconnect."""
    producer, _, relay = sites
    spec = reserve(relay, "prefill-a", "decode-b")
    with monkeypatch.context() as patch:
        patch.setattr(TcpConnection, "_take", lambda *_: 1 // 0)
        outgoing, _ = start_send(producer.node, spec)
        failure = failure_of(outgoing)
    assert isinstance(failure, LocalProtocolError)
    assert "ZeroDivisionError" in failure.message
    release(relay, spec)
    move(*sites)


def test_closing_a_node_cancels_what_is_under_way_and_takes_nothing_more(
    world: World, sites: tuple[Site, Site, Site]
) -> None:
    _, consumer, relay = sites
    over_tcp, local = reserve(relay, "prefill-a", "decode-b"), reserve(consumer, "prefill-a", "decode-b")
    ends = [
        consumer.node.receive(over_tcp, LAYOUT, fingerprint(), tokens(over_tcp)),
        consumer.node.receive(local, LAYOUT, fingerprint(), tokens(local)),
    ]
    relay.store.memory.when(lambda ledger: ledger.gets_parked > 0).result(WAIT_S)
    consumer.store.memory.when(lambda ledger: ledger.gets_parked > 0).result(WAIT_S)
    consumer.node.close()
    assert [failure_of(end).code for end in ends] == ["transfer_cancelled"] * 2
    with pytest.raises(LocalProtocolError, match="closed"):
        consumer.node.receive(local, LAYOUT, fingerprint(), tokens(local))
    consumer.node.close()  # again
    release(relay, over_tcp)
    release(consumer, local)


def test_a_store_that_is_there_for_control_but_not_for_data_is_unreachable(
    world: World, sites: tuple[Site, Site, Site]
) -> None:
    producer, _, relay = sites
    spec = reserve(relay, "prefill-a", "decode-b")
    proxy = world.proxy(relay.store.address)
    proxy.stop()  # its port is free again
    outgoing, _ = start_send(producer.node, with_store(spec, proxy.address))
    failure = failure_of(outgoing)
    assert failure.code == "peer_unreachable"
    release(relay, spec)
