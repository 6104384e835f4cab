"""What the store machine remembers: leases, the chunks under them, and the ledger of staging bytes.

Not a machine and no policy: `store.machine` decides, these hold.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from farfill.store.events import ChunkHandle, OpId
from farfill.store.protocol import Reserve


class LeaseState(StrEnum):
    LIVE = "live"
    VERIFIED = "verified"  # the consumer has everything; bytes freed, the fact remembered until the deadline
    CANCELLED = "cancelled"  # released; remembered until the deadline
    EXPIRED = "expired"  # remembered for a while after the deadline


@dataclass(frozen=True, slots=True)
class StoredChunk:
    payload_bytes: int
    checksum: int


@dataclass(slots=True)
class Lease:
    """One transfer's reservation.

    Attributes:
        terms: what was reserved, and by whom (`owner`); the owner alone may renew and release.
        deadline_s: when it ends; once it has ended, when the memory of it goes.
        stored: whole chunks. writing: the one put that now fills each index. waiting: the newer put of the same
            index, which begins when the former writer is known stopped. parked: gets of chunks not yet there.
        accepted_bytes: of chunks stored or being written; never over `terms.bytes`.
    """

    terms: Reserve
    owner: str
    epoch: int
    deadline_s: float
    state: LeaseState = LeaseState.LIVE
    stored: dict[int, StoredChunk] = field(default_factory=dict)
    writing: dict[int, OpId] = field(default_factory=dict)
    waiting: dict[int, OpId] = field(default_factory=dict)
    parked: dict[int, list[OpId]] = field(default_factory=dict)
    accepted_bytes: int = 0

    @property
    def key(self) -> tuple[str, int]:
        return self.terms.transfer_id, self.epoch

    def handle(self, index: int) -> ChunkHandle:
        return ChunkHandle(self.terms.transfer_id, self.epoch, index)

    def get_parked(self) -> int:
        return sum(len(ops) for ops in self.parked.values())


@dataclass(frozen=True, slots=True)
class PutOp:
    """A put between its header and its answer. `handle` None: its payload is only compared."""

    lease: tuple[str, int]
    index: int
    payload_bytes: int
    checksum: int
    handle: ChunkHandle | None


@dataclass(frozen=True, slots=True)
class GetOp:
    lease: tuple[str, int]
    index: int
    is_sending: bool


@dataclass(slots=True)
class Ledger:
    """free + held + quarantined = total. Held: reserved by live leases. Quarantined: buffers of ended leases that
    somebody still writes to or reads from."""

    total_bytes: int
    held_bytes: int = 0
    quarantined: dict[ChunkHandle, int] = field(default_factory=dict)
    quarantined_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.held_bytes - self.quarantined_bytes

    def hold(self, amount_bytes: int) -> None:
        assert 0 <= amount_bytes <= self.free_bytes
        self.held_bytes += amount_bytes

    def let_go(self, amount_bytes: int) -> None:
        assert 0 <= amount_bytes <= self.held_bytes
        self.held_bytes -= amount_bytes

    def quarantine(self, handle: ChunkHandle, amount_bytes: int) -> None:
        assert handle not in self.quarantined
        assert amount_bytes <= self.free_bytes
        self.quarantined[handle] = amount_bytes
        self.quarantined_bytes += amount_bytes

    def end_quarantine(self, handle: ChunkHandle) -> bool:
        """Whether it was in quarantine."""
        amount_bytes = self.quarantined.pop(handle, None)
        if amount_bytes is None:
            return False
        self.quarantined_bytes -= amount_bytes
        return True
