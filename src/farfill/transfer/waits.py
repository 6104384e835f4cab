"""When a transfer's waits began: what sender and receiver measure their clocks from. The rules are their own."""

from dataclasses import dataclass

from farfill.transfer.spec import Clocks


@dataclass(slots=True)
class Waits:
    """Times on the driver's clock.

    Attributes:
        started_at: of `Started`; setup and the whole run from it.
        progress_at: of the last progress; the stall clock runs from it. None: not yet running.
        produced_at: of the last new data chunk; the produce clock runs from it. None: not yet running.
        all_here_at: of the last arrival; the verify clock runs from it. None: something is still to come.
    """

    clocks: Clocks
    started_at: float | None = None
    progress_at: float | None = None
    produced_at: float | None = None
    all_here_at: float | None = None

    @property
    def setup_ends(self) -> float:
        assert self.started_at is not None, "Started comes first"
        return self.started_at + self.clocks.setup_s

    @property
    def transfer_ends(self) -> float:
        assert self.started_at is not None, "Started comes first"
        return self.started_at + self.clocks.transfer_s

    @property
    def stall_ends(self) -> float | None:
        return None if self.progress_at is None else self.progress_at + self.clocks.stall_s

    @property
    def probe_due(self) -> float | None:
        """Half of the stall clock: early enough for the answer to count."""
        return None if self.progress_at is None else self.progress_at + self.clocks.stall_s / 2

    @property
    def produce_ends(self) -> float | None:
        return None if self.produced_at is None else self.produced_at + self.clocks.produce_s

    @property
    def verify_ends(self) -> float | None:
        return None if self.all_here_at is None else self.all_here_at + self.clocks.verify_s
