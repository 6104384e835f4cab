"""What happens when something fails: fallback before the first token, a clear error after it, nothing left behind."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import httpx
import msgspec
import pytest
from fake_site import MODEL, Cluster, cluster, completion_text

from farfill.errors import ClientError, FailureClass, FarfillError, OperationError, OverloadError
from farfill.gateway.drive import RequestDriver
from farfill.gateway.mailbox import Mailbox
from farfill.gateway.settings import FallbackRules, GatewayClocks, Limits
from farfill.router.budget import FallbackPolicy
from farfill.router.messages import ReserveGranted
from farfill.router.policy import Placement
from farfill.transfer.spec import Clocks

LONG = "a long prompt that is well over the threshold of the gateway"
SHORT = "a short prompt"


def body(prompt: str = LONG, **more: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 3, **more}


@pytest.fixture
async def fleet() -> AsyncIterator[Cluster]:
    async with cluster() as made:
        yield made


@pytest.fixture
async def client(fleet: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=fleet.url, timeout=30) as made:
        yield made


def assert_fell_back(answer: httpx.Response, failure_class: FailureClass) -> None:
    assert answer.status_code == 200
    assert answer.headers["x-farfill-path"] == "local"
    assert answer.headers["x-farfill-reason"] == f"fallback:{failure_class.value}"
    assert "x-farfill-transfer" not in answer.headers
    assert answer.json()["choices"][0]["text"] == completion_text(LONG, 3)


FAILURES: list[tuple[str, FarfillError]] = [
    ("reserve", OverloadError("store_full", "full")),
    ("prefill", OperationError("lease_expired", "too late")),
    ("prefill", OperationError("engine_failed", "crashed")),
    ("prefill", OverloadError("queue_full", "full")),
    ("decode", OperationError("transfer_stalled", "nothing came")),
    ("decode", OperationError("fingerprint_mismatch", "dtype")),
    ("decode", OperationError("chunk_corrupt", "bad tag")),
    ("decode", OperationError("lease_unknown", "gone")),
    ("decode", OperationError("connection_lost", "the store is gone")),
]


@pytest.mark.parametrize(("where", "error"), FAILURES, ids=[f"{where}-{error.code}" for where, error in FAILURES])
async def test_each_class_of_failure_falls_back_and_is_counted(
    fleet: Cluster, client: httpx.AsyncClient, where: str, error: FarfillError
) -> None:
    worker = fleet.decode if where == "decode" else fleet.prefill
    worker.fail[where] = error
    assert error.failure_class is not None
    assert_fell_back(await client.post("/v1/completions", json=body()), error.failure_class)
    await fleet.site.until(lambda: fleet.site.held == 0)
    metrics = (await client.get("/metrics")).text
    assert f'farfill_gateway_fallbacks_total{{class="{error.failure_class.value}"}} 1.0' in metrics


async def test_the_log_says_why_a_request_fell_back(
    fleet: Cluster, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.prefill.fail["prefill"] = OperationError("engine_failed", "its engine crashed")
    answer = await client.post("/v1/completions", json=body())
    assert_fell_back(answer, FailureClass.TRANSPORT)
    lines = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and "falls back" in r.getMessage()]
    assert len(lines) == 1
    for part in (answer.headers["x-request-id"], "[engine_failed]", "its engine crashed", "remote", "east-1", "west-1"):
        assert part in lines[0]
    await fleet.site.until(lambda: fleet.site.held == 0)


def test_the_failures_name_every_class() -> None:
    assert {error.failure_class for _, error in FAILURES} == set(FailureClass)


async def test_where_the_policy_says_fail_the_client_gets_the_error_itself() -> None:
    rules = FallbackRules(FallbackPolicy({FailureClass.INTEGRITY: "fail"}))
    async with cluster(fallback=rules) as fleet, httpx.AsyncClient(base_url=fleet.url) as client:
        fleet.decode.fail["decode"] = OperationError("chunk_corrupt", "bad tag")
        answer = await client.post("/v1/completions", json=body())
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "chunk_corrupt")
        assert answer.headers["x-farfill-path"] == "remote"
        await fleet.site.until(lambda: fleet.site.held == 0)


async def test_the_budget_of_fallbacks_ends() -> None:
    async with (
        cluster(fallback=FallbackRules(burst=2, per_s=0.001)) as fleet,
        httpx.AsyncClient(base_url=fleet.url) as client,
    ):
        fleet.prefill.fail["prefill"] = OperationError("engine_failed", "crashed")
        for _ in range(2):
            assert_fell_back(await client.post("/v1/completions", json=body()), FailureClass.TRANSPORT)
        answer = await client.post("/v1/completions", json=body())
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "fallback_exhausted"
        assert int(answer.headers["retry-after"]) > 900
        await fleet.site.until(lambda: fleet.site.held == 0)


async def test_a_dead_relay_costs_one_fallback_then_requests_stay_local_until_it_is_back() -> None:
    async with (
        cluster(placement=Placement.RELAY, fallback=FallbackRules(burst=1, per_s=0.001)) as fleet,
        httpx.AsyncClient(base_url=fleet.url) as client,
    ):
        port = int(fleet.relay.url.rsplit(":", 1)[1])
        assert (await client.post("/v1/completions", json=body())).headers["x-farfill-path"] == "remote"
        await fleet.relay.stop()
        assert_fell_back(await client.post("/v1/completions", json=body()), FailureClass.TRANSPORT)
        for number in range(3):  # the budget is used up, and not asked for
            answer = await client.post("/v1/completions", json=body(f"{number}: {LONG}"))
            assert answer.status_code == 200
            assert answer.headers["x-farfill-path"] == "local"
            assert answer.headers["x-farfill-reason"] == "relay_unavailable"
        assert "farfill_gateway_relay_up 0.0" in (await client.get("/metrics")).text
        await fleet.relay.start(port)
        assert fleet.gateway.relay is not None
        await fleet.gateway.relay.look()
        answer = await client.post("/v1/completions", json=body("one more: " + LONG))
        assert answer.headers["x-farfill-path"] == "remote"
        assert "farfill_gateway_relay_up 1.0" in (await client.get("/metrics")).text


@pytest.mark.parametrize("draining", [False, True])
async def test_a_look_finds_a_relay_that_is_down_or_drains(draining: bool) -> None:
    async with (
        cluster(placement=Placement.RELAY) as fleet,
        httpx.AsyncClient(base_url=fleet.url) as client,
    ):
        if draining:
            fleet.relay.draining = True
        else:
            await fleet.relay.stop()
        assert fleet.gateway.relay is not None
        await fleet.gateway.relay.look()
        answer = await client.post("/v1/completions", json=body())
        assert answer.headers["x-farfill-reason"] == "relay_unavailable"
        assert not fleet.site.leases


async def test_a_prompt_that_never_fits_the_relay_stays_local_and_uses_no_fallback() -> None:
    async with (
        cluster(placement=Placement.RELAY) as fleet,
        httpx.AsyncClient(base_url=fleet.url) as client,
    ):
        fleet.relay.store_bytes = 1024
        assert fleet.gateway.relay is not None
        await fleet.gateway.relay.look()
        answer = await client.post("/v1/completions", json=body())
        assert (answer.headers["x-farfill-path"], answer.headers["x-farfill-reason"]) == ("local", "exceeds_store")
        assert not fleet.site.leases


async def test_a_prefill_worker_killed_in_the_middle_is_a_fallback(fleet: Cluster, client: httpx.AsyncClient) -> None:
    fleet.prefill.hold["prefill"] = asyncio.Event()
    pending = asyncio.create_task(client.post("/v1/completions", json=body()))
    await fleet.site.until(lambda: fleet.prefill.active["prefill"] and fleet.decode.active["decode"])
    await fleet.prefill.stop()
    assert_fell_back(await pending, FailureClass.TRANSPORT)
    await fleet.site.until(lambda: fleet.decode.active["decode"] == 0)
    for lease in fleet.site.leases.values():  # its store died with it: nothing was there to release
        lease.released = True


async def test_a_prefill_worker_that_is_gone_is_not_tried_a_second_time(
    fleet: Cluster, client: httpx.AsyncClient
) -> None:
    await fleet.prefill.stop()
    first = await client.post("/v1/completions", json=body())
    assert_fell_back(first, FailureClass.TRANSPORT)
    await fleet.gateway.fleet.look("east-1")
    second = await client.post("/v1/completions", json=body())
    assert second.headers["x-farfill-reason"] == "prefill_unavailable"


async def test_the_first_failure_cancels_the_other_leg(fleet: Cluster, client: httpx.AsyncClient) -> None:
    fleet.prefill.hold["prefill"] = asyncio.Event()
    fleet.decode.fail["decode"] = OperationError("transfer_stalled", "nothing came")
    answer = await client.post("/v1/completions", json=body())
    assert_fell_back(answer, FailureClass.TIMEOUT)
    await fleet.site.until(lambda: fleet.prefill.active["prefill"] == 0)


async def test_a_decode_worker_that_is_down_is_replaced_by_another() -> None:
    async with (
        cluster(more=(("west-2", "decode", "west"),)) as fleet,
        httpx.AsyncClient(base_url=fleet.url) as client,
    ):
        await fleet.decode.stop()
        answer = await client.post("/v1/completions", json=body(SHORT))
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"] == completion_text(SHORT, 3)


async def test_with_no_decode_worker_up_the_error_says_when_to_come_back(
    fleet: Cluster, client: httpx.AsyncClient
) -> None:
    await fleet.decode.stop()
    await fleet.gateway.fleet.look("west-1")
    answer = await client.post("/v1/completions", json=body())
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")
    assert answer.headers["retry-after"] == "2"


async def test_the_setup_clock_ends_a_reservation_that_is_not_answered() -> None:
    clocks = GatewayClocks(transfer=Clocks(setup_s=0.2), poll_s=60.0)
    async with cluster(clocks=clocks) as fleet, httpx.AsyncClient(base_url=fleet.url) as client:
        fleet.prefill.hold["reserve"] = asyncio.Event()
        assert_fell_back(await client.post("/v1/completions", json=body()), FailureClass.TIMEOUT)


async def test_a_grant_that_comes_after_the_client_left_is_given_back(fleet: Cluster) -> None:
    hold = fleet.prefill.hold["reserve"] = asyncio.Event()
    async with aiohttp.ClientSession() as session:
        pending = asyncio.create_task(session.post(fleet.url + "/v1/completions", json=body()))
        await fleet.site.until(lambda: fleet.prefill.active["reserve"])
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
    await fleet.gateway.admission.idle()
    hold.set()
    await fleet.site.until(lambda: fleet.site.leases and fleet.site.held == 0)


async def test_a_grant_that_nobody_read_yet_when_the_client_left_is_given_back(
    fleet: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grant is in the request's mailbox, and the client's going away is what the request hears of first."""
    drivers: list[asyncio.Task[object]] = []
    run, put_now = RequestDriver.run, Mailbox.put_now

    async def noted(self: RequestDriver, choose: Any) -> object:
        task = asyncio.current_task()
        assert task is not None
        drivers.append(task)
        return await run(self, choose)

    def leave_first(self: Mailbox, event: object) -> None:
        if isinstance(event, ReserveGranted):
            drivers[0].cancel()
        put_now(self, event)  # type: ignore[arg-type]

    monkeypatch.setattr(RequestDriver, "run", noted)
    monkeypatch.setattr(Mailbox, "put_now", leave_first)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.post(fleet.url + "/v1/completions", json=body())
    await fleet.gateway.admission.idle()
    await fleet.site.until(lambda: bool(fleet.site.leases) and fleet.site.held == 0)


