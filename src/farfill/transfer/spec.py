"""What both legs of a request are told about its transfer: the `farfill` object inside `kv_transfer_params`.

The gateway makes one per transfer and sends it, over mutually authenticated TLS, to the prefill leg (with
`do_remote_decode`) and to the decode leg (with `do_remote_prefill`). It carries the transfer's key: it is
never logged and its `repr` shows no key.
"""

from typing import Any, Final

import msgspec

from farfill.errors import ClientError
from farfill.kv.spec import WIRE_VERSION, TransferId

KEY_BYTES: Final = 32


class StoreAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a store listens. `instance` is its identity (uuid of this process's life); host:port only an address.

    `control_url` is the base URL of its HTTP(S) control API; `host`, `data_port` its data plane.
    """

    instance: str
    control_url: str
    host: str
    data_port: int


class Clocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every wait has its own clock (seconds)."""

    queue_s: float = 30.0  # waiting for the engine or for a place before anything happens
    setup_s: float = 5.0  # connecting, session, reserving
    stall_s: float = 10.0  # chunks or answers are due and nothing comes
    produce_s: float = 60.0  # the store answers, and prefill has made no new chunk since the last one
    transfer_s: float = 300.0  # from reservation to VERIFIED, all in all
    verify_s: float = 10.0  # from the last chunk's arrival to VERIFIED


class TransferSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One transfer.

    Attributes:
        transfer_id: 128 random bits in hex, made by the gateway.
        epoch: granted by the store with the lease; a request that carries another one is refused.
        store: where the chunks go and come from.
        producer, consumer: worker instances that may put and get.
        prefix_tokens: tokens whose cache travels: prompt tokens minus one (decode computes the last one).
        chunk_tokens: the token grid; both sides derive the same chunks from it.
        key: 32 bytes, AES-256-GCM master of this transfer; each chunk's own key is derived from it.
        clocks: the waits.
    """

    transfer_id: TransferId
    epoch: int
    store: StoreAddress
    producer: str
    consumer: str
    prefix_tokens: int
    chunk_tokens: int
    key: bytes
    clocks: Clocks = Clocks()
    wire_version: int = WIRE_VERSION

    def __repr__(self) -> str:
        return f"TransferSpec({self.transfer_id}, epoch={self.epoch}, prefix_tokens={self.prefix_tokens}, key=...)"


def to_kv_transfer_params(spec: TransferSpec, *, leg: str) -> dict[str, Any]:
    """The JSON value for a leg's request body. `leg`: "prefill" or "decode"."""
    assert leg in ("prefill", "decode")
    return {
        "do_remote_decode": leg == "prefill",
        "do_remote_prefill": leg == "decode",
        "farfill": msgspec.to_builtins(spec),
    }


def from_kv_transfer_params(params: object) -> tuple[str, TransferSpec] | None:
    """Reads a request's `kv_transfer_params`: (leg, spec), or None where the request asks for no transfer.

    Raises:
        ClientError: `invalid_request`, naming the field, for anything malformed.
    """
    if params is None:
        return None
    if not isinstance(params, dict):
        raise ClientError("invalid_request", "kv_transfer_params must be an object", field="kv_transfer_params")
    produce, consume = params.get("do_remote_decode", False), params.get("do_remote_prefill", False)
    if not produce and not consume:
        return None
    if bool(produce) == bool(consume):
        raise ClientError(
            "invalid_request",
            "kv_transfer_params must set exactly one of do_remote_decode and do_remote_prefill",
            field="kv_transfer_params",
        )
    try:
        spec = msgspec.convert(params.get("farfill"), TransferSpec)
    except msgspec.ValidationError as error:
        raise ClientError(
            "invalid_request", f"kv_transfer_params.farfill: {error}", field="kv_transfer_params.farfill"
        ) from error
    if len(spec.key) != KEY_BYTES:
        raise ClientError(
            "invalid_request", f"the transfer key must have {KEY_BYTES} bytes", field="kv_transfer_params.farfill.key"
        )
    if spec.prefix_tokens < 1 or spec.chunk_tokens < 1 or spec.epoch < 1:
        raise ClientError(
            "invalid_request",
            "prefix_tokens, chunk_tokens and epoch must be at least 1",
            field="kv_transfer_params.farfill",
        )
    return ("prefill" if produce else "decode"), spec
