"""The relay's process: a store, its control API, and nothing else. The store is `farfill.store`; this only serves it.

SIGTERM drains: no new reservations; leases may end, and control and data stay reachable for them. SIGINT stops at once.
"""

import asyncio
import logging
import os
import signal
from pathlib import Path

from aiohttp import web
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily

from farfill import tls
from farfill.config import RelaySettings, TlsSettings
from farfill.engines.serving.listen import bind, check_ready_file, url_of, write_ready_file
from farfill.store.control import add_store_routes
from farfill.store.machine import StoreLimits
from farfill.store.server import Security, StoreServer, StoreSettings

_log = logging.getLogger(__name__)


async def serve_relay(settings: RelaySettings, files: TlsSettings | None, ready_file: Path | None) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises:
        ConfigurationError: `certificate_invalid`, `port_in_use`, `insecure_listener`, `config_invalid`.
    """
    if ready_file is not None:
        check_ready_file(ready_file)
    context = tls.server_context(files.files()) if files is not None else None
    listener = bind(settings.host, settings.port, field="relay.port")
    port = listener.getsockname()[1]
    url = url_of("http" if context is None else "https", settings.advertise_host or settings.host, port)
    store = StoreServer(
        StoreSettings(
            host=settings.host,
            data_port=settings.data_port,
            security=Security.LOOPBACK if context is None else Security.MUTUAL_TLS,
            control_url=url,
            limits=StoreLimits(settings.store_bytes),
            advertise_host=settings.advertise_host,
        )
    )
    runner = web.AppRunner(_app(store), access_log=None, handle_signals=False)
    stop = _stop_signals()
    try:
        await runner.setup()
        await web.SockSite(runner, listener, ssl_context=context).start()
        if ready_file is not None:
            facts = {
                "name": settings.name,
                "url": url,
                "data_port": store.address.data_port,
                "instance": store.address.instance,
                "pid": os.getpid(),
            }
            write_ready_file(ready_file, facts)
        _log.info("relay %s at %s, data port %d", settings.name, url, store.address.data_port)
        drains = await stop is signal.SIGTERM
        await asyncio.to_thread(store.stop, settings.drain_s if drains else 0.0)
    finally:
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)
        await runner.cleanup()
        await asyncio.to_thread(store.stop)


def _stop_signals() -> "asyncio.Future[signal.Signals]":
    """Done with the first stop signal; a second one while draining is answered by the default: the process ends."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[signal.Signals] = loop.create_future()

    def note(number: signal.Signals) -> None:
        if not stop.done():
            stop.set_result(number)
        for one in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(one)

    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, note, one)
    return stop


def _app(store: StoreServer) -> web.Application:
    app = web.Application(client_max_size=64 * 1024)  # a control request has two names and an id
    add_store_routes(app, store)

    async def health(request: web.Request) -> web.Response:
        draining = (await asyncio.to_thread(store.status)).draining
        return web.json_response({"status": "draining" if draining else "ok"}, status=503 if draining else 200)

    async def metrics(request: web.Request) -> web.Response:
        body = await asyncio.to_thread(_exposition, store)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    app.router.add_get("/health", health)
    app.router.add_get("/metrics", metrics)
    return app


class _StoreCollector:
    """The store's ledger, read when somebody scrapes."""

    def __init__(self, store: StoreServer) -> None:
        self._store = store

    def collect(self) -> list[GaugeMetricFamily]:
        status = self._store.status()
        ledger = status.ledger
        held = GaugeMetricFamily("farfill_store_bytes", "Staging memory by state", labels=["state"])
        for state in ("free", "held", "quarantined", "total"):
            held.add_metric([state], getattr(ledger, f"{state}_bytes"))
        return [
            held,
            GaugeMetricFamily("farfill_store_leases", "Live leases", value=ledger.leases),
            GaugeMetricFamily("farfill_relay_draining", "1 while nothing new is granted", value=status.draining),
        ]


def _exposition(store: StoreServer) -> bytes:
    registry = CollectorRegistry()
    registry.register(_StoreCollector(store))
    return generate_latest(registry)
