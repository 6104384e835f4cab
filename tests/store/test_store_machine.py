"""The store machine's rules, one by one (see `farfill.store.machine`)."""

import pytest

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
    Tick,
    VerifiedReported,
)
from farfill.store.machine import StoreLimits, StoreMachine
from farfill.store.protocol import (
    CHUNK_BYTES_MAX,
    CHUNKS_MAX,
    LOOPBACK,
    Get,
    Have,
    Put,
    Release,
    Renew,
    Reserve,
    Verified,
)

EPOCH = 7  # the first that the store of these tests grants


class Store:
    """A machine, a clock, and short words for what happens."""

    def __init__(self, total_bytes: int = 1000, **limits: float) -> None:
        self.machine = StoreMachine(StoreLimits(total_bytes, **limits), EPOCH)  # type: ignore[arg-type]
        self.now = 100.0
        self._ops = 0

    def op(self) -> OpId:
        self._ops += 1
        return OpId(self._ops)

    def handle(self, event: object) -> list[StoreEffect]:
        effects = self.machine.handle(event, self.now)  # type: ignore[arg-type]
        ledger = self.machine.snapshot()
        assert ledger.free_bytes + ledger.held_bytes + ledger.quarantined_bytes == ledger.total_bytes
        return effects

    def reserve(
        self, transfer_id: str = "t", total: int = 400, chunks: int = 5, lease_s: float = 10.0, peer: str = "gateway"
    ) -> list[StoreEffect]:
        return self.handle(ReserveAsked(self.op(), peer, Reserve(transfer_id, "p", "c", total, chunks, lease_s)))

    def begin(self, index: int, size: int = 50, crc: int = 1, epoch: int = EPOCH, peer: str = "p") -> tuple[OpId, list]:
        op = self.op()
        return op, self.handle(PutBegan(op, peer, Put("t", epoch, index, size, crc)))

    def put(self, index: int, size: int = 50, crc: int = 1, epoch: int = EPOCH) -> list[StoreEffect]:
        op, effects = self.begin(index, size, crc, epoch)
        assert isinstance(effects[0], Receive), effects
        return self.handle(PutReceived(op, crc))

    def get(self, index: int, epoch: int = EPOCH, peer: str = "c") -> tuple[OpId, list[StoreEffect]]:
        op = self.op()
        return op, self.handle(GetAsked(op, peer, Get("t", epoch, index)))

    def release(self, peer: str = "gateway", epoch: int = EPOCH) -> list[StoreEffect]:
        return self.handle(ReleaseAsked(self.op(), peer, Release("t", epoch)))

    def verified(self, peer: str = "c") -> list[StoreEffect]:
        return self.handle(VerifiedReported(self.op(), peer, Verified("t", EPOCH)))


def codes(effects: list[StoreEffect]) -> list[str]:
    return [effect.code for effect in effects if isinstance(effect, Refuse)]


def kinds(effects: list[StoreEffect]) -> list[type]:
    return [type(effect) for effect in effects]


@pytest.fixture
def store() -> Store:
    """With one lease of 400 bytes and 5 chunks, of ten seconds."""
    store = Store()
    (grant,) = store.reserve()
    assert grant == Grant(OpId(1), "t", EPOCH, 10.0)
    return store


# ---- reservations


def test_a_reservation_holds_its_bytes_and_has_an_epoch_of_its_own() -> None:
    store = Store()
    assert isinstance(store.reserve("a", 400)[0], Grant)
    (second,) = store.reserve("b", 600)
    assert isinstance(second, Grant)
    assert second.epoch == EPOCH + 1
    assert store.machine.snapshot().free_bytes == 0


def test_what_does_not_fit_is_refused_and_says_when_to_come_back(store: Store) -> None:
    before = store.machine.snapshot()
    (refusal,) = store.reserve("b", 601)
    assert isinstance(refusal, Refuse)
    assert (refusal.code, refusal.retry_after_s) == ("store_full", 10.0)
    assert store.machine.snapshot() == before


def test_the_number_of_leases_is_bounded() -> None:
    store = Store(leases_max=2)
    assert kinds(store.reserve("a", 1) + store.reserve("b", 1)) == [Grant, Grant]
    assert codes(store.reserve("c", 1)) == ["store_full"]


