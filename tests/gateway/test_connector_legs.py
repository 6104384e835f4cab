"""Legs at an engine with a connector: nothing is believed before the connector says how the transfer ended."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from farfill.gateway.connector_legs import Direction, Question, connector_decode_leg, connector_prefill_leg
from farfill.gateway.legs import LegAnswer, Upstream, tracing
from farfill.gateway.upstream import open_session
from farfill.router.messages import (
    DecodeLegDone,
    DecodeLegFailed,
    DecodeLegOutput,
    DecodeLegStarted,
    Event,
    PrefillLegAccepted,
    PrefillLegDone,
    PrefillLegFailed,
)

DONE = {"state": "done", "kv_bytes": 7000, "transfer_bytes": 7100, "seconds": 0.5, "cached_tokens": 3}
STREAM = b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'


class Engine:
    """A server whose head says 200 at once, as vLLM's does, and beside it a connector's control API.

    `ended`: what became of the transfer, None as long as nothing has; `body`, `status`: the engine's answer, which
    comes once `compute` is set.
    """

    def __init__(self) -> None:
        self.ended: dict[str, Any] | None = None
        self.known = True
        self.changed = asyncio.Event()
        self.compute = asyncio.Event()
        self.body, self.status = STREAM, 200
        self.asked: list[str] = []
        self.active = 0
        self.seen = asyncio.Condition()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns when the condition holds; it is looked at whenever somebody has come or gone."""
        async with asyncio.timeout(20), self.seen:
            await self.seen.wait_for(condition)

    async def _tell(self) -> None:
        async with self.seen:
            self.seen.notify_all()

    def end(self, **result: Any) -> None:
        self.ended = result
        self.changed.set()

    async def completions(self, request: web.Request) -> web.StreamResponse:
        self.active += 1
        await self._tell()
        try:
            if self.status != 200:
                await self.compute.wait()
                return web.json_response({"error": {"message": "Internal server error"}}, status=self.status)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await self.compute.wait()
            await response.write(self.body)
            return response
        finally:
            self.active -= 1
            # The handler may be ending by cancellation: whoever waits is told by a task of its own.
            self.teller = asyncio.ensure_future(self._tell())

    async def transfer(self, request: web.Request) -> web.Response:
        self.asked.append(request.query["direction"])
        await self._tell()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(float(request.query["wait_s"])):
                await self.changed.wait()
        if self.ended is None and not self.known:
            return web.json_response({"state": "unknown"}, status=404)
        return web.json_response(self.ended or {"state": "running"})


class Leg:
    """One leg, run against the engine, and what it posted."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url, self.queue_s, self.answer = session, url, 30.0, LegAnswer()
        self.events: list[Event] = []
        self.upstream = Upstream("w", "POST", f"{url}/v1/completions", {}, b"{}", generates=True)

    async def post(self, event: Event) -> None:
        self.events.append(event)

    def ask(self, direction: Direction) -> Question:
        return Question(self.session, "w", self.url, "t1", direction, self.queue_s)

    def decode(self) -> "asyncio.Task[None]":
        return asyncio.create_task(
            connector_decode_leg(self.session, self.upstream, self.ask("received"), 0, self.answer, self.post)
        )

    def prefill(self) -> "asyncio.Task[None]":
        return asyncio.create_task(
            connector_prefill_leg(self.session, self.upstream, self.ask("sent"), self.answer, self.post)
        )


@pytest.fixture
async def engine() -> Engine:
    return Engine()


@pytest.fixture
async def leg(engine: Engine) -> AsyncIterator[Leg]:
    app = web.Application()
    app.router.add_post("/v1/completions", engine.completions)
    app.router.add_get("/farfill/v1/transfers/t1", engine.transfer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    session = open_session(None, 5.0, tracing())
    try:
        yield Leg(session, f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await session.close()
        await runner.cleanup()


async def test_decoding_has_started_when_the_connector_says_that_the_cache_has_come(engine: Engine, leg: Leg) -> None:
    engine.compute.set()
    running = leg.decode()
    await engine.until(lambda: bool(engine.asked))
    assert leg.events == []
    engine.end(**DONE)
    await running
    assert leg.events == [DecodeLegStarted(0, 7000), DecodeLegOutput(0, STREAM), DecodeLegDone(0)]
    assert leg.answer.kv_bytes == 7000
    assert leg.answer.headers is not None
    assert leg.answer.headers["X-Farfill-Transfer-Seconds"] == "0.500000"


async def test_a_failed_load_ends_the_leg_with_its_own_code_before_the_engine_says_anything(
    engine: Engine, leg: Leg
) -> None:
    running = leg.decode()
    engine.end(state="failed", code="chunk_corrupt", message="chunk 3")
    await running
    (failed,) = leg.events
    assert isinstance(failed, DecodeLegFailed)
    assert (failed.error.code, failed.reached) == ("chunk_corrupt", True)


async def test_the_engines_own_failure_is_told_where_the_transfer_did_not_fail(engine: Engine, leg: Leg) -> None:
    engine.status = 500
    engine.compute.set()
    await leg.decode()
    (failed,) = leg.events
    assert isinstance(failed, DecodeLegFailed)
    assert failed.error.code == "engine_failed"


async def test_an_engine_that_does_not_come_to_the_request_has_a_clock(engine: Engine, leg: Leg) -> None:
    engine.known = False
    leg.queue_s = 0.2
    await leg.decode()
    (failed,) = leg.events
    assert isinstance(failed, DecodeLegFailed)
    assert failed.error.code == "queue_timeout"


async def test_a_prefill_leg_is_done_when_the_store_has_every_chunk(engine: Engine, leg: Leg) -> None:
    engine.compute.set()
    engine.body = b"{}"
    running = leg.prefill()
    await engine.until(lambda: len(engine.asked) >= 2)
    assert leg.events == [PrefillLegAccepted()]
    engine.end(**DONE)
    await running
    assert leg.events == [PrefillLegAccepted(), PrefillLegDone()]
    assert leg.answer.report is not None
    assert (leg.answer.report.transfer_bytes, leg.answer.report.cached_tokens) == (7100, 3)


async def test_a_failed_send_ends_the_prefill_leg_while_the_engine_computes(engine: Engine, leg: Leg) -> None:
    running = leg.prefill()
    engine.end(state="failed", code="stale_epoch", message="was it restarted?")
    await running
    assert isinstance(leg.events[-1], PrefillLegFailed)
    assert leg.events[-1].error.code == "stale_epoch"


async def test_aborting_a_leg_hangs_up(engine: Engine, leg: Leg) -> None:
    running = leg.decode()
    await engine.until(lambda: engine.active == 1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await engine.until(lambda: engine.active == 0)
    assert leg.events == []
