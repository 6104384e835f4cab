"""A worker's process: its listeners, its ready file, its signals, its drain.

Not here: what it answers (`app`), making an engine (the command line does, and hands it in).
"""

import asyncio
import contextlib
import logging
import os
import signal
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from farfill.engines.api import Engine
from farfill.engines.serving.app import build_worker_app
from farfill.engines.serving.call import settled
from farfill.engines.serving.listen import bind, url_of, write_ready_file
from farfill.engines.serving.settings import WorkerSettings
from farfill.engines.serving.worker import Worker, WorkerIdentity
from farfill.store.machine import StoreLimits
from farfill.store.server import Security, StoreServer, StoreSettings
from farfill.tls import client_context, server_context
from farfill.transfer.node import TransferNode

_log = logging.getLogger(__name__)

# Longer than any client of ours keeps an idle connection, so that it is the client who closes (no request is lost).
KEEPALIVE_S: Final = 75.0
# After the drain's time an engine gets this long to end its present step, and clients to be told.
_ABORT_S: Final = 5.0
_CUT_OFF_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class RunningWorker:
    """A worker that listens. `url` is what peers call."""

    worker: Worker
    url: str

    @property
    def data_port(self) -> int:
        return self.worker.store.address.data_port

    async def drain(self, drain_s: float) -> bool:
        """Accepts and grants nothing more; waits for requests in flight, and for leases on what others still fetch.

        Returns whether all of them ended within `drain_s` seconds.
        """
        self.worker.admission.close()
        self.worker.metrics.draining()
        leases = self.worker.store.memory.drain()
        try:
            async with asyncio.timeout(drain_s):
                await self.worker.admission.idle()
                await settled(leases)
        except TimeoutError:
            _log.warning("after %s s of drain, %d requests are cut off", drain_s, self.worker.admission.requests)
            return False
        return True


@contextlib.asynccontextmanager
async def running_worker(settings: WorkerSettings, engine: Engine) -> AsyncIterator[RunningWorker]:
    """A worker that serves while the block runs. Leaving the block stops it at once; `drain` before, to be graceful.

    The engine stays the caller's, who stops it afterwards.

    Raises:
        ConfigurationError: `insecure_listener`, `port_in_use`, `certificate_invalid`, `config_invalid`.
    """
    settings.check()
    tls, host = settings.tls, settings.advertise_host or settings.host
    async with contextlib.AsyncExitStack() as stack:
        server_tls = None if tls is None else server_context(tls)
        client_tls = None if tls is None else client_context(tls)
        listener = stack.enter_context(contextlib.closing(bind(settings.host, settings.port, field="worker.port")))
        url = url_of("http" if tls is None else "https", host, listener.getsockname()[1])
        store = StoreServer(
            StoreSettings(
                host=settings.host,
                data_port=settings.data_port,
                security=Security.LOOPBACK if tls is None else Security.MUTUAL_TLS,
                control_url=url,
                limits=StoreLimits(total_bytes=settings.store_bytes),
                advertise_host=host,
            )
        )
        stack.push_async_callback(asyncio.to_thread, store.stop)
        node = TransferNode(
            settings.name, store.local(settings.name), client_tls, connections_per_peer=settings.connections
        )
        stack.push_async_callback(asyncio.to_thread, node.close)
        identity = WorkerIdentity(settings.name, uuid.uuid4().hex, settings.role, settings.site)
        worker = Worker(identity, engine, node=node, store=store, requests_max=settings.requests)
        runner = web.AppRunner(
            build_worker_app(worker),
            # A gateway that hangs up cancels its request here, and with it whatever the request holds.
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=KEEPALIVE_S,
            shutdown_timeout=_CUT_OFF_S,
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.SockSite(runner, listener, ssl_context=server_tls).start()
        yield RunningWorker(worker, url)


async def serve_worker(settings: WorkerSettings, engine: Engine) -> None:
    """Serves until SIGTERM (then drains for `settings.drain_s`) or SIGINT (then stops at once); stops the engine.

    A second signal during the drain ends the process as that signal does by default.

    Raises:
        ConfigurationError: see `running_worker`.
    """
    with contextlib.ExitStack() as stack:
        asked = stack.enter_context(_stop_signals())
        try:
            async with running_worker(settings, engine) as running:
                if settings.ready_file is not None:
                    stack.callback(settings.ready_file.unlink, missing_ok=True)
                    write_ready_file(settings.ready_file, _ready(running))
                _log.info("worker %s (%s) serves at %s", settings.name, settings.role.value, running.url)
                drain_s = settings.drain_s if await asked is signal.SIGTERM else 0.0
                _log.info("worker %s stops, with %s s of drain", settings.name, drain_s)
                if not await running.drain(drain_s):
                    await _abort(running, engine)
        finally:
            await asyncio.to_thread(engine.stop)


async def _abort(running: RunningWorker, engine: Engine) -> None:
    """Ends the requests that are left so that their clients are told: an error, or an error event in a stream."""
    stopping = asyncio.create_task(asyncio.to_thread(engine.stop))
    await asyncio.wait((stopping,), timeout=_ABORT_S)
    with contextlib.suppress(TimeoutError):  # what is still in flight then is cancelled with its connection
        async with asyncio.timeout(_CUT_OFF_S):
            await running.worker.admission.idle()


def _ready(running: RunningWorker) -> dict[str, object]:
    identity = running.worker.identity
    return {
        "name": identity.name,
        "url": running.url,
        "data_port": running.data_port,
        "instance": identity.instance,
        "pid": os.getpid(),
    }


@contextlib.contextmanager
def _stop_signals() -> "Iterator[asyncio.Future[signal.Signals]]":
    """Done with the first stop signal. From then on, and after the block, signals do what they do by default."""
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[signal.Signals] = loop.create_future()
    stops = (signal.SIGTERM, signal.SIGINT)

    def note(number: signal.Signals) -> None:
        if not asked.done():
            asked.set_result(number)
        for one in stops:
            loop.remove_signal_handler(one)

    for one in stops:
        loop.add_signal_handler(one, note, one)
    try:
        yield asked
    finally:
        for one in stops:
            loop.remove_signal_handler(one)
