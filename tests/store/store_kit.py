"""A client that speaks the store's data plane byte by byte."""

import contextlib
import socket

from farfill.kv.spec import WIRE_VERSION
from farfill.store.protocol import Message, OpenSession, ServerMessage, payload_bytes_of
from farfill.store.server import StoreServer
from farfill.transfer.frames import (
    ATTACH_REPLY_BYTES,
    AttachStatus,
    FrameDecoder,
    FrameEncoder,
    Keys,
    decode_attach_reply,
    encode_attach,
    new_nonce,
)

WAIT_S = 60.0  # an end to a hanging test; nothing is proved by it


class RawClient:
    """Everything by hand, so that it can be done wrongly."""

    def __init__(self, store: StoreServer, peer: str, nonce: bytes | None = None) -> None:
        self.session = store.open_session(peer, OpenSession(store.address.instance, WIRE_VERSION))
        self.nonce = nonce or new_nonce()
        self.sock = socket.create_connection((store.address.host, store.address.data_port), timeout=WAIT_S)
        self.status = self.attach()
        keys = Keys(self.session.key, self.nonce)
        self.encoder = FrameEncoder(keys.client)
        self.decoder: FrameDecoder[ServerMessage] = FrameDecoder(keys.server, ServerMessage)

    def attach(self) -> AttachStatus:
        record = encode_attach(self.session.session_id, self.session.key, self.nonce)
        self.sock.sendall(record)
        reply = b""
        while len(reply) < ATTACH_REPLY_BYTES:
            piece = self.sock.recv(ATTACH_REPLY_BYTES - len(reply))
            assert piece, "the store closed the connection"
            reply += piece
        return decode_attach_reply(reply, record, self.session.key)

    def frame(self, message: Message, payload: bytes = b"") -> bytes:
        return self.encoder.encode(message) + payload

    def say(self, message: Message, payload: bytes = b"") -> None:
        self.sock.sendall(self.frame(message, payload))

    def hear(self) -> tuple[Message, bytes]:
        message: Message | None = None
        while message is None:
            message = self.decoder.received(self._read())
        payload = bytearray(payload_bytes_of(message))
        if payload:
            self.decoder.place(memoryview(payload))
            while not self.decoder.is_between_frames:
                self.decoder.received(self._read())
        return message, bytes(payload)

    def _read(self) -> int:
        count = self.sock.recv_into(self.decoder.next_buffer())
        assert count, "the store closed the connection"
        return count

    def is_closed_by_store(self) -> bool:
        """Waits for the end of the stream; what comes before it is nobody's matter."""
        with contextlib.suppress(ConnectionResetError):
            while self.sock.recv(4096):
                pass
        return True
