"""Sealing: no key meets a nonce twice, and a chunk opens only unaltered, in its own place, transfer and epoch."""

import os
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_cases import EVERY_KIND, counting_salts

from farfill.errors import LocalProtocolError, PeerError
from farfill.kv import sealing
from farfill.kv.plan import closing_index, plan_chunks
from farfill.kv.sealing import (
    MANIFEST_IDENTITY,
    SALT_BYTES,
    SEAL_OVERHEAD_BYTES,
    TAG_BYTES,
    ChunkIdentity,
    ChunkKind,
    Sealer,
    closing_identity,
    data_identity,
    tag_of,
)
from farfill.kv.spec import ChunkIndex, TransferId

KEY = bytes(range(32))
ID = TransferId("0123456789abcdef" * 2)
PLACE = ChunkIdentity(ChunkIndex(3), ChunkKind.ROWS, layer=2, token_start=8, token_stop=16)


def sealer(key: bytes = KEY, transfer_id: TransferId = ID, epoch: int = 1) -> Sealer:
    salts = counting_salts()
    return Sealer(key, transfer_id, epoch, salts=lambda size: next(salts))


def opens(opener: Sealer, identity: ChunkIdentity, sealed: bytes | bytearray, size: int) -> bool:
    try:
        opener.open_into(identity, sealed, bytearray(size))
    except PeerError as error:
        assert error.code == "chunk_corrupt"
        return False
    return True


@given(st.binary(max_size=4096))
def test_what_is_sealed_opens_again(plaintext: bytes) -> None:
    one = Sealer(KEY, ID, 1)
    sealed = one.seal(PLACE, plaintext)
    assert len(sealed) == len(plaintext) + SEAL_OVERHEAD_BYTES
    out = bytearray(len(plaintext))
    assert Sealer(KEY, ID, 1).open_into(PLACE, sealed, out) == tag_of(sealed)
    assert out == plaintext
    assert one.open(PLACE, sealed) == (out, tag_of(sealed))


def test_sealing_into_a_slot_of_a_larger_buffer_touches_nothing_else() -> None:
    pool, plaintext = bytearray(b"\xaa" * 256), os.urandom(100)
    slot = memoryview(pool)[50 : 50 + 100 + SEAL_OVERHEAD_BYTES]
    tag = sealer().seal_into(PLACE, plaintext, slot)
    assert tag == tag_of(slot)
    assert pool[:50] == b"\xaa" * 50
    assert pool[50 + 148 :] == b"\xaa" * (256 - 198)
    out = bytearray(b"\xbb" * 120)
    assert sealer().open_into(PLACE, slot, memoryview(out)[10:110]) == tag
    assert out == b"\xbb" * 10 + plaintext + b"\xbb" * 10


def test_buffers_of_wider_elements_are_taken_as_bytes() -> None:
    plaintext = memoryview(os.urandom(64)).cast("f", (4, 4))
    sealed = sealer().seal(PLACE, plaintext)
    out = bytearray(64)
    sealer().open_into(PLACE, sealed, memoryview(out).cast("f"))
    assert out == plaintext.tobytes()


def test_nothing_of_the_plaintext_is_readable() -> None:
    sealed = bytes(sealer().seal(PLACE, b"secret row " * 100))
    assert b"secret" not in sealed


