"""A Transformers cache out to wire chunks and back in, bit for bit.

Transformers keeps rows as [1, heads, tokens, dim]; the wire has [tokens, heads, dim]. Here is the only place that knows
the attributes of Transformers' cache layers. Not here: which chunks there are (`kv.plan`), when they are made (`work`).

Completeness is checked both ways: a tensor that a cache layer holds and the layout does not declare is an error, as is
one that the layout declares and the cache lacks.
"""

import copy
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Cache, DynamicCache, PretrainedConfig

from farfill.errors import LocalProtocolError, PeerError
from farfill.kv.layout import held_range
from farfill.kv.spec import CacheLayout, ChunkSpec, Extent, LayerKind, LayerLayout, TensorSpec

# Copies move bits, not numbers; numpy has no bfloat16, so both sides look at integers of the same width.
_BITS: Final = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.int16), 4: (torch.int32, np.int32)}
# Tensors among a layer's attributes that are no state: constants of the layer.
_CONSTANTS: Final = frozenset({"_sliding_window_tensor"})


def new_cache(config: PretrainedConfig) -> Cache:
    """An empty cache for one sequence of a model with this config."""
    return DynamicCache(config=config)


def cache_bytes(cache: Cache) -> int:
    """Bytes of all state tensors in the cache."""
    return sum(tensor.nbytes for layer in cache.layers for _, tensor in _tensors_of(layer))


def clone_cache(cache: Cache, *, tokens: int | None = None) -> Cache:
    """A cache that can go on by itself; neither changes the other.

    Rows are shared, for Transformers replaces row tensors when they grow; states are copied, for it changes them in
    place.

    Args:
        tokens: keep only the rows of the first so many tokens; only for a cache that has rows of all tokens.
    """
    clone = copy.copy(cache)
    clone.layers = [_clone_layer(layer, tokens) for layer in cache.layers]
    return clone


def _clone_layer(layer: Any, tokens: int | None) -> Any:
    clone = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            copied = {key: item.clone() if isinstance(item, torch.Tensor) else item for key, item in value.items()}
            setattr(clone, name, copied)
    if getattr(clone, "keys", None) is None:
        return clone
    if hasattr(clone, "cumulative_length"):
        # A window's rows are a view into all rows of the last step; sharing it would keep those alive.
        assert tokens is None, "a window cannot be cut back"
        clone.keys, clone.values = clone.keys.clone(), clone.values.clone()
    elif tokens is not None:
        clone.keys, clone.values = clone.keys.narrow(-2, 0, tokens), clone.values.narrow(-2, 0, tokens)
    return clone