async def test_the_request_clock_is_an_error_not_a_fallback() -> None:
    clocks = GatewayClocks(request_s=0.3, poll_s=60.0)
    async with cluster(clocks=clocks) as fleet, httpx.AsyncClient(base_url=fleet.url) as client:
        fleet.prefill.hold["prefill"] = asyncio.Event()
        answer = await client.post("/v1/completions", json=body())
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")
        await fleet.site.until(lambda: fleet.site.held == 0)


async def test_a_lease_is_renewed_while_the_transfer_runs(fleet: Cluster, client: httpx.AsyncClient) -> None:
    fleet.prefill.lease_s = 0.2
    hold = fleet.prefill.hold["prefill"] = asyncio.Event()
    pending = asyncio.create_task(client.post("/v1/completions", json=body()))
    await fleet.site.until(lambda: any(lease.renewals >= 4 for lease in fleet.site.leases.values()))
    hold.set()
    answer = await pending
    assert answer.headers["x-farfill-path"] == "remote"
    await fleet.site.until(lambda: fleet.site.held == 0)


async def test_a_lease_that_was_reaped_is_a_miss(fleet: Cluster, client: httpx.AsyncClient) -> None:
    fleet.prefill.lease_s = 0.2
    fleet.prefill.hold["prefill"] = asyncio.Event()
    fleet.prefill.fail["renew"] = OperationError("lease_unknown", "reaped")
    assert_fell_back(await client.post("/v1/completions", json=body()), FailureClass.MISS)
    for lease in fleet.site.leases.values():
        lease.released = True  # that is what "reaped" means