@pytest.mark.parametrize(
    "request_",
    [
        Reserve("", "p", "c", 1, 2, 1.0),
        Reserve("t", "", "c", 1, 2, 1.0),
        Reserve("t", "p", "c" * 201, 1, 2, 1.0),
        Reserve("t", "p", "c", 0, 2, 1.0),
        Reserve("t", "p", "c", -5, 2, 1.0),
        Reserve("t", "p", "c", 1, 1, 1.0),
        Reserve("t", "p", "c", 1, CHUNKS_MAX + 1, 1.0),
        Reserve("t", "p", "c", 1, 2, 0.0),
        Reserve("t", "p", "c", 1, 2, 3601.0),
        Reserve("t", "p", "c", 1, 2, float("nan")),
    ],
)
def test_terms_that_make_no_sense_are_refused(request_: Reserve) -> None:
    store = Store()
    assert codes(store.handle(ReserveAsked(store.op(), "gateway", request_))) == ["invalid_request"]
    assert store.machine.deadline is None


def test_asking_again_for_the_same_gives_the_same_lease(store: Store) -> None:
    store.now += 4
    (again,) = store.reserve()
    assert isinstance(again, Grant)
    assert (again.epoch, again.lease_s) == (EPOCH, 6.0)
    assert codes(store.reserve(total=300)) == ["invalid_request"]
    assert codes(store.reserve(peer="another")) == ["invalid_request"]
    assert store.machine.snapshot().held_bytes == 400


def test_only_who_reserved_renews_and_releases(store: Store) -> None:
    for peer in ("p", "c", "mallory"):
        assert codes(store.release(peer)) == ["forbidden"]
        renew = RenewAsked(store.op(), peer, Renew("t", EPOCH, 5.0))
        assert codes(store.handle(renew)) == ["forbidden"]
    assert kinds(store.release()) == [ConfirmReleased]
    assert kinds(store.release()) == [ConfirmReleased]  # again


def test_a_renewed_lease_ends_later(store: Store) -> None:
    store.now += 9
    assert kinds(store.handle(RenewAsked(store.op(), "gateway", Renew("t", EPOCH, 20.0)))) == [ConfirmRenewed]
    store.now += 19
    store.handle(Tick())
    assert store.machine.snapshot().leases == 1
    store.now += 1
    store.handle(Tick())
    assert store.machine.snapshot().leases == 0
    late = RenewAsked(store.op(), "gateway", Renew("t", EPOCH, 20.0))
    assert codes(store.handle(late)) == ["lease_expired"]


def test_renewing_a_verified_lease_lets_it_be_remembered_for_longer(store: Store) -> None:
    store.put(0)
    store.verified()
    store.now += 9
    assert kinds(store.handle(RenewAsked(store.op(), "gateway", Renew("t", EPOCH, 20.0)))) == [ConfirmRenewed]
    assert store.machine.snapshot().held_bytes == 0  # remembered, not held
    store.now += 15
    (present,) = store.handle(HaveAsked(store.op(), "p", Have("t", EPOCH)))
    assert isinstance(present, AnswerPresent)
    assert present.verified
    store.now += 5
    store.handle(Tick())
    assert codes(store.get(0)[1]) == ["lease_unknown"]


# ---- who may do what


def test_only_the_named_producer_puts_and_only_the_named_consumer_gets(store: Store) -> None:
    for peer in ("c", "gateway", "mallory", ""):
        assert codes(store.begin(0, peer=peer)[1]) == ["peer_unauthenticated"]
    for peer in ("p", "gateway", "mallory", ""):
        assert codes(store.get(0, peer=peer)[1]) == ["peer_unauthenticated"]
        assert codes(store.verified(peer)) == ["peer_unauthenticated"]
    for peer, expected in (("p", []), ("c", []), ("gateway", ["peer_unauthenticated"])):
        assert codes(store.handle(HaveAsked(store.op(), peer, Have("t", EPOCH)))) == expected
    assert kinds(store.begin(0, peer=LOOPBACK)[1]) == [Receive]  # where nobody can be told apart


