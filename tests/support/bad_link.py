"""A TCP proxy before a store's data port that cuts connections and flips bits where a test says."""

import socket
import threading
from collections.abc import Callable

from farfill.transfer.spec import StoreAddress


class Proxy:
    """Forwards TCP to a store's data port and does harm on the way.

    Args:
        cuts: after so many bytes from the client the n-th connection is cut; later ones are not.
        answer_cuts: the same for bytes from the store.
        flip_at: of the bytes from the client on the first connections, flip a bit at this offset.
        flip_answer_at: the same for bytes from the store.
        flips: how many connections are flipped.
    """

    def __init__(
        self,
        store: StoreAddress,
        *,
        cuts: tuple[int, ...] = (),
        answer_cuts: tuple[int, ...] = (),
        flip_at: int | None = None,
        flip_answer_at: int | None = None,
        flips: int = 1,
    ) -> None:
        self._target = (store.host, store.data_port)
        self._cuts, self._answer_cuts = list(cuts), list(answer_cuts)
        self._flip_at, self._flip_answer_at, self._flips = flip_at, flip_answer_at, flips
        self._lock = threading.Lock()
        self.connections = 0
        self.bytes_up = 0
        self.bytes_down = 0
        self.cuts_done = 0
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = replace_address(store, self._listener.getsockname()[1])
        self._is_stopped = False
        self._start(self._accept)

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name="test-proxy")
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            with self._lock:
                self._sockets += [client, server]
                self.connections += 1
                cut = self._cuts.pop(0) if self._cuts else None
                answer_cut = self._answer_cuts.pop(0) if self._answer_cuts else None
                is_flipped = self.connections <= self._flips
                flip = self._flip_at if is_flipped else None
                flip_answer = self._flip_answer_at if is_flipped else None
            pair = (client, server)
            self._start(lambda p=pair, c=cut, f=flip: self._pump(p[0], p[1], c, f, up=True))  # type: ignore[misc]
            self._start(lambda p=pair, c=answer_cut, f=flip_answer: self._pump(p[1], p[0], c, f, up=False))  # type: ignore[misc]

    def _pump(
        self, source: socket.socket, target: socket.socket, cut: int | None, flip: int | None, *, up: bool
    ) -> None:
        moved = 0
        try:
            while data := source.recv(16 * 1024):
                if cut is not None and moved + len(data) > cut:
                    target.sendall(data[: cut - moved])
                    with self._lock:
                        self.cuts_done += 1
                    break
                if flip is not None and moved <= flip < moved + len(data):
                    flipped = bytearray(data)
                    flipped[flip - moved] ^= 0x10
                    data = bytes(flipped)
                target.sendall(data)
                moved += len(data)
                with self._lock:
                    if up:
                        self.bytes_up += len(data)
                    else:
                        self.bytes_down += len(data)
        except OSError:
            return  # the other direction has closed it
        finally:
            for sock in (source, target):
                _close(sock)

    def stop(self) -> None:
        _close(self._listener)
        for sock in self._sockets:
            _close(sock)
        for thread in self._threads:
            thread.join()


def _close(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        sock.close()
        return
    sock.close()


def replace_address(store: StoreAddress, port: int) -> StoreAddress:
    return StoreAddress(store.instance, store.control_url, store.host, port)
