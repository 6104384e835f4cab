"""What must hold after every event, whatever the faults: ARCHITECTURE.md's rules, checked from outside the machines.

The checkers look at what the drivers saw (messages, effects, bytes), not at what a machine believes; where they ask a
machine, it is for a figure that it exports. A checker never changes anything.

    ledger          free + held + quarantined = total; the buffers in hand fit into held + quarantined
    buffers         no buffer is dropped or filled while somebody else writes or reads it, none is dropped twice
    epoch           nothing is stored or served under an epoch other than the lease's
    re-put          a chunk the store has acknowledged, or said to have, is not put again; after a cut it is asked first
    verified        only VERIFIED decodes, and then every byte of the cache is the prompt's
    output          what the client has is at every moment a prefix of the reference, and the whole of it when complete
    remote          a response that says remote moved bytes, and so did the worker
    fallback        starts before the head or never; is named in the header; its budget is kept
    terminal        one outcome for each request, nothing to the client after it, an end of the response before it
    excuse          a request that got nothing had a reason: its policy, its budget, or no decode worker left
    complete        a prefill leg is done when the store has acknowledged every chunk
    lease           each grant that the gateway got is released once or was lost; none is held at the end
    liveness        every request ends within its clocks; after healing every store is empty and every wait is over
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from farfill.router.messages import RecordOutcome
from farfill.router.policy import Path
from farfill.store.protocol import LedgerSnapshot


@dataclass(frozen=True, slots=True)
class Violation:
    at_s: float
    checker: str
    what: str

    def __str__(self) -> str:
        return f"{self.at_s:.6f} s [{self.checker}] {self.what}"


@dataclass(slots=True)
class RequestRecord:
    """What the outside saw of one request.

    Attributes:
        reference: the tokens that a single process would answer.
        head: path, reason and bytes that the response's head says.
        lost: its gateway was killed; nobody can answer it.
    """

    name: str
    arrived_s: float
    reference: tuple[int, ...]
    head: tuple[Path, str, int] | None = None
    output: list[int] = field(default_factory=list)
    ended: str | None = None  # how the client's response ended: "complete", "error", "error event"
    outcome: RecordOutcome | None = None
    client_left: bool = False
    lost: bool = False
    grants: dict[tuple[str, int], str] = field(default_factory=dict)  # (transfer, epoch) -> held, released, lost
    lease_ends_s: float = 0.0  # as the gateway knows it


class Checkers:
    """Collects violations. `now` is set by whoever drives the world, before each event."""

    def __init__(self) -> None:
        self.now = 0.0
        self.violations: list[Violation] = []
        self.requests: dict[str, RequestRecord] = {}
        self.statistics: Counter[str] = Counter()
        self.moved_bytes: Counter[str] = Counter()  # chunk bytes opened, by transfer

    def count(self, what: str, amount: int = 1) -> None:
        self.statistics[what] += amount

    def require(self, holds: bool, checker: str, what: str) -> None:
        if not holds:
            self.violations.append(Violation(self.now, checker, what))

    # --- store ------------------------------------------------------------------------------------------------------

    def ledger(self, store: str, snapshot: LedgerSnapshot, buffers_bytes: int) -> None:
        parts = (snapshot.free_bytes, snapshot.held_bytes, snapshot.quarantined_bytes)
        self.require(min(parts) >= 0, "ledger", f"{store}: a negative part: {snapshot}")
        self.require(sum(parts) == snapshot.total_bytes, "ledger", f"{store}: {parts} is not {snapshot.total_bytes}")
        self.require(
            buffers_bytes <= snapshot.held_bytes + snapshot.quarantined_bytes,
            "ledger",
            f"{store}: {buffers_bytes} bytes of buffers, more than held and quarantined: {snapshot}",
        )

    def store_empty(self, store: str, snapshot: LedgerSnapshot, buffers: int, operations: int) -> None:
        """Long after healing."""
        self.require(snapshot.free_bytes == snapshot.total_bytes, "liveness", f"{store} keeps bytes: {snapshot}")
        self.require(snapshot.leases == 0, "liveness", f"{store} keeps leases: {snapshot}")
        self.require(snapshot.gets_parked == 0, "liveness", f"{store} keeps parked gets: {snapshot}")
        self.require(buffers == 0, "liveness", f"{store} keeps {buffers} buffers that no lease holds")
        self.require(operations == 0, "liveness", f"{store} has not answered {operations} operations")

    # --- transfer ---------------------------------------------------------------------------------------------------

    def verified(
        self, transfer: str, opened: Sequence[int], planned: int, differing: Sequence[int], is_closed: bool
    ) -> None:
        """A receiver says VERIFIED.

        Args:
            opened: the data chunks that its driver opened, of 1 to `planned`.
            differing: those whose bytes are not the prompt's.
            is_closed: the closing record names the tags of what was opened.
        """
        self.count("verified")
        self.require(
            list(opened) == list(range(1, planned + 1)),
            "verified",
            f"{transfer}: VERIFIED with chunks {list(opened)} of {planned} opened",
        )
        self.require(not differing, "verified", f"{transfer}: VERIFIED with foreign bytes in chunks {list(differing)}")
        self.require(is_closed, "verified", f"{transfer}: VERIFIED, and the closing record names other chunks")

    def decode_began(self, transfer: str, is_verified: bool) -> None:
        self.require(is_verified, "verified", f"{transfer}: decodes without being VERIFIED")

    # --- request ----------------------------------------------------------------------------------------------------

    def leg_started(self, record: RequestRecord, attempt: int) -> None:
        if attempt > 0:
            self.count("fallbacks")
            self.require(record.head is None, "fallback", f"{record.name}: a fallback after the head was sent")
        self.require(record.outcome is None, "terminal", f"{record.name}: a leg was started after the end")

    def head_sent(self, record: RequestRecord, path: Path, reason: str, transfer: str | None, kv_bytes: int) -> None:
        self._to_client(record)
        self.require(record.head is None, "terminal", f"{record.name}: two heads")
        record.head = (path, reason, kv_bytes)
        says_moved = path is not Path.LOCAL
        self.require(
            not says_moved or (kv_bytes > 0 and transfer is not None and self.moved_bytes[transfer] > 0),
            "remote",
            f"{record.name}: the head says {path} and {kv_bytes} bytes; the worker opened "
            f"{self.moved_bytes[transfer or '']}",
        )

    def forwarded(self, record: RequestRecord, token: int) -> None:
        self._to_client(record)
        self.require(record.head is not None, "verified", f"{record.name}: output before the head")
        record.output.append(token)
        self.require(
            tuple(record.output) == record.reference[: len(record.output)],
            "output",
            f"{record.name}: {record.output} is not the beginning of {record.reference}",
        )

    def response_ended(self, record: RequestRecord, how: str) -> None:
        self._to_client(record)
        self.require(record.ended is None, "terminal", f"{record.name}: the response ended twice")
        record.ended = how
        if how == "complete":
            self.require(
                tuple(record.output) == record.reference, "output", f"{record.name}: complete with {record.output} only"
            )
        self.require(
            (record.head is not None) == (how != "error"),
            "terminal",
            f"{record.name}: ended by {how} at head {record.head}",
        )

    def outcome(self, record: RequestRecord, outcome: RecordOutcome, is_excused: bool) -> None:
        self.require(record.outcome is None, "terminal", f"{record.name}: a second outcome, {outcome}")
        record.outcome = outcome
        self.count(f"outcome {outcome.state}")
        if outcome.state == "failed" and record.head is None:
            self.require(is_excused, "excuse", f"{record.name} failed with {outcome.code}, and need not have")
        if self.now >= record.lease_ends_s:
            self.lease_lost(record)
        held = [key for key, state in record.grants.items() if state == "held"]
        self.require(not held, "lease", f"{record.name} ended and did not release {held}")
        expected = {"done": "complete", "failed": "error event" if record.head else "error", "cancelled": None}
        self.require(
            record.ended == expected[outcome.state], "terminal", f"{record.name}: {outcome.state} after {record.ended}"
        )
        if outcome.state == "done":
            fell_back, shown = (
                bool(outcome.fallbacks),
                record.head is not None and record.head[1].startswith("fallback:"),
            )
            self.require(
                fell_back == shown, "fallback", f"{record.name}: head {record.head}, fallbacks {outcome.fallbacks}"
            )
            assert outcome.path is not None
            self.count(f"done {outcome.path.value}" + (" by fallback" if fell_back else ""))

    def granted(self, record: RequestRecord, transfer: str, epoch: int, lease_s: float) -> None:
        record.grants.setdefault((transfer, epoch), "held")
        record.lease_ends_s = self.now + lease_s

    def renewed(self, record: RequestRecord, lease_s: float) -> None:
        if self.now < record.lease_ends_s:  # later, the gateway has given it up already; the store reaps it
            record.lease_ends_s = self.now + lease_s

    def lease_lost(self, record: RequestRecord) -> None:
        for key, state in record.grants.items():
            if state == "held":
                record.grants[key] = "lost"

    def released(self, record: RequestRecord, transfer: str, epoch: int) -> None:
        state = record.grants.get((transfer, epoch))
        self.require(state == "held", "lease", f"{record.name}: releases a lease that is {state}")
        record.grants[transfer, epoch] = "released"

    def request_over(self, record: RequestRecord, must_be_done: bool) -> None:
        """Long after healing."""
        if record.lost:
            return
        self.require(record.outcome is not None, "liveness", f"{record.name} has never ended")
        held = [key for key, state in record.grants.items() if state == "held"]
        self.require(not held, "lease", f"{record.name} never released {held}")
        if must_be_done:
            ended = record.outcome and (record.outcome.state, record.outcome.code)
            self.require(ended == ("done", None), "liveness", f"{record.name} came after healing and ended as {ended}")

    def ended_in_time(self, record: RequestRecord, limit_s: float) -> None:
        self.require(
            self.now <= record.arrived_s + limit_s,
            "liveness",
            f"{record.name} took {self.now - record.arrived_s:.3f} s",
        )

    def _to_client(self, record: RequestRecord) -> None:
        self.require(record.outcome is None and record.ended is None, "terminal", f"{record.name}: spoke after its end")