# --- after the first token ------------------------------------------------------------------------------------------


async def test_a_stream_that_breaks_off_ends_with_an_error_event_and_no_end_mark(
    fleet: Cluster, client: httpx.AsyncClient
) -> None:
    fleet.decode.cut_after = 2
    for prompt in (LONG, SHORT):
        answer = await client.post("/v1/completions", json=body(prompt, stream=True))
        assert answer.status_code == 200
        events = answer.text.strip().split("\n\n")
        assert len(events) == 3
        error = msgspec.json.decode(events[-1].removeprefix("data: "))["error"]
        assert error["code"] == "connection_lost"
        assert "[DONE]" not in answer.text
    await fleet.site.until(lambda: fleet.site.held == 0)
    metrics = (await client.get("/metrics")).text
    assert 'outcome="connection_lost",path="remote",reason="above_threshold"} 1.0' in metrics


async def test_the_workers_own_error_event_is_forwarded_and_not_doubled(
    fleet: Cluster, client: httpx.AsyncClient
) -> None:
    fleet.decode.fail["token"] = OperationError("engine_failed", "out of memory")
    answer = await client.post("/v1/completions", json=body(stream=True))
    assert answer.text.count('"error"') == 1
    assert "out of memory" in answer.text
    assert "[DONE]" not in answer.text
    assert 'outcome="engine_failed"' in (await client.get("/metrics")).text


