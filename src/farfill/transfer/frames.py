"""The data plane's bytes: attach records, and frames in and out. A sans-I/O core; it holds no socket and no payload.

    connection = attach record (client) | attach reply (server) | frames, both ways
    frame      = prefix (magic, header size) | header (msgpack, one message) | MAC (16 bytes) | payload, raw
    MAC        = first 16 bytes of HMAC-SHA256(key of the direction, sequence number | header size | header)

Rule 1: the decoder says into which memory the next bytes go; a payload goes to the caller's own, untouched.
Rule 2: every size that came from the network passes `check_size` before anything is allocated by it.
Rule 3: sequence numbers are counted, not sent; a frame that is lost, repeated, moved or altered fails its MAC.
Rule 4: after any violation the decoder is of no more use, and the connection is closed.

The payload is not under the MAC: chunks are sealed end to end, and carry a CRC-32 against damage on the way.
"""

import hmac
import secrets
import struct
from enum import Enum
from typing import Final, Generic, TypeVar

import msgspec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from farfill.errors import LocalProtocolError, PeerError
from farfill.kv.limits import check_size
from farfill.store.protocol import CHUNK_BYTES_MAX, ClientMessage, Message, ServerMessage, payload_bytes_of

# A bitmap of all chunks is 32 KiB; everything else is under 2 KiB.
HEADER_BYTES_MAX: Final = 40 * 1024
MAC_BYTES: Final = 16
KEY_BYTES: Final = 32
SESSION_ID_BYTES: Final = 16
NONCE_BYTES: Final = 16

_PREFIX: Final = struct.Struct(">HH")
_FRAME_MAGIC: Final = 0xFA17
_ATTACH_MAGIC: Final = b"farfill1"
ATTACH_BYTES: Final = len(_ATTACH_MAGIC) + SESSION_ID_BYTES + NONCE_BYTES + MAC_BYTES
ATTACH_REPLY_BYTES: Final = len(_ATTACH_MAGIC) + 1 + MAC_BYTES

MessageT = TypeVar("MessageT", ClientMessage, ServerMessage)


class AttachStatus(Enum):
    ACCEPTED = 0
    UNKNOWN_SESSION = 1  # not known (any more), or its MAC is wrong: ask for another one
    REFUSED = 2  # too many connections, or a nonce that was used


class Keys:
    """Both directions' MAC keys of one connection: HKDF-SHA256 over the session key, salted with the client's nonce."""

    __slots__ = ("client", "server")

    def __init__(self, session_key: bytes, nonce: bytes) -> None:
        self.client = _derive(session_key, nonce, b"farfill data client")
        self.server = _derive(session_key, nonce, b"farfill data server")

    def __repr__(self) -> str:
        return "Keys(...)"


def _derive(session_key: bytes, nonce: bytes, info: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=nonce, info=info).derive(session_key)


def _mac(key: bytes, *parts: bytes | memoryview) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")[:MAC_BYTES]


# ---- attaching


def new_nonce() -> bytes:
    """16 random bytes for one connection."""
    return secrets.token_bytes(NONCE_BYTES)


def encode_attach(session_id: str, session_key: bytes, nonce: bytes) -> bytes:
    """The client's first bytes. `session_id` is 32 hex digits."""
    body = _ATTACH_MAGIC + bytes.fromhex(session_id) + nonce
    if len(body) + MAC_BYTES != ATTACH_BYTES:
        raise LocalProtocolError("a session id has 32 hex digits, a nonce 16 bytes")
    return body + _mac(session_key, b"attach", body)


def decode_attach(record: bytes | bytearray) -> tuple[str, bytes]:
    """(session id, nonce) of an attach record whose MAC is yet to be checked by `attach_holds`.

    Raises:
        PeerError: `protocol_violation`, for other bytes than ours.
    """
    if len(record) != ATTACH_BYTES or not record.startswith(_ATTACH_MAGIC):
        raise PeerError("protocol_violation", "the connection does not begin with an attach record")
    start = len(_ATTACH_MAGIC)
    middle = start + SESSION_ID_BYTES
    return bytes(record[start:middle]).hex(), bytes(record[middle : middle + NONCE_BYTES])


def attach_holds(record: bytes | bytearray, session_key: bytes) -> bool:
    """Whether the record was made by one who has the session's key."""
    return hmac.compare_digest(_mac(session_key, b"attach", bytes(record[:-MAC_BYTES])), bytes(record[-MAC_BYTES:]))


def encode_attach_reply(status: AttachStatus, record: bytes | bytearray, session_key: bytes | None) -> bytes:
    """The server's first bytes. Without a session there is no key, and the MAC is zero."""
    body = _ATTACH_MAGIC + bytes([status.value])
    mac = bytes(MAC_BYTES) if session_key is None else _mac(session_key, b"reply", body, bytes(record))
    return body + mac


