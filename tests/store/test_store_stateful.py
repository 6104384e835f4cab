"""The store machine under any sequence of events, against a model of a few lines: content, ledger, answers."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from farfill.store.events import (
    AcceptVerified,
    AnswerPresent,
    AnswerStored,
    ChunkHandle,
    ConfirmReleased,
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
    ReserveAsked,
    SendChunk,
    StopWriter,
    StoreEffect,
    StoreEvent,
    Tick,
    VerifiedReported,
)
from farfill.store.machine import StoreLimits, StoreMachine
from farfill.store.protocol import Get, Have, Put, Release, Reserve, Verified

IDS = st.sampled_from(["a", "b", "c"])
INDICES = st.integers(0, 3)
TOTAL = 300


class StoreRules(RuleBasedStateMachine):
    """Keeps buffers as the shell does; nothing may be answered twice, lost, or served from a dropped buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = StoreMachine(StoreLimits(TOTAL, remember_s=5.0), 10)
        self.now = 0.0
        self.ops = 0
        self.epochs: dict[str, int] = {}
        self.waiting: dict[OpId, str] = {}  # op -> kind, not yet answered
        self.receiving: dict[OpId, tuple[ChunkHandle | None, int]] = {}
        self.sending: dict[OpId, ChunkHandle] = {}
        self.buffers: dict[ChunkHandle, int | None] = {}  # content (a checksum); None while it is written
        self.claimed: dict[OpId, int] = {}

    def new_op(self, kind: str) -> OpId:
        self.ops += 1
        self.waiting[OpId(self.ops)] = kind
        return OpId(self.ops)

    def handle(self, event: StoreEvent) -> None:
        for effect in self.machine.handle(event, self.now):
            self.carry_out(effect)

    def carry_out(self, effect: StoreEffect) -> None:
        match effect:
            case Receive():
                assert self.waiting[effect.op] == "put"
                assert effect.op not in self.receiving
                if effect.handle is not None:
                    assert effect.handle not in self.buffers, "a buffer in use was given to another writer"
                    self.buffers[effect.handle] = None
                self.receiving[effect.op] = (effect.handle, self.claimed[effect.op])
            case StopWriter():
                assert effect.op in self.receiving
            case SendChunk():
                assert self.waiting.pop(effect.op) == "get"
                assert self.buffers[effect.handle] == effect.checksum, "sent before it was whole, or another content"
                self.sending[effect.op] = effect.handle
            case Drop():
                assert effect.handle not in self.sending.values(), "dropped while it was read"
                assert effect.handle not in [handle for handle, _ in self.receiving.values()], "dropped while written"
                del self.buffers[effect.handle]
            case AnswerStored():
                assert self.waiting.pop(effect.op) == "put"
            case Grant():
                assert self.waiting.pop(effect.op) == "reserve"
                assert effect.epoch >= self.epochs.get(effect.transfer_id, 10)
                self.epochs[effect.transfer_id] = effect.epoch
            case AnswerPresent():
                assert self.waiting.pop(effect.op) == "have"
                for index in effect.indices:
                    assert self.buffers[ChunkHandle(effect.transfer_id, effect.epoch, index)] is not None
            case ConfirmReleased() | AcceptVerified() | Refuse():
                self.waiting.pop(effect.op)  # KeyError: answered twice
                self.receiving.pop(effect.op, None)
            case _:
                raise AssertionError(f"unexpected {effect}")

    @rule(name=IDS, size=st.integers(1, 200), lease_s=st.integers(1, 10))
    def reserve(self, name: str, size: int, lease_s: int) -> None:
        self.handle(ReserveAsked(self.new_op("reserve"), "g", Reserve(name, "p", "c", size, 4, float(lease_s))))

    @rule(name=IDS, index=INDICES, size=st.integers(1, 60), crc=st.integers(0, 1), stale=st.booleans())
    def begin_put(self, name: str, index: int, size: int, crc: int, stale: bool) -> None:
        op = self.new_op("put")
        self.claimed[op] = crc
        epoch = self.epochs.get(name, 10) - stale
        self.handle(PutBegan(op, "p", Put(name, epoch, index, size, crc)))

    @precondition(lambda self: self.receiving)
    @rule(data=st.data(), damaged=st.booleans())
    def end_put(self, data: st.DataObject, damaged: bool) -> None:
        op = data.draw(st.sampled_from(sorted(self.receiving)))
        handle, crc = self.receiving.pop(op)
        got = crc + 5 if damaged else crc
        if handle is not None:
            self.buffers[handle] = got
        self.handle(PutReceived(op, got))

    @precondition(lambda self: any(kind == "put" for kind in self.waiting.values()))
    @rule(data=st.data())
    def abort_put(self, data: st.DataObject) -> None:
        op = data.draw(st.sampled_from(sorted(op for op, kind in self.waiting.items() if kind == "put")))
        self.receiving.pop(op, None)
        del self.waiting[op]
        self.handle(PutAborted(op))

    @rule(name=IDS, index=INDICES, stale=st.booleans())
    def get(self, name: str, index: int, stale: bool) -> None:
        self.handle(GetAsked(self.new_op("get"), "c", Get(name, self.epochs.get(name, 10) - stale, index)))

    @precondition(lambda self: self.sending or "get" in self.waiting.values())
    @rule(data=st.data())
    def end_get(self, data: st.DataObject) -> None:
        parked = [op for op, kind in self.waiting.items() if kind == "get"]
        op = data.draw(st.sampled_from(sorted([*self.sending, *parked])))
        self.sending.pop(op, None)
        self.waiting.pop(op, None)
        self.handle(GetEnded(op))

    @rule(name=IDS)
    def have(self, name: str) -> None:
        self.handle(HaveAsked(self.new_op("have"), "p", Have(name, self.epochs.get(name, 10))))

    @rule(name=IDS)
    def verified(self, name: str) -> None:
        self.handle(VerifiedReported(self.new_op("verified"), "c", Verified(name, self.epochs.get(name, 10))))

    @rule(name=IDS)
    def release(self, name: str) -> None:
        self.handle(ReleaseAsked(self.new_op("release"), "g", Release(name, self.epochs.get(name, 10))))

    @rule(seconds=st.integers(0, 6))
    def tick(self, seconds: int) -> None:
        self.now += seconds
        self.handle(Tick())

    @invariant()
    def the_ledger_balances(self) -> None:
        ledger = self.machine.snapshot()
        assert ledger.free_bytes + ledger.held_bytes + ledger.quarantined_bytes == TOTAL
        assert min(ledger.free_bytes, ledger.held_bytes, ledger.quarantined_bytes) >= 0
        assert ledger.gets_parked == sum(kind == "get" for kind in self.waiting.values())

    @invariant()
    def a_deadline_is_never_overdue(self) -> None:
        assert self.machine.deadline is None or self.machine.deadline > self.now

    def teardown(self) -> None:
        """However it went: once everybody has stopped and every lease has ended, every byte is free."""
        self.now += 10_000
        self.handle(Tick())
        for op in list(self.receiving):
            self.receiving.pop(op)
            self.waiting.pop(op)
            self.handle(PutAborted(op))
        for op in list(self.sending):
            self.sending.pop(op)
            self.handle(GetEnded(op))
        assert self.machine.snapshot().free_bytes == TOTAL
        assert self.buffers == {}
        assert self.waiting == {}, "somebody was never answered"


TestStoreRules = StoreRules.TestCase
TestStoreRules.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