@pytest.mark.parametrize(("epoch", "code"), [(EPOCH + 1, "stale_epoch"), (EPOCH - 1, "stale_epoch")])
def test_another_epoch_is_refused_whatever_is_asked(store: Store, epoch: int, code: str) -> None:
    store.put(0)
    assert codes(store.begin(1, epoch=epoch)[1]) == [code]
    assert codes(store.get(0, epoch=epoch)[1]) == [code]
    assert codes(store.handle(HaveAsked(store.op(), "p", Have("t", epoch)))) == [code]
    assert codes(store.handle(VerifiedReported(store.op(), "c", Verified("t", epoch)))) == [code]
    assert codes(store.release(epoch=epoch)) == [code]


def test_an_unknown_lease_is_not_a_stale_one() -> None:
    store = Store()
    assert codes(store.get(0)[1]) == ["lease_unknown"]
    assert codes(store.get(0, epoch=EPOCH - 1)[1]) == ["stale_epoch"]  # granted before this store was started
    assert codes(store.get(0, epoch=0)[1]) == ["lease_unknown"]


def test_a_transfer_that_is_reserved_again_has_a_new_epoch(store: Store) -> None:
    store.put(0)
    store.release()
    (grant,) = store.reserve()
    assert isinstance(grant, Grant)
    assert grant.epoch == EPOCH + 1
    assert codes(store.begin(1)[1]) == ["stale_epoch"]
    _, parked = store.get(0, epoch=EPOCH + 1)
    assert parked == []  # nothing of the former lease is served


# ---- puts and gets


def test_a_put_is_stored_and_served(store: Store) -> None:
    assert kinds(store.put(3, 50, crc=9)) == [AnswerStored]
    op, (sent,) = store.get(3)
    assert sent == SendChunk(op, ChunkHandle("t", EPOCH, 3), 50, 9)
    assert store.handle(GetEnded(op)) == []


def test_a_get_waits_for_its_chunk_and_all_who_wait_are_served(store: Store) -> None:
    first, second = store.get(2), store.get(2)
    assert first[1] == second[1] == []
    assert store.machine.snapshot().gets_parked == 2
    effects = store.put(2)
    assert kinds(effects) == [AnswerStored, SendChunk, SendChunk]
    assert [effect.op for effect in effects[1:]] == [first[0], second[0]]  # type: ignore[union-attr]
    assert store.machine.snapshot().gets_parked == 0


def test_parked_gets_are_bounded() -> None:
    store = Store(gets_parked_max=2)
    store.reserve()
    assert store.get(0)[1] == store.get(1)[1] == []
    assert codes(store.get(2)[1]) == ["queue_full"]


def test_a_get_whose_connection_is_gone_is_forgotten(store: Store) -> None:
    op, _ = store.get(2)
    store.handle(GetEnded(op))
    assert store.machine.snapshot().gets_parked == 0
    assert kinds(store.put(2)) == [AnswerStored]


def test_the_same_chunk_again_is_stored_again_and_another_content_is_a_conflict(store: Store) -> None:
    store.put(1, 50, crc=5)
    op, effects = store.begin(1, 50, crc=5)
    assert effects == [Receive(op, None, 50)]  # taken, compared, kept nowhere
    assert kinds(store.handle(PutReceived(op, 5))) == [AnswerStored]
    assert codes(store.begin(1, 50, crc=6)[1]) == ["chunk_conflict"]
    assert codes(store.begin(1, 49, crc=5)[1]) == ["chunk_conflict"]
    assert store.get(1)[1][0].checksum == 5  # type: ignore[union-attr]


def test_a_chunk_that_arrived_damaged_is_not_stored(store: Store) -> None:
    _, parked = store.get(1)
    assert parked == []
    op, _ = store.begin(1, 50, crc=5)
    effects = store.handle(PutReceived(op, 4))
    assert kinds(effects) == [Drop, Refuse]
    assert codes(effects) == ["chunk_corrupt"]
    assert kinds(store.put(1, 50, crc=5)) == [AnswerStored, SendChunk]


def test_a_repeat_that_arrived_damaged_is_refused_and_the_stored_one_stays(store: Store) -> None:
    store.put(1, 50, crc=5)
    op, _ = store.begin(1, 50, crc=5)
    assert codes(store.handle(PutReceived(op, 4))) == ["chunk_corrupt"]
    assert kinds(store.get(1)[1]) == [SendChunk]


