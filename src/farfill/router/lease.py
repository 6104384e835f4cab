"""The request's hold on staging at a store: asked, held, let go exactly once.

Not the store's side of it (`farfill.store.machine`), and not its renewal over HTTP (the gateway).
"""

from enum import StrEnum
from typing import Final

from farfill.errors import FailureClass, FarfillError

# Two renewals may be lost before the lease runs out.
RENEWALS_PER_LEASE: Final = 3


class LeaseStatus(StrEnum):
    NONE = "none"  # never asked for
    ASKED = "asked"
    ABANDONED = "abandoned"  # asked for, no longer wanted: a grant that still comes is released at once
    HELD = "held"
    GONE = "gone"  # released, lost, or never granted


class RequestLease:
    """Owned by one `RequestMachine`, which sends what this answers."""

    def __init__(self) -> None:
        self.status = LeaseStatus.NONE
        self.epoch = 0
        self._renew_at: float | None = None
        self._expires_at = 0.0
        self._renew_every_s = 0.0

    def ask(self) -> None:
        assert self.status is LeaseStatus.NONE, self.status
        self.status = LeaseStatus.ASKED

    def grant(self, epoch: int, lease_s: float, now: float) -> bool:
        """Takes the grant; False where it comes too late and must be released (`epoch` is set in both cases)."""
        assert self.status in (LeaseStatus.ASKED, LeaseStatus.ABANDONED), self.status
        self.epoch = epoch
        wanted = self.status is LeaseStatus.ASKED
        self.status = LeaseStatus.HELD
        self._extend(lease_s, now)
        return wanted

    def refuse(self) -> None:
        assert self.status in (LeaseStatus.ASKED, LeaseStatus.ABANDONED), self.status
        self.status = LeaseStatus.GONE

    def renewed(self, lease_s: float, now: float) -> None:
        if self.status is LeaseStatus.HELD:
            self._extend(lease_s, now)

    def not_renewed(self, error: FarfillError, now: float) -> bool:
        """True where the lease is lost with this; else another renewal follows."""
        if self.status is not LeaseStatus.HELD:
            return False
        if error.failure_class is FailureClass.MISS:
            self.status = LeaseStatus.GONE
            return True
        self._renew_at = now + self._renew_every_s
        return False

    def renewal_due(self, now: float) -> bool:
        """True once for each renewal that is due."""
        if self.status is LeaseStatus.HELD and self._renew_at is not None and now >= self._renew_at:
            self._renew_at = None
            return True
        return False

    def expired(self, now: float) -> bool:
        return self.status is LeaseStatus.HELD and now >= self._expires_at

    def let_go(self) -> bool:
        """The request needs it no more. True: the store must be told, and this is the only time it is."""
        if self.status is LeaseStatus.HELD:
            self.status = LeaseStatus.GONE
            return True
        if self.status is LeaseStatus.ASKED:
            self.status = LeaseStatus.ABANDONED
        return False

    @property
    def deadline(self) -> float | None:
        if self.status is not LeaseStatus.HELD:
            return None
        return self._expires_at if self._renew_at is None else min(self._renew_at, self._expires_at)

    def _extend(self, lease_s: float, now: float) -> None:
        self._expires_at = now + lease_s
        self._renew_every_s = lease_s / RENEWALS_PER_LEASE
        self._renew_at = now + self._renew_every_s
