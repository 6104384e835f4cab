"""Frames and attach records: what goes in comes out; what is altered, lost, moved, repeated or too large is refused."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farfill.errors import LocalProtocolError, PeerError
from farfill.store.protocol import (
    CHUNK_BYTES_MAX,
    CHUNKS_MAX,
    Chunk,
    ClientMessage,
    Get,
    Have,
    Message,
    Present,
    Put,
    Refused,
    ServerMessage,
    Stored,
    Verified,
    bitmap_of,
    indices_in,
    payload_bytes_of,
)
from farfill.transfer.frames import (
    ATTACH_BYTES,
    ATTACH_REPLY_BYTES,
    HEADER_BYTES_MAX,
    AttachStatus,
    FrameDecoder,
    FrameEncoder,
    Keys,
    attach_holds,
    decode_attach,
    decode_attach_reply,
    encode_attach,
    encode_attach_reply,
    new_nonce,
)

KEY = bytes(range(32))
SESSION = "ab" * 16


def feed(decoder: FrameDecoder, data: bytes, piece: int = 1 << 20) -> list[tuple[Message, bytes]]:  # type: ignore[type-arg]
    """All messages in the bytes, each with its payload, fed in pieces of that size at most."""
    got: list[tuple[Message, bytearray]] = []
    while data:
        memory = decoder.next_buffer()
        count = min(len(memory), len(data), piece)
        memory[:count] = data[:count]
        data = data[count:]
        message = decoder.received(count)
        if message is not None:
            payload = bytearray(payload_bytes_of(message))
            if payload:
                decoder.place(memoryview(payload))
            got.append((message, payload))
    return [(message, bytes(payload)) for message, payload in got]


def server_decoder() -> "FrameDecoder[ClientMessage]":
    return FrameDecoder(KEY, ClientMessage)


def two_puts() -> tuple[bytes, bytes]:
    encoder = FrameEncoder(KEY)
    first = encoder.encode(Put("t", 1, 3, 5, 77)) + b"first"
    return first, encoder.encode(Put("t", 1, 4, 6, 78)) + b"second"


NAMES = st.text(max_size=40)
NUMBERS = st.integers(0, 2**53)
CLIENT = st.one_of(
    st.builds(Put, NAMES, NUMBERS, NUMBERS, st.integers(0, 300), NUMBERS),
    st.builds(Get, NAMES, NUMBERS, NUMBERS),
    st.builds(Have, NAMES, NUMBERS),
    st.builds(Verified, NAMES, NUMBERS),
)
SERVER = st.one_of(
    st.builds(Stored, NAMES, NUMBERS, NUMBERS),
    st.builds(Chunk, NAMES, NUMBERS, NUMBERS, st.integers(0, 300), NUMBERS),
    st.builds(Present, NAMES, NUMBERS, st.binary(max_size=300), st.booleans()),
    st.builds(Refused, NAMES, NUMBERS, NAMES, st.none() | NUMBERS, NAMES, NAMES),
)


@pytest.mark.parametrize(("messages", "kind"), [(CLIENT, ClientMessage), (SERVER, ServerMessage)])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), piece=st.integers(1, 400))
def test_what_goes_in_comes_out_however_it_is_cut_into_pieces(
    messages: st.SearchStrategy[Message], kind: object, data: st.DataObject, piece: int
) -> None:
    sent = [(m, bytes(n % 251 for n in range(payload_bytes_of(m)))) for m in data.draw(st.lists(messages, max_size=5))]
    encoder = FrameEncoder(KEY)
    stream = b"".join(encoder.encode(message) + payload for message, payload in sent)
    decoder: FrameDecoder[ClientMessage] = FrameDecoder(KEY, kind)
    assert feed(decoder, stream, piece) == sent
    assert decoder.is_between_frames


def test_a_payload_goes_into_the_callers_memory() -> None:
    first, _ = two_puts()
    decoder = server_decoder()
    message = None
    rest = first
    while message is None:
        memory = decoder.next_buffer()
        memory[:], rest = rest[: len(memory)], rest[len(memory) :]
        message = decoder.received(len(memory))
    own = bytearray(5)
    decoder.place(memoryview(own))
    decoder.next_buffer()[:3] = rest[:3]
    decoder.received(3)
    assert own == b"fir\0\0"
    assert not decoder.is_between_frames
    decoder.next_buffer()[:] = rest[3:]
    decoder.received(2)
    assert own == b"first"
    assert decoder.is_between_frames


@settings(max_examples=300, deadline=None, derandomize=True)
@given(bit=st.integers(0, 10_000))
def test_any_flipped_bit_outside_a_payload_is_refused(bit: int) -> None:
    stream = bytearray(FrameEncoder(KEY).encode(Get("transfer", 12, 345)))
    bit %= len(stream) * 8
    stream[bit // 8] ^= 1 << bit % 8
    decoder = server_decoder()
    try:
        assert feed(decoder, bytes(stream)) == []  # a longer size: it waits for bytes that do not come
        assert not decoder.is_between_frames
    except PeerError as error:
        assert error.code in ("protocol_violation", "frame_too_large")
        with pytest.raises(LocalProtocolError):
            decoder.next_buffer()


@pytest.mark.parametrize("how", ["moved", "repeated", "lost", "of another connection"])
def test_frames_that_are_moved_repeated_or_lost_are_refused(how: str) -> None:
    first, second = two_puts()
    other = FrameEncoder(bytes(32)).encode(Get("t", 1, 1))
    stream = {
        "moved": second + first,
        "repeated": first + first,
        "lost": second,
        "of another connection": first + other,
    }[how]
    with pytest.raises(PeerError, match="altered, repeated or out of order"):
        feed(server_decoder(), stream)


def test_a_frame_of_the_other_direction_is_refused() -> None:
    keys = Keys(KEY, new_nonce())
    assert keys.client != keys.server
    with pytest.raises(PeerError, match="altered"):
        feed(FrameDecoder(keys.server, ServerMessage), FrameEncoder(keys.client).encode(Get("t", 1, 1)))


@pytest.mark.parametrize("length", range(1, 60))
def test_a_truncated_stream_ends_within_a_frame(length: int) -> None:
    first, _ = two_puts()
    if length >= len(first):
        length = len(first) - 1
    decoder = server_decoder()
    feed(decoder, first[:length])
    assert not decoder.is_between_frames


def test_other_bytes_than_ours_are_refused() -> None:
    with pytest.raises(PeerError, match="no frame begins here"):
        feed(server_decoder(), b"GET / HTTP/1.1\r\n\r\n")


@pytest.mark.parametrize("size", [HEADER_BYTES_MAX + 1, 65535])
def test_a_header_over_the_limit_is_refused_before_it_is_read(size: int) -> None:
    with pytest.raises(PeerError) as error:
        feed(server_decoder(), struct.pack(">HH", 0xFA17, size))
    assert error.value.code == "frame_too_large"


@pytest.mark.parametrize(
    ("payload_bytes", "code"), [(CHUNK_BYTES_MAX + 1, "frame_too_large"), (-1, "protocol_violation")]
)
def test_a_payload_over_the_limit_is_refused_even_from_one_who_has_the_key(payload_bytes: int, code: str) -> None:
    with pytest.raises(PeerError) as error:
        feed(server_decoder(), FrameEncoder(KEY).encode(Put("t", 1, 0, payload_bytes, 0)))
    assert error.value.code == code


def test_a_message_that_is_not_the_peers_to_say_is_refused() -> None:
    with pytest.raises(PeerError, match="cannot be read"):
        feed(server_decoder(), FrameEncoder(KEY).encode(Stored("t", 1, 1)))


def test_misuse_is_a_bug_of_ours() -> None:
    decoder = server_decoder()
    with pytest.raises(LocalProtocolError):
        decoder.place(memoryview(bytearray(1)))
    with pytest.raises(LocalProtocolError):
        decoder.received(0)
    with pytest.raises(LocalProtocolError):
        decoder.received(100)
    with pytest.raises(LocalProtocolError):
        FrameEncoder(KEY).encode(Refused("t", 1, "put", None, "x" * HEADER_BYTES_MAX, ""))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(indices=st.sets(st.integers(0, CHUNKS_MAX - 1), max_size=60))
def test_a_bitmap_names_exactly_its_indices(indices: set[int]) -> None:
    assert list(indices_in(bitmap_of(indices))) == sorted(indices)


def test_the_largest_bitmap_fits_a_header() -> None:
    FrameEncoder(KEY).encode(Present("t" * 200, 2**53, bitmap_of([CHUNKS_MAX - 1])))


# ---- attaching


def test_attaching_proves_the_session_key_to_both_sides() -> None:
    nonce = new_nonce()
    record = encode_attach(SESSION, KEY, nonce)
    assert len(record) == ATTACH_BYTES
    assert decode_attach(record) == (SESSION, nonce)
    assert attach_holds(record, KEY)
    assert not attach_holds(record, bytes(32))
    reply = encode_attach_reply(AttachStatus.ACCEPTED, record, KEY)
    assert len(reply) == ATTACH_REPLY_BYTES
    assert decode_attach_reply(reply, record, KEY) is AttachStatus.ACCEPTED
    with pytest.raises(PeerError, match="does not prove"):
        decode_attach_reply(encode_attach_reply(AttachStatus.ACCEPTED, record, bytes(32)), record, KEY)
    with pytest.raises(PeerError, match="does not prove"):  # of an earlier connection
        decode_attach_reply(reply, encode_attach(SESSION, KEY, new_nonce()), KEY)


def test_a_refusal_to_attach_needs_no_proof() -> None:
    record = encode_attach(SESSION, KEY, new_nonce())
    for status in (AttachStatus.UNKNOWN_SESSION, AttachStatus.REFUSED):
        assert decode_attach_reply(encode_attach_reply(status, record, None), record, KEY) is status


@settings(max_examples=200, deadline=None, derandomize=True)
@given(bit=st.integers(0, ATTACH_BYTES * 8 - 1))
def test_any_flipped_bit_of_an_attach_record_is_refused(bit: int) -> None:
    record = bytearray(encode_attach(SESSION, KEY, bytes(16)))
    record[bit // 8] ^= 1 << bit % 8
    if bit < 64:
        with pytest.raises(PeerError, match="does not begin with an attach record"):
            decode_attach(record)
    else:
        assert not attach_holds(record, KEY)


@pytest.mark.parametrize("reply", [b"", b"x" * ATTACH_REPLY_BYTES, b"farfill1" + bytes([9]) + bytes(16)])
def test_other_bytes_than_an_attach_reply_are_refused(reply: bytes) -> None:
    with pytest.raises(PeerError) as error:
        decode_attach_reply(reply, encode_attach(SESSION, KEY, bytes(16)), KEY)
    assert error.value.code == "protocol_violation"


def test_keys_show_nothing() -> None:
    assert repr(Keys(KEY, bytes(16))) == "Keys(...)"
    assert Keys(KEY, b"a" * 16).client != Keys(KEY, b"b" * 16).client
