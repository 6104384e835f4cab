"""The layout of a model's cache: its sizes, which rows it holds, its JSON form, and how to get one from a config.json.

Not here: reading the fields of each architecture (`architectures`), nor cutting a cache into chunks (`plan`).
"""

import hashlib
from collections.abc import Mapping
from math import prod
from typing import Any, Final

import msgspec

from farfill.errors import PeerError
from farfill.kv.architectures import read_config
from farfill.kv.limits import DIMENSION_MAX, LAYERS_MAX, NAME_CHARS_MAX, TENSORS_PER_LAYER_MAX, check_size
from farfill.kv.spec import DTYPE_BYTES, CacheLayout, Extent, LayerKind, LayerLayout, TensorSpec

_ROWS: Final = {
    LayerKind.FULL: Extent.TOKENS,
    LayerKind.MLA: Extent.TOKENS,
    LayerKind.WINDOW: Extent.WINDOW,
    LayerKind.CHUNKED: Extent.WINDOW,
}


def layout_from_config(config: Mapping[str, Any], *, dtype: str | None = None) -> CacheLayout:
    """The layout of the cache that a model with this Hugging Face config.json keeps.

    Args:
        config: the parsed config.json; a multimodal model's text part is found inside it.
        dtype: the dtype of keys, values and convolution states, if not the config's own ("bfloat16").

    Raises:
        ConfigurationError: `model_unsupported`, naming the field that is missing or not understood. Nothing is guessed.
    """
    return read_config(config, dtype=dtype)


def tensor_bytes(tensor: TensorSpec) -> int:
    """Bytes of one row (TOKENS, WINDOW) or of the whole state (STATE)."""
    return prod(tensor.row_shape) * DTYPE_BYTES[tensor.dtype]


def row_bytes(layer: LayerLayout) -> int:
    """Bytes of one token's rows in one layer; 0 for a layer without rows."""
    return sum(tensor_bytes(tensor) for tensor in layer.tensors if tensor.extent is not Extent.STATE)


def state_bytes(layer: LayerLayout) -> int:
    """Bytes of one layer's exact-length state; 0 for a layer without one."""
    return sum(tensor_bytes(tensor) for tensor in layer.tensors if tensor.extent is Extent.STATE)


def held_range(layer: LayerLayout, tokens: int) -> tuple[int, int]:
    """The half-open token range whose rows a layer holds when `tokens` tokens are cached.

    FULL and MLA: all. WINDOW: the last `window - 1`. CHUNKED: those since the last multiple of `window`. Others: none,
    that is (tokens, tokens).
    """
    match layer.kind:
        case LayerKind.FULL | LayerKind.MLA:
            return 0, tokens
        case LayerKind.WINDOW:
            assert layer.window is not None
            return max(0, tokens - (layer.window - 1)), tokens
        case LayerKind.CHUNKED:
            assert layer.window is not None
            return tokens - tokens % layer.window, tokens
        case LayerKind.LINEAR | LayerKind.NONE:
            return tokens, tokens


def bytes_per_token(layout: CacheLayout) -> int:
    """What each further token adds for good: the rows of the FULL and MLA layers, in bytes."""
    return sum(row_bytes(layer) for layer in layout.layers if layer.kind in (LayerKind.FULL, LayerKind.MLA))


def fixed_bytes(layout: CacheLayout) -> int:
    """The most that does not grow with the prompt: states, and windows once full (`window - 1` rows), in bytes."""
    windows = sum(row_bytes(layer) * (layer.window - 1) for layer in layout.layers if layer.window is not None)
    return windows + sum(state_bytes(layer) for layer in layout.layers)


def cache_bytes(layout: CacheLayout, tokens: int) -> int:
    """What a cache of `tokens` tokens holds, in bytes, exactly: what travels for a prefix of that length."""
    total = 0
    for layer in layout.layers:
        start, stop = held_range(layer, tokens)
        total += row_bytes(layer) * (stop - start) + state_bytes(layer)
    return total


def layout_to_builtins(layout: CacheLayout) -> dict[str, Any]:
    """The layout as a JSON value."""
    builtins: dict[str, Any] = msgspec.to_builtins(layout)
    return builtins


def layout_from_builtins(value: object) -> CacheLayout:
    """Reads and checks a layout that another process sent as JSON.

    Raises:
        PeerError: `layout_mismatch` for anything that is not a layout, naming what is wrong with it.
    """
    try:
        layout = msgspec.convert(value, CacheLayout)
    except msgspec.ValidationError as error:
        raise PeerError("layout_mismatch", f"not a cache layout: {error}", field="layout") from error
    check_layout(layout)
    return layout


def layout_digest(layout: CacheLayout) -> str:
    """SHA-256 of the layout's canonical form, in hex."""
    return hashlib.sha256(msgspec.json.encode(layout, order="deterministic")).hexdigest()


def check_layout(layout: CacheLayout) -> None:
    """Checks what the types do not say: order, kinds that fit their tensors, known dtypes, sane sizes.

    Raises:
        PeerError: `layout_mismatch`, or what `check_size` raises.
    """
    check_size("layers", len(layout.layers), LAYERS_MAX, minimum=1)
    check_size("model_type length", len(layout.model_type), NAME_CHARS_MAX, minimum=1)
    for position, layer in enumerate(layout.layers):
        if layer.index != position:
            raise _bad(f"layer {position} says that its index is {layer.index}")
        check_size(f"layer {position}: tensors", len(layer.tensors), TENSORS_PER_LAYER_MAX)
        windowed = layer.kind in (LayerKind.WINDOW, LayerKind.CHUNKED)
        if windowed != (layer.window is not None):
            raise _bad(f"layer {position} of kind {layer.kind} has window {layer.window}")
        if layer.window is not None:
            check_size(f"layer {position}: window", layer.window, DIMENSION_MAX, minimum=1)
        names = [tensor.name for tensor in layer.tensors]
        if len(set(names)) != len(names):
            raise _bad(f"layer {position} names a tensor twice: {', '.join(names)}")
        for tensor in layer.tensors:
            _check_tensor(layer, tensor)


def _check_tensor(layer: LayerLayout, tensor: TensorSpec) -> None:
    where = f"layer {layer.index}, tensor {tensor.name!r}"
    check_size(f"layer {layer.index}: tensor name length", len(tensor.name), NAME_CHARS_MAX, minimum=1)
    if tensor.dtype not in DTYPE_BYTES:
        raise _bad(f"{where} has dtype {tensor.dtype!r}; known are {', '.join(DTYPE_BYTES)}")
    if tensor.extent is not Extent.STATE and _ROWS.get(layer.kind) is not tensor.extent:
        raise _bad(f"{where} has extent {tensor.extent}, which a layer of kind {layer.kind} has not")
    if tensor.extent is Extent.STATE and layer.kind is LayerKind.NONE:
        raise _bad(f"{where} is a state, but the layer's kind is {layer.kind}")
    check_size(f"{where}: dimensions", len(tensor.row_shape), 4, minimum=1)
    for dimension in tensor.row_shape:
        check_size(f"{where}: dimension", dimension, DIMENSION_MAX, minimum=1)


def _bad(message: str) -> PeerError:
    return PeerError("layout_mismatch", message, field="layout")
