"""A generation's events told to an HTTP client: as one JSON object, or as server-sent events.

Not here: where the prompt's cache came from (`legs`), or the JSON's shapes (`responses`).

Rules: the head of a stream goes out once every prompt's prefix is there (computed, or imported from a VERIFIED
transfer), so that every failure before is a plain HTTP error and a gateway can still fall back. An error after that
is an error event, after which the stream ends without `[DONE]`.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from aiohttp import web

from farfill.engines.api import (
    ChoiceFinished,
    EngineEvent,
    PrefillCompleted,
    RequestFinished,
    TokensGenerated,
    Usage,
)
from farfill.engines.serving.call import EngineCall
from farfill.engines.serving.request import Streaming
from farfill.engines.serving.responses import ChoiceText, Head, Piece, Shape, usage_object
from farfill.errors import FarfillError, LocalProtocolError
from farfill.observe.metrics import WorkerMetrics

_log = logging.getLogger(__name__)
_DONE: Final = b"data: [DONE]\n\n"
# Where a response whose head was already out says with which code it failed, for the metrics.
FAILED: Final = web.RequestKey("farfill_failed", str)


@dataclass(frozen=True, slots=True)
class Answer:
    """How one response is to be given.

    Attributes:
        n: choices of each prompt; prompt p's choice c is number p * n + c.
        began: monotonic seconds at the request's head, for the first token's metric.
        headers: beside the usual ones.
    """

    shape: Shape
    head: Head
    n: int
    streaming: Streaming
    began: float
    headers: Mapping[str, str] = field(default_factory=dict)


class Transcript:
    """What the choices of one response have said so far, and its usage."""

    def __init__(self, answer: Answer, prompts: int, metrics: WorkerMetrics) -> None:
        self.choices = [ChoiceText(index) for index in range(answer.n * prompts)]
        self._n = answer.n
        self._prompts = prompts
        self._ready: set[int] = set()
        self._usages: dict[int, Usage] = {}
        self._metrics = metrics
        self._began = answer.began
        self._source: dict[int, bool] = {}  # prompt -> whether its prefix was imported
        self._told_first = False

    @property
    def prefixes_ready(self) -> bool:
        return len(self._ready) == self._prompts

    @property
    def usage(self) -> Usage:
        """Of the whole response, once it is finished."""
        usages = self._usages.values()
        return Usage(
            sum(usage.prompt_tokens for usage in usages),
            sum(usage.completion_tokens for usage in usages),
            sum(usage.cached_tokens for usage in usages),
        )

    def take(self, prompt: int, event: EngineEvent) -> Piece | None:
        """Notes an event; returns what of it a client should be told."""
        match event:
            case PrefillCompleted(computed, cached, imported):
                self._ready.add(prompt)
                self._source[prompt] = imported > 0
                own_cached = 0 if imported else cached
                self._metrics.prompt_ready(computed_tokens=computed, cached_tokens=own_cached, imported_tokens=imported)
            case TokensGenerated(index, token_ids, text, logprobs):
                self._ready.add(prompt)
                self._note_first(prompt)
                choice = self.choices[prompt * self._n + index]
                choice.text += text
                choice.completion_tokens += len(token_ids)
                choice.logprobs.extend(logprobs or ())
                return Piece(choice, text, logprobs, finished=False) if text or logprobs else None
            case ChoiceFinished(index, text, finish_reason, stop_reason):
                self._ready.add(prompt)
                choice = self.choices[prompt * self._n + index]
                choice.text += text
                choice.finish_reason, choice.stop_reason = finish_reason, stop_reason
                return Piece(choice, text, None, finished=True)
            case RequestFinished(usage):
                self._usages[prompt] = usage
            case _:
                pass
        return None

    def running_usage(self, prompt_tokens: int) -> Usage:
        return Usage(prompt_tokens, sum(choice.completion_tokens for choice in self.choices), 0)

    def _note_first(self, prompt: int) -> None:
        if not self._told_first:
            self._told_first = True
            first_s = time.monotonic() - self._began
            self._metrics.first_token("imported" if self._source.get(prompt) else "local", first_s)


async def give(
    request: web.Request,
    answer: Answer,
    calls: Sequence[EngineCall],
    *,
    prompt_tokens: int,
    metrics: WorkerMetrics,
    extra: Mapping[str, Any],
) -> web.StreamResponse:
    """Answers with what the calls generate, one call for each prompt.

    Args:
        prompt_tokens: of all prompts together.
        extra: further fields of a response that is not streamed.

    Raises:
        FarfillError: what went wrong before anything was sent.
    """
    transcript = Transcript(answer, len(calls), metrics)
    if answer.streaming.stream:
        return await _stream(request, answer, calls, transcript, prompt_tokens)
    async for prompt, event in merged(calls):
        transcript.take(prompt, event)
    whole = answer.shape.whole(answer.head, transcript.choices, usage_object(transcript.usage), dict(extra))
    return web.Response(body=msgspec.json.encode(whole), content_type="application/json", headers=answer.headers)


async def _stream(
    request: web.Request,
    answer: Answer,
    calls: Sequence[EngineCall],
    transcript: Transcript,
    prompt_tokens: int,
) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", **answer.headers}
    )
    waiting: list[bytes] = []
    try:
        async for prompt, event in merged(calls):
            piece = transcript.take(prompt, event)
            if piece is not None:
                waiting.append(_chunk(answer, transcript, piece, prompt_tokens))
            if not response.prepared and transcript.prefixes_ready:
                await response.prepare(request)
                waiting[:0] = _openings(answer, transcript)
            if response.prepared and waiting:
                await response.write(b"".join(waiting))
                waiting.clear()
        if answer.streaming.include_usage:
            await response.write(_event(answer.shape.last(answer.head, usage_object(transcript.usage))))
        await response.write(_DONE)
    except ConnectionError:
        raise
    except Exception as error:
        # The status line is out: only an error event can say that the stream was cut short, a bug included.
        if not response.prepared:
            raise
        if not isinstance(error, FarfillError):
            _log.exception("a stream ended by a bug")
            error = LocalProtocolError("an unexpected error ended the stream; the server's log says more")
        request[FAILED] = error.code
        await response.write(_event(error.to_openai()))
    await response.write_eof()
    return response


async def merged(calls: Sequence[EngineCall]) -> AsyncIterator[tuple[int, EngineEvent]]:
    """The events of several calls as they come, each with its call's number.

    Raises:
        FarfillError: of the first call that fails.
    """
    if len(calls) == 1:
        async for event in calls[0]:
            yield 0, event
        return
    waiting = {asyncio.ensure_future(call.next()): index for index, call in enumerate(calls)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                event = task.result()
                if not isinstance(event, RequestFinished):
                    waiting[asyncio.ensure_future(calls[index].next())] = index
                yield index, event
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _openings(answer: Answer, transcript: Transcript) -> list[bytes]:
    if not answer.shape.role_first:
        return []
    chunks = [answer.shape.first(answer.head, choice) for choice in transcript.choices]
    return [_event(_with_usage(answer, chunk, None)) for chunk in chunks]


def _chunk(answer: Answer, transcript: Transcript, piece: Piece, prompt_tokens: int) -> bytes:
    chunk = answer.shape.chunk(answer.head, piece)
    running = transcript.running_usage(prompt_tokens) if answer.streaming.continuous_usage else None
    return _event(_with_usage(answer, chunk, running))


def _with_usage(answer: Answer, chunk: dict[str, Any], usage: Usage | None) -> dict[str, Any]:
    """With `include_usage` every chunk has the field, null but in the last."""
    if usage is not None:
        chunk["usage"] = usage_object(usage)
    elif answer.streaming.include_usage:
        chunk["usage"] = None
    return chunk


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
