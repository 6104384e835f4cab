"""A store's control API over HTTP: its routes, for an aiohttp application, and its clients.

    POST /farfill/v1/store/reserve | renew | release | session     GET /farfill/v1/store/status

Not here: TLS contexts and listeners; the process that has the store has those. Peers are who their certificate's
common name says. A listener without TLS is on loopback, and whoever reaches it there may do what any peer may.
"""

import asyncio
import http.client
import ssl
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import web

from farfill.errors import (
    ClientError,
    ConfigurationError,
    FarfillError,
    OperationError,
    PeerError,
    error_from_openai,
)
from farfill.kv.spec import WIRE_VERSION
from farfill.store.protocol import (
    LOOPBACK,
    Granted,
    OpenSession,
    Release,
    Released,
    Renew,
    Renewed,
    Reserve,
    Session,
    StoreStatus,
)
from farfill.store.server import Security, StoreServer
from farfill.tls import PeerRole, is_loopback, peer_name, require_role
from farfill.transfer.failures import error_for
from farfill.transfer.spec import StoreAddress

PREFIX: Final = "/farfill/v1/store"
_BODY_BYTES_MAX: Final = 16 * 1024  # the largest request has two names and an id
_ANSWER_BYTES_MAX: Final = 64 * 1024

T = TypeVar("T")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


# ---- the server's side


def add_store_routes(app: web.Application, store: StoreServer) -> None:
    """Adds the routes. Errors are answered as JSON with a stable code, whatever the application's middlewares are."""

    async def reserve(request: web.Request) -> web.Response:
        _require_gateway(request, store)
        peer, body = await _read(request, store, Reserve)
        granted = await asyncio.wrap_future(store.reserve(peer, body))
        return _json(granted)

    async def renew(request: web.Request) -> web.Response:
        _require_gateway(request, store)
        peer, body = await _read(request, store, Renew)
        renewed = await asyncio.wrap_future(store.renew(peer, body))
        return _json(renewed)

    async def release(request: web.Request) -> web.Response:
        _require_gateway(request, store)
        peer, body = await _read(request, store, Release)
        released = await asyncio.wrap_future(store.release(peer, body))
        return _json(released)

    async def session(request: web.Request) -> web.Response:
        peer, body = await _read(request, store, OpenSession)
        return _json(store.open_session(peer, body))

    async def status(request: web.Request) -> web.Response:
        _peer_of(request, store)
        ledger = await asyncio.wrap_future(store.memory.when(lambda _: True))
        return _json(StoreStatus(store.address, ledger, store.memory.is_draining))

    for name, handler in (("reserve", reserve), ("renew", renew), ("release", release), ("session", session)):
        app.router.add_post(f"{PREFIX}/{name}", _answering(handler))
    app.router.add_get(f"{PREFIX}/status", _answering(status))


def _answering(handler: _Handler) -> _Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except FarfillError as error:
            return _refusal(error)

    return answer


def _refusal(error: FarfillError) -> web.Response:
    headers = {} if error.retry_after_s is None else {"Retry-After": str(max(1, round(error.retry_after_s)))}
    return web.json_response(error.to_openai(), status=error.http_status, headers=headers)


def _peer_of(request: web.Request, store: StoreServer) -> str:
    if store.security is Security.LOOPBACK:
        return LOOPBACK
    transport = request.transport
    return peer_name(None if transport is None else transport.get_extra_info("ssl_object"))


def _require_gateway(request: web.Request, store: StoreServer) -> None:
    """A certificate that states another role than a gateway's may not hold staging; one that states none may.

    Raises:
        ClientError: `forbidden`.
    """
    if store.security is Security.LOOPBACK:
        return
    transport = request.transport
    connection = None if transport is None else transport.get_extra_info("ssl_object")
    require_role(connection, PeerRole.GATEWAY, "gateways reserve staging")


