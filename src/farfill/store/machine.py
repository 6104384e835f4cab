"""The store's machine: who may put and get what, for how long, and in how many bytes.

Not here: buffers (the shell has them under `ChunkHandle`s), connections, checksums' computation, wire bytes.

Rules
1. A lease has a deadline on the store's clock and an epoch that no other lease of this or an earlier life has.
   A request under another epoch is refused as stale, never served.
2. free + held + quarantined = total. A reservation that does not fit is refused, and changes nothing.
3. Only the named producer puts, only the named consumer gets and verifies, only the reserver renews and releases.
4. One writer per chunk. A newer put of a chunk that is being written stops the older one and waits for it.
5. The same chunk again is Stored again; another content for a stored index is a conflict.
6. A get waits for its chunk, and no longer than the lease.
7. Reaping happens at every event and at every tick; it does not depend on anybody asking for anything.
"""

import heapq
from collections import Counter
from dataclasses import dataclass
from typing import Final, assert_never

from farfill.store.events import (
    AcceptVerified,
    AnswerPresent,
    AnswerStored,
    ChunkHandle,
    ConfirmReleased,
    ConfirmRenewed,
    DrainBegan,
    DrainCompleted,
    Drop,
    GetAsked,
    GetEnded,
    Grant,
    HaveAsked,
    OpId,
    PutAborted,
    PutBegan,
    PutReceived,
    Receive,
    Refuse,
    ReleaseAsked,
    RenewAsked,
    ReserveAsked,
    SendChunk,
    StopWriter,
    StoreEffect,
    StoreEvent,
    Tick,
    VerifiedReported,
)
from farfill.store.lease import GetOp, Lease, LeaseState, Ledger, PutOp, StoredChunk
from farfill.store.protocol import (
    CHUNK_BYTES_MAX,
    CHUNKS_MAX,
    LOOPBACK,
    NAME_CHARS_MAX,
    TRANSFER_BYTES_MAX,
    Get,
    Have,
    LedgerSnapshot,
    Put,
    Release,
    Renew,
    Reserve,
    Verified,
)

