"""Every error that farfill raises on purpose: one tree, each with a stable code.

The subclass says whose fault it is, which decides what the caller should do:

    FarfillError
    |- ConfigurationError   the operator's: names the field and what is allowed
    |- ClientError          the API caller's: a 4xx with an OpenAI-style body
    |- LocalProtocolError   ours: a bug; ends the request or the process, never a reconnect
    |- PeerError            the other side's: it broke the protocol, or it is not who it must be
    |- OperationError       the operation's: the thing was tried and did not work; retry or fall back
    `- OverloadError        nobody's: try again after `retry_after_s`

The code is the contract (clients, alerts and tests match on it); the message is for people. `CODES` says
for each code which HTTP status carries it, and which failure class the fallback policy sees (None: the
policy is not asked, because falling back would not help).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, ClassVar, Final


class FailureClass(StrEnum):
    """The classes that the fallback policy tells apart (one policy entry for each)."""

    MISS = "miss"  # what should be in the store is not there (lease gone, evicted)
    TRANSPORT = "transport"  # connection refused, reset, process killed
    TIMEOUT = "timeout"  # one of the clocks ran out
    COMPATIBILITY = "compatibility"  # fingerprint, layout, wire version
    INTEGRITY = "integrity"  # a digest, a tag or the manifest does not hold
    OVERLOAD = "overload"  # quota, queue or staging full


@dataclass(frozen=True, slots=True)
class Code:
    """What a stable error code means to the machines that see it."""

    http_status: int
    failure_class: FailureClass | None = None


_M = FailureClass
CODES: Final[Mapping[str, Code]] = MappingProxyType(
    {
        # configuration
        "config_unreadable": Code(500),
        "config_unknown_field": Code(500),
        "config_invalid": Code(500),
        "insecure_listener": Code(500),
        "certificate_invalid": Code(500),
        "model_not_found": Code(500),
        "model_unsupported": Code(500),
        "port_in_use": Code(500),
        "dependency_missing": Code(500),
        # client
        "invalid_json": Code(400),
        "invalid_encoding": Code(400),
        "invalid_request": Code(400),
        "unsupported_parameter": Code(400),
        "empty_prompt": Code(400),
        "context_length_exceeded": Code(400),
        "unauthorized": Code(401),
        "forbidden": Code(403),
        "prefill_only": Code(403),
        "unknown_model": Code(404),
        "unknown_endpoint": Code(404),
        "method_not_allowed": Code(405),
        "body_too_large": Code(413),
        "client_gone": Code(499),
        # local bug
        "internal_error": Code(500),
        # peer and operation, seen by the fallback policy
        "peer_unreachable": Code(502, _M.TRANSPORT),
        "connection_lost": Code(502, _M.TRANSPORT),
        "engine_failed": Code(502, _M.TRANSPORT),
        "peer_unauthenticated": Code(502, _M.TRANSPORT),
        "protocol_violation": Code(502, _M.INTEGRITY),
        "frame_too_large": Code(502, _M.INTEGRITY),
        "chunk_corrupt": Code(502, _M.INTEGRITY),
        "chunk_conflict": Code(502, _M.INTEGRITY),
        "manifest_invalid": Code(502, _M.INTEGRITY),
        "manifest_incomplete": Code(502, _M.INTEGRITY),
        "prompt_mismatch": Code(502, _M.INTEGRITY),
        "fingerprint_mismatch": Code(502, _M.COMPATIBILITY),
        "layout_mismatch": Code(502, _M.COMPATIBILITY),
        "wire_version_unsupported": Code(502, _M.COMPATIBILITY),
        "lease_unknown": Code(502, _M.MISS),
        "lease_expired": Code(502, _M.MISS),
        "stale_epoch": Code(502, _M.MISS),
        "transfer_cancelled": Code(502, _M.MISS),
        "setup_timeout": Code(504, _M.TIMEOUT),
        "queue_timeout": Code(504, _M.TIMEOUT),
        "transfer_stalled": Code(504, _M.TIMEOUT),
        "transfer_timeout": Code(504, _M.TIMEOUT),
        "verify_timeout": Code(504, _M.TIMEOUT),
        "request_timeout": Code(504, _M.TIMEOUT),
        # overload
        "store_full": Code(503, _M.OVERLOAD),
        "over_reservation": Code(502, _M.OVERLOAD),
        "queue_full": Code(503, _M.OVERLOAD),
        "draining": Code(503, _M.OVERLOAD),
        "no_worker": Code(503),
        "fallback_exhausted": Code(503),
    }
)


class FarfillError(Exception):
    """An error with a stable code.

    Args:
        code: a key of `CODES`.
        message: one sentence that names what is wrong, with the values, and what to do about it.
        field: the configuration field, request parameter or fingerprint field at fault, if one is.
        retry_after_s: seconds after which another try makes sense, if known.
    """

    openai_type: ClassVar[str] = "server_error"

    def __init__(
        self, code: str, message: str, *, field: str | None = None, retry_after_s: float | None = None
    ) -> None:
        assert code in CODES, f"{code!r} is not in CODES"
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    @property
    def http_status(self) -> int:
        return CODES[self.code].http_status

    @property
    def failure_class(self) -> FailureClass | None:
        return CODES[self.code].failure_class

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}"

    def to_openai(self) -> dict[str, Any]:
        """The body of an OpenAI-style error response."""
        return {"error": {"message": self.message, "type": self.openai_type, "param": self.field, "code": self.code}}


class ConfigurationError(FarfillError):
    """The operator's: names the field and what is allowed."""

    openai_type = "configuration_error"


class ClientError(FarfillError):
    """The API caller's."""

    openai_type = "invalid_request_error"


class LocalProtocolError(FarfillError):
    """Ours: a bug in farfill."""

    def __init__(self, message: str) -> None:
        super().__init__("internal_error", message)


class PeerError(FarfillError):
    """The other side's: it broke the protocol, or is not who or what it must be."""


class OperationError(FarfillError):
    """It was tried and did not work; whoever asked may retry or fall back."""


class OverloadError(FarfillError):
    """There is no room now."""

    openai_type = "overloaded_error"


def error_from_openai(body: object, http_status: int) -> FarfillError:
    """Reads another farfill process's error response back into an error (the inverse of `to_openai`).

    A body that is not farfill's (a proxy's page, another engine's error) becomes `engine_failed` for a
    5xx and `invalid_request` for a 4xx, with the peer's own message.
    """
    error = body.get("error") if isinstance(body, dict) else None
    error = error if isinstance(error, dict) else {}
    code, param = error.get("code"), error.get("param")
    message = str(error.get("message") or (body if isinstance(body, str) else "") or f"HTTP {http_status}")[:2000]
    field = param if isinstance(param, str) else None
    if not (isinstance(code, str) and code in CODES):
        code = "engine_failed" if http_status >= 500 else "invalid_request"
    if CODES[code].failure_class is FailureClass.OVERLOAD or CODES[code].http_status == 503:
        return OverloadError(code, message, field=field)
    if CODES[code].http_status < 500:
        return ClientError(code, message, field=field)
    return OperationError(code, message, field=field)
