"""Blocking sockets of the data plane: their options, frames written in one call, frames read into place.

Not here: what a message means. The two ends of the data plane (`transfer.connections`, `store.connection`) share it.
"""

import contextlib
import socket
import struct
import zlib
from collections.abc import Callable
from typing import Final, Generic

from farfill.errors import OperationError
from farfill.transfer.frames import FrameDecoder, MessageT

# A peer that moves no byte for so long in the middle of a frame is gone. Also how often an idle wait is looked at.
SILENCE_S: Final = 20
_SOCKET_BUFFER_BYTES: Final = 4 * 1024**2  # the kernel clips it to its own limit


def tune(sock: socket.socket) -> None:
    """No delay for small frames, large buffers for long links, and an end to every wait on a dead peer."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
    # Timeouts of the kernel, not of Python: Python's would make each call a poll and a call.
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", SILENCE_S, 0))
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)


def shut_down(sock: socket.socket) -> None:
    """Wakes whoever reads from or writes to the socket, in any thread."""
    with contextlib.suppress(OSError):  # not connected any more: then nobody waits
        sock.shutdown(socket.SHUT_RDWR)


def receive_exactly(sock: socket.socket, count: int) -> bytes:
    """`count` bytes. Raises OSError (also TimeoutError), or OperationError `connection_lost` at the stream's end."""
    data = bytearray(count)
    view, filled = memoryview(data), 0
    while filled < count:
        got = sock.recv_into(view[filled:])
        if got == 0:
            raise OperationError("connection_lost", "the peer closed the connection while it was being set up")
        filled += got
    return bytes(data)


def send_frame(sock: socket.socket, head: bytes, payload: memoryview | None) -> None:
    """Writes head and payload with as few calls as the kernel allows, and no copy. Raises OSError."""
    if payload is None:
        sock.sendall(head)
        return
    sent = sock.sendmsg([head, payload])
    if sent < len(head):
        sock.sendall(memoryview(head)[sent:])
        sent = len(head)
    if sent < len(head) + payload.nbytes:
        sock.sendall(payload[sent - len(head) :])


class FrameReader(Generic[MessageT]):
    """Reads one connection's frames, in one thread.

    Args:
        may_stay: asked each `SILENCE_S` while nothing comes between frames; False ends the connection.
    """

    def __init__(self, sock: socket.socket, decoder: FrameDecoder[MessageT], may_stay: Callable[[], bool]) -> None:
        self._sock = sock
        self._decoder: FrameDecoder[MessageT] = decoder
        self._may_stay = may_stay

    def read_message(self) -> MessageT | None:
        """The next message; None where the stream ends between frames, or `may_stay` says no.

        Raises:
            PeerError: a violation. OperationError: `connection_lost` within a frame. OSError: the socket's.
        """
        while True:
            count = self._read()
            if count == 0:
                return None
            message = self._decoder.received(count)
            if message is not None:
                return message

    def read_payload(self, payload: memoryview, checksum: bool) -> int:
        """Fills `payload` with what follows the last message; its CRC-32, or 0 where not asked for."""
        self._decoder.place(payload)
        crc, filled = 0, 0
        while filled < payload.nbytes:
            count = self._read()
            if checksum:  # piece by piece, while the bytes are in the cache
                crc = zlib.crc32(payload[filled : filled + count], crc)
            filled += count
            self._decoder.received(count)
        return crc

    def _read(self) -> int:
        while True:
            try:
                count = self._sock.recv_into(self._decoder.next_buffer())
            except BlockingIOError:  # the kernel's timeout
                if not self._decoder.is_between_frames:
                    raise OperationError("connection_lost", f"no byte for {SILENCE_S} s within a frame") from None
                if not self._may_stay():
                    return 0
                continue
            if count == 0 and not self._decoder.is_between_frames:
                raise OperationError("connection_lost", "the connection ended within a frame")
            return count
