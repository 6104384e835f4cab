"""How a request's answer reaches its client: as a stream, in one piece, or not at all (the probe of `/ready`).

Not here: what is sent when (the request machine).
"""

from collections.abc import Mapping
from typing import Final, Protocol

import msgspec
from aiohttp import web

from farfill.errors import FarfillError
from farfill.gateway.errors import error_response

# One answer of a request that is not streamed: a million tokens with logprobs stay under it.
ANSWER_BYTES_MAX: Final = 256 * 1024**2

# Of the connection, not of the message (RFC 9110, 7.6.1), or set anew for the other side.
HOP_BY_HOP: Final = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade", "host", "content-length", "expect",
    }
)  # fmt: skip


def end_to_end(headers: Mapping[str, str], *drop: str) -> dict[str, str]:
    """Headers without those of the connection, those that `Connection` names, and `drop` (lower case)."""
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    return {
        name: value
        for name, value in headers.items()
        if name.lower() not in HOP_BY_HOP and name.lower() not in named and name.lower() not in drop
    }


class ClientSide(Protocol):
    """Where the answer goes. Writing raises ConnectionError where the client is gone."""

    async def send_head(self, status: int, headers: Mapping[str, str]) -> None: ...
    async def forward(self, data: bytes) -> None: ...
    async def end(self) -> None: ...
    async def error_before_head(self, error: FarfillError, headers: Mapping[str, str]) -> None: ...
    async def error_after_head(self, error: FarfillError, *, told: bool) -> None:
        """`told`: the stream itself has said so already."""


class StreamingClient:
    """Sends each piece as it comes."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response: web.StreamResponse | None = None

    async def send_head(self, status: int, headers: Mapping[str, str]) -> None:
        self.response = web.StreamResponse(status=status, headers=headers)
        await self.response.prepare(self._request)

    async def forward(self, data: bytes) -> None:
        assert self.response is not None
        await self.response.write(data)

    async def end(self) -> None:
        assert self.response is not None
        await self.response.write_eof()

    async def error_before_head(self, error: FarfillError, headers: Mapping[str, str]) -> None:
        self.response = error_response(error, headers)

    async def error_after_head(self, error: FarfillError, *, told: bool) -> None:
        """An error event where the stream has events; and in any case an end that no client takes for a good one."""
        assert self.response is not None
        if self.response.content_type == "text/event-stream":
            if not told:
                await self.response.write(b"data: " + msgspec.json.encode(error.to_openai()) + b"\n\n")
            self.response.force_close()
            await self.response.write_eof()
        elif self._request.transport is not None:
            self._request.transport.abort()


class BufferedClient:
    """Keeps the whole answer back until it is complete, so that a failure at its very end is still a clear error.

    The leg bounds it (`ANSWER_BYTES_MAX`).
    """

    def __init__(self) -> None:
        self.response: web.StreamResponse | None = None
        self._status = 200
        self._headers: Mapping[str, str] = {}
        self._body = bytearray()

    async def send_head(self, status: int, headers: Mapping[str, str]) -> None:
        self._status, self._headers = status, headers

    async def forward(self, data: bytes) -> None:
        self._body += data

    async def end(self) -> None:
        self.response = web.Response(status=self._status, headers=self._headers, body=bytes(self._body))

    async def error_before_head(self, error: FarfillError, headers: Mapping[str, str]) -> None:
        self.response = error_response(error, headers)

    async def error_after_head(self, error: FarfillError, *, told: bool) -> None:
        ours = {name: value for name, value in self._headers.items() if name.startswith("X-Farfill-")}
        self.response = error_response(error, ours)
