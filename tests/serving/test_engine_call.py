"""Rules: no event of an engine is lost or out of order on its way to the event loop; leaving a call aborts its request;
waiting for another thread's future never cancels it.
"""

import asyncio
import threading
from concurrent.futures import Future

import pytest
from tiny_engine import TinyEngine

from farfill.engines.api import (
    GenerationRequest,
    OnEvent,
    RequestAborted,
    RequestFinished,
    RequestStarted,
    SamplingParams,
    TokensGenerated,
    Usage,
)
from farfill.engines.serving.answer import merged
from farfill.engines.serving.call import generation, settled
from farfill.errors import ClientError, OperationError, OverloadError

EVENTS = 5000
ASKED = GenerationRequest("r", [1, 2], SamplingParams())


class Flood(TinyEngine):
    """Emits many events as fast as it can."""

    def generate(self, request: GenerationRequest, on_event: OnEvent) -> None:
        def run() -> None:
            on_event(RequestStarted())
            for number in range(EVENTS):
                on_event(TokensGenerated(0, (number,), ""))
            on_event(RequestFinished(Usage(2, EVENTS, 0)))

        threading.Thread(target=run).start()


class Silent(TinyEngine):
    """Accepts, and says nothing until it is aborted."""

    def generate(self, request: GenerationRequest, on_event: OnEvent) -> None:
        self.heard = on_event

    def abort(self, request_id: str) -> None:
        self.aborted = request_id
        self.heard(RequestAborted())


async def test_every_event_arrives_once_and_in_order() -> None:
    engine = Flood()
    with generation(engine, ASKED) as call:
        events = [event async for event in call]
    assert isinstance(events[0], RequestStarted)
    assert [event.token_ids[0] for event in events if isinstance(event, TokensGenerated)] == list(range(EVENTS))
    assert isinstance(events[-1], RequestFinished)
    engine.stop()


async def test_merged_calls_keep_each_calls_order() -> None:
    engine = Flood()
    with generation(engine, ASKED) as one, generation(engine, ASKED) as other:
        seen: list[list[int]] = [[], []]
        async for index, event in merged([one, other]):
            if isinstance(event, TokensGenerated):
                seen[index].append(event.token_ids[0])
    assert seen == [list(range(EVENTS))] * 2
    engine.stop()


async def test_the_queue_clock_and_leaving_abort_the_request() -> None:
    engine = Silent()
    with pytest.raises(OperationError) as late, generation(engine, ASKED) as call:
        await call.started(0.01)
    assert late.value.code == "queue_timeout"
    assert engine.aborted == "r"
    engine.stop()


async def test_an_abort_from_elsewhere_is_told_as_draining() -> None:
    engine = Silent()
    with pytest.raises(OverloadError) as told, generation(engine, ASKED) as call:
        engine.heard(RequestAborted())
        await call.next()
    assert told.value.code == "draining"
    assert not hasattr(engine, "aborted")  # it has ended already
    engine.stop()


async def test_a_refused_request_leaves_nothing_to_abort() -> None:
    engine = TinyEngine()
    with pytest.raises(ClientError), generation(engine, GenerationRequest("r", [], SamplingParams())):
        raise AssertionError("it was accepted")
    assert engine.stats().aborted_total == 0
    engine.stop()


async def test_waiting_does_not_cancel_a_future() -> None:
    future: Future[int] = Future()
    waiting = asyncio.create_task(settled(future))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not future.cancelled()
    again = asyncio.create_task(settled(future))
    threading.Thread(target=future.set_result, args=(7,)).start()
    assert await again == 7
    assert await settled(future) == 7
