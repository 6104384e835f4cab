"""Whole transfers over real TCP and mutual TLS: the three placements, streaming, and what is told at the end."""

import pytest
from plane_kit import (
    LAYOUT,
    WAIT_S,
    World,
    fingerprint,
    payload_of,
    publish_all,
    release,
    reserve,
    start_send,
    tokens,
)


@pytest.mark.parametrize("placement", ["producer", "consumer", "relay"])
@pytest.mark.parametrize("secured", [True, False])
def test_every_placement_moves_the_same_bytes(placement: str, secured: bool, request: pytest.FixtureRequest) -> None:
    world: World = request.getfixturevalue("world" if secured else "bare_world")
    producer, consumer, relay = world.site("prefill-a"), world.site("decode-b"), world.site("relay-c")
    at = {"producer": producer, "consumer": consumer, "relay": relay}[placement]
    spec = reserve(at, "prefill-a", "decode-b")
    incoming = consumer.node.receive(spec, LAYOUT, fingerprint(), tokens(spec))
    outgoing, plan = start_send(producer.node, spec)
    publish_all(outgoing, plan, cached_tokens=64)
    cache = incoming.future.result(WAIT_S)
    report = outgoing.future.result(WAIT_S)
    for chunk in plan:
        assert bytes(cache.payload(chunk.index)) == payload_of(chunk)
    assert cache.cached_tokens == 64
    assert cache.prefix_tokens == spec.prefix_tokens
    assert cache.bytes_moved == report.sealed_bytes == report.sent_bytes
    assert report.resent_chunks == 0
    assert cache.started_at <= cache.first_byte_at <= cache.verified_at
    at.store.memory.when(lambda ledger: ledger.held_bytes == 0).result(WAIT_S)  # freed early: VERIFIED was reported
    release(at, spec)