_ENDED: Final = {
    LeaseState.VERIFIED: ("lease_expired", "the consumer has verified this transfer; its bytes are freed"),
    LeaseState.CANCELLED: ("transfer_cancelled", "the transfer was released"),
    LeaseState.EXPIRED: ("lease_expired", "the lease has ended; reserve again"),
}


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bounds of one store. `remember_s`: how long an expired lease is still known as such."""

    total_bytes: int
    leases_max: int = 4096  # with those that are only remembered; each is a few hundred bytes
    gets_parked_max: int = 1024  # per lease; 4 connections x 16 asked ahead is 64
    lease_s_max: float = 3600.0
    remember_s: float = 60.0


class StoreMachine:
    """See the module's rules.

    Args:
        limits: the bounds.
        first_epoch: at least 1, and above every epoch that an earlier life of this store has granted.
    """

    def __init__(self, limits: StoreLimits, first_epoch: int = 1) -> None:
        assert first_epoch >= 1
        self._limits = limits
        self._first_epoch = first_epoch
        self._next_epoch = first_epoch
        self._ledger = Ledger(limits.total_bytes)
        self._leases: dict[str, Lease] = {}  # the newest lease of each transfer id
        self._puts: dict[OpId, PutOp] = {}
        self._gets: dict[OpId, GetOp] = {}
        self._readers: Counter[ChunkHandle] = Counter()  # gets that now send from a buffer
        self._deadlines: list[tuple[float, str, int]] = []  # a heap; entries may be out of date, never too late
        self._is_draining = False
        self._drain_told = False

    # ---- what others may look at

    @property
    def deadline(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def free_bytes(self) -> int:
        return self._ledger.free_bytes

    def snapshot(self) -> LedgerSnapshot:
        live = self._live()
        return LedgerSnapshot(
            total_bytes=self._ledger.total_bytes,
            free_bytes=self._ledger.free_bytes,
            held_bytes=self._ledger.held_bytes,
            quarantined_bytes=self._ledger.quarantined_bytes,
            leases=len(live),
            gets_parked=sum(lease.get_parked() for lease in live),
        )

    def handle(self, event: StoreEvent, now: float) -> list[StoreEffect]:
        effects = self._reap(now)
        match event:
            case ReserveAsked():
                effects += self._reserve(event.op, event.peer, event.request, now)
            case RenewAsked():
                effects += self._renew(event.op, event.peer, event.request, now)
            case ReleaseAsked():
                effects += self._release(event.op, event.peer, event.request)
            case PutBegan():
                effects += self._begin_put(event.op, event.peer, event.message)
            case PutReceived():
                effects += self._end_put(event.op, event.checksum)
            case PutAborted():
                effects += self._abort_put(event.op)
            case GetAsked():
                effects += self._get(event.op, event.peer, event.message)
            case GetEnded():
                effects += self._end_get(event.op)
            case HaveAsked():
                effects += self._have(event.op, event.peer, event.message)
            case VerifiedReported():
                effects += self._verified(event.op, event.peer, event.message)
            case DrainBegan():
                self._is_draining = True
            case Tick():
                pass
            case _:
                assert_never(event)
        if self._is_draining and not self._drain_told and not self._live():
            self._drain_told = True
            effects.append(DrainCompleted())
        assert 0 <= self._ledger.free_bytes <= self._ledger.total_bytes
        return effects

    # ---- the checks, each by itself

    def _is_named(self, peer: str, named: str) -> bool:
        """Rule 3. Without TLS (loopback alone) there are no identities to tell apart."""
        return peer in (named, LOOPBACK)

    def _is_current(self, lease: Lease, epoch: int) -> bool:
        """Rule 1."""
        return lease.epoch == epoch

    def _fits(self, lease: Lease, message: Put) -> bool:
        """Whether the put stays inside what was reserved."""
        return (
            0 <= message.index < lease.terms.chunks
            and lease.accepted_bytes + message.payload_bytes <= lease.terms.bytes
        )

    def _is_same(self, stored: StoredChunk, payload_bytes: int, checksum: int) -> bool:
        """Rule 5. CRC-32 tells a repeat from a conflict; that nobody forged it is the AEAD tag's matter."""
        return stored.payload_bytes == payload_bytes and stored.checksum == checksum

    def _find(self, op: OpId, transfer_id: str, epoch: int) -> Lease | Refuse:
        """The lease that these words name, whatever its state."""
        lease = self._leases.get(transfer_id)
        if lease is None:
            if 0 < epoch < self._first_epoch:
                return Refuse(op, "stale_epoch", f"epoch {epoch} was granted before this store was started")
            return Refuse(op, "lease_unknown", f"there is no lease for transfer {transfer_id[:NAME_CHARS_MAX]}")
        if not self._is_current(lease, epoch):
            return Refuse(op, "stale_epoch", f"epoch {epoch} is not the lease's epoch {lease.epoch}")
        return lease

    # ---- control

    def _reserve(self, op: OpId, peer: str, request: Reserve, now: float) -> list[StoreEffect]:
        limits, former = self._limits, self._leases.get(request.transfer_id)
        if former is not None and former.state is LeaseState.LIVE:
            if former.owner == peer and former.terms == request:  # the answer was lost; grant it again
                return [Grant(op, request.transfer_id, former.epoch, former.deadline_s - now)]
            return [Refuse(op, "invalid_request", "the transfer id is already reserved, on other terms")]
        if self._is_draining:
            return [Refuse(op, "draining", "the store is about to stop")]
        names = (request.transfer_id, request.producer, request.consumer)
        if not all(0 < len(name) <= NAME_CHARS_MAX for name in names):
            return [Refuse(op, "invalid_request", f"ids and names must have 1 to {NAME_CHARS_MAX} characters")]
        if not (2 <= request.chunks <= CHUNKS_MAX and 0 < request.bytes <= TRANSFER_BYTES_MAX):
            return [
                Refuse(op, "invalid_request", f"at most {CHUNKS_MAX} chunks and {TRANSFER_BYTES_MAX} bytes a transfer")
            ]
        if not 0 < request.lease_s <= limits.lease_s_max:
            return [Refuse(op, "invalid_request", f"lease_s must be over 0 and at most {limits.lease_s_max}")]
        if request.bytes > self._ledger.free_bytes:
            detail = f"{request.bytes} bytes asked, {self._ledger.free_bytes} of {limits.total_bytes} free"
            return [Refuse(op, "store_full", detail, self._soonest_end_s(now))]
        if former is None and len(self._leases) >= limits.leases_max:
            return [Refuse(op, "store_full", f"{limits.leases_max} leases at once", self._soonest_end_s(now))]
        lease = Lease(request, peer, self._next_epoch, now + request.lease_s)
        self._next_epoch += 1
        self._ledger.hold(request.bytes)
        self._leases[request.transfer_id] = lease
        self._arm(lease)
        return [Grant(op, request.transfer_id, lease.epoch, request.lease_s)]

    def _renew(self, op: OpId, peer: str, request: Renew, now: float) -> list[StoreEffect]:
        lease = self._find(op, request.transfer_id, request.epoch)
        if isinstance(lease, Refuse):
            return [lease]
        if not self._is_named(peer, lease.owner):
            return [Refuse(op, "forbidden", "only who reserved may renew")]
        # VERIFIED is not a loss: who reserved may hear of it only with the answer's end, long after the consumer said
        # so. Renewing lets the store remember it for longer.
        if lease.state not in (LeaseState.LIVE, LeaseState.VERIFIED):
            return [Refuse(op, *_ENDED[lease.state])]
        if not 0 < request.lease_s <= self._limits.lease_s_max:
            return [Refuse(op, "invalid_request", f"lease_s must be over 0 and at most {self._limits.lease_s_max}")]
        lease.deadline_s = now + request.lease_s
        self._arm(lease)
        return [ConfirmRenewed(op, request.transfer_id, request.epoch, request.lease_s)]

    def _release(self, op: OpId, peer: str, request: Release) -> list[StoreEffect]:
        lease = self._find(op, request.transfer_id, request.epoch)
        if isinstance(lease, Refuse):
            return [lease]
        if not self._is_named(peer, lease.owner):
            return [Refuse(op, "forbidden", "only who reserved may release")]
        effects = self._end(lease, LeaseState.CANCELLED)
        return [*effects, ConfirmReleased(op, request.transfer_id, request.epoch)]

    # ---- puts

    def _begin_put(self, op: OpId, peer: str, message: Put) -> list[StoreEffect]:
        lease = self._find(op, message.transfer_id, message.epoch)
        if isinstance(lease, Refuse):
            return [lease]
        if not self._is_named(peer, lease.terms.producer):
            return [Refuse(op, "peer_unauthenticated", f"{peer} is not this transfer's producer")]
        if not 0 < message.payload_bytes <= CHUNK_BYTES_MAX:
            return [Refuse(op, "frame_too_large", f"a chunk has 1 to {CHUNK_BYTES_MAX} bytes")]
        if lease.state is LeaseState.VERIFIED:  # the consumer has it; a late repeat is no error
            return [self._start(op, lease, message, is_repeat=True)]
        if lease.state is not LeaseState.LIVE:
            return [Refuse(op, *_ENDED[lease.state])]
        stored = lease.stored.get(message.index)
        if stored is not None:
            if not self._is_same(stored, message.payload_bytes, message.checksum):
                return [Refuse(op, "chunk_conflict", f"chunk {message.index} is stored with another content")]
            return [self._start(op, lease, message, is_repeat=True)]
        former = lease.writing.get(message.index)
        if former is not None:
            replaced = lease.waiting.pop(message.index, None)
            lease.waiting[message.index] = op
            self._puts[op] = PutOp(lease.key, message.index, message.payload_bytes, message.checksum, None)
            effects: list[StoreEffect] = [StopWriter(former)]
            if replaced is not None:
                del self._puts[replaced]
                effects.append(Refuse(replaced, "connection_lost", "a newer put of the same chunk has come"))
            return effects
        if not self._fits(lease, message):
            return [Refuse(op, "over_reservation", f"{lease.terms.chunks} chunks, {lease.terms.bytes} bytes reserved")]
        return [self._start(op, lease, message, is_repeat=False)]

    def _start(self, op: OpId, lease: Lease, message: Put, *, is_repeat: bool) -> Receive:
        handle = None if is_repeat else lease.handle(message.index)
        self._puts[op] = PutOp(lease.key, message.index, message.payload_bytes, message.checksum, handle)
        if handle is not None:
            lease.writing[message.index] = op
            lease.accepted_bytes += message.payload_bytes
        return Receive(op, handle, message.payload_bytes)

    def _end_put(self, op: OpId, checksum: int) -> list[StoreEffect]:
        put = self._puts.pop(op)
        transfer_id, epoch = put.lease
        if put.handle is None:
            if checksum != put.checksum:
                return [_corrupt(op, put)]
            return [AnswerStored(op, transfer_id, epoch, put.index)]
        if self._ledger.end_quarantine(put.handle):
            return [Drop(put.handle), Refuse(op, *self._why_ended(put.lease))]
        lease = self._leases[transfer_id]
        del lease.writing[put.index]
        if checksum != put.checksum:
            lease.accepted_bytes -= put.payload_bytes
            return [Drop(put.handle), _corrupt(op, put), *self._start_waiting(lease, put.index)]
        lease.stored[put.index] = StoredChunk(put.payload_bytes, checksum)
        effects: list[StoreEffect] = [AnswerStored(op, transfer_id, epoch, put.index)]
        for get in lease.parked.pop(put.index, ()):
            effects.append(self._serve(get, lease, put.index))
        return effects + self._start_waiting(lease, put.index)

    def _abort_put(self, op: OpId) -> list[StoreEffect]:
        put = self._puts.pop(op, None)
        if put is None:
            return []  # it had been refused when its connection went
        lease = self._leases.get(put.lease[0])
        if put.handle is None:
            if lease is not None and lease.waiting.get(put.index) == op:
                del lease.waiting[put.index]
            return []
        if self._ledger.end_quarantine(put.handle):
            return [Drop(put.handle)]
        assert lease is not None
        assert lease.epoch == put.lease[1]
        del lease.writing[put.index]
        lease.accepted_bytes -= put.payload_bytes
        return [Drop(put.handle), *self._start_waiting(lease, put.index)]

    def _start_waiting(self, lease: Lease, index: int) -> list[StoreEffect]:
        """The former writer has stopped: the put that waited for it may begin."""
        op = lease.waiting.pop(index, None)
        if op is None:
            return []
        put = self._puts.pop(op)
        message = Put(lease.terms.transfer_id, lease.epoch, index, put.payload_bytes, put.checksum)
        return self._begin_put(op, LOOPBACK, message)  # its peer was checked when it came

    # ---- gets

    def _get(self, op: OpId, peer: str, message: Get) -> list[StoreEffect]:
        lease = self._find(op, message.transfer_id, message.epoch)
        if isinstance(lease, Refuse):
            return [lease]
        if not self._is_named(peer, lease.terms.consumer):
            return [Refuse(op, "peer_unauthenticated", f"{peer} is not this transfer's consumer")]
        if lease.state is not LeaseState.LIVE:
            return [Refuse(op, *_ENDED[lease.state])]
        if not 0 <= message.index < lease.terms.chunks:
            return [Refuse(op, "over_reservation", f"{lease.terms.chunks} chunks reserved, {message.index} asked")]
        if message.index in lease.stored:
            return [self._serve(op, lease, message.index)]
        if lease.get_parked() >= self._limits.gets_parked_max:
            return [Refuse(op, "queue_full", f"{self._limits.gets_parked_max} gets of this transfer wait already")]
        lease.parked.setdefault(message.index, []).append(op)
        self._gets[op] = GetOp(lease.key, message.index, is_sending=False)
        return []

    def _serve(self, op: OpId, lease: Lease, index: int) -> SendChunk:
        self._gets[op] = GetOp(lease.key, index, is_sending=True)
        self._readers[lease.handle(index)] += 1
        stored = lease.stored[index]
        return SendChunk(op, lease.handle(index), stored.payload_bytes, stored.checksum)

    def _end_get(self, op: OpId) -> list[StoreEffect]:
        get = self._gets.pop(op, None)
        if get is None:
            return []  # it had been refused when its connection went
        handle = ChunkHandle(*get.lease, get.index)
        if get.is_sending:
            self._readers[handle] -= 1
            if self._readers[handle]:
                return []
            del self._readers[handle]
            return [Drop(handle)] if self._ledger.end_quarantine(handle) else []
        parked = self._leases[get.lease[0]].parked
        parked[get.index].remove(op)
        if not parked[get.index]:
            del parked[get.index]
        return []

    def _have(self, op: OpId, peer: str, message: Have) -> list[StoreEffect]:
        lease = self._find(op, message.transfer_id, message.epoch)
        if isinstance(lease, Refuse):
            return [lease]
        if not (self._is_named(peer, lease.terms.producer) or self._is_named(peer, lease.terms.consumer)):
            return [Refuse(op, "peer_unauthenticated", f"{peer} has no part in this transfer")]
        if lease.state is LeaseState.VERIFIED:
            return [AnswerPresent(op, message.transfer_id, message.epoch, (), verified=True)]
        if lease.state is not LeaseState.LIVE:
            return [Refuse(op, *_ENDED[lease.state])]
        return [AnswerPresent(op, message.transfer_id, message.epoch, tuple(sorted(lease.stored)), verified=False)]

    def _verified(self, op: OpId, peer: str, message: Verified) -> list[StoreEffect]:
        lease = self._find(op, message.transfer_id, message.epoch)
        if isinstance(lease, Refuse):
            return [lease]
        if not self._is_named(peer, lease.terms.consumer):
            return [Refuse(op, "peer_unauthenticated", f"{peer} is not this transfer's consumer")]
        if lease.state not in (LeaseState.LIVE, LeaseState.VERIFIED):
            return [Refuse(op, *_ENDED[lease.state])]
        return [*self._end(lease, LeaseState.VERIFIED), AcceptVerified(op)]

    # ---- the end of a lease

    def _reap(self, now: float) -> list[StoreEffect]:
        """Rule 7."""
        effects: list[StoreEffect] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, transfer_id, epoch = heapq.heappop(self._deadlines)
            lease = self._leases.get(transfer_id)
            if lease is None or lease.epoch != epoch or lease.deadline_s > now:
                continue  # forgotten, replaced or renewed since
            if lease.state is LeaseState.LIVE:
                effects += self._end(lease, LeaseState.EXPIRED)
                lease.deadline_s = now + self._limits.remember_s
                self._arm(lease)
            else:
                del self._leases[transfer_id]
        return effects

    def _end(self, lease: Lease, state: LeaseState) -> list[StoreEffect]:
        """Ends a live lease: refuses who waits, frees its bytes, but for those of buffers still in use."""
        if lease.state is not LeaseState.LIVE:
            return []
        lease.state = state
        code, detail = _ENDED[state]
        effects: list[StoreEffect] = []
        for op in [op for ops in lease.parked.values() for op in ops]:
            del self._gets[op]
            effects.append(Refuse(op, code, detail))
        for op in lease.waiting.values():
            del self._puts[op]
            effects.append(Refuse(op, code, detail))
        self._ledger.let_go(lease.terms.bytes)
        for index, op in lease.writing.items():
            self._ledger.quarantine(lease.handle(index), self._puts[op].payload_bytes)
        for index, stored in lease.stored.items():
            if lease.handle(index) in self._readers:
                self._ledger.quarantine(lease.handle(index), stored.payload_bytes)
            else:
                effects.append(Drop(lease.handle(index)))
        for holder in (lease.parked, lease.waiting, lease.writing, lease.stored):
            holder.clear()
        lease.accepted_bytes = 0
        return effects

    def _why_ended(self, key: tuple[str, int]) -> tuple[str, str]:
        lease = self._leases.get(key[0])
        if lease is None or lease.epoch != key[1] or lease.state is LeaseState.LIVE:
            return _ENDED[LeaseState.EXPIRED]
        return _ENDED[lease.state]

    def _live(self) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.state is LeaseState.LIVE]

    def _arm(self, lease: Lease) -> None:
        heapq.heappush(self._deadlines, (lease.deadline_s, *lease.key))

    def _soonest_end_s(self, now: float) -> float:
        """Seconds until a live lease ends by itself: when it makes sense to ask again."""
        ends = [lease.deadline_s for lease in self._live()]
        return max(0.0, min(ends, default=now + self._limits.remember_s) - now)


def _corrupt(op: OpId, put: PutOp) -> Refuse:
    return Refuse(op, "chunk_corrupt", f"chunk {put.index} arrived damaged; send it again")
