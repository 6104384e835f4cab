"""A request's two legs: prefill for a peer and publish, or get a peer's cache and decode from it.

Not here: how chunks travel (`farfill.transfer`), how a prompt is computed (the engine).

Rules: each leg is a transaction of an engine request and a transfer: the first failure cancels the other, and a client
that goes away (the gateway) cancels both. The prefill leg is answered when every chunk is in the store's hands. The
decode leg's engine sees the cache only once it is VERIFIED.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

from aiohttp import web

from farfill.engines.api import (
    GenerationRequest,
    PrefillCompleted,
    PrefillRequest,
    RequestFinished,
    SamplingParams,
    Usage,
)
from farfill.engines.serving.answer import Answer, give
from farfill.engines.serving.call import EngineCall, generation, prefill, settled
from farfill.engines.serving.http import json_response
from farfill.engines.serving.responses import ChoiceText, usage_object
from farfill.engines.serving.worker import Worker
from farfill.errors import ClientError, FarfillError, LocalProtocolError, OperationError, PeerError
from farfill.kv.spec import WIRE_VERSION
from farfill.observe.metrics import OK, Direction
from farfill.transfer.incoming import Incoming, ReceivedCache
from farfill.transfer.outgoing import Outgoing, SendReport
from farfill.transfer.spec import TransferSpec

KV_BYTES_HEADER: Final = "X-Farfill-Kv-Bytes"  # plaintext bytes of the cache that was imported
TRANSFER_BYTES_HEADER: Final = "X-Farfill-Transfer-Bytes"  # sealed bytes that came, repeats included
TRANSFER_SECONDS_HEADER: Final = "X-Farfill-Transfer-Seconds"  # from the first ask to VERIFIED

A = TypeVar("A")
B = TypeVar("B")
EndT = TypeVar("EndT", Outgoing, Incoming)


async def prefill_leg(
    worker: Worker, spec: TransferSpec, prompt: Sequence[int], cache_salt: str, answer: Answer
) -> web.Response:
    """Computes the prompt's prefix, publishes it, and answers once every chunk is in the store's hands.

    The answer is a completion without text, with `kv_transfer_params` for who decodes and, under `farfill`, what it
    took.

    Raises:
        FarfillError: the first failure of the computing or of the sending.
    """
    _check_spec(worker, spec, prompt, own=spec.producer, part="producer")
    info = worker.engine.info
    sending = await _begun(partial(worker.node.send, spec, info.layout, info.fingerprint, prompt[:-1]))
    with _accounted(worker, "sent", sending) as account:
        request = PrefillRequest(
            worker.engine_id(answer.head.response_id), prompt, spec.chunk_tokens, sending, cache_salt
        )
        with prefill(worker.engine, request) as call:
            computed, sent = await _both(_compute(worker, call, spec.clocks.queue_s), settled(sending.future))
        account.note(sent.sent_bytes, sent.elapsed_s)
    return _prefill_answer(spec, answer, computed, sent)


async def decode_leg(
    worker: Worker,
    request: web.Request,
    spec: TransferSpec,
    prompt: Sequence[int],
    sampling: SamplingParams,
    cache_salt: str,
    answer: Answer,
) -> web.StreamResponse:
    """Gets the prompt's cache; once it is VERIFIED, decodes from it and answers the client.

    Raises:
        FarfillError: what went wrong before the response's head was sent.
    """
    _check_spec(worker, spec, prompt, own=spec.consumer, part="consumer")
    limit = worker.engine.info.max_model_len
    if len(prompt) >= limit:  # the engine would say so too, but only after the cache has crossed the link
        raise ClientError(
            "context_length_exceeded",
            f"the model's maximum length is {limit} tokens; the prompt has {len(prompt)}",
            field="prompt",
        )
    imported = await _receive(worker, spec, prompt)
    headers = {
        KV_BYTES_HEADER: str(sum(chunk.payload_bytes for chunk in imported.plan)),
        TRANSFER_BYTES_HEADER: str(imported.bytes_moved),
        TRANSFER_SECONDS_HEADER: f"{imported.verified_at - imported.started_at:.6f}",
    }
    generate = GenerationRequest(
        worker.engine_id(answer.head.response_id), prompt, sampling, imported, spec.chunk_tokens, cache_salt
    )
    with contextlib.ExitStack() as unless_accepted:
        unless_accepted.callback(imported.release)
        with generation(worker.engine, generate) as call:
            unless_accepted.pop_all()  # from here on the engine releases it
            await call.started(spec.clocks.queue_s)
            return await give(
                request,
                replace(answer, headers=headers),
                [call],
                prompt_tokens=len(prompt),
                metrics=worker.metrics,
                extra={},
            )


async def _receive(worker: Worker, spec: TransferSpec, prompt: Sequence[int]) -> ReceivedCache:
    """The VERIFIED cache, or the failure that ended its transfer."""
    info = worker.engine.info
    receiving = await _begun(partial(worker.node.receive, spec, info.layout, info.fingerprint, prompt[:-1]))
    with _accounted(worker, "received", receiving) as account:
        imported = await settled(receiving.future)
        account.note(imported.bytes_moved, imported.verified_at - imported.started_at)
    return imported


@dataclass(slots=True)
class _Computed:
    """What a prefill took; times in seconds."""

    queue_s: float
    prefill_s: float
    usage: Usage


async def _compute(worker: Worker, call: EngineCall, queue_s: float) -> _Computed:
    began = time.monotonic()
    await call.started(queue_s)
    started = time.monotonic()
    async for event in call:
        match event:
            case PrefillCompleted(computed, cached, _):
                worker.metrics.prompt_ready(computed_tokens=computed, cached_tokens=cached, imported_tokens=0)
            case RequestFinished(usage):
                prefill_s = time.monotonic() - started
                worker.metrics.prefilled(prefill_s)
                return _Computed(started - began, prefill_s, usage)
            case _:
                pass
    raise LocalProtocolError("the engine ended a prefill without a terminal event")


def _prefill_answer(spec: TransferSpec, answer: Answer, computed: _Computed, sent: SendReport) -> web.Response:
    extra = {
        "kv_transfer_params": {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "farfill": {"transfer_id": spec.transfer_id, "epoch": spec.epoch, "prefix_tokens": spec.prefix_tokens},
        },
        "farfill": {
            "queue_s": computed.queue_s,
            "prefill_s": computed.prefill_s,
            "transfer_s": sent.elapsed_s,
            "transfer_bytes": sent.sent_bytes,
            "resent_chunks": sent.resent_chunks,
            "cached_tokens": computed.usage.cached_tokens,
        },
    }
    choice = ChoiceText(0, finish_reason="length")
    return json_response(answer.shape.whole(answer.head, [choice], usage_object(computed.usage), extra))


async def _begun(start: Callable[[], EndT]) -> EndT:
    """Begins a transfer on a thread (a long prompt's plan takes a while), and cancels it if we are cancelled then."""
    starting = asyncio.ensure_future(asyncio.to_thread(start))

    def cancel(started: "asyncio.Future[EndT]") -> None:
        if started.exception() is None:
            started.result().cancel("the request was cancelled")

    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(cancel)
        raise


@dataclass(slots=True)
class _Account:
    """What a transfer's metrics are told in the end."""

    outcome: str = "transfer_cancelled"
    transfer_bytes: int = 0
    seconds: float = 0.0

    def note(self, transfer_bytes: int, seconds: float) -> None:
        self.outcome, self.transfer_bytes, self.seconds = OK, transfer_bytes, seconds


@contextlib.contextmanager
def _accounted(worker: Worker, direction: Direction, end: Outgoing | Incoming) -> Iterator[_Account]:
    """A transfer that is cancelled if the block is left before its end, and counted in any case."""
    account = _Account()
    try:
        yield account
    except FarfillError as error:
        account.outcome = error.code
        raise
    finally:
        end.cancel("the request has ended")
        worker.metrics.transfer_ended(
            direction, account.outcome, transfer_bytes=account.transfer_bytes, seconds=account.seconds
        )


async def _both(first: Coroutine[Any, Any, A], second: Coroutine[Any, Any, B]) -> tuple[A, B]:
    """Both results, or the first failure, which cancels the other."""
    one, other = asyncio.create_task(first), asyncio.create_task(second)
    try:
        done, _ = await asyncio.wait((one, other), return_when=asyncio.FIRST_EXCEPTION)
        # Where both have failed at once, the second is the cause: a publish raises what has ended the transfer.
        for task in (other, one):
            if task in done and (failure := task.exception()) is not None:
                raise failure
        return one.result(), other.result()
    finally:
        one.cancel()
        other.cancel()
        await asyncio.gather(one, other, return_exceptions=True)


def _check_spec(worker: Worker, spec: TransferSpec, prompt: Sequence[int], *, own: str, part: str) -> None:
    """What can be seen to be wrong before a byte moves.

    Raises:
        PeerError: `wire_version_unsupported`, `prompt_mismatch`.
        OperationError: `stale_epoch`, where the transfer is meant for another life of this worker.
    """
    if spec.wire_version != WIRE_VERSION:
        raise PeerError(
            "wire_version_unsupported", f"the transfer has wire version {spec.wire_version}, this side {WIRE_VERSION}"
        )
    if own != worker.identity.instance:
        raise OperationError(
            "stale_epoch",
            f"the transfer's {part} is instance {own[:100]}; this is {worker.identity.name}, instance "
            f"{worker.identity.instance}: was it restarted?",
            field=f"kv_transfer_params.farfill.{part}",
        )
    if len(prompt) - 1 != spec.prefix_tokens:
        raise PeerError(
            "prompt_mismatch",
            f"the prompt has {len(prompt)} tokens here, so its prefix {len(prompt) - 1}; "
            f"the transfer is of {spec.prefix_tokens}",
            field="kv_transfer_params.farfill.prefix_tokens",
        )