def _tensors_of(layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every state tensor among a layer's attributes, whatever it is called: ("keys", t), ("conv_states", t), ..."""
    for name, value in vars(layer).items():
        for item in value.values() if isinstance(value, dict) else (value,):
            if isinstance(item, torch.Tensor) and item.numel() and name not in _CONSTANTS:
                yield name, item


def _wire_view(layer: Any, declared: TensorSpec) -> torch.Tensor | None:
    """The declared tensor as a view in wire order: [rows, *row_shape], or [*row_shape] for a state."""
    held: torch.Tensor | None
    match declared.name:
        case "k" | "latent":
            held = getattr(layer, "keys", None)
        case "v" | "rope_key":
            held = getattr(layer, "values", None)
        case "conv" | "recurrent":
            held = getattr(layer, f"{declared.name}_states", {}).get(0)
            return None if held is None else held[0]
        case _:
            return None
    return None if held is None or not held.numel() else held[0].transpose(0, 1)


class CacheExporter:
    """Reads chunks out of one cache while it grows. Declares nothing by itself: the layout is the contract."""

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout

    def check(self, cache: Cache, tokens: int) -> None:
        """Compares what the cache holds at `tokens` tokens with what the layout declares: names, shapes, dtypes, rows.

        Raises:
            LocalProtocolError: the layout is not this cache's; publishing it would lose or invent state.
        """
        if len(cache.layers) != len(self._layout.layers):
            raise LocalProtocolError(f"the cache has {len(cache.layers)} layers, the layout {len(self._layout.layers)}")
        for layer, declared in zip(cache.layers, self._layout.layers, strict=True):
            _check_layer(layer, declared, tokens)

    def chunk(self, cache: Cache, spec: ChunkSpec, tokens: int) -> memoryview:
        """The payload of one chunk of a cache that holds `tokens` tokens: a fresh read-only buffer, format "B"."""
        declared = self._layout.layers[spec.layer]
        payload = np.empty(spec.payload_bytes, np.uint8)
        offset = 0
        for tensor in chunk_tensors(declared, spec):
            source = _wire_view(cache.layers[spec.layer], tensor)
            assert source is not None, f"layer {spec.layer} has no {tensor.name}"
            if not spec.is_state:
                first = tokens - source.shape[0]  # the token of row 0: windows hold only the last rows
                source = source[spec.token_start - first : spec.token_stop - first]
            bits = _as_bits(source)
            size = bits.size * bits.itemsize
            np.copyto(payload[offset : offset + size].view(bits.dtype).reshape(bits.shape), bits)
            offset += size
        assert offset == spec.payload_bytes, (offset, spec)
        return payload.data.toreadonly()


def chunk_tensors(layer: LayerLayout, spec: ChunkSpec) -> tuple[TensorSpec, ...]:
    """The tensors in one chunk, in order."""
    return tuple(tensor for tensor in layer.tensors if (tensor.extent is Extent.STATE) == spec.is_state)


def _as_bits(tensor: torch.Tensor) -> NDArray[Any]:
    return tensor.view(_BITS[tensor.element_size()][0]).numpy()


def _check_layer(layer: Any, declared: LayerLayout, tokens: int) -> None:
    where = f"layer {declared.index} ({type(layer).__name__})"
    held = {tensor.data_ptr(): name for name, tensor in _tensors_of(layer)}
    start, stop = held_range(declared, tokens)
    for spec in declared.tensors:
        view = _wire_view(layer, spec)
        if view is None:
            if spec.extent is Extent.STATE or start < stop:
                raise LocalProtocolError(f"{where} lacks {spec.name}, which the layout declares")
            continue
        held.pop(view.data_ptr(), None)
        if str(view.dtype).removeprefix("torch.") != spec.dtype:
            raise LocalProtocolError(f"{where}: {spec.name} is {view.dtype}, the layout says {spec.dtype}")
        shape = tuple(view.shape) if spec.extent is Extent.STATE else tuple(view.shape[1:])
        if shape != spec.row_shape:
            raise LocalProtocolError(f"{where}: {spec.name} has shape {shape}, the layout says {spec.row_shape}")
        if spec.extent is not Extent.STATE and view.shape[0] < stop - start:
            raise LocalProtocolError(f"{where}: {spec.name} has {view.shape[0]} rows at {tokens} tokens")
    if held:
        raise LocalProtocolError(f"{where} holds {', '.join(sorted(held.values()))}, which the layout does not declare")


class CacheImporter:
    """Builds a cache from the chunks of one plan, in any order of layers; each row exactly once.

    Args:
        config: the model's.
        prefix_tokens: tokens whose cache this is.
    """

    def __init__(self, config: PretrainedConfig, layout: CacheLayout, prefix_tokens: int) -> None:
        self._layout = layout
        self._tokens = prefix_tokens
        self._cache = new_cache(config)
        if len(self._cache.layers) != len(layout.layers):
            raise LocalProtocolError(
                f"the model's cache has {len(self._cache.layers)} layers, not {len(layout.layers)}"
            )
        self._tensors: dict[tuple[int, str], torch.Tensor] = {}
        self._next_row: dict[int, int] = {}  # by layer: the token whose row comes next
        self._states: set[int] = set()
        for layer in layout.layers:
            start, stop = held_range(layer, prefix_tokens)
            self._next_row[layer.index] = start
            for tensor in layer.tensors:
                shape = tensor.row_shape if tensor.extent is Extent.STATE else (stop - start, *tensor.row_shape)
                self._tensors[layer.index, tensor.name] = torch.empty(shape, dtype=getattr(torch, tensor.dtype))

    @property
    def bytes_held(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def add(self, spec: ChunkSpec, payload: memoryview) -> None:
        """Copies one chunk in.

        Raises:
            PeerError: `manifest_invalid` for a chunk that is not the next of its layer, or not of the stated size.
        """
        if not 0 <= spec.layer < len(self._layout.layers):
            raise PeerError("manifest_invalid", f"chunk {spec.index} is of layer {spec.layer}, which does not exist")
        layer = self._layout.layers[spec.layer]
        start, stop = held_range(layer, self._tokens)
        if spec.is_state:
            expected = spec.layer not in self._states and spec.token_start == spec.token_stop == self._tokens
            self._states.add(spec.layer)
        else:
            expected = self._next_row[spec.layer] == spec.token_start < spec.token_stop <= stop
            self._next_row[spec.layer] = spec.token_stop
        if not expected:
            raise PeerError(
                "manifest_invalid", f"chunk {spec.index} is not what comes next in layer {spec.layer}: {spec}"
            )
        parts = []
        for tensor in chunk_tensors(layer, spec):
            target = self._tensors[spec.layer, tensor.name]
            parts.append(
                _as_bits(target if spec.is_state else target[spec.token_start - start : spec.token_stop - start])
            )
        size = sum(part.size * part.itemsize for part in parts)
        if not size == spec.payload_bytes == payload.nbytes or not parts:
            raise PeerError(
                "manifest_invalid",
                f"chunk {spec.index} of layer {spec.layer} has {payload.nbytes} bytes, not {size}",
            )
        offset = 0
        for part in parts:
            flat = np.frombuffer(payload, part.dtype, count=part.size, offset=offset)
            np.copyto(part, flat.reshape(part.shape))
            offset += part.size * part.itemsize

    def finish(self) -> Cache:
        """The cache, as it was at the producer.

        Raises:
            PeerError: `manifest_incomplete`, naming the first layer that is not whole.
        """
        for layer in self._layout.layers:
            _, stop = held_range(layer, self._tokens)
            has_states = any(tensor.extent is Extent.STATE for tensor in layer.tensors)
            if self._next_row[layer.index] != stop or (has_states and layer.index not in self._states):
                raise PeerError(
                    "manifest_incomplete",
                    f"layer {layer.index} ends at token {self._next_row[layer.index]} of {stop}",
                )
        for held, declared in zip(self._cache.layers, self._layout.layers, strict=True):
            tensors = {tensor.name: self._tensors.pop((declared.index, tensor.name)) for tensor in declared.tensors}
            _fill_layer(held, declared, tensors, self._tokens)
        return self._cache


def _fill_layer(layer: Any, declared: LayerLayout, tensors: dict[str, torch.Tensor], tokens: int) -> None:
    """Puts wire tensors into an empty Transformers cache layer, with all its bookkeeping."""
    rows = {spec.name: tensors[spec.name] for spec in declared.tensors if spec.extent is not Extent.STATE}
    for name in ("conv", "recurrent"):
        if name in tensors:
            state = tensors[name][None]
            layer.lazy_initialization(**{f"{name}_states": state})
            getattr(layer, f"{name}_states")[0].copy_(state)
            layer.has_previous_state[0] = True
    if not rows:
        return
    keys, values = rows.get("k", rows.get("latent")), rows.get("v", rows.get("rope_key"))
    if keys is None or values is None:
        raise LocalProtocolError(f"layer {declared.index} declares {sorted(rows)}, which this engine cannot place")
    keys, values = _transformers_rows(keys, declared, tokens), _transformers_rows(values, declared, tokens)
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = tokens


def _transformers_rows(rows: torch.Tensor, declared: LayerLayout, tokens: int) -> torch.Tensor:
    """[rows, heads, dim] to [1, heads, rows, dim]."""
    if declared.kind is LayerKind.CHUNKED:
        # Transformers keeps the last window - 1 rows, also those before the border, which its mask hides.
        assert declared.window is not None
        missing = min(tokens, declared.window - 1) - rows.shape[0]
        rows = torch.cat([rows.new_zeros(missing, *rows.shape[1:]), rows])
    return rows.transpose(0, 1)[None]
