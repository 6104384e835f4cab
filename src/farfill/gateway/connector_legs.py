"""Legs at a worker that is another server's engine with farfill's connector inside it (vLLM).

Not here: legs at farfill's own workers (`legs`), on which these stand.

What differs: the prefill leg is given the prefix alone, for the engine computes all that it is given; its answer comes
before the chunks are in the store's hands, and a decode leg's head before anything is VERIFIED. So each leg is
accompanied by a question to the connector's control API: how did the transfer end? Nothing is believed before that.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, Literal

import aiohttp
import msgspec
from multidict import CIMultiDict

from farfill.errors import CODES, FarfillError, OperationError, PeerError
from farfill.gateway.legs import (
    TRANSFER_SECONDS_HEADER,
    LegAnswer,
    Post,
    PrefillReport,
    Upstream,
    decode_leg,
    prefill_leg,
)
from farfill.gateway.upstream import failure_of, read_error
from farfill.router.messages import (
    DecodeLegFailed,
    DecodeLegStarted,
    Event,
    PrefillLegDone,
    PrefillLegFailed,
)

Direction = Literal["sent", "received"]

# One question waits at most so long; then it is asked again. Less than what proxies and firewalls cut.
_WAIT_S: Final = 20.0
_SLACK_S: Final = 5.0
# How long after a leg's answer the connector may not know its transfer, or its failure.
_LATE_S: Final = 2.0
_ANSWER_BYTES_MAX: Final = 64 * 1024


class TransferEnd(msgspec.Struct, frozen=True):
    """One end of a transfer, as the connector tells it."""

    state: Literal["running", "done", "failed"]
    kv_bytes: int = 0
    transfer_bytes: int = 0
    seconds: float = 0.0
    cached_tokens: int = 0
    code: str = ""
    message: str = ""


class Question:
    """Asks one connector how a transfer ended.

    Args:
        control_url: base URL of its control API.
        queue_s: how long the engine may take to come to the request; before that its connector knows no transfer.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        worker: str,
        control_url: str,
        transfer_id: str,
        direction: Direction,
        queue_s: float,
    ) -> None:
        self._session = session
        self._worker = worker
        self._queue_s = queue_s
        self._url = f"{control_url.rstrip('/')}/farfill/v1/transfers/{transfer_id}"
        self._direction = direction

    async def end(self) -> TransferEnd:
        """Waits until the transfer is done; once it is under way, whoever waits has a clock of his own.

        Raises:
            FarfillError: why the transfer failed there, or why that cannot be learnt; `queue_timeout`.
        """
        clock = asyncio.get_running_loop().time
        until = clock() + self._queue_s
        known = False
        while True:
            end = await self.ask(_WAIT_S if known else max(0.0, min(_WAIT_S, until - clock())))
            known = known or end is not None
            if end is not None and end.state == "done":
                return end
            if end is not None and end.state == "failed":
                code = end.code if end.code in CODES else "engine_failed"
                raise OperationError(code, end.message or "the transfer failed")
            if not known and clock() >= until:
                raise OperationError(
                    "queue_timeout", f"{self._worker} has not come to this request within {self._queue_s:g} s"
                )

    async def ask(self, wait_s: float) -> TransferEnd | None:
        """How it stands once it has ended, or after `wait_s` seconds. None: the connector knows nothing of it.

        Raises:
            FarfillError: it cannot be asked.
        """
        query = {"direction": self._direction, "wait_s": f"{wait_s:g}"}
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with (
                asyncio.timeout(wait_s + _SLACK_S),
                self._session.get(self._url, params=query, allow_redirects=False) as response,
            ):
                if response.status == 404 and loop.time() - began >= wait_s - 0.1:
                    return None
                if response.status != 200:
                    raise await read_error(response)
                raw = await response.content.read(_ANSWER_BYTES_MAX)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise failure_of(error, self._worker) from error
        try:
            return msgspec.json.decode(raw, type=TransferEnd)
        except msgspec.DecodeError as error:
            raise PeerError(
                "protocol_violation", f"{self._worker}: a transfer's result can't be read: {error}"
            ) from None


async def connector_prefill_leg(
    session: aiohttp.ClientSession, upstream: Upstream, question: Question, answer: LegAnswer, post: Post
) -> None:
    """As `legs.prefill_leg`; done only once the store has every chunk."""
    clock = asyncio.get_running_loop().time
    began = clock()

    async def pass_on(event: Event) -> None:
        if not isinstance(event, PrefillLegDone):
            await post(event)
            return
        prefill_s = clock() - began
        if await question.ask(_LATE_S) is None:
            raise OperationError("engine_failed", f"{upstream.worker} prefilled without a transfer")
        end = await question.end()
        answer.report = PrefillReport(0.0, prefill_s, end.seconds, end.transfer_bytes, end.cached_tokens)
        await post(event)

    error = await _accompanied(prefill_leg(session, upstream, answer, pass_on), question)
    if error is not None:
        await post(PrefillLegFailed(error))


async def connector_decode_leg(
    session: aiohttp.ClientSession, upstream: Upstream, question: Question, attempt: int, answer: LegAnswer, post: Post
) -> None:
    """As `legs.decode_leg`; started only once the connector says that the cache has come, and how much of it."""
    started = False

    async def pass_on(event: Event) -> None:
        nonlocal started
        if isinstance(event, DecodeLegStarted):
            end = await question.end()
            started = True
            answer.kv_bytes = end.kv_bytes
            answer.headers = CIMultiDict(answer.headers or {})
            answer.headers[TRANSFER_SECONDS_HEADER] = f"{end.seconds:.6f}"
            event = DecodeLegStarted(event.attempt, end.kv_bytes)
        elif isinstance(event, DecodeLegFailed) and event.reached and not started:
            # The engine says only that it failed; the connector knows why, if it was the transfer.
            end_or_none = await question.ask(0.0)
            if end_or_none is not None and end_or_none.state == "failed":
                await question.end()
        await post(event)

    error = await _accompanied(decode_leg(session, upstream, attempt, answer, pass_on), question)
    if error is not None:
        await post(DecodeLegFailed(attempt, error))


async def _accompanied(leg: Coroutine[Any, Any, None], question: Question) -> FarfillError | None:
    """Runs a leg until its own end, or until its transfer fails, which cancels it. Returns the transfer's failure."""
    running, asking = asyncio.create_task(leg), asyncio.create_task(question.end())
    try:
        await asyncio.wait((running, asking), return_when=asyncio.FIRST_COMPLETED)
        if not running.done() and asking.exception() is None:
            await asyncio.wait((running,))
        for task in (asking, running):
            if task.done() and (error := task.exception()) is not None:
                if isinstance(error, FarfillError):
                    return error
                raise error
        return None
    finally:
        running.cancel()
        asking.cancel()
        await asyncio.gather(running, asking, return_exceptions=True)