def test_every_flipped_bit_is_refused() -> None:
    plaintext = b"sixteen bytes ok"
    sealed = sealer().seal(PLACE, plaintext)
    assert opens(sealer(), PLACE, sealed, 16)
    for position in range(len(sealed) * 8):
        sealed[position // 8] ^= 1 << position % 8
        assert not opens(sealer(), PLACE, sealed, 16), f"bit {position}"
        sealed[position // 8] ^= 1 << position % 8
    assert opens(sealer(), PLACE, sealed, 16)


def test_another_place_transfer_epoch_or_key_is_refused() -> None:
    sealed = sealer().seal(PLACE, bytes(16))
    for changed in (
        replace(PLACE, index=ChunkIndex(4)),
        replace(PLACE, kind=ChunkKind.STATE),
        replace(PLACE, layer=3),
        replace(PLACE, layer=None),
        replace(PLACE, token_start=7),
        replace(PLACE, token_stop=17),
    ):
        assert not opens(sealer(), changed, sealed, 16), changed
    assert not opens(sealer(transfer_id=TransferId(ID[:-1] + "0")), PLACE, sealed, 16)
    assert not opens(sealer(epoch=2), PLACE, sealed, 16)
    assert not opens(sealer(key=bytes(32)), PLACE, sealed, 16)


def test_another_wire_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sealed = sealer().seal(PLACE, bytes(16))
    monkeypatch.setattr(sealing, "WIRE_VERSION", sealing.WIRE_VERSION + 1)
    assert not opens(sealer(), PLACE, sealed, 16)


def test_truncated_or_lengthened_chunks_are_refused() -> None:
    sealed = sealer().seal(PLACE, bytes(16))
    for length in range(len(sealed)):
        assert not opens(sealer(), PLACE, sealed[:length], 16)
        with pytest.raises(PeerError) as caught:
            sealer().open(PLACE, sealed[:length])
        assert caught.value.code == "chunk_corrupt"
    assert not opens(sealer(), PLACE, sealed + b"\0", 16)
    assert not opens(sealer(), PLACE, sealed, 15)
    assert not opens(sealer(), PLACE, sealed, 17)


@given(
    st.lists(st.tuples(st.text(max_size=6), st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=2, unique=True),
    st.lists(
        st.builds(
            ChunkIdentity,
            st.integers(0, 300),
            st.sampled_from(ChunkKind),
            st.none() | st.integers(0, 300),
            st.integers(0, 300),
            st.integers(0, 300),
        ),
        min_size=2,
        max_size=2,
        unique=True,
    ),
)
def test_no_two_identities_share_an_encoding(
    transfers: list[tuple[str, int, int]], identities: list[ChunkIdentity]
) -> None:
    first, second = (Sealer(KEY, TransferId(name), epoch) for name, epoch, _ in transfers)
    encodings = {first._associated(identity) for identity in identities}
    assert len(encodings) == len(identities)
    if (transfers[0][0], transfers[0][1]) != (transfers[1][0], transfers[1][1]):
        assert encodings.isdisjoint(second._associated(identity) for identity in identities)


def test_identities_of_a_plan_are_all_different() -> None:
    plan = plan_chunks(EVERY_KIND, 40, 8)
    identities = {MANIFEST_IDENTITY, closing_identity(closing_index(plan)), *map(data_identity, plan)}
    assert len(identities) == len(plan) + 2
    assert {identity.kind for identity in identities} == set(ChunkKind)


def test_no_key_meets_a_nonce_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted at the cipher itself: over transfers, epochs, chunks and re-sent chunks, also under one transfer key."""
    seen: list[tuple[bytes, bytes]] = []

    class Counting:
        def __init__(self, key: bytes) -> None:
            self._key, self._cipher = key, AESGCM(key)

        def encrypt_into(self, nonce: bytes, data: memoryview, associated: bytes, buf: memoryview) -> int:
            seen.append((bytes(self._key), bytes(nonce)))
            return self._cipher.encrypt_into(nonce, data, associated, buf)

    monkeypatch.setattr(sealing, "AESGCM", Counting)
    plan = plan_chunks(EVERY_KIND, 40, 8)
    sealed = 0
    for transfer_id, epoch in ((ID, 1), (ID, 2), (TransferId("another"), 1)):
        one = Sealer(KEY, transfer_id, epoch)
        for _sending in range(20):
            for chunk in plan:
                one.seal(data_identity(chunk), bytes(4))
                sealed += 1
    assert len(seen) == sealed == 60 * len(plan)
    assert len(set(seen)) == sealed
    # and even where the salts repeat, as they do in a simulation, other places have other keys
    seen.clear()
    for index in range(100):
        sealer().seal(replace(PLACE, index=ChunkIndex(index)), bytes(4))
    assert len(set(seen)) == 100


def test_each_sealing_draws_a_fresh_salt() -> None:
    drawn = []

    def salts(size: int) -> bytes:
        drawn.append(os.urandom(size))
        return drawn[-1]

    one = Sealer(KEY, ID, 1, salts=salts)
    sealed = [one.seal(PLACE, bytes(8)) for _ in range(50)]
    assert [bytes(chunk[:SALT_BYTES]) for chunk in sealed] == drawn
    assert len({bytes(chunk[SALT_BYTES:]) for chunk in sealed}) == 50


def test_with_given_salts_a_run_repeats() -> None:
    assert sealer().seal(PLACE, b"row") == sealer().seal(PLACE, b"row")
    assert len(sealer().seal(PLACE, b"")) == SALT_BYTES + TAG_BYTES


def test_our_own_mistakes_are_local_errors() -> None:
    with pytest.raises(LocalProtocolError, match="32 bytes"):
        Sealer(bytes(31), ID, 1)
    with pytest.raises(LocalProtocolError, match="into a buffer"):
        sealer().seal_into(PLACE, bytes(16), bytearray(16))
    with pytest.raises(LocalProtocolError, match="salt"):
        Sealer(KEY, ID, 1, salts=lambda size: b"short").seal(PLACE, b"")


def test_the_key_is_never_shown() -> None:
    one = Sealer(b"k" * 32, ID, 1)
    assert "k" * 8 not in repr(one)
    assert not hasattr(one, "__dict__")


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_open(noise: bytes) -> None:
    with pytest.raises(PeerError) as caught:
        Sealer(KEY, ID, 1).open(PLACE, noise)
    assert caught.value.code == "chunk_corrupt"
