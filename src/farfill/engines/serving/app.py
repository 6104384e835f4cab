"""A worker's HTTP endpoints. Thin: each handler reads, asks the worker, and answers."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from farfill.engines.serving import generate
from farfill.engines.serving.fields import invalid
from farfill.engines.serving.http import add_request_id, answering, json_response, read_body
from farfill.engines.serving.request import parse_detokenize, parse_tokenize
from farfill.engines.serving.worker import BODY_BYTES_MAX, VERSION, Worker
from farfill.errors import OverloadError
from farfill.store.control import add_store_routes
from farfill.store.server import Security
from farfill.tls import PeerRole, require_role

# What makes the engine work, and so is for gateways; the rest only tells, also to the operator's scrapers and probes.
_FOR_GATEWAYS: Final = ("/v1/", "/tokenize", "/detokenize")

WorkerHandler = Callable[[Worker, web.Request], Awaitable[web.StreamResponse]]


def build_worker_app(worker: Worker) -> web.Application:
    """The worker's application, its store's control routes included."""
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[answering(worker.metrics)])
    app.on_response_prepare.append(add_request_id)
    routes: list[tuple[str, str, WorkerHandler]] = [
        ("POST", "/v1/completions", generate.completions),
        ("POST", "/v1/chat/completions", generate.chat_completions),
        ("GET", "/v1/models", _models),
        ("GET", "/v1/models/{model:.+}", _model),
        ("POST", "/tokenize", _tokenize),
        ("POST", "/detokenize", _detokenize),
        ("GET", "/health", _health),
        ("GET", "/version", _version),
        ("GET", "/metrics", _metrics),
        ("GET", "/farfill/v1/info", _info),
    ]
    for method, path, handler in routes:
        app.router.add_route(method, path, _bound(worker, handler, for_gateways=path.startswith(_FOR_GATEWAYS)))
    add_store_routes(app, worker.store)
    return app


def _bound(
    worker: Worker, handler: WorkerHandler, *, for_gateways: bool
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        if for_gateways and worker.store.security is Security.MUTUAL_TLS:
            transport = request.transport
            connection = None if transport is None else transport.get_extra_info("ssl_object")
            require_role(connection, PeerRole.GATEWAY, "gateways ask for generations")
        return await handler(worker, request)

    return handle


async def _models(worker: Worker, request: web.Request) -> web.StreamResponse:
    return json_response({"object": "list", "data": [_model_object(worker)]})


async def _model(worker: Worker, request: web.Request) -> web.StreamResponse:
    worker.check_model(request.match_info["model"])
    return json_response(_model_object(worker))


def _model_object(worker: Worker) -> dict[str, Any]:
    info = worker.engine.info
    return {
        "id": info.model,
        "object": "model",
        "created": worker.began_unix_s,
        "owned_by": "farfill",
        "root": info.model,
        "parent": None,
        "max_model_len": info.max_model_len,
    }


async def _tokenize(worker: Worker, request: web.Request) -> web.StreamResponse:
    """vLLM's shape."""
    parsed = parse_tokenize(await read_body(request, BODY_BYTES_MAX))
    worker.check_model(parsed.model)
    if parsed.chat is not None:
        tokens = await worker.encode_chat(parsed.chat)
    else:
        assert parsed.prompt is not None
        tokens = await worker.encode(parsed.prompt, add_special_tokens=parsed.add_special_tokens)
    strings = None
    if parsed.return_token_strs:
        strings = [worker.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokens]
    return json_response(
        {
            "count": len(tokens),
            "max_model_len": worker.engine.info.max_model_len,
            "tokens": list(tokens),
            "token_strs": strings,
        }
    )


async def _detokenize(worker: Worker, request: web.Request) -> web.StreamResponse:
    """vLLM's shape."""
    parsed = parse_detokenize(await read_body(request, BODY_BYTES_MAX))
    worker.check_model(parsed.model)
    if any(token >= worker.tokenizer.vocab_size for token in parsed.tokens):
        raise invalid("tokens", f"must hold token ids under {worker.tokenizer.vocab_size}")
    return json_response({"prompt": worker.tokenizer.decode(parsed.tokens, skip_special_tokens=False)})


async def _health(worker: Worker, request: web.Request) -> web.StreamResponse:
    """200 while the worker accepts requests. That the process answers says nothing of the path: see the gateway."""
    if worker.admission.is_closed:
        raise OverloadError("draining", "this worker is stopping")
    return json_response({"status": "ok", "requests": worker.admission.requests})


async def _version(worker: Worker, request: web.Request) -> web.StreamResponse:
    return json_response({"version": VERSION})


async def _metrics(worker: Worker, request: web.Request) -> web.StreamResponse:
    body = await asyncio.to_thread(worker.metrics.exposition)  # it asks the engine and the store, which have locks
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


async def _info(worker: Worker, request: web.Request) -> web.StreamResponse:
    return json_response(worker.describe())