async def test_tokens_reach_the_client_while_the_worker_still_generates(fleet: Cluster) -> None:
    hold = fleet.decode.hold["token"] = asyncio.Event()
    async with (
        aiohttp.ClientSession() as session,
        session.post(fleet.url + "/v1/completions", json=body(stream=True)) as answer,
    ):
        first = await answer.content.readuntil(b"\n\n")
        assert first.startswith(b"data: ")
        hold.set()
        assert (await answer.content.read()).endswith(b"data: [DONE]\n\n")


async def test_a_prefill_leg_that_fails_after_the_first_token_harms_nobody(fleet: Cluster) -> None:
    token = fleet.decode.hold["token"] = asyncio.Event()
    prefill = fleet.prefill.hold["prefill"] = asyncio.Event()
    async with aiohttp.ClientSession() as session:
        pending = asyncio.create_task(session.post(fleet.url + "/v1/completions", json=body(stream=True)))
        await fleet.site.until(lambda: fleet.prefill.active["prefill"] and fleet.decode.active["decode"])
        (transfer_id,) = fleet.site.leases
        fleet.site.of(transfer_id).set()  # the chunks are all there, and the prefill leg has not answered yet
        async with await pending as answer:
            await answer.content.readuntil(b"\n\n")
            fleet.prefill.fail["prefill"] = OperationError("engine_failed", "crashed")
            prefill.set()
            await fleet.site.until(lambda: fleet.site.held == 0)  # freed while the stream goes on
            token.set()
            assert (await answer.content.read()).endswith(b"data: [DONE]\n\n")


def broken(*_: object) -> None:
    raise ZeroDivisionError("a planted bug")


