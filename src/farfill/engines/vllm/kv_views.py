"""vLLM's paged cache tensors as what travels: rows of tokens x heads x dim, and states in their wire shape.

Here is the only place that knows how vLLM lays out memory. Not here: which rows and when (`worker_side`), nor what a
model's cache consists of (the layout); but that the two agree, tensor by tensor and both ways, is checked here.

vLLM gives each attention layer one tensor [blocks, heads, tokens in a block, content]. On GPUs a token's content is its
key beside its value (or its latent beside its rope key). On CPUs a block's content is all keys, then all values, each
in an order that suits the processor; that order is found by asking vLLM's own writing kernel, not assumed. A recurrent
layer has one page of bytes for each block, its states one after the other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from farfill.engines.vllm.ranks import Ranks
from farfill.engines.vllm.step import BlockTable
from farfill.errors import ConfigurationError, LocalProtocolError, PeerError
from farfill.kv.spec import CacheLayout, ChunkSpec, Extent, LayerKind, LayerLayout, TensorSpec

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

# Copies move bits, not numbers.
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# Attention backends whose block content is, for each token, its key and then its value.
_BESIDE: Final = frozenset({"FLASH_ATTN", "TRITON_ATTN"})
_PACKED: Final = "CPU_ATTN"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_BITS[tensor.element_size()])


class Rows(Protocol):
    """One named tensor's rows in one layer's pages."""

    def read(self, pages: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, dim] as integers of the element's width; token i is `offsets[i]` in page `pages[i]`."""

    def write(self, pages: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor) -> None: ...


