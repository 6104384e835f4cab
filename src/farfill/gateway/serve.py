"""A gateway as a process: its listener, its signals, its ready-file, its drain.

Not here: the parts of a gateway (`gateway`), its routes (`app`).
"""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import web

from farfill.errors import ConfigurationError
from farfill.gateway.app import build_gateway_app
from farfill.gateway.gateway import Gateway
from farfill.gateway.settings import GatewaySettings

_log = logging.getLogger(__name__)

_BACKLOG: Final = 1024
# After the drain's time a request that still runs is cancelled; this long it may take to free what it holds.
_ABORT_S: Final = 5.0


@dataclass(slots=True)
class RunningGateway:
    """`drains`: leaving waits for requests in flight; set it to False to cut them off."""

    gateway: Gateway
    url: str
    drains: bool = True


@contextlib.asynccontextmanager
async def running_gateway(settings: GatewaySettings) -> AsyncIterator[RunningGateway]:
    """Serves until the block is left, then drains: nobody new, those in flight to their end, at most `drain_s`.

    Raises:
        ConfigurationError: see `GatewaySettings.check`; `certificate_invalid`, `port_in_use`.
    """
    settings.check()
    listener = _bind(settings.host, settings.port)
    try:
        gateway = Gateway(settings)
    except ConfigurationError:
        listener.close()
        raise
    runner = web.AppRunner(
        build_gateway_app(gateway),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=_ABORT_S,
        # Longer than a client's pool keeps an idle connection, so that the client closes first.
        keepalive_timeout=75.0,
    )
    running = RunningGateway(gateway, "")
    try:
        await runner.setup()
        await gateway.start()
        await web.SockSite(runner, listener).start()
        port = listener.getsockname()[1]
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        running.url = f"http://{host}:{port}"
        yield running
    finally:
        gateway.admission.is_closed = True
        gateway.metrics.draining()
        if not running.drains:
            gateway.admission.cut()
        try:
            async with asyncio.timeout(settings.clocks.drain_s if running.drains else _ABORT_S):
                await gateway.admission.idle()
        except TimeoutError:
            _log.warning("%d requests did not end within the drain; they are cancelled", gateway.admission.requests)
        await runner.cleanup()
        await gateway.stop()
        listener.close()


async def serve_gateway(settings: GatewaySettings, on_ready: Callable[[str], Any] = lambda url: None) -> None:
    """Serves until SIGTERM (then drains) or SIGINT (then cuts requests in flight), then returns.

    `on_ready` gets the base URL.

    A second signal during the drain ends the process as that signal does by default.

    Raises:
        ConfigurationError: see `running_gateway`; `config_invalid` for a ready-file that can't be written.
    """
    if settings.ready_file is not None and not settings.ready_file.parent.is_dir():
        raise _ready_file_invalid(settings.ready_file, "its folder does not exist")
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[signal.Signals] = loop.create_future()

    def stop(number: signal.Signals) -> None:
        for one in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(one)
        if not stopped.done():
            stopped.set_result(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    try:
        async with running_gateway(settings) as running:
            _log.info("the gateway serves at %s", running.url)
            if settings.ready_file is not None:
                _write_ready_file(settings.ready_file, running.url)
            on_ready(running.url)
            running.drains = await stopped is signal.SIGTERM
            _log.info("the gateway %s", "drains" if running.drains else "stops at once")
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        if settings.ready_file is not None:
            settings.ready_file.unlink(missing_ok=True)


def _bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises ConfigurationError: `port_in_use` or `config_invalid`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigurationError(
            "config_invalid", f"the host {host!r} is no address: {error}", field="gateway.host"
        ) from error
    listener = socket.socket(family, kind, protocol)
    try:
        # A gateway that is started again gets its port back although old connections linger.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                "port_in_use",
                f"port {port} on {host} is taken by another process; choose another",
                field="gateway.port",
            ) from error
        raise ConfigurationError(
            "config_invalid", f"cannot listen on {host} port {port}: {error.strerror}", field="gateway.host"
        ) from error
    return listener


def _write_ready_file(path: Path, url: str) -> None:
    """So that a reader sees all of it, or no file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(msgspec.json.encode({"url": url, "pid": os.getpid()}))
        temporary.replace(path)
    except OSError as error:
        raise _ready_file_invalid(path, error.strerror or str(error)) from error


def _ready_file_invalid(path: Path, why: str) -> ConfigurationError:
    return ConfigurationError("config_invalid", f"the ready-file {path} can't be written: {why}", field="ready_file")