@pytest.mark.parametrize(
    ("index", "size", "code"),
    [
        (5, 1, "over_reservation"),
        (-1, 1, "over_reservation"),
        (0, 401, "over_reservation"),
        (0, 0, "frame_too_large"),
        (0, CHUNK_BYTES_MAX + 1, "frame_too_large"),
    ],
)
def test_a_put_stays_within_what_was_reserved(store: Store, index: int, size: int, code: str) -> None:
    assert codes(store.begin(index, size)[1]) == [code]


def test_the_sum_of_puts_stays_within_what_was_reserved(store: Store) -> None:
    store.put(0, 300)
    op, _ = store.begin(1, 100)
    assert codes(store.begin(2, 1)[1]) == ["over_reservation"]
    store.handle(PutAborted(op))
    assert kinds(store.put(2, 100)) == [AnswerStored]
    assert codes(store.get(5)[1]) == ["over_reservation"]


def test_a_newer_put_stops_the_older_and_waits_until_it_has_stopped(store: Store) -> None:
    old, _ = store.begin(1)
    new, effects = store.begin(1)
    assert effects == [StopWriter(old)]
    assert store.handle(PutAborted(old)) == [
        Drop(ChunkHandle("t", EPOCH, 1)),
        Receive(new, ChunkHandle("t", EPOCH, 1), 50),
    ]
    assert kinds(store.handle(PutReceived(new, 1))) == [AnswerStored]


def test_if_the_older_put_arrives_after_all_the_newer_is_a_repeat(store: Store) -> None:
    old, _ = store.begin(1)
    new, _ = store.begin(1)
    effects = store.handle(PutReceived(old, 1))
    assert kinds(effects) == [AnswerStored, Receive]
    assert effects[1] == Receive(new, None, 50)
    assert kinds(store.handle(PutReceived(new, 1))) == [AnswerStored]


def test_of_several_newer_puts_the_newest_waits(store: Store) -> None:
    old, _ = store.begin(1)
    middle, _ = store.begin(1)
    newest, effects = store.begin(1)
    assert effects == [
        StopWriter(old),
        Refuse(middle, "connection_lost", "a newer put of the same chunk has come"),
    ]
    assert store.handle(PutAborted(middle)) == []
    assert store.handle(PutAborted(old))[1] == Receive(newest, ChunkHandle("t", EPOCH, 1), 50)


def test_a_waiting_put_whose_connection_is_gone_is_forgotten(store: Store) -> None:
    old, _ = store.begin(1)
    new, _ = store.begin(1)
    assert store.handle(PutAborted(new)) == []
    assert kinds(store.handle(PutAborted(old))) == [Drop]


def test_have_tells_whole_chunks_only(store: Store) -> None:
    store.put(0)
    store.put(3)
    store.begin(4)
    op = store.op()
    assert store.handle(HaveAsked(op, "p", Have("t", EPOCH))) == [AnswerPresent(op, "t", EPOCH, (0, 3), verified=False)]


# ---- the end


def test_an_expired_lease_refuses_who_waits_and_frees_its_bytes(store: Store) -> None:
    store.put(0)
    get, _ = store.get(1)
    assert store.machine.deadline == 110.0
    store.now = 110.0
    effects = store.handle(Tick())
    assert Drop(ChunkHandle("t", EPOCH, 0)) in effects
    assert [effect.op for effect in effects if isinstance(effect, Refuse)] == [get]
    assert codes(effects) == ["lease_expired"]
    assert store.machine.snapshot().free_bytes == 1000
    assert codes(store.get(0)[1]) == ["lease_expired"]
    assert codes(store.begin(0)[1]) == ["lease_expired"]


def test_a_lease_ends_even_if_no_tick_comes(store: Store) -> None:
    """Rule 7: the reaper does not depend on the timer, nor admission on the reaper."""
    store.now = 110.0
    (grant,) = [effect for effect in store.reserve("b", 1000) if isinstance(effect, Grant)]
    assert grant.epoch == EPOCH + 1


def test_an_expired_lease_is_remembered_for_a_while_and_then_forgotten(store: Store) -> None:
    store.now = 110.0
    store.handle(Tick())
    store.now = store.machine.deadline or 0.0
    store.handle(Tick())
    assert codes(store.get(0)[1]) == ["lease_unknown"]
    assert store.machine.deadline is None


