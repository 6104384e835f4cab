"""Buffers for arriving chunks, used again: receiving into fresh pages runs at about half the speed.

Not the ledger: what lies here is free memory, and the store keeps it under the ledger's free bytes.
"""

import threading


class BufferShelf:
    """Buffers by their exact size; a model's chunks have few sizes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: dict[int, list[memoryview]] = {}
        self._lying_bytes = 0

    @property
    def lying_bytes(self) -> int:
        with self._lock:
            return self._lying_bytes

    def take(self, size_bytes: int) -> memoryview:
        """A buffer of that size; what is in it means nothing."""
        with self._lock:
            buffers = self._buffers.get(size_bytes)
            if buffers:
                self._lying_bytes -= size_bytes
                return buffers.pop()
        return memoryview(bytearray(size_bytes))

    def put_back(self, buffer: memoryview, lying_bytes_max: int) -> None:
        """Nobody reads or writes `buffer` any more. It is dropped where it would make more than that many bytes."""
        with self._lock:
            if self._lying_bytes + buffer.nbytes <= lying_bytes_max:
                self._lying_bytes += buffer.nbytes
                self._buffers.setdefault(buffer.nbytes, []).append(buffer)

    def trim(self, lying_bytes_max: int) -> None:
        """Drops buffers, the largest first, until no more than that many bytes lie here."""
        with self._lock:
            for size_bytes in sorted(self._buffers, reverse=True):
                buffers = self._buffers[size_bytes]
                while buffers and self._lying_bytes > lying_bytes_max:
                    buffers.pop()
                    self._lying_bytes -= size_bytes
                if not buffers:
                    del self._buffers[size_bytes]
