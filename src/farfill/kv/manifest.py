"""The manifest (chunk 0) and the closing record (the last chunk): what a transfer consists of, and proof of its end.

Not here: their sealing (`sealing`), nor when they are sent and awaited (`transfer`).

Rule 1: the consumer derives layout and plan itself; the manifest is compared with them, never followed.
Rule 2: a layer or tensor that is missing or extra is a refusal that names it.
Rule 3: a version that is not ours is refused before anything else is read.
"""

from collections.abc import Sequence
from hmac import compare_digest
from typing import Final

import msgspec

from farfill.errors import LocalProtocolError, PeerError
from farfill.kv.fingerprint import CODEC_NONE, Fingerprint, require_compatible
from farfill.kv.layout import check_layout
from farfill.kv.limits import CHUNK_BYTES_MAX, CHUNKS_MAX, check_size
from farfill.kv.plan import manifest_bytes_max, plan_chunks
from farfill.kv.prefix import token_digest
from farfill.kv.sealing import TAG_BYTES
from farfill.kv.spec import (
    WIRE_VERSION,
    CacheLayout,
    ChunkIndex,
    ChunkSpec,
    Extent,
    LayerKind,
    LayerLayout,
    TensorSpec,
    TransferId,
)


class Manifest(msgspec.Struct, frozen=True):
    """What a transfer consists of, exactly, as its producer says.

    Attributes:
        token_digest: SHA-256 over the prefix's token ids, `prefix.token_digest`.
        chunks: the data chunks, in wire order.
    """

    transfer_id: TransferId
    epoch: int
    fingerprint: Fingerprint
    layout: CacheLayout
    prefix_tokens: int
    chunk_tokens: int
    token_digest: bytes
    chunks: tuple[ChunkSpec, ...]
    codec: str = CODEC_NONE
    wire_version: int = WIRE_VERSION


class ClosingRecord(msgspec.Struct, frozen=True):
    """Written once every data chunk is sealed.

    Attributes:
        tags: each data chunk's 16-byte tag, in plan order.
        cached_tokens: prompt tokens that the prefill side found in its own cache and did not compute.
    """

    transfer_id: TransferId
    epoch: int
    tags: tuple[bytes, ...]
    cached_tokens: int


def manifest_for(
    *,
    transfer_id: TransferId,
    epoch: int,
    fingerprint: Fingerprint,
    layout: CacheLayout,
    prefix_token_ids: Sequence[int],
    chunk_tokens: int,
) -> Manifest:
    """The producer's manifest of a transfer."""
    return Manifest(
        transfer_id=transfer_id,
        epoch=epoch,
        fingerprint=fingerprint,
        layout=layout,
        prefix_tokens=len(prefix_token_ids),
        chunk_tokens=chunk_tokens,
        token_digest=token_digest(prefix_token_ids),
        chunks=plan_chunks(layout, len(prefix_token_ids), chunk_tokens),
    )


# The wire forms: rows instead of maps where there are many, so that a manifest stays small.
_WireTensor = tuple[str, Extent, tuple[int, ...], str]
_WireLayer = tuple[LayerKind, int | None, tuple[_WireTensor, ...]]
_WireChunk = tuple[int, int, int, int, bool, int]


class _Versioned(msgspec.Struct, frozen=True):
    wire_version: int


class _WireManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    wire_version: int
    transfer_id: str
    epoch: int
    fingerprint: Fingerprint
    model_type: str
    layers: tuple[_WireLayer, ...]
    prefix_tokens: int
    chunk_tokens: int
    token_digest: bytes
    codec: str
    chunks: tuple[_WireChunk, ...]


class _WireClosing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    wire_version: int
    transfer_id: str
    epoch: int
    cached_tokens: int
    tags: bytes  # all tags, one after the other