def decode_attach_reply(reply: bytes | bytearray, record: bytes, session_key: bytes) -> AttachStatus:
    """What the server said to our attach record. Only an acceptance proves itself; a refusal is only a hint.

    Raises:
        PeerError: `protocol_violation`, for other bytes than ours, altered ones, or an acceptance by one who has not
            the session's key.
    """
    if len(reply) != ATTACH_REPLY_BYTES or not reply.startswith(_ATTACH_MAGIC):
        raise PeerError("protocol_violation", "the store does not answer with an attach reply")
    try:
        status = AttachStatus(reply[len(_ATTACH_MAGIC)])
    except ValueError:
        raise PeerError("protocol_violation", "the store's attach reply has an unknown status") from None
    if status is AttachStatus.ACCEPTED:
        expected = encode_attach_reply(status, record, session_key)
        if not hmac.compare_digest(expected, bytes(reply)):
            raise PeerError("protocol_violation", "the store's attach reply does not prove the session's key")
    return status


# ---- frames


class FrameEncoder:
    """Makes the bytes that go before a payload. One per direction of a connection; frames go out in call order."""

    __slots__ = ("_encoder", "_key", "_sequence")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sequence = 0
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: Message) -> bytes:
        """Prefix, header and MAC; `payload_bytes_of(message)` bytes of payload must follow."""
        header = self._encoder.encode(message)
        if len(header) > HEADER_BYTES_MAX:
            raise LocalProtocolError(f"a frame header of {len(header)} bytes is over {HEADER_BYTES_MAX}")
        prefix = _PREFIX.pack(_FRAME_MAGIC, len(header))
        mac = _mac(self._key, self._sequence.to_bytes(8, "big"), prefix, header)
        self._sequence += 1
        return prefix + header + mac


class _Part(Enum):
    PREFIX = "prefix"
    HEADER = "header"
    PAYLOAD = "payload"
    PLACE = "place"  # waits for `place`
    BROKEN = "broken"


class FrameDecoder(Generic[MessageT]):
    """Turns bytes into messages. Use:

        memory = decoder.next_buffer()         # receive at least one byte into it
        message = decoder.received(count)      # a message, once its header is whole and true
        if message and payload_bytes_of(message): decoder.place(memory for the payload)
        ...next_buffer and received, until `is_between_frames`: the payload is whole

    Args:
        key: MAC key of the direction.
        messages: what the peer may say: `ClientMessage` or `ServerMessage`.
    """

    def __init__(self, key: bytes, messages: type[MessageT] | object) -> None:
        self._key = key
        self._decoder: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(messages)
        self._sequence = 0
        self._head = memoryview(bytearray(_PREFIX.size + HEADER_BYTES_MAX + MAC_BYTES))
        self._part = _Part.PREFIX
        self._target = self._head[: _PREFIX.size]
        self._filled = 0
        self._payload_bytes = 0

    @property
    def is_between_frames(self) -> bool:
        """No byte of a further frame has come. An end of the stream anywhere else is a truncation."""
        return self._part is _Part.PREFIX and self._filled == 0

    def next_buffer(self) -> memoryview:
        """Where the next bytes go; never empty."""
        if self._part in (_Part.PLACE, _Part.BROKEN):
            raise LocalProtocolError(f"next_buffer in state {self._part.value}")
        return self._target[self._filled :]

    def place(self, payload: memoryview) -> None:
        """Gives the memory, of exactly the payload's size, into which the announced payload goes."""
        if self._part is not _Part.PLACE or payload.nbytes != self._payload_bytes:
            raise LocalProtocolError("place: no payload is announced, or not of this size")
        self._enter(_Part.PAYLOAD, payload.cast("B"))

    def received(self, count: int) -> MessageT | None:
        """`count` bytes have been written to the start of `next_buffer()`.

        Raises:
            PeerError: `protocol_violation` or `frame_too_large`; the connection must be closed.
        """
        if not 0 < count <= len(self._target) - self._filled:
            raise LocalProtocolError(f"received {count} bytes into a buffer of {len(self._target) - self._filled}")
        self._filled += count
        if self._filled < len(self._target):
            return None
        try:
            return self._advance()
        except PeerError:
            self._part = _Part.BROKEN
            raise

    def _advance(self) -> MessageT | None:
        if self._part is _Part.PAYLOAD:
            self._enter(_Part.PREFIX, self._head[: _PREFIX.size])
            return None
        magic, header_bytes = _PREFIX.unpack(self._head[: _PREFIX.size])
        end = _PREFIX.size + header_bytes
        if self._part is _Part.PREFIX:
            if magic != _FRAME_MAGIC:
                raise PeerError("protocol_violation", "no frame begins here")
            check_size("frame header bytes", header_bytes, HEADER_BYTES_MAX, minimum=1)
            self._enter(_Part.HEADER, self._head[_PREFIX.size : end + MAC_BYTES])
            return None
        mac = _mac(self._key, self._sequence.to_bytes(8, "big"), self._head[:end])
        if not hmac.compare_digest(mac, self._head[end : end + MAC_BYTES]):
            raise PeerError("protocol_violation", f"frame {self._sequence} is altered, repeated or out of order")
        try:
            message = self._decoder.decode(self._head[_PREFIX.size : end])
        except msgspec.DecodeError as error:
            raise PeerError("protocol_violation", f"frame {self._sequence} cannot be read: {error}") from error
        self._sequence += 1
        self._payload_bytes = check_size("payload bytes", payload_bytes_of(message), CHUNK_BYTES_MAX)
        if self._payload_bytes:
            self._part = _Part.PLACE
        else:
            self._enter(_Part.PREFIX, self._head[: _PREFIX.size])
        return message

    def _enter(self, part: _Part, target: memoryview) -> None:
        self._part, self._target, self._filled = part, target, 0
