"""What became of each transfer here, kept for a while so that the gateway can ask. No transfer is decided here.

vLLM's own API says neither that a cache has come nor why it has not, so the gateway learns it here.
"""

import asyncio
import threading
from collections import OrderedDict
from typing import Any, Final, Literal

import msgspec

from farfill.errors import FarfillError

Direction = Literal["sent", "received"]
State = Literal["running", "done", "failed"]

# Those that ended last. A gateway asks while the request is under way, so a few thousand cover minutes of traffic.
_KEPT_MAX: Final = 4096


class TransferResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """One end of a transfer.

    Attributes:
        kv_bytes: plaintext bytes of cache. transfer_bytes: sealed bytes, repeats included.
        seconds: from its beginning here to its end.
        cached_tokens: of the prefix, that the prefill side found in its own cache.
        code, message: of the error, where `state` is "failed".
    """

    transfer_id: str
    direction: Direction
    state: State
    kv_bytes: int = 0
    transfer_bytes: int = 0
    seconds: float = 0.0
    cached_tokens: int = 0
    code: str = ""
    message: str = ""


def failed(transfer_id: str, direction: Direction, error: FarfillError) -> TransferResult:
    return TransferResult(transfer_id, direction, "failed", code=error.code, message=error.message)


class Results:
    """Written by the engine's and the transfers' threads, read on the control API's event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: OrderedDict[tuple[str, Direction], TransferResult] = OrderedDict()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed: set[asyncio.Future[Any]] = set()

    def serve_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """`ended` may be awaited on this loop from now on; before, and on others, it may not."""
        self._loop = loop

    def put(self, result: TransferResult) -> bool:
        """Keeps the first end of a transfer; what comes after it changes nothing. Whether this one was kept."""
        key = (result.transfer_id, result.direction)
        with self._lock:
            known = self._results.get(key)
            if known is not None and known.state != "running":
                return False
            self._results[key] = result
            self._results.move_to_end(key)
            while len(self._results) > _KEPT_MAX:
                self._results.popitem(last=False)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)
        return True

    def get(self, transfer_id: str, direction: Direction) -> TransferResult | None:
        with self._lock:
            return self._results.get((transfer_id, direction))

    async def ended(self, transfer_id: str, direction: Direction, wait_s: float) -> TransferResult | None:
        """The result once it is not "running", or as it is after `wait_s` seconds; None: nothing is known of it."""
        try:
            async with asyncio.timeout(wait_s):
                while (result := self.get(transfer_id, direction)) is None or result.state == "running":
                    changed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                    self._changed.add(changed)
                    try:
                        await changed
                    finally:
                        self._changed.discard(changed)
        except TimeoutError:
            return self.get(transfer_id, direction)
        return result

    def _wake(self) -> None:
        for changed in self._changed:
            if not changed.done():
                changed.set_result(None)
