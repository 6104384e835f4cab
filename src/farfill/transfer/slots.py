"""Which connection slots are open, and when a closed one is tried again: the part sender and receiver share.

Not a machine by itself: `sender` and `receiver` feed it and carry its effects out with theirs.
"""

from dataclasses import dataclass

from farfill.transfer.events import FATAL_CODES, ConnectionId, LinkSettings, OpenConnection


@dataclass(slots=True)
class _Slot:
    """`attempts` in a row without progress; `retry_at` None: open, opening, or given up."""

    attempts: int = 0
    connection: ConnectionId | None = None
    retry_at: float | None = None
    is_opening: bool = False


class ConnectionSlots:
    """Slots with spaced retries that stop."""

    def __init__(self, settings: LinkSettings) -> None:
        assert settings.slots >= 1
        assert 0.0 <= settings.jitter <= 1.0
        self._settings = settings
        self._slots = [_Slot() for _ in range(settings.slots)]
        self.last_code = "peer_unreachable"
        self.last_detail = "no connection could be opened"
        self.was_open = False

    @property
    def open_connections(self) -> list[ConnectionId]:
        """In slot order."""
        return [slot.connection for slot in self._slots if slot.connection is not None]

    @property
    def is_exhausted(self) -> bool:
        """Nothing open, nothing opening, nothing to come."""
        return all(s.connection is None and not s.is_opening and s.retry_at is None for s in self._slots)

    @property
    def deadline(self) -> float | None:
        return min((slot.retry_at for slot in self._slots if slot.retry_at is not None), default=None)

    def open_all(self) -> list[OpenConnection]:
        for slot in self._slots:
            slot.is_opening = True
        return [OpenConnection(number) for number in range(len(self._slots))]

    def open_due(self, now: float) -> list[OpenConnection]:
        effects = []
        for number, slot in enumerate(self._slots):
            if slot.retry_at is not None and slot.retry_at <= now:
                slot.retry_at, slot.is_opening = None, True
                effects.append(OpenConnection(number))
        return effects

    def opened(self, number: int, connection: ConnectionId) -> None:
        slot = self._slots[number]
        slot.connection, slot.is_opening, slot.retry_at = connection, False, None
        self.was_open = True

    def refused(self, number: int, code: str, detail: str, now: float) -> None:
        slot = self._slots[number]
        if slot.is_opening:
            slot.is_opening = False
            self._retry(slot, code, detail, now)

    def lost(self, connection: ConnectionId, code: str, detail: str, now: float) -> bool:
        """Whether it was one of ours."""
        for slot in self._slots:
            if slot.connection == connection:
                slot.connection = None
                self._retry(slot, code, detail, now)
                return True
        return False

    def progressed(self) -> None:
        """Something new was acknowledged or verified: attempts count from nothing again."""
        for slot in self._slots:
            slot.attempts = 0

    def _retry(self, slot: _Slot, code: str, detail: str, now: float) -> None:
        self.last_code, self.last_detail = code, detail
        if code in FATAL_CODES or slot.attempts >= self._settings.retries_max:
            return
        slot.attempts += 1
        slot.retry_at = now + self._settings.backoff_of(slot.attempts)