_DIGEST_BYTES: Final = 32


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as msgpack, at most `plan.manifest_bytes_max` bytes.

    Raises:
        LocalProtocolError: it is larger (a fingerprint or layout beyond `limits`).
    """
    encoded = msgspec.msgpack.encode(
        _WireManifest(
            wire_version=manifest.wire_version,
            transfer_id=manifest.transfer_id,
            epoch=manifest.epoch,
            fingerprint=manifest.fingerprint,
            model_type=manifest.layout.model_type,
            layers=tuple(
                (layer.kind, layer.window, tuple((t.name, t.extent, t.row_shape, t.dtype) for t in layer.tensors))
                for layer in manifest.layout.layers
            ),
            prefix_tokens=manifest.prefix_tokens,
            chunk_tokens=manifest.chunk_tokens,
            token_digest=manifest.token_digest,
            codec=manifest.codec,
            chunks=tuple(
                (c.index, c.layer, c.token_start, c.token_stop, c.is_state, c.payload_bytes) for c in manifest.chunks
            ),
        )
    )
    if len(encoded) > manifest_bytes_max(manifest.chunks):
        raise LocalProtocolError(f"a manifest of {len(encoded)} bytes is over {manifest_bytes_max(manifest.chunks)}")
    return encoded


def decode_manifest(data: bytes | bytearray | memoryview) -> Manifest:
    """Reads a manifest. What it says is not yet compared with anything: `check_manifest` does that.

    Raises:
        PeerError: `wire_version_unsupported`, `manifest_invalid`, or `frame_too_large`.
    """
    check_size("manifest bytes", memoryview(data).nbytes, CHUNK_BYTES_MAX, minimum=1)
    _require_version(data, "manifest")
    try:
        wire = msgspec.msgpack.decode(data, type=_WireManifest)
    except msgspec.DecodeError as error:
        raise PeerError("manifest_invalid", f"the manifest cannot be read: {error}") from error
    check_size("manifest chunks", len(wire.chunks), CHUNKS_MAX)
    layers = tuple(
        LayerLayout(index, kind, tuple(TensorSpec(*tensor) for tensor in tensors), window)
        for index, (kind, window, tensors) in enumerate(wire.layers)
    )
    return Manifest(
        transfer_id=TransferId(wire.transfer_id),
        epoch=wire.epoch,
        fingerprint=wire.fingerprint,
        layout=CacheLayout(wire.model_type, layers),
        prefix_tokens=wire.prefix_tokens,
        chunk_tokens=wire.chunk_tokens,
        token_digest=wire.token_digest,
        chunks=tuple(ChunkSpec(ChunkIndex(chunk[0]), *chunk[1:]) for chunk in wire.chunks),
        codec=wire.codec,
        wire_version=wire.wire_version,
    )


def check_manifest(
    manifest: Manifest,
    *,
    layout: CacheLayout,
    fingerprint: Fingerprint,
    prefix_token_ids: Sequence[int],
    transfer_id: TransferId,
    epoch: int,
    chunk_tokens: int,
) -> tuple[ChunkSpec, ...]:
    """Compares a manifest with what this side expects; returns the plan that this side derived itself.

    Args:
        layout, fingerprint: this side's own.
        prefix_token_ids: the prompt's token ids but the last, as this side has them.
        transfer_id, epoch, chunk_tokens: from the transfer's spec.

    Raises:
        PeerError: `wire_version_unsupported`; `manifest_invalid` (another transfer, epoch or codec, or a wrong chunk
            list); `manifest_incomplete` (names the layers, tensors or chunks that are missing or extra);
            `layout_mismatch` (a tensor of another shape, dtype or kind); `fingerprint_mismatch`; `prompt_mismatch`.
    """
    if manifest.wire_version != WIRE_VERSION:
        raise _unsupported(manifest.wire_version, "manifest")
    _require_transfer("manifest", manifest.transfer_id, manifest.epoch, transfer_id, epoch)
    if manifest.codec != CODEC_NONE:
        raise PeerError("manifest_invalid", f"the manifest's codec is {manifest.codec!r}; only {CODEC_NONE!r} is known")
    # The tensors first: "layer 7 lacks v" says more than "layout_digest differs".
    _require_layout(manifest.layout, layout)
    require_compatible(fingerprint, manifest.fingerprint)
    if manifest.prefix_tokens != len(prefix_token_ids):
        raise PeerError(
            "prompt_mismatch",
            f"the manifest is of {manifest.prefix_tokens} tokens; this side's prefix has {len(prefix_token_ids)}",
            field="prefix_tokens",
        )
    if not compare_digest(manifest.token_digest, token_digest(prefix_token_ids)):
        raise PeerError("prompt_mismatch", "the manifest is of other token ids than this side's", field="token_digest")
    if manifest.chunk_tokens != chunk_tokens:
        raise PeerError(
            "manifest_invalid",
            f"the manifest's grid is {manifest.chunk_tokens} tokens; this transfer's is {chunk_tokens}",
            field="chunk_tokens",
        )
    plan = plan_chunks(layout, len(prefix_token_ids), chunk_tokens)
    if manifest.chunks != plan:
        raise _wrong_chunks(manifest.chunks, plan)
    return plan


def encode_closing(record: ClosingRecord) -> bytes:
    """The closing record as msgpack, at most `plan.closing_bytes_max` bytes."""
    if any(len(tag) != TAG_BYTES for tag in record.tags):
        raise LocalProtocolError(f"a tag has {TAG_BYTES} bytes")
    return msgspec.msgpack.encode(
        _WireClosing(WIRE_VERSION, record.transfer_id, record.epoch, record.cached_tokens, b"".join(record.tags))
    )


def decode_closing(data: bytes | bytearray | memoryview) -> ClosingRecord:
    """Reads a closing record; `check_closing` compares it.

    Raises:
        PeerError: `wire_version_unsupported`, `manifest_invalid`, or `frame_too_large`.
    """
    check_size("closing record bytes", memoryview(data).nbytes, CHUNK_BYTES_MAX, minimum=1)
    _require_version(data, "closing record")
    try:
        wire = msgspec.msgpack.decode(data, type=_WireClosing)
    except msgspec.DecodeError as error:
        raise PeerError("manifest_invalid", f"the closing record cannot be read: {error}") from error
    if len(wire.tags) % TAG_BYTES:
        raise PeerError("manifest_invalid", f"the closing record has {len(wire.tags)} bytes of tags")
    check_size("closing record tags", len(wire.tags) // TAG_BYTES, CHUNKS_MAX)
    tags = tuple(wire.tags[start : start + TAG_BYTES] for start in range(0, len(wire.tags), TAG_BYTES))
    return ClosingRecord(TransferId(wire.transfer_id), wire.epoch, tags, wire.cached_tokens)


def check_closing(
    record: ClosingRecord,
    *,
    plan: Sequence[ChunkSpec],
    tags: Sequence[bytes],
    prefix_tokens: int,
    transfer_id: TransferId,
    epoch: int,
) -> None:
    """Compares a closing record with the chunks that this side opened.

    Args:
        tags: the tag of each data chunk as this side opened it, in plan order.

    Raises:
        PeerError: `manifest_invalid`, `manifest_incomplete` (it closes another number of chunks), or `chunk_conflict`
            (a chunk that was opened is not the one that the producer finally sealed).
    """
    _require_transfer("closing record", record.transfer_id, record.epoch, transfer_id, epoch)
    if len(tags) != len(plan):
        raise LocalProtocolError(f"{len(tags)} chunks were opened of a plan of {len(plan)}")
    if len(record.tags) != len(plan):
        raise PeerError(
            "manifest_incomplete", f"the closing record has {len(record.tags)} chunks; the plan has {len(plan)}"
        )
    if not 0 <= record.cached_tokens <= prefix_tokens:
        raise PeerError(
            "manifest_invalid",
            f"cached_tokens is {record.cached_tokens}; the prefix has {prefix_tokens} tokens",
            field="cached_tokens",
        )
    for chunk, closed, opened in zip(plan, record.tags, tags, strict=True):
        if not compare_digest(closed, opened):
            raise PeerError(
                "chunk_conflict", f"chunk {chunk.index} was sealed twice, and what was opened is not what was closed"
            )


def _require_version(data: bytes | bytearray | memoryview, what: str) -> None:
    try:
        version = msgspec.msgpack.decode(data, type=_Versioned).wire_version
    except msgspec.DecodeError as error:
        raise PeerError("manifest_invalid", f"the {what} cannot be read: {error}") from error
    if version != WIRE_VERSION:
        raise _unsupported(version, what)


def _unsupported(version: int, what: str) -> PeerError:
    return PeerError(
        "wire_version_unsupported",
        f"the {what} has wire version {version}; this side speaks {WIRE_VERSION}: run the same farfill version on both",
        field="wire_version",
    )


def _require_transfer(what: str, their_id: str, their_epoch: int, transfer_id: TransferId, epoch: int) -> None:
    if their_id != transfer_id:
        raise PeerError("manifest_invalid", f"the {what} is of another transfer", field="transfer_id")
    if their_epoch != epoch:
        raise PeerError(
            "manifest_invalid", f"the {what} is of epoch {their_epoch}; this side's is {epoch}", field="epoch"
        )


def _require_layout(theirs: CacheLayout, ours: CacheLayout) -> None:
    check_layout(theirs)
    if theirs.model_type != ours.model_type:
        raise PeerError(
            "layout_mismatch",
            f"the manifest is of model type {theirs.model_type!r}; this side serves {ours.model_type!r}",
            field="layout",
        )
    differences = []
    for missing in ours.layers[len(theirs.layers) :]:
        differences.append(f"layer {missing.index} is missing")
    for extra in theirs.layers[len(ours.layers) :]:
        differences.append(f"layer {extra.index} is extra")
    for our_layer, their_layer in zip(ours.layers, theirs.layers, strict=False):
        our_names = [tensor.name for tensor in our_layer.tensors]
        their_names = [tensor.name for tensor in their_layer.tensors]
        for name in our_names:
            if name not in their_names:
                differences.append(f"layer {our_layer.index} lacks tensor {name!r}")
        for name in their_names:
            if name not in our_names:
                differences.append(f"layer {our_layer.index} has the extra tensor {name!r}")
    if differences:
        shown = "; ".join(differences[:8]) + (f"; and {len(differences) - 8} more" if len(differences) > 8 else "")
        raise PeerError("manifest_incomplete", f"the manifest does not have what this model needs: {shown}")
    for our_layer, their_layer in zip(ours.layers, theirs.layers, strict=True):
        if our_layer != their_layer:
            raise PeerError(
                "layout_mismatch",
                f"layer {our_layer.index}: ours is {_describe(our_layer)}, theirs is {_describe(their_layer)}",
                field="layout",
            )


def _describe(layer: LayerLayout) -> str:
    tensors = ", ".join(f"{tensor.name} {list(tensor.row_shape)} {tensor.dtype}" for tensor in layer.tensors)
    window = f", window {layer.window}" if layer.window is not None else ""
    return f"{layer.kind} ({tensors or 'no tensors'}{window})"


def _wrong_chunks(theirs: Sequence[ChunkSpec], ours: Sequence[ChunkSpec]) -> PeerError:
    for their_chunk, our_chunk in zip(theirs, ours, strict=False):
        if their_chunk != our_chunk:
            return PeerError(
                "manifest_invalid", f"the manifest's chunk {_place(their_chunk)} must be {_place(our_chunk)}"
            )
    if len(theirs) < len(ours):
        missing = ours[len(theirs)]
        return PeerError(
            "manifest_incomplete",
            f"the manifest lists {len(theirs)} of {len(ours)} chunks; {_place(missing)} is missing",
        )
    return PeerError("manifest_incomplete", f"the manifest lists the extra chunk {_place(theirs[len(ours)])}")


def _place(chunk: ChunkSpec) -> str:
    what = "state" if chunk.is_state else "rows"
    return (
        f"{chunk.index} (layer {chunk.layer}, {what} [{chunk.token_start}, {chunk.token_stop}), "
        f"{chunk.payload_bytes} bytes)"
    )
