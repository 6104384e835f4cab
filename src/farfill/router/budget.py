"""How many fallbacks a gateway affords, and which classes of failure deserve one.

Not here: when a request may fall back at all (`request`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from farfill.errors import FailureClass

Answer = Literal["local", "fail"]

# A cache that the decode side can't get is recomputed; a mismatch is the operator's to see, but recomputing is right
# in any case, for nothing of the failed transfer is used.
DEFAULT_ANSWERS: Final[Mapping[FailureClass, Answer]] = dict.fromkeys(FailureClass, "local")


@dataclass(frozen=True, slots=True)
class FallbackPolicy:
    """For each class of failure: `local` (recompute on the decode worker) or `fail` (tell the client)."""

    answers: Mapping[FailureClass, Answer] = field(default_factory=lambda: dict(DEFAULT_ANSWERS))

    def answer(self, failure_class: FailureClass) -> Answer:
        return self.answers.get(failure_class, "fail")


class FallbackBudget:
    """A token bucket, shared by all requests of a gateway: a dead link must not become a storm of local prefills.

    Args:
        burst: fallbacks that may come at once.
        per_s: fallbacks regained each second; 0: none ever.
    """

    def __init__(self, burst: float, per_s: float) -> None:
        assert burst >= 0
        assert per_s >= 0
        self._burst = float(burst)
        self._per_s = float(per_s)
        self._level = float(burst)
        self._at: float | None = None

    def take(self, now: float) -> bool:
        """Takes one fallback; False where there is none left (and takes nothing)."""
        self._refill(now)
        if self._level < 1.0:
            return False
        self._level -= 1.0
        return True

    def retry_after_s(self, now: float) -> float | None:
        """Seconds until there is one again; None: never."""
        self._refill(now)
        if self._level >= 1.0:
            return 0.0
        return (1.0 - self._level) / self._per_s if self._per_s > 0 and self._burst >= 1.0 else None

    def _refill(self, now: float) -> None:
        if self._at is not None and now > self._at:
            self._level = min(self._burst, self._level + (now - self._at) * self._per_s)
        self._at = now if self._at is None else max(self._at, now)
