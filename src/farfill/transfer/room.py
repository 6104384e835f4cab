"""How many bytes of published chunks this process may hold that no store has yet: back-pressure on engines.

Not the store's ledger: that counts what stores hold for others.
"""

import threading
from collections.abc import Callable


class Room:
    """A bound with waiting. A chunk larger than the bound gets in when nothing else is."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._condition = threading.Condition()
        self._taken_bytes = 0

    @property
    def taken_bytes(self) -> int:
        with self._condition:
            return self._taken_bytes

    def take(self, amount_bytes: int, is_pointless: Callable[[], bool]) -> None:
        """Waits until it fits or `is_pointless` says that nobody needs it any more; takes it in either case."""
        with self._condition:
            self._condition.wait_for(
                lambda: self._taken_bytes == 0 or self._taken_bytes + amount_bytes <= self._bytes_max or is_pointless()
            )
            self._taken_bytes += amount_bytes

    def give_back(self, amount_bytes: int) -> None:
        with self._condition:
            self._taken_bytes -= amount_bytes
            assert self._taken_bytes >= 0
            self._condition.notify_all()

    def look_again(self) -> None:
        """Something that `is_pointless` depends on has changed."""
        with self._condition:
            self._condition.notify_all()