async def test_a_bug_before_the_head_is_an_error_and_loud(
    fleet: Cluster, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farfill.gateway.legs._kv_bytes", broken)
    answer = await client.post("/v1/completions", json=body())
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "a planted bug" in caplog.text
    await fleet.site.until(lambda: fleet.site.held == 0)


async def test_a_bug_after_the_first_token_breaks_the_stream_off_and_is_loud(
    fleet: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farfill.gateway.legs.Tail.verdict", broken)
    async with (
        aiohttp.ClientSession() as session,
        session.post(fleet.url + "/v1/completions", json=body(stream=True)) as answer,
    ):
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.content.read()
    assert "a planted bug" in caplog.text
    await fleet.site.until(lambda: fleet.site.held == 0)


async def test_a_bug_after_the_end_is_loud_too(
    fleet: Cluster, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet.gateway.choose._index, "remember", broken)
    await client.post("/v1/completions", json=body())
    assert "a planted bug" in caplog.text


async def test_an_answer_without_end_is_the_workers_fault_where_it_must_be_kept(
    fleet: Cluster, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farfill.gateway.drive.ANSWER_BYTES_MAX", 20)
    answer = await client.post("/v1/completions", json=body())
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_failed")


@pytest.mark.parametrize("prompt", [None, 7, {"text": LONG}], ids=["none", "number", "object"])
async def test_without_a_prompt_the_engines_error_comes_with_a_reason_that_is_true(
    fleet: Cluster, client: httpx.AsyncClient, prompt: object
) -> None:
    fleet.decode.fail["local"] = ClientError("empty_prompt", "prompt is missing", field="prompt")
    answer = await client.post("/v1/completions", json={**body(), "prompt": prompt})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "empty_prompt")
    assert (answer.headers["x-farfill-path"], answer.headers["x-farfill-reason"]) == ("local", "not_tokenizable")


# --- clients that leave ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("moment", ["tokenize", "reserve", "prefill", "token", "local"])
async def test_a_client_that_leaves_frees_everything(fleet: Cluster, moment: str, stream: bool) -> None:
    worker = fleet.prefill if moment in ("reserve", "prefill") else fleet.decode
    hold = worker.hold[moment] = asyncio.Event()
    if moment == "token" and not stream:
        worker.hold["decode"] = hold
    async with aiohttp.ClientSession() as session:
        prompt = SHORT if moment == "local" else LONG
        pending = asyncio.create_task(session.post(fleet.url + "/v1/completions", json=body(prompt, stream=stream)))
        where = "decode" if moment == "token" else moment
        await fleet.site.until(lambda: worker.active[where])
        if moment == "token" and stream:
            answer = await pending
            await answer.content.readuntil(b"\n\n")
            answer.close()
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
    await fleet.gateway.admission.idle()
    if moment == "reserve":
        hold.set()
    await fleet.site.until(lambda: not any(worker.active.total() for worker in fleet.workers) and fleet.site.held == 0)
    assert 'outcome="client_gone"' in fleet.gateway.metrics.exposition().decode()


@pytest.mark.parametrize("prompt", [SHORT, LONG])
async def test_a_client_that_leaves_after_the_end_mark_is_done(fleet: Cluster, prompt: str) -> None:
    fleet.decode.hold["eof"] = asyncio.Event()  # never set: the worker's end is still to come when the client leaves
    async with aiohttp.ClientSession() as session:
        answer = await session.post(fleet.url + "/v1/completions", json=body(prompt, stream=True))
        await answer.content.readuntil(b"data: [DONE]\n\n")
        answer.close()
    await fleet.gateway.admission.idle()
    await fleet.site.until(lambda: not any(worker.active.total() for worker in fleet.workers) and fleet.site.held == 0)
    metrics = fleet.gateway.metrics.exposition().decode()
    assert 'outcome="done"' in metrics
    assert 'outcome="client_gone"' not in metrics


async def test_a_slow_client_holds_its_worker_back_and_leaving_ends_the_workers_answer(fleet: Cluster) -> None:
    """128 MiB are on offer: were they buffered for a client that does not read, the worker would never have to wait."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(fleet.url + "/v1/endless"),
    ):
        async with asyncio.timeout(20):
            await fleet.decode.stalled.wait()
        assert fleet.decode.active["endless"] == 1
    await fleet.site.until(lambda: fleet.decode.active["endless"] == 0)


# --- limits ---------------------------------------------------------------------------------------------------------


async def test_more_requests_than_allowed_are_refused_at_once() -> None:
    async with cluster(limits=Limits(requests=2)) as fleet, httpx.AsyncClient(base_url=fleet.url) as client:
        hold = fleet.decode.hold["local"] = asyncio.Event()
        pending = [asyncio.create_task(client.post("/v1/completions", json=body(SHORT))) for _ in range(2)]
        await fleet.site.until(lambda: fleet.decode.active["local"] == 2)
        refused = await client.post("/v1/completions", json=body(SHORT))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        assert refused.headers["retry-after"] == "1"
        hold.set()
        assert [answer.status_code for answer in await asyncio.gather(*pending)] == [200, 200]
        assert 'farfill_gateway_refused_total{code="queue_full"} 1.0' in (await client.get("/metrics")).text


async def test_a_clients_own_error_is_passed_on_without_a_fallback(fleet: Cluster, client: httpx.AsyncClient) -> None:
    fleet.decode.fail["decode"] = ClientError("unsupported_parameter", "no such thing", field="bad_words")
    answer = await client.post("/v1/completions", json=body())
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "bad_words"
    assert fleet.gateway.metrics.exposition().decode().count("farfill_gateway_fallbacks_total{") == 0
    await fleet.site.until(lambda: fleet.site.held == 0)
