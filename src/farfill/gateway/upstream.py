"""HTTP to workers: the client session, and what its failures mean in farfill's words.

Not here: what is asked of them (`legs`, `fleet`).
"""

import ssl
from typing import Final

import aiohttp
import msgspec

from farfill.errors import CODES, ClientError, FarfillError, OperationError, OverloadError, error_from_openai

ERROR_BYTES_MAX: Final = 64 * 1024
# aiohttp's servers keep an idle connection for 75 s (farfill's workers use that), vLLM's for 5 s. A client that gives
# up first never sends a request into a connection that the server is just closing.
KEEPALIVE_S: Final = 4.0
READ_BYTES: Final = 256 * 1024


def open_session(tls: ssl.SSLContext | None, setup_s: float, tracing: aiohttp.TraceConfig) -> aiohttp.ClientSession:
    """The session for all workers. Connecting is bounded by `setup_s`; the rest by each request's own clocks."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=tls if tls is not None else True)
    return aiohttp.ClientSession(
        trace_configs=[tracing],
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=setup_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
        read_bufsize=READ_BYTES,
    )


def failure_of(error: Exception, worker: str) -> FarfillError:
    """What a client library's exception means."""
    detail = f"{worker}: {type(error).__name__}: {error}"[:500]
    if isinstance(error, aiohttp.ServerTimeoutError | TimeoutError):
        return OperationError("setup_timeout", f"no connection in time to {detail}")
    if isinstance(error, aiohttp.ClientSSLError | aiohttp.ServerFingerprintMismatch | ssl.SSLError):
        return OperationError("peer_unauthenticated", f"TLS failed with {detail}")
    if isinstance(error, aiohttp.ClientConnectorError):
        return OperationError("peer_unreachable", f"no connection to {detail}")
    if isinstance(error, aiohttp.ClientResponseError):
        return OperationError("engine_failed", f"no proper HTTP from {detail}")
    return OperationError("connection_lost", f"lost the connection to {detail}")


async def read_error(response: aiohttp.ClientResponse) -> FarfillError:
    """Reads a response that is not a success. Raises what the client library raises while it reads."""
    raw = await response.content.read(ERROR_BYTES_MAX)
    while len(raw) < ERROR_BYTES_MAX and (more := await response.content.read(ERROR_BYTES_MAX - len(raw))):
        raw += more
    return error_of(response.status, raw, response.headers.get("Retry-After"))


def error_of(status: int, raw: bytes, retry_after: str | None) -> FarfillError:
    """What a worker's error response means to the request."""
    try:
        body: object = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        body = raw.decode("utf-8", "replace")
    error = error_from_openai(body, status)
    theirs = body.get("error") if isinstance(body, dict) else None
    ours = isinstance(theirs, dict) and isinstance(theirs.get("code"), str) and theirs["code"] in CODES
    if status in (401, 403) and error.code != "prefill_only":
        # The client never spoke with the worker: it is the gateway that is not let in.
        error = OperationError("peer_unauthenticated", f"the worker does not let the gateway in: {error.message}")
    elif not ours and status in _BY_STATUS:
        code = _BY_STATUS[status]
        kind = OverloadError if code in ("queue_full", "draining") else ClientError
        error = kind(code, error.message, field=error.field)
    if retry_after is not None and retry_after.isdigit() and len(retry_after) < 6:
        error.retry_after_s = float(retry_after)
    return error


# An engine that is not farfill's worker says no more than this.
_BY_STATUS: Final = {
    404: "unknown_endpoint",
    405: "method_not_allowed",
    413: "body_too_large",
    429: "queue_full",
    503: "queue_full",
}
