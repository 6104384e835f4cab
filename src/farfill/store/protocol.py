"""What the store and its clients say to each other: data-plane messages, control requests, and their limits.

Not here: how a message becomes bytes (`transfer.frames`), who may say it and what it does (`store.machine`).
"""

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from farfill.kv import limits
from farfill.kv.sealing import SEAL_OVERHEAD_BYTES
from farfill.transfer.spec import StoreAddress

# What the kv layer allows, and the seal around it; the manifest and the closing record are chunks too. The bitmap of
# `Present` (32 KiB) follows from the number of chunks.
CHUNK_BYTES_MAX: Final = limits.CHUNK_BYTES_MAX + SEAL_OVERHEAD_BYTES
CHUNKS_MAX: Final = limits.CHUNKS_MAX + 2
TRANSFER_BYTES_MAX: Final = limits.TRANSFER_BYTES_MAX + CHUNKS_MAX * SEAL_OVERHEAD_BYTES + 2 * CHUNK_BYTES_MAX
NAME_CHARS_MAX: Final = 200  # identities and transfer ids
DETAIL_CHARS_MAX: Final = 500  # the sentence that goes with a code

# The identity of every peer where there is no TLS, which is allowed on loopback alone: it may do what any peer may.
# No certificate can carry it, for `tls.NAME_PATTERN` has no parentheses.
LOOPBACK: Final = "(loopback)"


class Put(msgspec.Struct, frozen=True, array_like=True, tag="put", forbid_unknown_fields=True):
    """Client: `payload_bytes` of sealed chunk follow. `checksum` is CRC-32 of the payload."""

    transfer_id: str
    epoch: int
    index: int
    payload_bytes: int
    checksum: int


class Get(msgspec.Struct, frozen=True, array_like=True, tag="get", forbid_unknown_fields=True):
    """Client: send me this chunk, now or as soon as it is there."""

    transfer_id: str
    epoch: int
    index: int


class Have(msgspec.Struct, frozen=True, array_like=True, tag="have", forbid_unknown_fields=True):
    """Client: which chunks does the store hold?"""

    transfer_id: str
    epoch: int


class Verified(msgspec.Struct, frozen=True, array_like=True, tag="verified", forbid_unknown_fields=True):
    """Client (consumer): I hold and have verified everything; the store may free it. Answered only if refused."""

    transfer_id: str
    epoch: int


class Stored(msgspec.Struct, frozen=True, array_like=True, tag="stored", forbid_unknown_fields=True):
    """Server: this chunk is in the store's hands, whole."""

    transfer_id: str
    epoch: int
    index: int


class Chunk(msgspec.Struct, frozen=True, array_like=True, tag="chunk", forbid_unknown_fields=True):
    """Server: `payload_bytes` of sealed chunk follow."""

    transfer_id: str
    epoch: int
    index: int
    payload_bytes: int
    checksum: int


class Present(msgspec.Struct, frozen=True, array_like=True, tag="present", forbid_unknown_fields=True):
    """Server: the chunks it holds (see `indices_in`). `verified`: the consumer has had them all and said so."""

    transfer_id: str
    epoch: int
    bitmap: bytes
    verified: bool = False


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused", forbid_unknown_fields=True):
    """Server: no. `request` is the tag of what was asked; `code` is one of `farfill.errors.CODES`."""

    transfer_id: str
    epoch: int
    request: str
    index: int | None
    code: str
    detail: str


ClientMessage = Put | Get | Have | Verified
ServerMessage = Stored | Chunk | Present | Refused
Message = ClientMessage | ServerMessage


def payload_bytes_of(message: Message) -> int:
    """Bytes of payload that follow the message."""
    return message.payload_bytes if isinstance(message, Put | Chunk) else 0


def bitmap_of(indices: Iterable[int]) -> bytes:
    """Bit i of the little-endian number is set where i is among the indices."""
    bits = 0
    for index in indices:
        bits |= 1 << index
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def indices_in(bitmap: bytes) -> Iterator[int]:
    """The indices of `bitmap_of`, ascending."""
    for position, byte in enumerate(bitmap):
        for bit in range(8):
            if byte >> bit & 1:
                yield position * 8 + bit


class Reserve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Control: hold `bytes` of staging for one transfer for `lease_s` seconds.

    Attributes:
        bytes: sealed bytes of all chunks, manifest and closing record included; an upper bound.
        chunks: number of chunks, manifest and closing record included; an upper bound.
        producer, consumer: identities (certificate common names) of the peers that may put and get.
    """

    transfer_id: str
    producer: str
    consumer: str
    bytes: int
    chunks: int
    lease_s: float


class Granted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The lease runs from now, on the store's monotonic clock, for `lease_s` seconds."""

    transfer_id: str
    epoch: int
    lease_s: float
    store: StoreAddress


class Renew(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Control: let the lease end `lease_s` seconds from now."""

    transfer_id: str
    epoch: int
    lease_s: float


class Renewed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Done."""

    transfer_id: str
    epoch: int
    lease_s: float


class Release(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Control: end the transfer, whatever its state; frees what it holds. Idempotent."""

    transfer_id: str
    epoch: int


class Released(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Done."""

    transfer_id: str
    epoch: int


class OpenSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Control: give me keys for data connections. `instance` is the store's life the caller expects."""

    instance: str
    wire_version: int


class Session(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys for data connections. `key` is 32 bytes; it travels over mutual TLS (or loopback) and is never logged."""

    session_id: str
    key: bytes
    expires_in_s: float

    def __repr__(self) -> str:
        return f"Session({self.session_id}, key=...)"


class LedgerSnapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Staging bytes: free + held + quarantined = total, after every event. The rest are counts."""

    total_bytes: int
    free_bytes: int
    held_bytes: int
    quarantined_bytes: int
    leases: int
    gets_parked: int


class StoreStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a store says of itself."""

    store: StoreAddress
    ledger: LedgerSnapshot
    draining: bool
