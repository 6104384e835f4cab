"""Sealing one chunk: AES-256-GCM under a key of its own, bound to what the chunk is and to its transfer.

Not here: how peers come to share the transfer key (the legs carry it over mutual TLS), nor what is inside a chunk.

    sealed  = salt (32 bytes, random) | ciphertext | tag (16 bytes)
    key     = HKDF-SHA256(ikm = transfer key, salt = salt, info = identity), 32 bytes
    nonce   = twelve zero bytes: a key seals exactly once, for its salt is drawn anew at each sealing
    aad     = identity

Rule 1: the same key never meets the same nonce twice. Re-sealing a chunk draws a new salt, so it is a new key.
Rule 2: what a chunk is stands in its identity, so a chunk opens only in its own place, transfer and epoch.
"""

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from farfill.errors import LocalProtocolError, PeerError
from farfill.kv.spec import WIRE_VERSION, ChunkIndex, ChunkSpec, TransferId

KEY_BYTES: Final = 32
SALT_BYTES: Final = 32
TAG_BYTES: Final = 16
SEAL_OVERHEAD_BYTES: Final = SALT_BYTES + TAG_BYTES

_NONCE: Final = bytes(12)
_MAGIC: Final = b"farfill-chunk"
# index, kind, layer, token start, token stop: fixed width, big-endian, so that no two identities share an encoding.
_PLACE: Final = struct.Struct(">QBIQQ")
_NO_LAYER: Final = 0xFFFFFFFF


class ChunkKind(IntEnum):
    MANIFEST = 0
    ROWS = 1  # token rows of one layer
    STATE = 2  # exact-length state of one layer
    CLOSING = 3


@dataclass(frozen=True, slots=True)
class ChunkIdentity:
    """What a chunk is within its transfer. `layer` is None for the manifest and the closing record."""

    index: ChunkIndex
    kind: ChunkKind
    layer: int | None = None
    token_start: int = 0
    token_stop: int = 0


MANIFEST_IDENTITY: Final = ChunkIdentity(ChunkIndex(0), ChunkKind.MANIFEST)


def data_identity(chunk: ChunkSpec) -> ChunkIdentity:
    """The identity of a data chunk of a plan."""
    kind = ChunkKind.STATE if chunk.is_state else ChunkKind.ROWS
    return ChunkIdentity(chunk.index, kind, chunk.layer, chunk.token_start, chunk.token_stop)


def closing_identity(index: ChunkIndex) -> ChunkIdentity:
    """The identity of the closing record; `index` is the plan's `closing_index`."""
    return ChunkIdentity(index, ChunkKind.CLOSING)


class Sealer:
    """Seals and opens the chunks of one transfer. Holds nothing that changes: threads may share one.

    Args:
        key: the transfer key, 32 bytes.
        transfer_id, epoch: bound into every chunk.
        salts: gives 32 fresh bytes at each call; other than `os.urandom` only where a run must be repeatable.
    """

    __slots__ = ("_key", "_prefix", "_salts")

    def __init__(
        self, key: bytes, transfer_id: TransferId, epoch: int, *, salts: Callable[[int], bytes] = os.urandom
    ) -> None:
        if len(key) != KEY_BYTES:
            raise LocalProtocolError(f"a transfer key has {KEY_BYTES} bytes, not {len(key)}")
        name = transfer_id.encode()
        self._key = bytes(key)
        self._prefix = _MAGIC + struct.pack(">HHQ", WIRE_VERSION, len(name), epoch) + name
        self._salts = salts

    def __repr__(self) -> str:
        return "Sealer(key=...)"

    def seal(self, identity: ChunkIdentity, plaintext: bytes | bytearray | memoryview) -> bytearray:
        """Seals into a new buffer of `len(plaintext) + SEAL_OVERHEAD_BYTES` bytes."""
        sealed = bytearray(memoryview(plaintext).nbytes + SEAL_OVERHEAD_BYTES)
        self.seal_into(identity, plaintext, memoryview(sealed))
        return sealed

    def seal_into(
        self, identity: ChunkIdentity, plaintext: bytes | bytearray | memoryview, out: bytearray | memoryview
    ) -> bytes:
        """Seals into `out`, which has exactly `len(plaintext) + SEAL_OVERHEAD_BYTES` bytes; returns the tag."""
        source, target = _flat(plaintext), _flat(out)
        if len(target) != len(source) + SEAL_OVERHEAD_BYTES:
            raise LocalProtocolError(f"sealing {len(source)} bytes into a buffer of {len(target)}")
        salt = self._salts(SALT_BYTES)
        if len(salt) != SALT_BYTES:
            raise LocalProtocolError(f"the salt source gave {len(salt)} bytes instead of {SALT_BYTES}")
        associated = self._associated(identity)
        target[:SALT_BYTES] = salt
        self._cipher(salt, associated).encrypt_into(_NONCE, source, associated, target[SALT_BYTES:])
        return bytes(target[-TAG_BYTES:])

    def open_into(
        self, identity: ChunkIdentity, sealed: bytes | bytearray | memoryview, out: bytearray | memoryview
    ) -> bytes:
        """Opens into `out`, which has exactly the plaintext's size; returns the tag.

        On failure `out` holds nothing that may be used.

        Raises:
            PeerError: `chunk_corrupt`, if a single bit of it, its place, transfer, epoch, length or key is not right.
        """
        source, target = _flat(sealed), _flat(out)
        if len(source) != len(target) + SEAL_OVERHEAD_BYTES:
            raise PeerError(
                "chunk_corrupt",
                f"chunk {identity.index} has {len(source)} bytes; {len(target) + SEAL_OVERHEAD_BYTES} were expected",
            )
        associated = self._associated(identity)
        try:
            self._cipher(bytes(source[:SALT_BYTES]), associated).decrypt_into(
                _NONCE, source[SALT_BYTES:], associated, target
            )
        except InvalidTag:
            raise PeerError(
                "chunk_corrupt", f"chunk {identity.index} does not open: it was altered, or is not this transfer's"
            ) from None
        return bytes(source[-TAG_BYTES:])

    def open(self, identity: ChunkIdentity, sealed: bytes | bytearray | memoryview) -> tuple[bytearray, bytes]:
        """Opens a chunk whose length only its sealed form tells (manifest, closing record): (plaintext, tag).

        The caller has checked the length against `plan.sealed_bytes_max` before it took the bytes.

        Raises:
            PeerError: `chunk_corrupt`.
        """
        plaintext = bytearray(max(0, memoryview(sealed).nbytes - SEAL_OVERHEAD_BYTES))
        tag = self.open_into(identity, sealed, plaintext)
        return plaintext, tag

    def _associated(self, identity: ChunkIdentity) -> bytes:
        layer = _NO_LAYER if identity.layer is None else identity.layer
        return self._prefix + _PLACE.pack(
            identity.index, identity.kind, layer, identity.token_start, identity.token_stop
        )

    def _cipher(self, salt: bytes, info: bytes) -> AESGCM:
        return AESGCM(HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=salt, info=info).derive(self._key))


def tag_of(sealed: bytes | bytearray | memoryview) -> bytes:
    """A sealed chunk's tag: its last 16 bytes."""
    return bytes(memoryview(sealed)[-TAG_BYTES:])


def _flat(buffer: bytes | bytearray | memoryview) -> memoryview:
    return memoryview(buffer).cast("B")
