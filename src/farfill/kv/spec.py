"""The in-memory types of what travels: tensors, layers, chunks. Pure data, no numpy, no torch.

Not here: reading a model's config.json (`layout`), cutting a cache into chunks (`plan`), bytes (`sealing`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NewType

TransferId = NewType("TransferId", str)
ChunkIndex = NewType("ChunkIndex", int)

# Of everything that two processes exchange about a transfer: legs, manifest, closing record, sealing. Raised
# whenever one of them changes its bytes or its meaning; a peer with another one is refused by name.
WIRE_VERSION: Final = 1

# Bytes of one element, of every dtype that may travel.
DTYPE_BYTES: Final[Mapping[str, int]] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


class LayerKind(StrEnum):
    FULL = "full"  # MHA, GQA, MQA: one row per token, all tokens
    MLA = "mla"  # latent attention: one compressed row per token, all tokens
    WINDOW = "window"  # sliding-window attention: rows of the last `window - 1` tokens
    CHUNKED = "chunked"  # chunked attention (Llama 4): rows since the last border, `tokens % window` of them
    LINEAR = "linear"  # recurrent state of fixed size: Mamba2, GDN, KDA, Lightning, short conv
    NONE = "none"  # no state of its own (MLP-only or cache-sharing layers)


class Extent(StrEnum):
    """How a tensor's size depends on the number of tokens."""

    TOKENS = "tokens"  # [tokens, *row_shape]
    WINDOW = "window"  # [held, *row_shape]: the last tokens' rows; `layout.held_range` says how many
    STATE = "state"  # [*row_shape]; exact-length: holds only for the token position where it was taken


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One state tensor of one layer, in the engine-neutral wire form.

    Attributes:
        name: "k", "v", "latent", "rope_key", "conv", "recurrent", "k_scale", "index_key", ...
        row_shape: for TOKENS and WINDOW the shape of one token's row, (heads, dim); for STATE the whole shape.
        dtype: "float32", "bfloat16", "float16", "float8_e4m3fn", "int8"; little-endian on the wire.
    """

    name: str
    extent: Extent
    row_shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """One layer's state. `window` is in tokens: the model's own number.

    A WINDOW layer's token sees itself and `window - 1` before it; a CHUNKED layer's token sees from the last multiple
    of `window` on. A layer's rows are all TOKENS or all WINDOW, so that one token range says what it holds.
    """

    index: int
    kind: LayerKind
    tensors: tuple[TensorSpec, ...]
    window: int | None = None


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """All layers of one model, in order; `layers[i].index == i`."""

    model_type: str
    layers: tuple[LayerLayout, ...]


@dataclass(frozen=True, slots=True)
class ChunkSpec:
    """One data chunk: all tensors of one layer for one token range, or one layer's exact-length state.

    Attributes:
        index: position on the wire. 0 is the manifest, 1..n are data chunks, n + 1 is the closing record.
        layer: the layer's index.
        token_start, token_stop: half-open token range; for a state both are the position it was taken at.
        is_state: whether the tensors are the layer's STATE tensors (else its TOKENS/WINDOW tensors).
        payload_bytes: plaintext bytes: the tensors in layout order, each C-contiguous [tokens, *row_shape].
    """

    index: ChunkIndex
    layer: int
    token_start: int
    token_stop: int
    is_state: bool
    payload_bytes: int
