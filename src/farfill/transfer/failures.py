"""From a stable code to the error that says whose fault it is. Not the codes themselves (`farfill.errors`)."""

from farfill.errors import (
    CODES,
    FailureClass,
    FarfillError,
    LocalProtocolError,
    OperationError,
    OverloadError,
    PeerError,
)

_PEERS_FAULT = {FailureClass.INTEGRITY, FailureClass.COMPATIBILITY}


def error_for(code: str, detail: str, retry_after_s: float | None = None) -> FarfillError:
    """The error of the class that fits the code. A code that is not ours came from a peer: `protocol_violation`."""
    if code not in CODES:
        return PeerError("protocol_violation", f"the peer gave an unknown code: {detail}")
    if code == "internal_error":
        return LocalProtocolError(detail)
    failure_class = CODES[code].failure_class
    if failure_class is FailureClass.OVERLOAD:
        return OverloadError(code, detail, retry_after_s=retry_after_s)
    if failure_class in _PEERS_FAULT or code == "peer_unauthenticated":
        return PeerError(code, detail)
    return OperationError(code, detail, retry_after_s=retry_after_s)
