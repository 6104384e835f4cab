"""The store's buffers: under their handles while chunks are held, on a shelf to be used again afterwards.

Receiving into fresh pages runs at about half the speed. Not the ledger: what lies on the shelf is free memory, and is
kept under the ledger's free bytes.
"""

import threading

from farfill.store.events import ChunkHandle


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


class ChunkBuffers:
    """Which buffer is under which handle. Not thread-safe but for `shelf`: the store's mailbox calls it."""

    def __init__(self) -> None:
        self.shelf = BufferShelf()
        self._buffers: dict[ChunkHandle, memoryview] = {}
        self._from_shelf: set[ChunkHandle] = set()

    def __getitem__(self, handle: ChunkHandle) -> memoryview:
        return self._buffers[handle]

    def keep(self, handle: ChunkHandle, buffer: memoryview, *, is_from_shelf: bool) -> None:
        """`is_from_shelf`: nobody else keeps it, so that it may be used again."""
        self._buffers[handle] = buffer
        if is_from_shelf:
            self._from_shelf.add(handle)

    def drop(self, handle: ChunkHandle, free_bytes: int) -> None:
        """Nobody writes or reads it any more. There is none under the handle where its put was aborted."""
        buffer = self._buffers.pop(handle, None)
        if buffer is not None and handle in self._from_shelf:
            self._from_shelf.discard(handle)
            self.shelf.put_back(buffer, free_bytes)
