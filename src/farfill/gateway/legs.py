"""A request's legs over HTTP: what goes to a worker, and what comes back as events for the request machine.

Not here: when a leg starts, is aborted or replaced (the machine), nor what the client sees (`client_side`).

A leg is a coroutine; aborting it is cancelling it, which closes its connection, and a worker frees what it holds when
the gateway hangs up.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import msgspec
from yarl import URL

from farfill.errors import FarfillError, OperationError, error_from_openai
from farfill.gateway.body import BodyStream
from farfill.gateway.upstream import failure_of, read_error
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

Post = Callable[[Event], Awaitable[None]]

# What a worker says in a decode leg's head; all of it goes on to the client.
KV_BYTES_HEADER: Final = "X-Farfill-Kv-Bytes"  # plaintext bytes of the cache that was imported
TRANSFER_BYTES_HEADER: Final = "X-Farfill-Transfer-Bytes"  # sealed bytes that came
TRANSFER_SECONDS_HEADER: Final = "X-Farfill-Transfer-Seconds"

# Enough for the end mark, or for an error event with a message of the longest kind.
_TAIL_BYTES: Final = 8192
_DONE: Final = b"data: [DONE]"
_ERROR: Final = b'data: {"error"'


@dataclass(frozen=True, slots=True)
class Upstream:
    """One HTTP request to a worker.

    Attributes:
        target: the full URL, encoded as it is to be sent.
        generates: the answer is a generation: it has a body, and a stream of it ends with its end mark (see `Tail`).
        answer_bytes_max: more is taken for a fault of the worker; None: it is not kept, so it may be endless.
    """

    worker: str
    method: str
    target: URL
    headers: Mapping[str, str]
    body: bytes | BodyStream | None
    generates: bool = False
    answer_bytes_max: int | None = None


class PrefillReport(msgspec.Struct, frozen=True):
    """What a farfill worker says of a prefill leg, under `farfill`. Seconds."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    transfer_bytes: int = 0
    cached_tokens: int = 0


class _PrefillAnswer(msgspec.Struct, frozen=True):
    farfill: PrefillReport


def read_report(raw: bytes) -> PrefillReport | None:
    """None where the engine behind is not farfill's worker: it says nothing of the kind, and need not."""
    try:
        return msgspec.json.decode(raw, type=_PrefillAnswer).farfill
    except msgspec.DecodeError:
        return None


@dataclass(slots=True)
class LegAnswer:
    """What a leg has learnt so far; the driver reads it when it sends the head.

    Attributes:
        told: the worker's own error event has gone to the client, as part of the stream.
        report: of a prefill leg: what it took.
    """

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    kv_bytes: int = 0
    told: bool = False
    report: PrefillReport | None = None


class Tail:
    """The end of a stream of server-sent events, which tells whether it is complete."""

    def __init__(self) -> None:
        self._tail = b""

    def take(self, data: bytes) -> None:
        self._tail = data[-_TAIL_BYTES:] if len(data) >= _TAIL_BYTES else (self._tail + data)[-_TAIL_BYTES:]

    def verdict(self) -> tuple[FarfillError | None, bool]:
        """(None, _) where the end mark is there; else the error, and whether it stands in the stream already."""
        last = self._tail.rstrip().rsplit(b"\n\n", 1)[-1].strip()
        if last == _DONE:
            return None, False
        if last.startswith(_ERROR):
            try:
                return error_from_openai(msgspec.json.decode(last.removeprefix(b"data:")), 502), True
            except msgspec.DecodeError:
                return OperationError("engine_failed", "the stream ended with an error that can't be read"), True
        return OperationError("connection_lost", "the worker's stream ended without its end mark"), False


async def prefill_leg(session: aiohttp.ClientSession, upstream: Upstream, answer: LegAnswer, post: Post) -> None:
    """Runs the prefill leg; posts what happens. `answer.report` is set before `PrefillLegDone`."""

    async def accepted() -> None:
        await post(PrefillLegAccepted())

    try:
        async with session.request(
            upstream.method,
            upstream.target,
            headers=upstream.headers,
            data=upstream.body,
            allow_redirects=False,
            trace_request_ctx=accepted,
        ) as response:
            if response.status != 200:
                await post(PrefillLegFailed(await read_error(response)))
                return
            answer.status, answer.report = response.status, read_report(await response.read())
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        await post(PrefillLegFailed(failure_of(error, upstream.worker)))
        return
    await post(PrefillLegDone())


def tracing() -> aiohttp.TraceConfig:
    """For the session: calls a request's `trace_request_ctx` once its head is on its way."""
    trace = aiohttp.TraceConfig()

    async def sent(session: aiohttp.ClientSession, context: Any, params: Any) -> None:
        if context.trace_request_ctx is not None:
            await context.trace_request_ctx()

    trace.on_request_headers_sent.append(sent)
    return trace


async def decode_leg(
    session: aiohttp.ClientSession, upstream: Upstream, attempt: int, answer: LegAnswer, post: Post
) -> None:
    """Runs a decode leg; posts what happens. `answer` is complete before `DecodeLegStarted`."""
    seen_bytes, watched, tail = 0, False, Tail()
    try:
        async with session.request(
            upstream.method, upstream.target, headers=upstream.headers, data=upstream.body, allow_redirects=False
        ) as response:
            if response.status >= 400:
                error = await read_error(response)
                await post(DecodeLegFailed(attempt, error, reached=True))
                return
            answer.status, answer.headers = response.status, response.headers
            answer.kv_bytes = _kv_bytes(response.headers)
            watched = upstream.generates and response.content_type == "text/event-stream"
            async for data in response.content.iter_any():
                if seen_bytes == 0:
                    await post(DecodeLegStarted(attempt, answer.kv_bytes))
                seen_bytes += len(data)
                if upstream.answer_bytes_max is not None and seen_bytes > upstream.answer_bytes_max:
                    failure = f"{upstream.worker}: an answer of more than {upstream.answer_bytes_max} bytes"
                    await post(DecodeLegFailed(attempt, OperationError("engine_failed", failure)))
                    return
                if watched:
                    tail.take(data)
                await post(DecodeLegOutput(attempt, data))
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        body = upstream.body
        if isinstance(body, BodyStream) and body.failure is not None:
            await post(DecodeLegFailed(attempt, body.failure))  # the client's fault, not the worker's
        else:
            await post(DecodeLegFailed(attempt, failure_of(error, upstream.worker), reached=False))
        return
    if seen_bytes == 0:
        if upstream.generates:
            empty = OperationError("engine_failed", f"{upstream.worker} answered with an empty body")
            await post(DecodeLegFailed(attempt, empty))
            return
        await post(DecodeLegStarted(attempt, answer.kv_bytes))  # 204 and its like
    if watched:
        failed, answer.told = tail.verdict()
        if failed is not None:
            await post(DecodeLegFailed(attempt, failed))
            return
    await post(DecodeLegDone(attempt))


def _kv_bytes(headers: Mapping[str, str]) -> int:
    """0 also where the worker says that nothing came over the link, whatever it has imported."""
    moved = headers.get(TRANSFER_BYTES_HEADER)
    return 0 if moved is not None and _count(moved) == 0 else _count(headers.get(KV_BYTES_HEADER))


def _count(value: str | None) -> int:
    return int(value) if value is not None and value.isascii() and value.isdigit() and len(value) < 19 else 0
