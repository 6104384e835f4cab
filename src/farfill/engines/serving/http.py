"""What every response of a worker has: a request id, OpenAI-style errors, its outcome counted.

Not here: what the endpoints do (`app`).
"""

import asyncio
import logging
import math
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from farfill.engines.serving.answer import FAILED
from farfill.errors import ClientError, FarfillError, LocalProtocolError, OperationError, OverloadError
from farfill.observe.metrics import OK, WorkerMetrics

_log = logging.getLogger(__name__)

REQUEST_ID_HEADER: Final = "X-Request-Id"
# What a client may call a request: it comes back in headers, ids and logs, so no odd characters and no novels.
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=-]{0,127}")
# A body of the largest size over a slow link; a client that sends nothing for so long is gone.
BODY_S: Final = 120.0

REQUEST_ID: Final = web.RequestKey("farfill_request_id", str)
BEGAN: Final = web.RequestKey("farfill_began", float)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def json_response(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json", headers=headers
    )


def error_response(error: FarfillError) -> web.Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    return json_response(error.to_openai(), status=error.http_status, headers=headers)


async def read_body(request: web.Request, limit_bytes: int) -> bytes:
    """The request's body.

    Raises:
        ClientError: `body_too_large` over `limit_bytes` (of what the headers promise, or of what comes);
            `unsupported_parameter` for a compressed body.
        OperationError: `request_timeout` if it does not arrive.
    """
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ClientError("unsupported_parameter", "send the body uncompressed", field="Content-Encoding")
    too_large = ClientError("body_too_large", f"the body is larger than the limit of {limit_bytes} bytes")
    if request.content_length is not None and request.content_length > limit_bytes:
        raise too_large
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    except TimeoutError:
        raise OperationError("request_timeout", f"the body did not arrive within {BODY_S} s") from None
    except web.RequestPayloadError as error:
        raise ClientError("invalid_request", f"the body could not be read: {error}") from error


def answering(metrics: WorkerMetrics) -> Middleware:
    """The middleware around every handler."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[BEGAN] = time.monotonic()
        given = request.headers.get(REQUEST_ID_HEADER, "")
        request[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        outcome = "client_gone"
        try:
            response, outcome = await _answered(request, handler)
            return response
        finally:
            resource = request.match_info.route.resource
            endpoint = resource.canonical if resource is not None else "unknown"
            metrics.request_ended(endpoint, outcome, time.monotonic() - request[BEGAN])

    return middleware


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """An `on_response_prepare` signal: streams too have the header."""
    if REQUEST_ID in request:
        response.headers[REQUEST_ID_HEADER] = request[REQUEST_ID]


async def _answered(request: web.Request, handler: Handler) -> tuple[web.StreamResponse, str]:
    try:
        response = await handler(request)
        return response, request.get(FAILED, OK)
    except ConnectionError as error:
        # Our peer here is the client: it went away while we wrote. There is nobody to answer.
        _log.info("client gone: %s", error)
        raise
    except FarfillError as error:
        if error.http_status >= 500 and not isinstance(error, OverloadError):  # those come in crowds
            _log.warning("request %s: %s", request[REQUEST_ID], error)
        return error_response(error), error.code
    except web.HTTPNotFound:
        missing = ClientError("unknown_endpoint", f"there is no {request.path[:200]} here")
        return error_response(missing), missing.code
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        wrong = ClientError("method_not_allowed", f"{request.path[:200]} takes {allowed}, not {request.method[:20]}")
        response = error_response(wrong)
        response.headers["Allow"] = allowed
        return response, wrong.code
    except web.HTTPException as error:  # the library's own: what it refuses before a handler sees it
        code = "body_too_large" if error.status == 413 else "invalid_request"
        refused = ClientError(code, f"{error.status} {error.reason}")
        return error_response(refused), refused.code
    except Exception:  # noqa: BLE001 - it is answered and logged with its trace, not hidden
        # A bug ends its request, loudly; the log has the trace, the client has the code.
        _log.exception("request %s ended by a bug", request[REQUEST_ID])
        bug = LocalProtocolError("an unexpected error ended the request; the server's log says more")
        return error_response(bug), bug.code
