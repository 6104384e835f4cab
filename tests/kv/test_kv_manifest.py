"""A manifest is compared with what the consumer derived itself; whatever differs is refused by name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_cases import EVERY_KIND, fingerprint_of, layouts

from farfill.errors import LocalProtocolError, PeerError
from farfill.kv.manifest import (
    ClosingRecord,
    Manifest,
    check_closing,
    check_manifest,
    decode_closing,
    decode_manifest,
    encode_closing,
    encode_manifest,
    manifest_for,
)
from farfill.kv.plan import manifest_bytes_max, plan_chunks
from farfill.kv.spec import WIRE_VERSION, CacheLayout, LayerLayout, TransferId

ID = TransferId("0123456789abcdef" * 2)
IDS = [7, 11, 13] * 7
GRID = 8
FINGERPRINT = fingerprint_of(EVERY_KIND)
PLAN = plan_chunks(EVERY_KIND, len(IDS), GRID)
TAGS = tuple(bytes([number]) * 16 for number in range(len(PLAN)))


def manifest(layout: CacheLayout = EVERY_KIND) -> Manifest:
    return manifest_for(
        transfer_id=ID,
        epoch=3,
        fingerprint=fingerprint_of(layout),
        layout=layout,
        prefix_token_ids=IDS,
        chunk_tokens=GRID,
    )


def check(received: Manifest, **changes: Any) -> Any:
    expected = {
        "layout": EVERY_KIND,
        "fingerprint": FINGERPRINT,
        "prefix_token_ids": IDS,
        "transfer_id": ID,
        "epoch": 3,
        "chunk_tokens": GRID,
    }
    return check_manifest(received, **{**expected, **changes})


def refusal(call: Callable[[], object]) -> PeerError:
    with pytest.raises(PeerError) as caught:
        call()
    return caught.value


def changed_layer(index: int, change: Callable[[LayerLayout], LayerLayout]) -> CacheLayout:
    layers = list(EVERY_KIND.layers)
    layers[index] = change(layers[index])
    return replace(EVERY_KIND, layers=tuple(layers))


@settings(max_examples=50)
@given(layouts(), st.integers(1, 60), st.integers(1, 70))
def test_a_manifest_survives_the_wire_and_passes(layout: CacheLayout, tokens: int, grid: int) -> None:
    sent = manifest_for(
        transfer_id=ID,
        epoch=3,
        fingerprint=fingerprint_of(layout),
        layout=layout,
        prefix_token_ids=range(tokens),
        chunk_tokens=grid,
    )
    encoded = encode_manifest(sent)
    received = decode_manifest(bytearray(encoded))
    assert received == sent
    plan = check(
        received,
        layout=layout,
        fingerprint=fingerprint_of(layout),
        prefix_token_ids=list(range(tokens)),
        chunk_tokens=grid,
    )
    assert plan == plan_chunks(layout, tokens, grid)


def test_a_missing_layer_is_named() -> None:
    error = refusal(lambda: check(manifest(replace(EVERY_KIND, layers=EVERY_KIND.layers[:-1]))))
    assert error.code == "manifest_incomplete"
    assert "layer 6 is missing" in error.message


def test_an_extra_layer_is_named() -> None:
    more = replace(EVERY_KIND, layers=(*EVERY_KIND.layers, replace(EVERY_KIND.layers[0], index=7)))
    error = refusal(lambda: check(manifest(more)))
    assert error.code == "manifest_incomplete"
    assert "layer 7 is extra" in error.message


def test_many_missing_layers_make_a_message_that_can_be_read() -> None:
    many = CacheLayout("deep", tuple(replace(EVERY_KIND.layers[0], index=index) for index in range(93)))
    short = CacheLayout("deep", many.layers[:24])
    error = refusal(lambda: check(manifest(short), layout=many))
    assert "layer 24 is missing" in error.message
    assert "and 61 more" in error.message


@pytest.mark.parametrize(("layer", "tensor"), [(0, "v"), (2, "rope_key"), (4, "recurrent"), (6, "conv")])
def test_a_missing_or_extra_tensor_is_named(layer: int, tensor: str) -> None:
    fewer = changed_layer(
        layer, lambda one: replace(one, tensors=tuple(spec for spec in one.tensors if spec.name != tensor))
    )
    error = refusal(lambda: check(manifest(fewer)))
    assert (error.code, f"layer {layer} lacks tensor '{tensor}'" in error.message) == ("manifest_incomplete", True)
    error = refusal(lambda: check(manifest(), layout=fewer))
    assert error.code == "manifest_incomplete"
    assert f"layer {layer} has the extra tensor '{tensor}'" in error.message


def test_tensors_of_another_shape_dtype_order_or_window_are_a_mismatch() -> None:
    def tensor(**changes: Any) -> Callable[[LayerLayout], LayerLayout]:
        return lambda one: replace(one, tensors=(replace(one.tensors[0], **changes), *one.tensors[1:]))

    for layout in (
        changed_layer(0, tensor(row_shape=(4, 2))),
        changed_layer(0, tensor(dtype="float16")),
        changed_layer(0, lambda one: replace(one, tensors=one.tensors[::-1])),
        changed_layer(1, lambda one: replace(one, window=6)),
    ):
        error = refusal(lambda layout=layout: check(manifest(layout)))
        assert (error.code, error.field) == ("layout_mismatch", "layout")
        assert "ours is" in error.message
        assert "theirs is" in error.message


def test_a_layout_of_another_model_type_is_a_mismatch() -> None:
    error = refusal(lambda: check(manifest(replace(EVERY_KIND, model_type="other"))))
    assert (error.code, "'other'" in error.message) == ("layout_mismatch", True)


def test_another_fingerprint_is_refused() -> None:
    error = refusal(lambda: check(manifest(), fingerprint=fingerprint_of(EVERY_KIND, weights_digest="d" * 64)))
    assert (error.code, error.field) == ("fingerprint_mismatch", "weights_digest")


def test_another_prompt_is_refused() -> None:
    for token_ids in (IDS[:-1], [*IDS, 1], [*IDS[:-1], 1], [IDS[1], IDS[0], *IDS[2:]]):
        assert refusal(lambda token_ids=token_ids: check(manifest(), prefix_token_ids=token_ids)).code == (
            "prompt_mismatch"
        )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"transfer_id": TransferId("another")}, "transfer_id"),
        ({"epoch": 4}, "epoch"),
        ({"chunk_tokens": 4}, "chunk_tokens"),
        ({"codec": "zstd"}, None),
    ],
)
def test_another_transfer_epoch_grid_or_codec_is_refused(changes: dict[str, Any], field: str | None) -> None:
    error = refusal(lambda: check(msgspec.structs.replace(manifest(), **changes)))
    assert (error.code, error.field) == ("manifest_invalid", field)


def test_a_chunk_list_that_is_not_the_plan_is_refused() -> None:
    chunks = manifest().chunks

    def with_chunks(*listed: Any) -> Manifest:
        return msgspec.structs.replace(manifest(), chunks=tuple(listed))

    error = refusal(lambda: check(with_chunks(*chunks[:-1])))
    assert (error.code, "13 (layer 6, state" in error.message) == ("manifest_incomplete", True)
    error = refusal(lambda: check(with_chunks(*chunks, replace(chunks[-1], index=14))))
    assert (error.code, "extra chunk 14" in error.message) == ("manifest_incomplete", True)
    for listed in (
        chunks[1:],
        (chunks[1], chunks[0], *chunks[2:]),
        (chunks[0], *chunks),
        (replace(chunks[0], payload_bytes=chunks[0].payload_bytes + 1), *chunks[1:]),
        (replace(chunks[0], token_stop=7), *chunks[1:]),
    ):
        assert refusal(lambda listed=listed: check(with_chunks(*listed))).code == "manifest_invalid"


def test_another_wire_version_is_refused_before_anything_else_is_read() -> None:
    future = msgspec.msgpack.encode({"wire_version": WIRE_VERSION + 1, "something": "new"})
    for decode in (decode_manifest, decode_closing):
        error = refusal(lambda decode=decode: decode(future))
        assert (error.code, error.field) == ("wire_version_unsupported", "wire_version")
    newer = msgspec.structs.replace(manifest(), wire_version=WIRE_VERSION + 1)
    assert refusal(lambda: check(newer)).code == "wire_version_unsupported"


@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80, 0xFF])
def test_damaged_manifests_are_refused_or_say_the_same(mask: int) -> None:
    """Sealing guards every byte; this says that the check alone lets nothing pass that matters."""
    encoded = bytearray(encode_manifest(manifest()))
    refused = 0
    for position in range(len(encoded)):
        encoded[position] ^= mask
        try:
            received = decode_manifest(encoded)
            check(received)
        except PeerError as error:
            assert error.failure_class is not None
            refused += 1
        else:
            told = msgspec.structs.replace(FINGERPRINT, must_equal=received.fingerprint.must_equal)
            assert msgspec.structs.replace(received, fingerprint=told) == manifest(), f"byte {position}"
        encoded[position] ^= mask
    assert refused > len(encoded) / 2


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(noise: bytes) -> None:
    for decode in (decode_manifest, decode_closing):
        assert refusal(lambda decode=decode: decode(noise)).code in (
            "manifest_invalid",
            "wire_version_unsupported",
            "protocol_violation",
        )


def test_a_manifest_with_fields_of_its_own_is_refused() -> None:
    fields = msgspec.msgpack.decode(encode_manifest(manifest()))
    for changed in ({**fields, "more": 1}, {name: value for name, value in fields.items() if name != "layers"}):
        assert refusal(lambda changed=changed: decode_manifest(msgspec.msgpack.encode(changed))).code == (
            "manifest_invalid"
        )


def test_a_manifest_over_its_bound_is_not_sent() -> None:
    huge = fingerprint_of(EVERY_KIND, rope="x" * 200_000)
    with pytest.raises(LocalProtocolError, match="manifest"):
        encode_manifest(msgspec.structs.replace(manifest(), fingerprint=huge))


def test_the_manifest_of_a_large_model_is_small() -> None:
    layers = tuple(replace(EVERY_KIND.layers[0], index=index) for index in range(126))
    deep = manifest(CacheLayout("deep", layers))
    assert len(encode_manifest(deep)) < manifest_bytes_max(deep.chunks) / 4


def closing(**changes: Any) -> ClosingRecord:
    return msgspec.structs.replace(ClosingRecord(ID, 3, TAGS, 5), **changes)


def check_record(record: ClosingRecord, tags: tuple[bytes, ...] = TAGS) -> None:
    check_closing(record, plan=PLAN, tags=tags, prefix_tokens=len(IDS), transfer_id=ID, epoch=3)


def test_a_closing_record_survives_the_wire_and_passes() -> None:
    received = decode_closing(memoryview(encode_closing(closing())))
    assert received == closing()
    check_record(received)
    check_record(closing(cached_tokens=0))
    check_record(closing(cached_tokens=len(IDS)))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"transfer_id": TransferId("another")}, "manifest_invalid"),
        ({"epoch": 2}, "manifest_invalid"),
        ({"tags": TAGS[:-1]}, "manifest_incomplete"),
        ({"tags": (*TAGS, bytes(16))}, "manifest_incomplete"),
        ({"tags": (TAGS[1], TAGS[0], *TAGS[2:])}, "chunk_conflict"),
        ({"tags": (*TAGS[:-1], b"\xff" * 16)}, "chunk_conflict"),
        ({"cached_tokens": len(IDS) + 1}, "manifest_invalid"),
        ({"cached_tokens": -1}, "manifest_invalid"),
    ],
)
def test_a_closing_record_that_does_not_fit_is_refused(changes: dict[str, Any], code: str) -> None:
    assert refusal(lambda: check_record(decode_closing(encode_closing(closing(**changes))))).code == code


def test_closing_over_too_few_opened_chunks_is_our_own_mistake() -> None:
    with pytest.raises(LocalProtocolError):
        check_record(closing(), TAGS[:-1])
    with pytest.raises(LocalProtocolError):
        encode_closing(closing(tags=(b"short",)))


def test_tags_that_are_not_whole_are_refused() -> None:
    fields = msgspec.msgpack.decode(encode_closing(closing()))
    fields["tags"] = fields["tags"][:-1]
    assert refusal(lambda: decode_closing(msgspec.msgpack.encode(fields))).code == "manifest_invalid"
