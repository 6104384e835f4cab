"""Whole transfers on bad links and with bad peers: cuts, flipped bits, restarts, strangers, quota, leases."""

import threading

import msgspec
import pytest
from plane_kit import (
    LAYOUT,
    QUICK,
    WAIT_S,
    Certificates,
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

from farfill.errors import FailureClass, FarfillError, LocalProtocolError, OverloadError
from farfill.kv.plan import plan_chunks, transfer_bytes
from farfill.store.protocol import Chunk, Get, Reserve, ServerMessage
from farfill.transfer.events import LinkSettings
from farfill.transfer.node import TransferNode
from farfill.transfer.spec import Clocks, TransferSpec

# One connection, one chunk in flight: then at most one chunk is uncertain at each cut, and bytes can be counted.
ONE_BY_ONE = LinkSettings(backoff_s=0.01, window_chunks=1)


def failure_of(end: object) -> FarfillError:
    failure = end.future.exception(WAIT_S)  # type: ignore[attr-defined]
    assert isinstance(failure, FarfillError)
    return failure


def pair(world: World, settings: LinkSettings = QUICK, connections: int = 2) -> tuple[Site, Site, Site]:
    """Producer, consumer, relay."""
    options = {"settings": settings, "connections_per_peer": connections}
    return world.site("prefill-a", **options), world.site("decode-b", **options), world.site("relay-c", **options)


def receive(site: Site, spec: TransferSpec):  # type: ignore[no-untyped-def]
    return site.node.receive(spec, LAYOUT, fingerprint(), tokens(spec))


def test_a_sender_cut_three_times_resends_only_what_was_not_acknowledged(world: World) -> None:
    producer, consumer, relay = pair(world, ONE_BY_ONE, 1)
    spec = reserve(relay, "prefill-a", "decode-b", prefix_tokens=400)
    proxy = world.proxy(relay.store.address, cuts=(70_000, 150_000, 90_000))
    incoming = receive(consumer, spec)
    outgoing, plan = start_send(producer.node, with_store(spec, proxy.address))
    publish_all(outgoing, plan)
    cache, report = incoming.future.result(WAIT_S), outgoing.future.result(WAIT_S)
    assert proxy.cuts_done == 3
    assert proxy.connections == 4
    assert 1 <= report.resent_chunks <= 3  # at most the one in flight at each cut
    largest = max(chunk.payload_bytes for chunk in plan) + 48
    assert report.sent_bytes <= report.sealed_bytes + 3 * largest
    # On the wire: what was sealed, the pieces that were cut off, and less than 200 bytes of frame around a chunk.
    assert proxy.bytes_up <= report.sealed_bytes + 3 * largest + 200 * (len(plan) + 10)
    assert all(bytes(cache.payload(chunk.index)) == payload_of(chunk) for chunk in plan)
    release(relay, spec)


def test_a_receiver_cut_three_times_asks_only_for_what_it_has_not(world: World) -> None:
    producer, consumer, relay = pair(world, ONE_BY_ONE, 1)
    spec = reserve(relay, "prefill-a", "decode-b", prefix_tokens=400)
    proxy = world.proxy(relay.store.address, answer_cuts=(70_000, 150_000, 90_000))
    outgoing, plan = start_send(producer.node, spec)
    publish_all(outgoing, plan)
    report = outgoing.future.result(WAIT_S)
    incoming = receive(consumer, with_store(spec, proxy.address))
    cache = incoming.future.result(WAIT_S)
    assert proxy.cuts_done == 3
    assert cache.bytes_moved == report.sealed_bytes  # no whole chunk came twice
    assert all(bytes(cache.payload(chunk.index)) == payload_of(chunk) for chunk in plan)
    release(relay, spec)


def test_cuts_on_both_sides_of_many_connections_at_once(world: World) -> None:
    producer, consumer, relay = pair(world, QUICK, 3)
    spec = reserve(relay, "prefill-a", "decode-b", prefix_tokens=800, chunk_tokens=32)
    up = world.proxy(relay.store.address, cuts=(30_000, 90_000, 50_000, 10_000, 120_000))
    down = world.proxy(relay.store.address, answer_cuts=(60_000, 20_000, 40_000, 80_000))
    incoming = receive(consumer, with_store(spec, down.address))
    outgoing, plan = start_send(producer.node, with_store(spec, up.address))
    publish_all(outgoing, plan)
    cache = incoming.future.result(WAIT_S)
    outgoing.future.result(WAIT_S)
    assert all(bytes(cache.payload(chunk.index)) == payload_of(chunk) for chunk in plan)
    release(relay, spec)


def test_a_chunk_is_served_while_later_ones_are_still_to_come(world: World) -> None:
    producer, consumer, _ = pair(world)
    spec = reserve(consumer, "prefill-a", "decode-b")
    outgoing, plan = start_send(producer.node, spec)
    got: dict[int, int] = {}
    arrived = threading.Event()

    def on_answer(message: ServerMessage, sealed: memoryview | None, give_back: object) -> None:
        assert isinstance(message, Chunk)
        assert sealed is not None
        got[message.index] = sealed.nbytes
        give_back()  # type: ignore[operator]
        arrived.set()

    # Parked before the chunk exists, answered when it comes, with nothing else published.
    consumer.store.local("decode-b").ask(Get(spec.transfer_id, spec.epoch, 1), None, on_answer)
    outgoing.publish(plan[0], memoryview(payload_of(plan[0])))
    assert arrived.wait(WAIT_S)
    assert got == {1: plan[0].payload_bytes + 48}
    assert not outgoing.future.done()
    incoming = receive(consumer, spec)
    for chunk in plan[1:]:
        outgoing.publish(chunk, memoryview(payload_of(chunk)))
    outgoing.finish(0)
    incoming.future.result(WAIT_S)
    outgoing.future.result(WAIT_S)
    release(consumer, spec)


@pytest.mark.parametrize(
    ("offset", "resent"),
    [(10, 0), (50, 0), (57, 1), (65, 1), (500, 1), (40_000, 1)],
    ids=["session-id", "attach-mac", "frame-prefix", "header", "manifest", "data"],
)
def test_a_bit_flipped_on_the_way_to_the_store_is_noticed_and_mended(world: World, offset: int, resent: int) -> None:
    producer, consumer, relay = pair(world, ONE_BY_ONE, 1)
    spec = reserve(relay, "prefill-a", "decode-b", prefix_tokens=400)
    proxy = world.proxy(relay.store.address, flip_at=offset)
    incoming = receive(consumer, spec)
    outgoing, plan = start_send(producer.node, with_store(spec, proxy.address))
    publish_all(outgoing, plan)
    cache = incoming.future.result(WAIT_S)
    assert outgoing.future.result(WAIT_S).resent_chunks == resent
    assert proxy.connections == 2  # what cannot be trusted is closed
    assert all(bytes(cache.payload(chunk.index)) == payload_of(chunk) for chunk in plan)
    release(relay, spec)


@pytest.mark.parametrize("offset", [15, 40, 500, 40_000], ids=["attach-reply", "header", "manifest", "data"])
def test_a_bit_flipped_on_the_way_from_the_store_is_noticed_and_mended(world: World, offset: int) -> None:
    producer, consumer, relay = pair(world, ONE_BY_ONE, 1)
    spec = reserve(relay, "prefill-a", "decode-b", prefix_tokens=400)
    proxy = world.proxy(relay.store.address, flip_answer_at=offset)
    outgoing, plan = start_send(producer.node, spec)
    publish_all(outgoing, plan)
    cache = receive(consumer, with_store(spec, proxy.address)).future.result(WAIT_S)
    assert proxy.connections == 2
    assert all(bytes(cache.payload(chunk.index)) == payload_of(chunk) for chunk in plan)
    outgoing.future.result(WAIT_S)
    release(relay, spec)


@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_a_link_that_always_flips_a_bit_ends_with_chunk_corrupt(world: World, end: str) -> None:
    producer, consumer, relay = pair(world, ONE_BY_ONE, 1)
    spec = reserve(relay, "prefill-a", "decode-b")
    if end == "sender":
        proxy = world.proxy(relay.store.address, flip_at=500, flips=100)
        outgoing, _ = start_send(producer.node, with_store(spec, proxy.address))
        failure = failure_of(outgoing)
    else:
        outgoing, plan = start_send(producer.node, spec)
        publish_all(outgoing, plan)
        outgoing.future.result(WAIT_S)
        proxy = world.proxy(relay.store.address, flip_answer_at=500, flips=100)
        failure = failure_of(receive(consumer, with_store(spec, proxy.address)))
    assert failure.code == "chunk_corrupt"
    assert failure.failure_class is FailureClass.INTEGRITY
    assert proxy.connections == 3  # the first and two more
    release(relay, spec)


def test_a_lease_that_has_ended_is_told_to_both_sides(world: World) -> None:
    producer, consumer, relay = pair(world)
    spec = reserve(relay, "prefill-a", "decode-b", lease_s=1.0)
    incoming = receive(consumer, spec)
    outgoing, plan = start_send(producer.node, spec)
    assert failure_of(incoming).code == "lease_expired"  # it waits for chunk 1, which does not come
    relay.store.memory.when(lambda ledger: ledger.free_bytes == ledger.total_bytes).result(WAIT_S)
    for chunk in plan:
        if outgoing.future.done():
            break
        outgoing.publish(chunk, memoryview(payload_of(chunk)))
    assert failure_of(outgoing).code == "lease_expired"
    with pytest.raises(FarfillError, match="lease_expired"):
        outgoing.publish(plan[-1], memoryview(payload_of(plan[-1])))


def test_a_released_transfer_is_cancelled_on_both_sides(world: World) -> None:
    producer, consumer, relay = pair(world)
    spec = reserve(relay, "prefill-a", "decode-b")
    incoming = receive(consumer, spec)
    outgoing, plan = start_send(producer.node, spec)
    outgoing.publish(plan[0], memoryview(payload_of(plan[0])))
    relay.store.memory.when(lambda ledger: ledger.gets_parked > 0).result(WAIT_S)
    release(relay, spec)
    assert failure_of(incoming).code == "transfer_cancelled"
    try:
        publish_all(outgoing, plan[1:])
    except LocalProtocolError:
        pass  # finish: chunk 0 was published outside
    except FarfillError as error:
        assert error.code == "transfer_cancelled"
    assert failure_of(outgoing).code == "transfer_cancelled"


def test_another_epoch_is_stale(world: World) -> None:
    producer, consumer, relay = pair(world)
    first = reserve(relay, "prefill-a", "decode-b")
    release(relay, first)
    second = reserve(relay, "prefill-a", "decode-b", transfer_id=first.transfer_id)
    assert second.epoch > first.epoch
    outgoing, _ = start_send(producer.node, first)
    assert failure_of(outgoing).code == "stale_epoch"
    assert failure_of(receive(consumer, first)).code == "stale_epoch"
    release(relay, second)


def test_a_restarted_store_refuses_what_its_former_life_granted(world: World) -> None:
    producer, consumer, relay = pair(world)
    spec = reserve(relay, "prefill-a", "decode-b")
    outgoing, plan = start_send(producer.node, spec)
    outgoing.publish(plan[0], memoryview(payload_of(plan[0])))
    reborn = world.site("relay-d")
    address = msgspec.structs.replace(reborn.store.address, instance=spec.store.instance)
    assert failure_of(receive(consumer, with_store(spec, address))).code == "stale_epoch"
    # Even one who learned the new instance has only an epoch of the former life.
    assert failure_of(receive(consumer, with_store(spec, reborn.store.address))).code == "stale_epoch"
    outgoing.cancel("test")
    assert failure_of(outgoing).code == "transfer_cancelled"
    release(relay, spec)


def test_a_store_that_dies_ends_both_sides_with_a_transport_error(world: World) -> None:
    producer, consumer, relay = pair(world)
    spec = reserve(relay, "prefill-a", "decode-b")
    incoming = receive(consumer, spec)
    outgoing, plan = start_send(producer.node, spec)
    outgoing.publish(plan[0], memoryview(payload_of(plan[0])))
    relay.store.memory.when(lambda ledger: ledger.gets_parked > 0).result(WAIT_S)
    world.sites.remove(relay)
    relay.stop()
    assert failure_of(incoming).failure_class is FailureClass.TRANSPORT
    assert failure_of(outgoing).failure_class is FailureClass.TRANSPORT
    assert failure_of(outgoing).code in ("peer_unreachable", "connection_lost")


def test_a_stranger_with_a_good_certificate_may_neither_put_nor_get(world: World) -> None:
    relay = world.site("relay-c")
    mallory = world.site("mallory")
    spec = reserve(relay, "prefill-a", "decode-b")
    outgoing, _ = start_send(mallory.node, spec)
    assert failure_of(outgoing).code == "peer_unauthenticated"
    assert failure_of(receive(mallory, spec)).code == "peer_unauthenticated"
    assert relay.ledger().held_bytes == relay.ledger().total_bytes - relay.ledger().free_bytes > 0
    release(relay, spec)


def test_the_consumer_may_not_put_and_the_producer_may_not_get(world: World) -> None:
    producer, consumer, relay = pair(world)
    spec = reserve(relay, "prefill-a", "decode-b")
    outgoing, _ = start_send(consumer.node, spec)
    assert failure_of(outgoing).code == "peer_unauthenticated"
    assert failure_of(receive(producer, spec)).code == "peer_unauthenticated"
    release(relay, spec)


def test_a_certificate_of_another_ca_is_refused(world: World, tmp_path_factory: pytest.TempPathFactory) -> None:
    relay = world.site("relay-c")
    spec = reserve(relay, "prefill-a", "decode-b")
    foreign = Certificates(tmp_path_factory.mktemp("foreign"))
    context = foreign.client("prefill-a")
    context.load_verify_locations(world.certificates.files("relay-c").ca)  # it trusts us; we do not trust it
    node = TransferNode("prefill-a", None, context, settings=QUICK)
    outgoing, _ = start_send(node, spec)
    assert failure_of(outgoing).code == "peer_unauthenticated"
    node.close()
    release(relay, spec)


def test_a_store_with_a_certificate_of_another_ca_is_refused(
    world: World, tmp_path_factory: pytest.TempPathFactory
) -> None:
    relay = world.site("relay-c")
    spec = reserve(relay, "prefill-a", "decode-b")
    foreign = Certificates(tmp_path_factory.mktemp("foreign"))
    node = TransferNode("prefill-a", None, foreign.client("prefill-a"), settings=QUICK)
    outgoing, _ = start_send(node, spec)
    assert failure_of(outgoing).code == "peer_unauthenticated"
    node.close()
    release(relay, spec)


def test_what_does_not_fit_is_refused_at_reservation_and_changes_nothing(world: World) -> None:
    relay = world.site("relay-c", store_bytes=3_000_000)
    first = reserve(relay, "prefill-a", "decode-b", prefix_tokens=400)
    before = relay.ledger()
    with pytest.raises(OverloadError, match="store_full") as refusal:
        reserve(relay, "prefill-a", "decode-b", prefix_tokens=4000)
    assert refusal.value.retry_after_s is not None
    assert relay.ledger() == before
    release(relay, first)


def test_more_than_was_reserved_is_refused(world: World) -> None:
    producer, _, relay = pair(world)
    spec = reserve(relay, "prefill-a", "decode-b", prefix_tokens=100)
    longer = msgspec.structs.replace(spec, prefix_tokens=400)
    outgoing, plan = start_send(producer.node, longer)
    for chunk in plan:
        if outgoing.future.done():
            break
        outgoing.publish(chunk, memoryview(payload_of(chunk)))
    assert failure_of(outgoing).code == "over_reservation"
    release(relay, spec)


def test_another_model_is_refused_before_any_data_moves(world: World) -> None:
    producer, consumer, relay = pair(world)
    spec = reserve(relay, "prefill-a", "decode-b")
    outgoing, _ = start_send(producer.node, spec)
    incoming = consumer.node.receive(spec, LAYOUT, fingerprint("other weights"), tokens(spec))
    failure = failure_of(incoming)
    assert failure.code == "fingerprint_mismatch"
    assert "other weights" in failure.message
    outgoing.cancel("test")
    release(relay, spec)


def test_another_prompt_is_refused(world: World) -> None:
    producer, consumer, relay = pair(world)
    spec = reserve(relay, "prefill-a", "decode-b")
    outgoing, plan = start_send(producer.node, spec)
    publish_all(outgoing, plan)
    incoming = consumer.node.receive(spec, LAYOUT, fingerprint(), [*tokens(spec)[:-1], 9999])
    assert failure_of(incoming).code == "prompt_mismatch"
    outgoing.future.result(WAIT_S)
    release(relay, spec)


def test_a_layer_that_is_missing_is_named(world: World) -> None:
    producer, consumer, relay = pair(world)
    spec = reserve(relay, "prefill-a", "decode-b")
    lacking = type(LAYOUT)(LAYOUT.model_type, LAYOUT.layers[:2])
    outgoing, _ = start_send(producer.node, spec, lacking)
    failure = failure_of(receive(consumer, spec))
    assert failure.code == "manifest_incomplete"
    assert "layer 2" in failure.message
    outgoing.cancel("test")
    release(relay, spec)


def test_another_key_opens_nothing(world: World) -> None:
    producer, consumer, relay = pair(world)
    spec = reserve(relay, "prefill-a", "decode-b")
    outgoing, plan = start_send(producer.node, spec)
    publish_all(outgoing, plan)
    outgoing.future.result(WAIT_S)
    other = msgspec.structs.replace(spec, key=bytes(32))
    assert failure_of(receive(consumer, other)).code == "chunk_corrupt"
    release(relay, spec)


@pytest.mark.parametrize("where", ["relay", "local"])
def test_cancelling_ends_both_ends_at_once(world: World, where: str) -> None:
    producer, consumer, relay = pair(world)
    at = relay if where == "relay" else consumer
    spec = reserve(at, "prefill-a", "decode-b")
    incoming = receive(consumer, spec)
    outgoing, plan = start_send(producer.node, spec)
    outgoing.publish(plan[0], memoryview(payload_of(plan[0])))
    incoming.cancel()
    outgoing.cancel("the client has gone")
    assert failure_of(incoming).code == failure_of(outgoing).code == "transfer_cancelled"
    with pytest.raises(FarfillError, match="the client has gone"):
        outgoing.publish(plan[1], memoryview(payload_of(plan[1])))
    assert producer.node.buffered_bytes == 0
    release(at, spec)


def test_a_transfer_that_nobody_feeds_ends_by_its_clock(world: World) -> None:
    _, consumer, relay = pair(world)
    spec = reserve(relay, "prefill-a", "decode-b", clocks=Clocks(transfer_s=0.2))
    assert failure_of(receive(consumer, spec)).code == "transfer_timeout"
    release(relay, spec)


def test_a_store_that_nobody_can_reach_ends_setup(world: World) -> None:
    producer, _, relay = pair(world)
    spec = reserve(relay, "prefill-a", "decode-b")
    world.sites.remove(relay)
    relay.stop()
    outgoing, _ = start_send(producer.node, spec)
    assert failure_of(outgoing).code == "peer_unreachable"


def test_chunks_must_be_the_plans_own_and_come_once(world: World) -> None:
    producer, consumer, relay = pair(world)
    spec = reserve(relay, "prefill-a", "decode-b")
    outgoing, plan = start_send(producer.node, spec)
    with pytest.raises(LocalProtocolError, match="bytes"):
        outgoing.publish(plan[0], memoryview(b"short"))
    with pytest.raises(LocalProtocolError, match="plan"):
        outgoing.publish(plan_chunks(LAYOUT, 100, 50)[0], memoryview(b""))
    with pytest.raises(LocalProtocolError, match="published"):
        outgoing.finish(0)
    outgoing.publish(plan[0], memoryview(payload_of(plan[0])))
    with pytest.raises(LocalProtocolError, match="before"):
        outgoing.publish(plan[0], memoryview(payload_of(plan[0])))
    with pytest.raises(LocalProtocolError, match="under way"):
        start_send(producer.node, spec)
    incoming = receive(consumer, spec)
    for chunk in reversed(plan[1:]):  # in any order
        outgoing.publish(chunk, memoryview(payload_of(chunk)))
    outgoing.finish(0)
    cache = incoming.future.result(WAIT_S)
    assert all(bytes(cache.payload(chunk.index)) == payload_of(chunk) for chunk in plan)
    cache.release()
    with pytest.raises(KeyError):
        cache.payload(plan[0].index)
    outgoing.future.result(WAIT_S)
    release(relay, spec)


def test_eight_transfers_at_once_share_the_connections(world: World) -> None:
    producer, consumer, relay = pair(world)
    proxy = world.proxy(relay.store.address)
    specs = [reserve(relay, "prefill-a", "decode-b", prefix_tokens=150 + 50 * n) for n in range(8)]
    incoming = [receive(consumer, with_store(spec, proxy.address)) for spec in specs]
    sends = [start_send(producer.node, with_store(spec, proxy.address)) for spec in specs]
    for outgoing, plan in sends:
        publish_all(outgoing, plan)
    for end, (outgoing, plan), spec in zip(incoming, sends, specs, strict=True):
        cache = end.future.result(WAIT_S)
        outgoing.future.result(WAIT_S)
        assert all(bytes(cache.payload(chunk.index)) == payload_of(chunk) for chunk in plan)
        release(relay, spec)
    assert proxy.connections <= 4  # two for each side, however many transfers


def test_publishing_waits_for_room_and_goes_on(world: World) -> None:
    producer = world.site("prefill-a", buffered_bytes_max=100_000)
    consumer = world.site("decode-b")
    spec = reserve(consumer, "prefill-a", "decode-b", prefix_tokens=1000)
    incoming = receive(consumer, spec)
    outgoing, plan = start_send(producer.node, spec)
    assert sum(chunk.payload_bytes for chunk in plan) > 500_000
    highest = 0
    for chunk in plan:
        outgoing.publish(chunk, memoryview(payload_of(chunk)))
        highest = max(highest, producer.node.buffered_bytes)
    outgoing.finish(0)
    incoming.future.result(WAIT_S)
    outgoing.future.result(WAIT_S)
    assert highest <= 100_000
    assert producer.node.buffered_bytes == 0
    release(consumer, spec)


def test_a_reservation_counts_every_sealed_byte_and_no_chunk_too_few(world: World) -> None:
    producer, _, relay = pair(world)
    plan = plan_chunks(LAYOUT, 200, 64)
    exact = Reserve("ab" * 16, "prefill-a", "decode-b", transfer_bytes(plan), len(plan) + 2, 60.0)
    granted = relay.store.reserve("gateway", exact).result(WAIT_S)
    assert relay.ledger().held_bytes == transfer_bytes(plan)
    spec = msgspec.structs.replace(
        reserve(relay, "prefill-a", "decode-b"), transfer_id=granted.transfer_id, epoch=granted.epoch
    )
    outgoing, chunks = start_send(producer.node, spec)
    publish_all(outgoing, chunks)
    assert outgoing.future.result(WAIT_S).chunks == len(plan) + 2