async def _read(request: web.Request, store: StoreServer, kind: type[T]) -> tuple[str, T]:
    peer = _peer_of(request, store)
    if request.content_length is None or request.content_length > _BODY_BYTES_MAX:
        raise ClientError("body_too_large", f"a request's body has a stated length of at most {_BODY_BYTES_MAX} bytes")
    try:
        return peer, msgspec.json.decode(await request.read(), type=kind)
    except msgspec.ValidationError as error:
        raise ClientError("invalid_request", f"{request.path}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ClientError("invalid_json", f"{request.path}: {error}") from error


def _json(answer: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


# ---- the clients' side


class StoreControl:
    """Asks one store, from asyncio.

    Args:
        session: whose connector has the TLS context; it stays the caller's.
        control_url: base URL, `StoreAddress.control_url`.
        timeout_s: for each call as a whole.

    Every method raises FarfillError: the store's own (by its code), `peer_unreachable`, `setup_timeout`, or
    `protocol_violation` for an answer that cannot be read.
    """

    def __init__(self, session: aiohttp.ClientSession, control_url: str, timeout_s: float = 5.0) -> None:
        self._session = session
        self._url = control_url.rstrip("/") + PREFIX
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def reserve(self, request: Reserve) -> Granted:
        return await self._call("POST", "reserve", request, Granted)

    async def renew(self, request: Renew) -> Renewed:
        return await self._call("POST", "renew", request, Renewed)

    async def release(self, request: Release) -> Released:
        return await self._call("POST", "release", request, Released)

    async def status(self) -> StoreStatus:
        return await self._call("GET", "status", None, StoreStatus)

    async def _call(self, method: str, name: str, body: msgspec.Struct | None, kind: type[T]) -> T:
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._session.request(
                method, f"{self._url}/{name}", data=data, timeout=self._timeout, allow_redirects=False
            ) as response:
                answer = await _read_bounded(response)
                return _read_answer(response.status, answer, kind, self._url)
        except TimeoutError as error:
            raise OperationError("setup_timeout", f"{self._url} has not answered {name} in time") from error
        except aiohttp.ClientError as error:
            raise _unreachable(self._url, error) from error


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes:
    answer = bytearray()
    async for piece in response.content.iter_any():
        answer += piece
        if len(answer) > _ANSWER_BYTES_MAX:
            raise PeerError("frame_too_large", f"{response.url}: an answer of over {_ANSWER_BYTES_MAX} bytes")
    return bytes(answer)


def fetch_session(store: StoreAddress, context: ssl.SSLContext | None, timeout_s: float) -> Session:
    """Opens a session, blocking; for threads.

    Args:
        context: a client's, with its certificate; None only for a store on loopback.
        timeout_s: for each step on the socket.

    Raises:
        FarfillError: as `StoreControl`; `peer_unauthenticated` where either side refuses the other's certificate.
    """
    url = urlsplit(store.control_url)
    if url.hostname is None or url.scheme not in ("http", "https") or (url.scheme == "https") != (context is not None):
        raise ConfigurationError(
            "config_invalid", f"control_url {store.control_url!r} does not fit this process's tls", field="control_url"
        )
    if context is None and not is_loopback(url.hostname):
        raise ConfigurationError(
            "config_invalid", f"the store at {store.control_url} is not on this machine: configure tls", field="tls"
        )
    if context is None:
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=timeout_s)
    else:
        connection = http.client.HTTPSConnection(url.hostname, url.port, timeout=timeout_s, context=context)
    body = msgspec.json.encode(OpenSession(store.instance, WIRE_VERSION))
    is_shaken = False  # the TLS handshake is done, and no byte of an answer is here
    try:
        connection.connect()
        is_shaken = context is not None
        path = url.path.rstrip("/") + f"{PREFIX}/session"
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        is_shaken = False
        return _read_answer(response.status, response.read(_ANSWER_BYTES_MAX), Session, store.control_url)
    except TimeoutError as error:
        raise OperationError("setup_timeout", f"{store.control_url} has not answered in {timeout_s} s") from error
    except (OSError, http.client.HTTPException) as error:
        if not is_shaken:
            raise _unreachable(store.control_url, error) from error
        # In TLS 1.3 the client's handshake is over before the server looks at its certificate, and asyncio's servers
        # then close without an alert. It may also just have died: whoever asks again will see.
        raise PeerError(
            "peer_unauthenticated",
            f"{store.control_url} closed right after the TLS handshake ({error}): is our certificate accepted there?",
        ) from error
    finally:
        connection.close()


def _unreachable(url: str, error: Exception) -> FarfillError:
    """`peer_unauthenticated` where either side refuses the other's certificate; all else is `peer_unreachable`."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError) and (
            isinstance(cause, ssl.SSLCertVerificationError) or "ALERT" in (cause.reason or "")
        ):
            return PeerError("peer_unauthenticated", f"{url}: {cause}")
        cause = cause.__cause__ or cause.__context__
    return OperationError("peer_unreachable", f"{url}: {error}")


def _read_answer(status: int, body: bytes, kind: type[T], url: str) -> T:
    try:
        if status == 200:
            return msgspec.json.decode(body, type=kind)
        failure = error_from_openai(msgspec.json.decode(body), status)
    except msgspec.DecodeError as error:
        raise PeerError("protocol_violation", f"{url}: HTTP {status}, and not a store's answer: {error}") from error
    raise failure if isinstance(failure, ClientError) else error_for(failure.code, failure.message)
