"""One OpenAI-style error for whatever goes wrong, and the middleware that sees to it.

Not here: the codes (`farfill.errors`), or errors inside a stream that has begun (`client_side`).
"""

import logging
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import msgspec
from aiohttp import web

from farfill.errors import ClientError, FarfillError, LocalProtocolError

_log = logging.getLogger(__name__)

REQUEST_ID_HEADER: Final = "X-Request-Id"
# It comes back in headers, goes to both legs and into logs: no odd characters, no novels.
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=-]{0,127}")
REQUEST_ID: Final = web.RequestKey("farfill_gateway_request_id", str)
_HEAD_IS_OUT: Final = web.RequestKey("farfill_gateway_head_is_out", bool)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def error_headers(error: FarfillError) -> dict[str, str]:
    return {} if error.retry_after_s is None else {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}


def error_response(error: FarfillError, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(error.to_openai()),
        status=error.http_status,
        content_type="application/json",
        headers={**error_headers(error), **(headers or {})},
    )


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    given = request.headers.get(REQUEST_ID_HEADER, "")
    request[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
    try:
        return await handler(request)
    except FarfillError as error:
        if request.get(_HEAD_IS_OUT):
            raise
        if error.http_status >= 500:
            _log.warning("request %s: %s", request[REQUEST_ID], error)
        return error_response(error)
    except web.HTTPNotFound:
        return error_response(ClientError("unknown_endpoint", f"there is no {request.path[:200]} here"))
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        wrong = ClientError("method_not_allowed", f"{request.path[:200]} takes {allowed}, not {request.method[:20]}")
        return error_response(wrong, {"Allow": allowed})
    except (web.HTTPException, ConnectionError):
        raise  # of aiohttp itself; or the client went away, and there is nobody to answer
    except Exception:
        _log.exception("request %s ended by a bug", request[REQUEST_ID])
        if request.get(_HEAD_IS_OUT):
            raise  # a second head in the middle of a body would be nonsense: aiohttp closes the connection
        return error_response(LocalProtocolError("an unexpected error ended the request; the gateway's log says more"))


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """An `on_response_prepare` signal: streams too have the header."""
    if REQUEST_ID in request:
        response.headers[REQUEST_ID_HEADER] = request[REQUEST_ID]
        request[_HEAD_IS_OUT] = True
