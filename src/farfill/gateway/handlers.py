"""The endpoints that workers answer: completions and chats, which may be split, and all others, passed through.

Not here: what the gateway answers itself (`app`, `ready`).
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from aiohttp import web

from farfill.errors import ClientError
from farfill.gateway.body import Body, BodyStream, parse, read_raw
from farfill.gateway.client_side import BufferedClient, StreamingClient
from farfill.gateway.errors import REQUEST_ID
from farfill.gateway.gateway import Gateway
from farfill.gateway.work import Work

# What an answer is taken to be where the client sets no bound: for the load that it is, nothing else.
_OUTPUT_TOKENS_GUESS: Final = 256
_OUTPUT_TOKENS_MOST: Final = 1_000_000


async def generate(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """`POST /v1/completions` and `POST /v1/chat/completions`.

    Raises:
        FarfillError: for a body that can't be read; everything later is in the answer.
    """
    tenant = gateway.tenants.authenticate(request.headers.get("Authorization"))
    with gateway.admission.enter():
        body = parse(await read_raw(request, gateway.settings.limits.body_bytes))
        model, streaming = body.model, body.stream
        work = Work(
            request_id=request[REQUEST_ID],
            tenant=tenant,
            method="POST",
            target=request.path,
            headers=request.headers,
            body=body.raw,
            fields=body.fields,
            streaming=streaming,
            generates=True,
            output_tokens=_output_tokens(body.fields),
        )
        client: StreamingClient | BufferedClient = StreamingClient(request) if streaming else BufferedClient()
        await gateway.drive(work, client, lambda: gateway.choose.path(work, model))
        return _answer(client)


async def pass_through(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """Any other endpoint of the engine: to a decode worker and back, as it is.

    A JSON body is read first, so that the right model's worker gets it, and another one if that fails. Any other body
    is streamed, and can be sent only once.
    """
    tenant = gateway.tenants.authenticate(request.headers.get("Authorization"))
    _check_path(request)
    with gateway.admission.enter():
        limit = gateway.settings.limits.body_bytes
        parsed: Body | None = None
        data: bytes | BodyStream | None = None
        if request.can_read_body:
            if request.content_type == "application/json":
                parsed = parse(await read_raw(request, limit))
                data = parsed.raw
            else:
                data = BodyStream(request, limit)
        replayable = not isinstance(data, BodyStream)
        work = Work(
            request_id=request[REQUEST_ID],
            tenant=tenant,
            method=request.method,
            target=request.raw_path,
            headers=request.headers,
            body=data,
            fields=parsed.fields if parsed is not None else {},
            streaming=True,
            output_tokens=_OUTPUT_TOKENS_GUESS,
        )
        client = StreamingClient(request)
        model = parsed.model if parsed is not None else None
        await gateway.drive(work, client, lambda: gateway.choose.local(work, model, replayable=replayable))
        return _answer(client)


def _answer(client: StreamingClient | BufferedClient) -> web.StreamResponse:
    if client.response is None:  # it left before anything was sent; this goes nowhere
        raise ClientError("client_gone", "the client closed its connection")
    return client.response


def _check_path(request: web.Request) -> None:
    """Behind the gateway are more endpoints than a client may see: no path may lead out of what was routed here.

    Raises:
        ClientError: `unknown_endpoint`.
    """
    if any(segment in (".", "..") for segment in re.split(r"[/\\]", request.path)):
        raise ClientError("unknown_endpoint", "a path with '.' or '..' in it leads nowhere here")


def _output_tokens(fields: Mapping[str, Any]) -> int:
    for name in ("max_completion_tokens", "max_tokens"):
        value = fields.get(name)
        if type(value) is int and value > 0:
            return min(value, _OUTPUT_TOKENS_MOST)
    return _OUTPUT_TOKENS_GUESS
