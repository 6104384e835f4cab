"""Cutting a cache into chunks: the same plan on both sides, derived from layout, prefix length and token grid.

Not here: the bytes of a chunk (the engines read and write those), nor their sealing.
"""

from collections.abc import Sequence
from typing import Final

from farfill.errors import ConfigurationError
from farfill.kv.layout import held_range, row_bytes, state_bytes
from farfill.kv.limits import CHUNK_BYTES_MAX, CHUNKS_MAX, MANIFEST_HEAD_BYTES_MAX, TOKENS_MAX, TRANSFER_BYTES_MAX
from farfill.kv.sealing import SEAL_OVERHEAD_BYTES, TAG_BYTES
from farfill.kv.spec import CacheLayout, ChunkIndex, ChunkSpec

MANIFEST_INDEX: Final = ChunkIndex(0)

# The largest msgpack form of a chunk entry: array 1, index 5, layer 3, token positions 5 + 5, flag 1, bytes 5.
_MANIFEST_ENTRY_BYTES: Final = 25
# Everything in a closing record but its tags: version, transfer id (at most 64 characters), epoch, count, names.
_CLOSING_HEAD_BYTES: Final = 256


def plan_chunks(layout: CacheLayout, prefix_tokens: int, chunk_tokens: int) -> tuple[ChunkSpec, ...]:
    """The data chunks of one transfer, in wire order; `plan[i].index == i + 1`.

    Token ranges on the grid of `chunk_tokens` come outermost, layers inside, so that a chunk exists as soon as
    prefill has passed its range. A windowed layer appears only where the range meets what it holds at
    `prefix_tokens`, clipped to that. Last comes one chunk for each layer with STATE tensors, taken at `prefix_tokens`.

    Raises:
        ConfigurationError: `config_invalid` (field `prefix_tokens` or `chunk_tokens`), if either is out of range or if
            the grid makes chunks too large or too many.
    """
    if not 1 <= prefix_tokens <= TOKENS_MAX:
        raise ConfigurationError(
            "config_invalid", f"prefix_tokens is {prefix_tokens}; allowed is 1 to {TOKENS_MAX}", field="prefix_tokens"
        )
    if not 1 <= chunk_tokens <= TOKENS_MAX:
        raise ConfigurationError(
            "config_invalid", f"chunk_tokens is {chunk_tokens}; allowed is 1 to {TOKENS_MAX}", field="chunk_tokens"
        )
    rows = [(layer, row_bytes(layer), held_range(layer, prefix_tokens)) for layer in layout.layers]
    rows = [entry for entry in rows if entry[1] > 0]
    plan: list[ChunkSpec] = []

    def append(layer: int, start: int, stop: int, is_state: bool, payload_bytes: int) -> None:
        if payload_bytes > CHUNK_BYTES_MAX:
            raise ConfigurationError(
                "config_invalid",
                f"layer {layer} has a chunk of {payload_bytes} bytes; the limit is {CHUNK_BYTES_MAX}: "
                "make chunk_tokens smaller",
                field="chunk_tokens",
            )
        if len(plan) >= CHUNKS_MAX:
            raise ConfigurationError(
                "config_invalid",
                f"{prefix_tokens} tokens on a grid of {chunk_tokens} make more than {CHUNKS_MAX} chunks: "
                "make chunk_tokens larger",
                field="chunk_tokens",
            )
        plan.append(ChunkSpec(ChunkIndex(len(plan) + 1), layer, start, stop, is_state, payload_bytes))

    for grid_start in range(0, prefix_tokens, chunk_tokens):
        for layer, bytes_per_row, (held_start, held_stop) in rows:
            start, stop = max(grid_start, held_start), min(grid_start + chunk_tokens, held_stop)
            if start < stop:
                append(layer.index, start, stop, False, (stop - start) * bytes_per_row)
    for layer in layout.layers:
        if state_bytes(layer) > 0:
            append(layer.index, prefix_tokens, prefix_tokens, True, state_bytes(layer))
    total_bytes = sum(chunk.payload_bytes for chunk in plan)
    if total_bytes > TRANSFER_BYTES_MAX:
        raise ConfigurationError(
            "config_invalid",
            f"the cache of {prefix_tokens} tokens has {total_bytes} bytes; the limit of one transfer is "
            f"{TRANSFER_BYTES_MAX}",
            field="prefix_tokens",
        )
    return tuple(plan)


def closing_index(plan: Sequence[ChunkSpec]) -> ChunkIndex:
    """The closing record's index: the one after the last data chunk."""
    return ChunkIndex(len(plan) + 1)


def manifest_bytes_max(plan: Sequence[ChunkSpec]) -> int:
    """An upper bound of the encoded manifest, in plaintext bytes; `manifest.encode_manifest` keeps to it."""
    return MANIFEST_HEAD_BYTES_MAX + _MANIFEST_ENTRY_BYTES * len(plan)


def closing_bytes_max(plan: Sequence[ChunkSpec]) -> int:
    """An upper bound of the encoded closing record, in plaintext bytes."""
    return _CLOSING_HEAD_BYTES + TAG_BYTES * len(plan)


def transfer_bytes(plan: Sequence[ChunkSpec]) -> int:
    """What a store must reserve for a transfer: data, manifest and closing record, all sealed (an upper bound)."""
    data_bytes = sum(chunk.payload_bytes for chunk in plan)
    return data_bytes + manifest_bytes_max(plan) + closing_bytes_max(plan) + SEAL_OVERHEAD_BYTES * (len(plan) + 2)


def sealed_bytes_max(plan: Sequence[ChunkSpec], index: int) -> int:
    """The most bytes that sealed chunk `index` may have; exact for data chunks.

    Raises:
        IndexError: `index` is not of this plan.
    """
    if index == MANIFEST_INDEX:
        return manifest_bytes_max(plan) + SEAL_OVERHEAD_BYTES
    if index == closing_index(plan):
        return closing_bytes_max(plan) + SEAL_OVERHEAD_BYTES
    if not 1 <= index <= len(plan):
        raise IndexError(f"chunk {index} is not of a plan of {len(plan)} data chunks")
    return plan[index - 1].payload_bytes + SEAL_OVERHEAD_BYTES
