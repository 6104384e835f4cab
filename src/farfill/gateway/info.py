"""What a worker says of itself at `GET /farfill/v1/info`, read and checked. Not how often it is asked (`fleet`)."""

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from farfill.errors import PeerError
from farfill.kv.fingerprint import Fingerprint, digest, fingerprint_from_builtins
from farfill.kv.layout import layout_from_builtins
from farfill.kv.spec import WIRE_VERSION, CacheLayout
from farfill.transfer.spec import StoreAddress

INFO_PATH: Final = "/farfill/v1/info"
# The layout of a model with hundreds of layers is under 200 KB.
INFO_BYTES_MAX: Final = 4 * 1024**2


class _Wire(msgspec.Struct, frozen=True):
    """Unknown fields are allowed: a newer worker may say more."""

    name: str
    instance: str
    role: str
    site: str
    model: str
    max_model_len: int
    fingerprint: dict[str, Any]
    layout: Any
    store: StoreAddress | None = None
    engine: str = ""
    version: str = ""
    wire_version: int = WIRE_VERSION
    draining: bool = False
    connector: bool = False


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """`instance` is the identity of one life of the worker's process.

    `connector`: it is another server's engine with farfill's connector inside (`connector_legs` says what differs).
    """

    name: str
    instance: str
    role: str
    site: str
    engine: str
    model: str
    max_model_len: int
    fingerprint: Fingerprint
    fingerprint_digest: str
    layout: CacheLayout
    store: StoreAddress | None
    draining: bool
    connector: bool = False


def read_info(raw: bytes) -> WorkerInfo:
    """Raises PeerError: `protocol_violation` for what is no info, or whatever fingerprint and layout refuse."""
    try:
        wire = msgspec.json.decode(raw, type=_Wire)
    except msgspec.DecodeError as error:
        raise PeerError("protocol_violation", f"the worker's {INFO_PATH} is not as agreed: {error}") from None
    fingerprint = fingerprint_from_builtins(wire.fingerprint)
    return WorkerInfo(
        wire.name,
        wire.instance,
        wire.role,
        wire.site,
        wire.engine,
        wire.model,
        wire.max_model_len,
        fingerprint,
        digest(fingerprint),
        layout_from_builtins(wire.layout),
        wire.store,
        wire.draining,
        wire.connector,
    )