def test_a_released_transfer_is_cancelled_for_who_waits_and_who_comes(store: Store) -> None:
    store.put(0)
    store.get(1)
    effects = store.release()
    assert codes(effects) == ["transfer_cancelled"]
    assert isinstance(effects[-1], ConfirmReleased)
    assert codes(store.get(0)[1]) == ["transfer_cancelled"]
    assert codes(store.begin(2)[1]) == ["transfer_cancelled"]
    assert codes(store.verified()) == ["transfer_cancelled"]


def test_verified_frees_the_bytes_early_and_is_remembered(store: Store) -> None:
    for index in range(5):
        store.put(index, 80)
    effects = store.verified()
    assert kinds(effects) == [Drop] * 5 + [AcceptVerified]
    assert store.machine.snapshot().free_bytes == 1000
    assert kinds(store.verified()) == [AcceptVerified]  # again
    (present,) = store.handle(HaveAsked(store.op(), "p", Have("t", EPOCH)))
    assert isinstance(present, AnswerPresent)
    assert present.verified  # a sender whose last acknowledgement was lost learns that it is done
    assert codes(store.get(0)[1]) == ["lease_expired"]
    late, (receive,) = store.begin(2, 80)
    assert receive == Receive(late, None, 80)
    assert kinds(store.handle(PutReceived(late, 1))) == [AnswerStored]
    store.release()  # does not turn VERIFIED into CANCELLED
    (present,) = store.handle(HaveAsked(store.op(), "p", Have("t", EPOCH)))
    assert isinstance(present, AnswerPresent)
    assert present.verified


@pytest.mark.parametrize("how", ["released", "expired", "verified"])
def test_a_buffer_that_is_being_written_is_quarantined_until_its_writer_has_stopped(store: Store, how: str) -> None:
    op, _ = store.begin(1, 70)
    if how == "released":
        store.release()
    elif how == "verified":
        store.verified()
    else:
        store.now = 110.0
        store.handle(Tick())
    ledger = store.machine.snapshot()
    assert (ledger.held_bytes, ledger.quarantined_bytes, ledger.free_bytes) == (0, 70, 930)
    effects = store.handle(PutAborted(op))
    assert effects == [Drop(ChunkHandle("t", EPOCH, 1))]
    assert store.machine.snapshot().quarantined_bytes == 0


def test_a_put_that_ends_after_its_lease_is_refused_with_the_reason(store: Store) -> None:
    op, _ = store.begin(1, 70)
    store.release()
    effects = store.handle(PutReceived(op, 1))
    assert kinds(effects) == [Drop, Refuse]
    assert codes(effects) == ["transfer_cancelled"]
    assert store.machine.snapshot().free_bytes == 1000


def test_a_buffer_that_is_being_read_is_quarantined_until_its_last_reader_is_done(store: Store) -> None:
    store.put(1, 70)
    store.put(2, 30)
    first, _ = store.get(1)
    second, _ = store.get(1)
    effects = store.release()
    assert [effect for effect in effects if isinstance(effect, Drop)] == [Drop(ChunkHandle("t", EPOCH, 2))]
    assert store.machine.snapshot().quarantined_bytes == 70
    assert store.handle(GetEnded(first)) == []
    assert store.machine.snapshot().quarantined_bytes == 70
    assert store.handle(GetEnded(second)) == [Drop(ChunkHandle("t", EPOCH, 1))]
    assert store.machine.snapshot().free_bytes == 1000


def test_a_waiting_put_is_refused_when_the_lease_ends(store: Store) -> None:
    old, _ = store.begin(1)
    new, _ = store.begin(1)
    effects = store.release()
    assert [effect.op for effect in effects if isinstance(effect, Refuse)] == [new]
    assert store.handle(PutAborted(old)) == [Drop(ChunkHandle("t", EPOCH, 1))]
    assert store.handle(PutAborted(new)) == []


def test_draining_grants_nothing_more_and_tells_when_the_last_lease_is_gone(store: Store) -> None:
    assert store.handle(DrainBegan()) == []
    assert codes(store.reserve("b", 1)) == ["draining"]
    assert kinds(store.put(0)) == [AnswerStored]  # what is under way goes on
    effects = store.release()
    assert kinds(effects) == [Drop, ConfirmReleased, DrainCompleted]
    assert DrainCompleted() not in store.handle(Tick())


def test_an_idle_store_drains_at_once() -> None:
    assert Store().handle(DrainBegan()) == [DrainCompleted()]
