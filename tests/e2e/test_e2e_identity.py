"""Two sites as processes, real weights: the remote path says what one process of plain Transformers says."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from cluster import Gateway, total, wait_until
from reference import MAX_TOKENS, eight_prompts, references

from conftest import Sites

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.slow]

# One worker in the demo's model: 30 layers x 3 heads x 64 numbers x 2 (K and V) x 4 bytes.
BYTES_PER_TOKEN = 30 * 3 * 64 * 2 * 4


@pytest.mark.parametrize("placement", ["relay", "producer", "consumer"])
def test_eight_requests_at_once_through_each_placement(sites: Sites, placement: str) -> None:
    """Rules 1 and 10 of the design: only what arrived whole is decoded; remote means that bytes moved."""
    cluster = sites.cluster
    gateway: Gateway = cluster.gateway(
        f"gateway-{placement}",
        [(sites.east, "east")],
        [(sites.west, "west")],
        threshold_tokens=64,
        placement=placement,
    )
    expected, _ = references(cluster.model)
    before = cluster.metrics(sites.west)
    client_tokens_before = total(cluster.metrics(sites.east), "farfill_engine_tokens_total", kind="decode")
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda one: gateway.chat(one, MAX_TOKENS), eight_prompts()))
    assert [reply.text for reply in replies] == [one.text for one in expected]
    assert [reply.usage["prompt_tokens"] for reply in replies] == [one.prompt_tokens for one in expected]
    for reply in replies:
        assert (reply.status, reply.path, reply.reason, reply.done) == (200, "remote", "above_threshold", True)
        assert int(reply.headers["x-farfill-kv-bytes"]) == (reply.usage["prompt_tokens"] - 1) * BYTES_PER_TOKEN
        assert reply.headers["x-farfill-transfer"]
    after = cluster.metrics(sites.west)
    received = total(after, "farfill_transfer_bytes_total", direction="received") - total(
        before, "farfill_transfer_bytes_total", direction="received"
    )
    # On the wire: the cache, and for each chunk a salt and a tag, and a manifest and a closing record.
    kv_bytes = sum(int(reply.headers["x-farfill-kv-bytes"]) for reply in replies)
    assert kv_bytes < received < 1.01 * kv_bytes
    # The decode worker computed no prompt, and the prefill worker no answer.
    assert total(after, "farfill_worker_prompt_tokens_total", source="computed") == total(
        before, "farfill_worker_prompt_tokens_total", source="computed"
    )
    assert total(cluster.metrics(sites.east), "farfill_engine_tokens_total", kind="decode") == client_tokens_before
    for node in (sites.east, sites.west, sites.relay):
        wait_until(lambda node=node: cluster.is_store_free(node))  # type: ignore[misc]


def test_a_short_prompt_stays_local(sites: Sites) -> None:
    gateway = sites.cluster.gateway(
        "gateway-short", [(sites.east, "east")], [(sites.west, "west")], threshold_tokens=10_000
    )
    expected, _ = references(sites.cluster.model)
    reply = gateway.chat(eight_prompts()[0], MAX_TOKENS)
    assert (reply.text, reply.path, reply.reason) == (expected[0].text, "local", "below_threshold")
    assert "x-farfill-transfer" not in reply.headers


def test_ready_is_a_generation_through_the_real_path(sites: Sites) -> None:
    gateway = sites.cluster.gateway("gateway-ready", [(sites.east, "east")], [(sites.west, "west")])
    before = total(sites.cluster.metrics(sites.west), "farfill_transfers_total", direction="received", outcome="ok")
    connection, response = gateway.open("/ready", {})
    assert response.status == 405
    connection.close()
    connection.request("GET", "/ready")
    assert connection.getresponse().status == 200
    connection.close()
    after = total(sites.cluster.metrics(sites.west), "farfill_transfers_total", direction="received", outcome="ok")
    assert after == before + 1


def test_the_prefill_worker_serves_no_client(sites: Sites) -> None:
    status, answer = sites.cluster.ask(
        sites.east, "/v1/chat/completions", {"messages": eight_prompts()[0], "max_tokens": 4}
    )
    assert (status, answer["error"]["code"]) == (403, "prefill_only")
