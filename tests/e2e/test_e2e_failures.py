"""Processes killed in the middle: the right tokens all the same, or a clear error; never wrong ones, never a hang."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from cluster import Cluster, Gateway, Node, Reply, total, wait_until
from reference import MAX_TOKENS, eight_prompts, long_prompt, prompt, references

from conftest import start_sites

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.slow]

_FAIL = dict.fromkeys(("miss", "transport", "timeout", "compatibility", "integrity", "overload"), "fail")


def ask_and_kill(cluster: Cluster, gateway: Gateway, east: Node, victim: Node) -> Reply:
    """Sends the long prompt and kills `victim` when the prefill worker has computed some of it, but not all."""
    already = total(cluster.metrics(east), "farfill_engine_tokens_total", kind="prefill")

    def computed() -> float:
        return total(cluster.metrics(east), "farfill_engine_tokens_total", kind="prefill") - already

    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(gateway.chat, long_prompt(), MAX_TOKENS)
        wait_until(lambda: computed() >= 512)
        assert computed() < 3000, "the prefill was over before anything could be killed in its middle"
        victim.kill()
        return pending.result()


@pytest.mark.parametrize("victim", ["prefill-east", "relay"])
def test_killed_in_mid_transfer_with_fallback(cluster: Cluster, victim: str) -> None:
    """Rules 7 and 12 of the design: the fallback is right, counted, and shown in the header."""
    sites = start_sites(cluster)
    gateway = cluster.gateway(
        "gateway", [(sites.east, "east")], [(sites.west, "west")], threshold_tokens=64, placement="relay"
    )
    _, expected = references(cluster.model)
    reply = ask_and_kill(cluster, gateway, sites.east, cluster.nodes[victim])
    assert (reply.status, reply.text, reply.done) == (200, expected.text, True)
    assert (reply.path, reply.reason) == ("local", "fallback:transport")
    assert total(gateway.metrics(), "farfill_gateway_fallbacks_total", **{"class": "transport"}) == 1
    wait_until(lambda: cluster.is_store_free(sites.west))
    if victim != "relay":
        wait_until(lambda: cluster.is_store_free(sites.relay))
    # The next request does not wait for the dead: it works, and says what happened to it.
    again = gateway.chat(eight_prompts()[0], MAX_TOKENS)
    assert again.text == references(cluster.model)[0][0].text
    assert again.path == "local"


@pytest.mark.parametrize("victim", ["prefill-east", "relay"])
def test_killed_in_mid_transfer_without_fallback(cluster: Cluster, victim: str) -> None:
    sites = start_sites(cluster)
    gateway = cluster.gateway(
        "gateway",
        [(sites.east, "east")],
        [(sites.west, "west")],
        threshold_tokens=64,
        placement="relay",
        fallback=_FAIL,
    )
    reply = ask_and_kill(cluster, gateway, sites.east, cluster.nodes[victim])
    assert reply.status == 502
    assert reply.error["code"] in ("connection_lost", "peer_unreachable", "engine_failed")
    assert reply.error["message"]
    assert total(gateway.metrics(), "farfill_gateway_fallbacks_total") == 0
    wait_until(lambda: cluster.is_store_free(sites.west))


def test_the_decode_worker_killed_in_mid_stream(cluster: Cluster) -> None:
    """After the first token there is no fallback: a clear error event, and no [DONE]."""
    sites = start_sites(cluster)
    gateway = cluster.gateway("gateway", [(sites.east, "east")], [(sites.west, "west")], threshold_tokens=64)
    reply = gateway.chat(eight_prompts()[1], 400, at_text=sites.west.kill, ignore_eos=True)
    assert reply.status == 200
    assert reply.path == "remote"
    assert reply.text
    assert reply.error["code"] == "connection_lost"
    assert not reply.done
    wait_until(lambda: cluster.is_store_free(sites.east))
    wait_until(lambda: total(gateway.metrics(), "farfill_gateway_active_requests") == 0)


def test_a_client_that_goes_away_frees_everything(cluster: Cluster) -> None:
    sites = start_sites(cluster)
    gateway = cluster.gateway(
        "gateway", [(sites.east, "east")], [(sites.west, "west")], threshold_tokens=64, placement="consumer"
    )
    body = {"messages": long_prompt(), "max_tokens": 4, "stream": True}
    with ThreadPoolExecutor(1) as pool:
        import http.client
        import json

        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        pending = pool.submit(
            wait_until,
            lambda: total(cluster.metrics(sites.east), "farfill_engine_tokens_total", kind="prefill") >= 512,
        )
        pending.result()
        assert not cluster.is_store_free(sites.west)
        connection.close()
    for node in (sites.east, sites.west):
        wait_until(lambda node=node: cluster.is_store_free(node))  # type: ignore[misc]
        wait_until(lambda node=node: total(cluster.metrics(node), "farfill_engine_requests") == 0)  # type: ignore[misc]
    assert total(cluster.metrics(sites.east), "farfill_engine_tokens_total", kind="prefill") < 3000
    wait_until(lambda: total(gateway.metrics(), "farfill_gateway_active_requests") == 0)


def test_sigterm_lets_a_running_answer_end(cluster: Cluster) -> None:
    """Rule 12 of the design: no admission, wait, then leave; at the gateway and at both workers."""
    sites = start_sites(cluster)
    gateway = cluster.gateway("gateway", [(sites.east, "east")], [(sites.west, "west")], threshold_tokens=64)
    processes = [gateway.node.child.process, sites.west.child.process, sites.east.child.process]

    def terminate() -> None:
        for process in processes:
            process.terminate()

    reply = gateway.chat(eight_prompts()[2], 60, at_text=terminate, ignore_eos=True)
    assert reply.done
    assert reply.usage["completion_tokens"] == 60
    assert [process.wait(60) for process in processes] == [0, 0, 0]


def test_a_worker_with_other_numbers_is_not_used_and_the_field_is_named(cluster: Cluster) -> None:
    children = [
        cluster.begin_worker("prefill-east", "prefill", "east", dtype="bfloat16"),
        cluster.begin_worker("decode-west", "decode", "west"),
    ]
    east, west = (cluster.ready(child) for child in children)
    gateway = cluster.gateway("gateway", [(east, "east")], [(west, "west")], threshold_tokens=16)
    reply = gateway.chat(prompt("Say one word about the sea, and then another one about the wide sky above it."), 4)
    assert (reply.status, reply.path) == (200, "local")
    assert reply.reason.startswith("incompatible:")
    log = gateway.node.child.log.read_text()
    assert "dtype" in log
    assert "bfloat16" in log
    assert "float32" in log
    assert total(cluster.metrics(west), "farfill_transfers_total") == 0
