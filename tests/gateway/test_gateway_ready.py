"""`/ready`: a real generation, one for all who ask, and it says which part failed."""

import asyncio

import httpx
from fake_site import MODEL, cluster

from farfill.errors import FailureClass, OperationError, OverloadError
from farfill.gateway.settings import FallbackRules, GatewayClocks
from farfill.router.budget import FallbackPolicy

STRICT = FallbackRules(FallbackPolicy(dict.fromkeys(FailureClass, "fail")))


def generations(fleet: object) -> int:
    return sum(one[0] == "/v1/completions" for one in fleet.decode.seen)  # type: ignore[attr-defined]


async def test_it_takes_the_remote_path_whatever_the_threshold() -> None:
    async with cluster(threshold=10_000) as fleet, httpx.AsyncClient(base_url=fleet.url) as client:
        answer = await client.get("/ready")
        assert answer.status_code == 200
        report = answer.json()["models"][MODEL]
        assert (report["path"], report["reason"]) == ("remote", "above_threshold")
        assert report["kv_bytes"] > 0
        (leg,) = [one[2] for one in fleet.decode.seen if one[0] == "/v1/completions"]
        assert leg["max_tokens"] == 1


async def test_all_who_ask_share_one_probe_and_its_answer_holds_for_a_while() -> None:
    async with cluster() as fleet, httpx.AsyncClient(base_url=fleet.url) as client:
        hold = fleet.decode.hold["decode"] = asyncio.Event()
        pending = [asyncio.create_task(client.get("/ready")) for _ in range(5)]
        await fleet.site.until(lambda: fleet.decode.active["decode"] == 1)
        pending.pop().cancel()  # who hangs up does not spoil it for the others
        hold.set()
        answers = await asyncio.gather(*pending)
        assert {answer.status_code for answer in answers} == {200}
        assert (await client.get("/ready")).status_code == 200
        assert generations(fleet) == 1


async def test_an_old_answer_is_not_kept() -> None:
    async with cluster(clocks=GatewayClocks(ready_s=0.0)) as fleet, httpx.AsyncClient(base_url=fleet.url) as client:
        assert (await client.get("/ready")).status_code == 200
        fleet.decode.fail["decode"] = fleet.decode.fail["local"] = OperationError("engine_failed", "crashed")
        assert (await client.get("/ready")).status_code == 503
        fleet.decode.fail.clear()
        assert (await client.get("/ready")).status_code == 200


async def test_it_is_degraded_where_the_policy_falls_back_and_not_ready_where_it_does_not() -> None:
    for rules, status in ((FallbackRules(), 200), (STRICT, 503)):
        async with cluster(fallback=rules) as fleet, httpx.AsyncClient(base_url=fleet.url) as client:
            fleet.prefill.fail["reserve"] = OverloadError("store_full", "full")
            answer = await client.get("/ready")
            assert answer.status_code == status
            report = answer.json()["models"][MODEL]
            assert report["ready"] == (status == 200)
            assert report.get("degraded", False) == (status == 200)
            assert report["part"] == "store"
            assert report["error"]["code"] == "store_full"


async def test_a_probe_takes_nothing_from_the_budget_of_fallbacks() -> None:
    async with (
        cluster(fallback=FallbackRules(burst=1, per_s=0)) as fleet,
        httpx.AsyncClient(base_url=fleet.url) as client,
    ):
        fleet.prefill.fail["prefill"] = OperationError("engine_failed", "crashed")
        answer = await client.get("/ready")
        assert answer.json()["models"][MODEL]["part"] == "worker: east-1 or west-1"
        body = {"model": MODEL, "prompt": "x" * 100, "max_tokens": 1}
        fell_back = await client.post("/v1/completions", json=body)
        assert fell_back.headers["x-farfill-reason"] == "fallback:transport"


async def test_what_works_but_not_as_configured_is_degraded() -> None:
    async with cluster(weights="others") as fleet, httpx.AsyncClient(base_url=fleet.url) as client:
        answer = await client.get("/ready")
        assert answer.status_code == 200
        report = answer.json()["models"][MODEL]
        assert report["degraded"] is True
        assert report["reason"] == "incompatible:weights_digest"


async def test_without_a_decode_worker_nothing_is_ready_and_the_report_names_it() -> None:
    async with cluster() as fleet, httpx.AsyncClient(base_url=fleet.url) as client:
        await fleet.decode.stop()
        await fleet.gateway.fleet.look("west-1")
        answer = await client.get("/ready")
        assert answer.status_code == 503
        report = answer.json()["models"][MODEL]
        assert (report["part"], report["error"]["code"]) == ("decode_worker", "no_worker")
