"""The store's end of one data connection: a thread that reads requests, and one that writes answers.

Not here: any decision. Requests become events of the machine, effects become answers.
"""

import logging
import queue
import socket
import threading
from functools import partial
from typing import Final, assert_never

from farfill.errors import FarfillError
from farfill.store.answers import answer_to, refused
from farfill.store.events import (
    GetAsked,
    GetEnded,
    HaveAsked,
    OpId,
    PutAborted,
    PutBegan,
    Receive,
    Refuse,
    SendChunk,
    StopWriter,
    VerifiedReported,
)
from farfill.store.memory import MemoryStore, OpEffect
from farfill.store.protocol import ClientMessage, Get, Have, Put, ServerMessage, Verified
from farfill.transfer.frames import FrameDecoder, FrameEncoder, Keys
from farfill.transfer.sockets import SILENCE_S, FrameReader, send_frame, shut_down

_log = logging.getLogger(__name__)

# Longer than a client keeps an idle connection, so that it is the client who closes.
IDLE_S: Final = 300
# Asked and not yet answered on one connection: 16 ahead for each of 64 transfers that share it.
GETS_MAX: Final = 1024

_Item = tuple[ServerMessage, memoryview | None, OpId | None]


class DataConnection:
    """Serves one attached peer until its connection ends.

    Args:
        sock: attached and tuned; closed at the end.
        peer: proven identity.
        keys: MAC keys of both directions.
    """

    def __init__(self, sock: socket.socket, peer: str, keys: Keys, memory: MemoryStore) -> None:
        self._sock = sock
        self._peer = peer
        self._memory = memory
        self._encoder = FrameEncoder(keys.server)
        decoder: FrameDecoder[ClientMessage] = FrameDecoder(keys.client, ClientMessage)
        self._reader = FrameReader(sock, decoder, self._may_stay)
        self._answers: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._go_ahead: queue.SimpleQueue[Receive | Refuse | None] = queue.SimpleQueue()
        self._gets: set[OpId] = set()
        self._put: OpId | None = None
        self._idle_s = 0
        self._scratch = memoryview(bytearray(64 * 1024))

    def serve(self) -> None:
        """Runs in the caller's thread until the connection ends; leaves nothing behind."""
        writer = threading.Thread(target=self._write, name=f"farfill-store-write-{self._peer}", daemon=True)
        writer.start()
        try:
            while (message := self._reader.read_message()) is not None:
                self._idle_s = 0
                self._take(message)
        except (OSError, FarfillError) as error:
            _log.info("data connection of %s ended: %s", self._peer, error)
        finally:
            if self._put is not None:
                self._memory.post(PutAborted(self._put))
            shut_down(self._sock)
            self._answers.put(None)
            writer.join()
            for op in list(self._gets):
                self._memory.post(GetEnded(op))
            self._sock.close()

    def stop(self) -> None:
        """From any thread: ends the connection; `serve` returns soon."""
        shut_down(self._sock)
        self._go_ahead.put(None)

    def _may_stay(self) -> bool:
        self._idle_s += SILENCE_S
        return bool(self._gets) or self._idle_s < IDLE_S

    # ---- reading

    def _take(self, message: ClientMessage) -> None:
        match message:
            case Put():
                self._take_put(message)
            case Get():
                if len(self._gets) >= GETS_MAX:
                    self._answers.put((refused(message, "queue_full", f"{GETS_MAX} gets at once"), None, None))
                    return
                op = self._memory.begin(partial(self._answer, message))
                self._gets.add(op)
                self._memory.post(GetAsked(op, self._peer, message))
            case Have():
                op = self._memory.begin(partial(self._answer, message))
                self._memory.post(HaveAsked(op, self._peer, message))
            case Verified():
                op = self._memory.begin(partial(self._answer, message))
                self._memory.post(VerifiedReported(op, self._peer, message))
            case _:
                assert_never(message)

    def _take_put(self, message: Put) -> None:
        op = self._memory.begin(partial(self._answer, message))
        self._put = op
        self._memory.post(PutBegan(op, self._peer, message))
        go_ahead = self._go_ahead.get()
        if go_ahead is None:  # stopped while it waited
            raise OSError("the store closes the connection")
        if isinstance(go_ahead, Refuse):
            self._put = None
            self._skip(message.payload_bytes)
            self._answers.put((refused(message, go_ahead.code, go_ahead.detail), None, None))
            return
        if go_ahead.handle is None:
            checksum = self._skip(message.payload_bytes)
            self._put = None
            self._memory.post_received(op, checksum, None, None)
            return
        buffer = self._memory.shelf.take(message.payload_bytes)
        checksum = self._reader.read_payload(buffer, checksum=True)
        self._put = None
        self._memory.post_received(op, checksum, go_ahead.handle, buffer, is_from_shelf=True)

    def _skip(self, payload_bytes: int) -> int:
        """Takes a payload that nobody wants off the wire; its CRC-32."""
        if not payload_bytes:
            return 0
        if self._scratch.nbytes < payload_bytes:
            self._scratch = memoryview(bytearray(payload_bytes))
        return self._reader.read_payload(self._scratch[:payload_bytes], checksum=True)

    # ---- answering (in whichever thread the store's mailbox runs)

    def _answer(self, message: ClientMessage, effect: OpEffect, buffer: memoryview | None) -> None:
        if isinstance(effect, Receive):
            self._go_ahead.put(effect)
        elif isinstance(effect, StopWriter):
            shut_down(self._sock)
        elif isinstance(effect, Refuse) and isinstance(message, Put) and effect.op == self._put:
            self._go_ahead.put(effect)  # before its payload, which has to be skipped first
        else:
            answer = answer_to(message, effect)  # type: ignore[arg-type]
            if answer is None:
                return
            op = effect.op if isinstance(effect, SendChunk) else None
            if isinstance(effect, Refuse):
                self._gets.discard(effect.op)
            self._answers.put((answer, buffer, op))

    def _write(self) -> None:
        while (item := self._answers.get()) is not None:
            message, payload, op = item
            try:
                send_frame(self._sock, self._encoder.encode(message), payload)
            except OSError as error:
                _log.info("data connection of %s cannot be written to: %s", self._peer, error)
                shut_down(self._sock)
                return  # the gets that are left are ended by `serve`
            if op is not None:
                self._gets.discard(op)
                self._memory.post(GetEnded(op))