class BesideRows:
    """Rows that are a slice of each token's content."""

    def __init__(self, cache: torch.Tensor, start: int, stop: int) -> None:
        self._part = _bits(cache)[..., start:stop]

    def read(self, pages: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self._part[pages, :, offsets]

    def write(self, pages: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor) -> None:
        self._part[pages, :, offsets] = rows.to(self._part.device)


class PackedRows:
    """Rows that are scattered over their half of a block.

    Args:
        cache: [pages, heads, page tokens, content], dense within a page.
        order: [page tokens, dim]: where in a head's part of a page each element is.
    """

    def __init__(self, cache: torch.Tensor, order: torch.Tensor) -> None:
        self._flat = _bits(cache).flatten(2)
        assert self._flat.data_ptr() == cache.data_ptr(), "a page is not dense"
        self._order = order
        self._heads = torch.arange(cache.shape[1])[None, :, None]

    def read(self, pages: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self._flat[pages[:, None, None], self._heads, self._order[offsets][:, None, :]]

    def write(self, pages: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor) -> None:
        self._flat[pages[:, None, None], self._heads, self._order[offsets][:, None, :]] = rows


@dataclass(frozen=True, slots=True)
class Paging:
    """How a group's block ids are pages of a layer's tensor. Numbers are in tokens, but `per_block`, in pages."""

    group: int
    block_tokens: int
    page_tokens: int
    per_block: int

    def locate(self, blocks: BlockTable, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(page of each token, its offset in the page) of tokens [start, stop).

        Raises:
            LocalProtocolError: one of them has no block, so that reading it would be another request's or nobody's.
        """
        first, last = start // self.block_tokens, (stop - 1) // self.block_tokens
        ids = torch.tensor(blocks[self.group][first : last + 1])
        # vLLM puts its null block, 0, in place of blocks that it has dropped.
        if len(ids) != last - first + 1 or not bool((ids > 0).all()):
            raise LocalProtocolError(f"tokens {start} to {stop} have no blocks in group {self.group}")
        tokens = torch.arange(start, stop)
        within = tokens % self.block_tokens
        pages = ids[tokens // self.block_tokens - first] * self.per_block + within // self.page_tokens
        return pages, within % self.page_tokens


@dataclass(frozen=True, slots=True)
class State:
    """One named state of a recurrent layer: where in a page, and how it turns into its wire shape and back.

    Attributes:
        block_tokens: which entry of a request's block list holds the state after so many tokens: they are by position
            in the prompt, one for so many tokens. None: there is one entry.
        pages: [blocks, bytes].
        shape: vLLM's own.
        to_wire, from_wire: between vLLM's shape and the layout's.
    """

    group: int
    block_tokens: int | None
    pages: torch.Tensor
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    to_wire: Callable[[torch.Tensor], torch.Tensor]
    from_wire: Callable[[torch.Tensor], torch.Tensor]

    def view(self, blocks: BlockTable, tokens: int) -> torch.Tensor:
        """The state after `tokens` tokens, in vLLM's shape, as bits.

        Raises:
            LocalProtocolError: the request has no block for it.
        """
        position = 0 if self.block_tokens is None else (tokens - 1) // self.block_tokens
        held = blocks[self.group]
        if position >= len(held) or held[position] <= 0:
            raise LocalProtocolError(f"the state after {tokens} tokens has no block in group {self.group}")
        size = prod(self.shape) * self.dtype.itemsize
        page = self.pages[held[position], self.offset : self.offset + size]
        return _bits(page.view(self.dtype).view(self.shape))


class CacheViews:
    """All state of a model in vLLM's memory, by farfill's layers.

    Args:
        kv_caches: vLLM's tensors by layer name, as `register_kv_caches` gets them.
        layers: vLLM's layer modules by the same names.
        ranks: this process's place among those that share the model's heads.

    Raises:
        ConfigurationError: `model_unsupported`: vLLM's cache is not what the layout says, or is laid out in a way that
            is not known here.
    """

    def __init__(
        self,
        layout: CacheLayout,
        config: "KVCacheConfig",
        kv_caches: Mapping[str, torch.Tensor],
        layers: Mapping[str, Any],
        ranks: Ranks = Ranks(),  # noqa: B008 - frozen
    ) -> None:
        self._layout = layout
        self._ranks = ranks
        self._paging: dict[int, Paging] = {}
        self._rows: dict[tuple[int, str], Rows] = {}
        self._states: dict[tuple[int, str], State] = {}
        for group_id, group in enumerate(config.kv_cache_groups):
            for name in group.layer_names:
                if name not in kv_caches:
                    raise _unsupported(f"vLLM registered no cache for its layer {name}")
                spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
                self._add(group_id, name, spec, kv_caches[name], layers[name])
        for layer in layout.layers:
            for tensor in layer.tensors:
                if (layer.index, tensor.name) not in (self._states if tensor.extent is Extent.STATE else self._rows):
                    raise _unsupported(f"layer {layer.index} has no {tensor.name} in vLLM's cache")

    def read(self, chunk: ChunkSpec, blocks: BlockTable) -> memoryview | None:
        """A chunk's payload, in a buffer of its own: on rank 0; None on the others, which give it their heads.

        Args:
            blocks: the request's, at a step after which the chunk's tokens are computed.
        """
        layer = self._layout.layers[chunk.layer]
        pieces = self._pieces(layer, chunk, blocks)
        if self._ranks.size == 1:
            return _payload(pieces, chunk.payload_bytes)
        own_bytes = sum(piece.numel() * piece.element_size() for piece in pieces)
        parts = self._ranks.gather(torch.frombuffer(bytearray(_payload(pieces, own_bytes)), dtype=torch.uint8))
        if parts is None:
            return None
        payload = torch.empty(chunk.payload_bytes, dtype=torch.uint8)
        offset = part_offset = 0
        for tensor, piece in zip(_tensors(layer, chunk), pieces, strict=True):
            own = piece.numel() * piece.element_size()
            whole_shape = (piece.shape[0], *tensor.row_shape)
            size = prod(whole_shape) * piece.element_size()
            whole = payload[offset : offset + size].view(piece.dtype).view(whole_shape)
            for rank, part in enumerate(parts):
                start, stop = self._heads(tensor, rank)
                whole[:, start:stop] = part[part_offset : part_offset + own].view(piece.dtype).view(piece.shape)
            offset, part_offset = offset + size, part_offset + own
        return payload.numpy().data.cast("B").toreadonly()

    def write(self, chunk: ChunkSpec, payload: memoryview, blocks: BlockTable, first_token: int) -> None:
        """Puts a chunk's rows from `first_token` on, or its states, into a request's blocks.

        Raises:
            PeerError: `layout_mismatch`, where the payload has not the chunk's size.
        """
        if payload.nbytes != chunk.payload_bytes:
            raise PeerError("layout_mismatch", f"chunk {chunk.index} has {payload.nbytes} bytes", field="layout")
        layer = self._layout.layers[chunk.layer]
        whole = torch.frombuffer(payload, dtype=torch.uint8)
        offset = 0
        for tensor in _tensors(layer, chunk):
            dtype: torch.dtype = getattr(torch, tensor.dtype)
            shape = tensor.row_shape
            if not chunk.is_state:
                shape = (chunk.token_stop - chunk.token_start, *shape)
            size = prod(shape) * dtype.itemsize
            source = _bits(whole[offset : offset + size].view(dtype)).view(shape)
            offset += size
            if chunk.is_state:
                state = self._states[layer.index, tensor.name]
                state.view(blocks, chunk.token_stop).copy_(state.from_wire(source))
            else:
                start = max(chunk.token_start, first_token)
                if start < chunk.token_stop:
                    where = self._paging[layer.index].locate(blocks, start, chunk.token_stop)
                    own = source[start - chunk.token_start :, slice(*self._heads(tensor))]
                    self._rows[layer.index, tensor.name].write(*where, own)

    def _heads(self, tensor: TensorSpec, rank: int | None = None) -> tuple[int, int]:
        """The range of a tensor's heads that a rank holds. An MLA row is one head, held by all."""
        return self._ranks.heads(tensor.row_shape[0], rank)

    def _pieces(self, layer: LayerLayout, chunk: ChunkSpec, blocks: BlockTable) -> list[torch.Tensor]:
        """The chunk's tensors in wire shape, as bits."""
        tensors = _tensors(layer, chunk)
        if chunk.is_state:
            pieces = []
            for tensor in tensors:
                state = self._states[layer.index, tensor.name]
                pieces.append(state.to_wire(state.view(blocks, chunk.token_stop)))
            return pieces
        where = self._paging[layer.index].locate(blocks, chunk.token_start, chunk.token_stop)
        return [self._rows[layer.index, tensor.name].read(*where) for tensor in tensors]

    # --- reading vLLM's description -----------------------------------------------------------------------------------

    def _add(self, group_id: int, name: str, spec: Any, cache: torch.Tensor, module: Any) -> None:
        from vllm.model_executor.models.utils import extract_layer_index
        from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec

        index = extract_layer_index(name)
        if index >= len(self._layout.layers):
            raise _unsupported(f"vLLM's layer {name} is beyond the layout's {len(self._layout.layers)} layers")
        layer = self._layout.layers[index]
        if isinstance(spec, MambaSpec):
            self._add_states(group_id, name, spec, cache, layer)
        elif isinstance(spec, AttentionSpec):
            if index in self._paging:
                raise _unsupported(f"layer {index} has two attention caches; {name} is the second")
            self._add_rows(group_id, name, spec, cache, layer, module)
        else:
            raise _unsupported(f"vLLM's layer {name} has a cache of the kind {type(spec).__name__}")

    def _add_rows(
        self, group_id: int, name: str, spec: Any, cache: torch.Tensor, layer: LayerLayout, module: Any
    ) -> None:
        declared = [tensor for tensor in layer.tensors if tensor.extent is not Extent.STATE]
        if cache.ndim != 4 or not declared:
            raise _unsupported(f"vLLM's layer {name} has a cache of shape {tuple(cache.shape)}; ours: {declared}")
        dtype = str(spec.dtype).removeprefix("torch.")
        heads, page_tokens, content = cache.shape[1:]
        wanted = sum(tensor.row_shape[1] for tensor in declared)
        start, _ = self._heads(declared[0])
        if content != wanted or any(t.dtype != dtype or self._heads(t) != (start, start + heads) for t in declared):
            raise _unsupported(
                f"vLLM's layer {name} has {heads} heads of {content} {dtype}; the layout says "
                + ", ".join(f"{t.name} {list(t.row_shape)} {t.dtype}" for t in declared)
            )
        per_block = spec.block_size // page_tokens
        self._paging[layer.index] = Paging(group_id, spec.block_size, page_tokens, per_block)
        backend = module.get_attn_backend().get_name()
        if backend == _PACKED:
            if layer.kind is LayerKind.MLA or declared[0].row_shape != declared[1].row_shape:
                raise _unsupported(f"vLLM's layer {name} keeps {layer.kind} rows packed for the processor")
            orders = _packed_orders(spec, page_tokens, module)
            for tensor, order in zip(declared, orders, strict=True):
                self._rows[layer.index, tensor.name] = PackedRows(cache, order)
            return
        if backend not in _BESIDE and layer.kind is not LayerKind.MLA:
            raise _unsupported(f"the attention backend {backend} lays its cache out in a way that is not known here")
        start = 0
        for tensor in declared:
            self._rows[layer.index, tensor.name] = BesideRows(cache, start, start + tensor.row_shape[1])
            start += tensor.row_shape[1]

    def _add_states(self, group_id: int, name: str, spec: Any, cache: torch.Tensor, layer: LayerLayout) -> None:
        if self._ranks.size > 1:
            raise _unsupported(f"vLLM's layer {name} keeps a recurrent state: use one rank (--tensor-parallel-size 1)")
        declared = [tensor for tensor in layer.tensors if tensor.extent is Extent.STATE]
        if len(declared) != len(spec.shapes):
            raise _unsupported(f"vLLM's layer {name} keeps {len(spec.shapes)} states; the layout says {len(declared)}")
        if spec.mamba_cache_mode not in ("none", "align") or spec.num_speculative_blocks:
            raise _unsupported(f"vLLM's layer {name} keeps states in the mode {spec.mamba_cache_mode!r}")
        # Without prefix caching there is one block, with it ("align") those at the last borders of blocks.
        block_tokens = spec.block_size if spec.mamba_cache_mode == "align" else None
        pages = cache.view(torch.uint8)[:, 0, 0]
        offset = 0
        for tensor, shape, dtype in zip(declared, spec.shapes, spec.dtypes, strict=True):
            if str(dtype).removeprefix("torch.") != tensor.dtype:
                raise _unsupported(
                    f"vLLM's layer {name} keeps {tensor.name} in {dtype}, the layout says {tensor.dtype}"
                )
            to_wire, from_wire = _turning(name, tensor, tuple(shape), spec)
            self._states[layer.index, tensor.name] = State(
                group_id, block_tokens, pages, offset, tuple(shape), dtype, to_wire, from_wire
            )
            offset += prod(shape) * dtype.itemsize


def _tensors(layer: LayerLayout, chunk: ChunkSpec) -> list[TensorSpec]:
    """The tensors in one chunk, in order."""
    return [tensor for tensor in layer.tensors if (tensor.extent is Extent.STATE) == chunk.is_state]


def _payload(pieces: Sequence[torch.Tensor], payload_bytes: int) -> memoryview:
    payload = torch.empty(payload_bytes, dtype=torch.uint8)
    offset = 0
    for piece in pieces:
        size = piece.numel() * piece.element_size()
        payload[offset : offset + size].view(piece.dtype).view(piece.shape).copy_(piece)
        offset += size
    assert offset == payload_bytes, (offset, payload_bytes)
    return payload.numpy().data.cast("B").toreadonly()


def _turning(
    name: str, tensor: TensorSpec, shape: tuple[int, ...], spec: Any
) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
    """How a state gets its wire shape, and back.

    The wire has a convolution's inputs as (channels, kernel), the last ones last. vLLM keeps kernel - 1 of them, for
    the oldest one is never read again, and in either order; on the wire that oldest column is zero.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    wire = tensor.row_shape
    if tensor.name == "conv":
        dim_first = is_conv_state_dim_first()
        if shape != ((wire[0], wire[1] - 1) if dim_first else (wire[1] - 1, wire[0])):
            raise _unsupported(f"vLLM's layer {name} keeps conv as {shape}; the layout says {wire}")

        def conv_to_wire(held: torch.Tensor) -> torch.Tensor:
            rows = held if dim_first else held.T
            return torch.cat([torch.zeros_like(rows[:, :1]), rows], dim=1)

        def conv_from_wire(sent: torch.Tensor) -> torch.Tensor:
            return sent[:, 1:] if dim_first else sent[:, 1:].T

        return conv_to_wire, conv_from_wire
    if spec.mamba_type is MambaAttentionBackendEnum.GDN_ATTN and len(wire) == 3:
        # vLLM keeps value x key, the wire has key x value.
        if shape != (wire[0], wire[2], wire[1]):
            raise _unsupported(f"vLLM's layer {name} keeps {tensor.name} as {shape}; the layout says {wire}")
        return (lambda held: held.transpose(1, 2)), (lambda sent: sent.transpose(1, 2))
    if shape != wire:
        raise _unsupported(f"vLLM's layer {name} keeps {tensor.name} as {shape}; the layout says {wire}")
    return (lambda held: held), (lambda sent: sent)


def _packed_orders(spec: Any, page_tokens: int, module: Any) -> Sequence[torch.Tensor]:
    """For keys and for values: [page tokens, dim], where vLLM's kernel puts each element in a head's part of a page.

    The kernel writes numbers that name a token and a dimension into a page; where each comes out is the order.
    Numbers under 256 are exact in every dtype, so an index is written in two digits.
    """
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    dim, dtype = spec.head_size, spec.dtype
    isa = getattr(module, "isa", None) or _get_attn_isa(dtype, spec.block_size, dim)
    half = page_tokens * dim
    tokens = torch.arange(page_tokens)[:, None].expand(page_tokens, dim)
    dims = torch.arange(dim)[None, :].expand(page_tokens, dim)
    found = torch.zeros(4, 2, half, dtype=torch.int64)
    for digit, numbers in enumerate((tokens // 256, tokens % 256, dims // 256, dims % 256)):
        page = torch.zeros(1, 1, 2 * page_tokens, dim, dtype=dtype)
        keys, values = page.chunk(2, dim=2)
        written = numbers.to(dtype)[:, None, :].contiguous()
        ops.cpu_attn_reshape_and_cache(written, written, keys, values, torch.arange(page_tokens), isa)
        found[digit] = page.view(2, half).to(torch.int64)
    orders = []
    for part in range(2):
        at = (found[0, part] * 256 + found[1, part]) * dim + found[2, part] * 256 + found[3, part]
        if not torch.equal(at.sort().values, torch.arange(half)):
            raise _unsupported(f"vLLM's kernel for {isa} does more than move the elements of a block")
        orders.append((at.argsort() + part * half).view(page_tokens, dim))
    return orders


def _unsupported(message: str) -> ConfigurationError:
    return ConfigurationError("model_unsupported", message, field="model")
