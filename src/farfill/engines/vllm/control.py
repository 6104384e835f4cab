"""HTTP beside vLLM's own API: worker info, the store's control API, results of transfers. It runs on its own thread.

    GET /farfill/v1/info
    GET /farfill/v1/transfers/{id}?direction=sent|received&wait_s=...
    GET /metrics
    POST /farfill/v1/store/...

Not here: any OpenAI endpoint; those are vLLM's, in another process. Off loopback it is mutual TLS or nothing.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

import msgspec
import prometheus_client
from aiohttp import web

from farfill.engines.serving.listen import bind, url_of
from farfill.engines.serving.settings import WorkerSettings
from farfill.engines.vllm.results import Direction, Results
from farfill.errors import ClientError
from farfill.store.control import add_store_routes
from farfill.store.machine import StoreLimits
from farfill.store.server import Security, StoreServer, StoreSettings
from farfill.tls import server_context

_log = logging.getLogger(__name__)

# The longest that one question may wait; who wants to wait longer asks again.
WAIT_S_MAX: Final = 60.0
_KEEPALIVE_S: Final = 75.0
_STOP_S: Final = 5.0


class ControlServer:
    """The store and the API over it; both listen from construction on.

    Args:
        describe: the value of `/farfill/v1/info`; called on the server's thread. The store's address is added to it.

    Raises:
        ConfigurationError: `port_in_use`, `insecure_listener`, `config_invalid`, `certificate_invalid`.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        results: Results,
        registry: prometheus_client.CollectorRegistry,
        describe: Callable[[], dict[str, Any]],
    ) -> None:
        tls = None if settings.tls is None else server_context(settings.tls)
        listener = bind(settings.host, settings.port, field="kv_connector_extra_config.port")
        host = settings.advertise_host or settings.host
        self.url = url_of("http" if tls is None else "https", host, listener.getsockname()[1])
        self.store = StoreServer(
            StoreSettings(
                host=settings.host,
                data_port=settings.data_port,
                security=Security.LOOPBACK if tls is None else Security.MUTUAL_TLS,
                control_url=self.url,
                limits=StoreLimits(total_bytes=settings.store_bytes),
                advertise_host=host,
            )
        )
        self._results = results
        self._registry = registry
        self._describe = describe
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(listener, tls), name="farfill-control", daemon=True)
        self._thread.start()
        self._started.result()

    def stop(self) -> None:
        """Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(_STOP_S)
        self.store.stop()

    def _run(self, listener: Any, tls: Any) -> None:
        try:
            self._loop.run_until_complete(self._serve(listener, tls))
        finally:
            self._loop.close()

    async def _serve(self, listener: Any, tls: Any) -> None:
        self._results.serve_on(self._loop)
        runner = web.AppRunner(self._app(), access_log=None, keepalive_timeout=_KEEPALIVE_S, shutdown_timeout=0.5)
        try:
            await runner.setup()
            await web.SockSite(runner, listener, ssl_context=tls).start()
        except Exception as error:
            self._started.set_exception(error)
            raise
        self._started.set_result(None)
        try:
            await self._stopped.wait()
        finally:
            await runner.cleanup()

    def _app(self) -> web.Application:
        app = web.Application()
        add_store_routes(app, self.store)
        app.router.add_get("/farfill/v1/info", self._info)
        app.router.add_get("/farfill/v1/transfers/{id}", self._transfer)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _info(self, request: web.Request) -> web.Response:
        return _json(self._describe() | {"store": msgspec.to_builtins(self.store.address)})

    async def _transfer(self, request: web.Request) -> web.Response:
        direction: Direction = "sent" if request.query.get("direction") == "sent" else "received"
        try:
            wait_s = min(max(float(request.query.get("wait_s", "0")), 0.0), WAIT_S_MAX)
        except ValueError:
            error = ClientError("invalid_request", "wait_s must be a number of seconds", field="wait_s")
            return web.json_response(error.to_openai(), status=error.http_status)
        result = await self._results.ended(request.match_info["id"], direction, wait_s)
        if result is None:
            return web.json_response({"state": "unknown"}, status=404)
        return _json(result)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=prometheus_client.generate_latest(self._registry),
            headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST},
        )


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
