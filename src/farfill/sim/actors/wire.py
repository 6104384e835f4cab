"""What simulated processes say to each other beside the store's own protocol: legs, attaching, payloads. Pure data.

Not the real wire: no bytes, no framing, no HTTP. Where `store.protocol` or `transfer.spec` has the message, it is used.
"""

import zlib
from dataclasses import dataclass

from farfill.store.protocol import Chunk
from farfill.transfer.spec import TransferSpec


@dataclass(frozen=True, slots=True)
class Attach:
    """The first message of a data connection: who speaks."""

    peer: str


@dataclass(frozen=True, slots=True)
class Attached:
    """The store's answer."""


@dataclass(frozen=True, slots=True)
class Payload:
    """The sealed bytes that follow a `Put`."""

    data: bytes

    def __str__(self) -> str:
        return f"Payload of {len(self.data)} bytes, {zlib.crc32(self.data):08x}"


@dataclass(frozen=True, slots=True)
class ChunkFrame:
    """A `Chunk` and its sealed bytes."""

    message: Chunk
    data: bytes

    def __str__(self) -> str:
        return f"{self.message}, {zlib.crc32(self.data):08x}"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A control call's error."""

    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class PrefillLeg:
    spec: TransferSpec
    store: str
    prompt: tuple[int, ...]

    def __str__(self) -> str:
        return f"PrefillLeg {self.spec} through {self.store}"


@dataclass(frozen=True, slots=True)
class DecodeLeg:
    """`spec` and `store` None: prefill yourself. Not `streaming`: say nothing before the last token."""

    attempt: int
    prompt: tuple[int, ...]
    output_tokens: int
    streaming: bool
    spec: TransferSpec | None
    store: str | None

    def __str__(self) -> str:
        return f"DecodeLeg {self.attempt} {self.spec} through {self.store}"


@dataclass(frozen=True, slots=True)
class LegAccepted:
    pass


@dataclass(frozen=True, slots=True)
class LegStarted:
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class LegOutput:
    token: int


@dataclass(frozen=True, slots=True)
class LegDone:
    pass


@dataclass(frozen=True, slots=True)
class LegFailed:
    code: str
    detail: str
