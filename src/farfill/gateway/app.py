"""The gateway's routes. Thin: what workers answer is in `handlers`, what the gateway answers itself is here."""

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from farfill.errors import ClientError, FarfillError
from farfill.gateway.errors import Handler, add_request_id, answer_errors
from farfill.gateway.gateway import VERSION, Gateway
from farfill.gateway.handlers import generate, pass_through
from farfill.gateway.ready import ReadyProbe

GatewayHandler = Callable[[Gateway, web.Request], Awaitable[web.StreamResponse]]

# Endpoints of engines that do not stand under /v1.
_ENGINE_PATHS: Final = (
    "/tokenize",
    "/detokenize",
    "/score",
    "/rerank",
    "/v2/rerank",
    "/pooling",
    "/classify",
    "/invocations",
    "/inference/v1/{rest:.+}",
)


def build_gateway_app(gateway: Gateway) -> web.Application:
    """The application; its cleanup stops the probe. Whoever makes the gateway starts and stops it."""
    probe = ReadyProbe(gateway)
    # The limit is the gateway's own (`body`): aiohttp's would answer with a page that is no OpenAI error.
    app = web.Application(middlewares=[answer_errors, _counting(gateway)], client_max_size=2**62)
    app.on_response_prepare.append(add_request_id)

    async def stop_probe(_: web.Application) -> None:
        await probe.close()

    app.on_cleanup.append(stop_probe)

    async def ready(_: Gateway, request: web.Request) -> web.StreamResponse:
        readiness = await probe.ask()
        return _json(readiness.report, status=200 if readiness.ready else 503)

    routes: list[tuple[str, str, GatewayHandler]] = [
        ("POST", "/v1/completions", generate),
        ("POST", "/v1/chat/completions", generate),
        ("GET", "/v1/models", _models),
        ("GET", "/v1/models/{model:.+}", _model),
        ("GET", "/health", _health),
        ("GET", "/ready", ready),
        ("GET", "/version", _version),
        ("GET", "/metrics", _metrics),
    ]
    for method, path, handler in routes:
        app.router.add_route(method, path, _bound(gateway, handler))
    for path in _ENGINE_PATHS:
        app.router.add_route("*", path, _bound(gateway, pass_through))
    # Only what has no route above: a GET of /v1/completions is a 405, not something for a worker.
    own = {path for _, path, _ in routes}

    async def anything_else(gateway: Gateway, request: web.Request) -> web.StreamResponse:
        if request.path in own:
            allowed = {method for method, path, _ in routes if path == request.path}
            raise web.HTTPMethodNotAllowed(request.method, allowed)
        return await pass_through(gateway, request)

    app.router.add_route("*", "/v1/{rest:.+}", _bound(gateway, anything_else))
    return app


def _bound(gateway: Gateway, handler: GatewayHandler) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await handler(gateway, request)

    return handle


def _counting(gateway: Gateway) -> Middleware:
    """Counts what was not let in: an error that no request machine has seen."""

    @web.middleware
    async def counting(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except FarfillError as error:
            gateway.metrics.refused(error.code)
            raise

    return counting


async def _models(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    gateway.tenants.authenticate(request.headers.get("Authorization"))
    models = gateway.fleet.models()
    return _json({"object": "list", "data": [_model_object(model, models[model]) for model in sorted(models)]})


async def _model(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    gateway.tenants.authenticate(request.headers.get("Authorization"))
    model = request.match_info["model"]
    models = gateway.fleet.models()
    if model not in models:
        raise ClientError("unknown_model", f"the model {model[:200]!r} is not here", field="model")
    return _json(_model_object(model, models[model]))


def _model_object(model: str, max_model_len: int) -> dict[str, Any]:
    return {
        "id": model,
        "object": "model",
        "created": _BEGAN_UNIX_S,
        "owned_by": "farfill",
        "root": model,
        "parent": None,
        "max_model_len": max_model_len,
    }


_BEGAN_UNIX_S: Final = int(time.time())


async def _health(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """200 as long as the process answers; whether it can serve is `/ready`'s question."""
    return _json(
        {"status": "draining" if gateway.admission.is_closed else "ok", "requests": gateway.admission.requests}
    )


async def _version(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    return _json({"version": VERSION})


async def _metrics(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    return web.Response(body=gateway.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


def _json(value: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
