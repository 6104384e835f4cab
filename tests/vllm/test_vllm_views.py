"""Rows in vLLM's paged memory: written by vLLM's own kernel they read back in wire order, and the other way round."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.kv_cache_interface import FullAttentionSpec

from farfill.engines.vllm.kv_views import CacheViews
from farfill.errors import ConfigurationError, LocalProtocolError
from farfill.kv.plan import plan_chunks
from farfill.kv.spec import CacheLayout, Extent, LayerKind, LayerLayout, TensorSpec

pytestmark = pytest.mark.vllm

HEADS, DIM, TOKENS = 2, 64, 300
LAYER = "model.layers.0.self_attn.attn"


def layout(dtype: str, heads: int = HEADS) -> CacheLayout:
    tensors = tuple(TensorSpec(name, Extent.TOKENS, (heads, DIM), dtype) for name in ("k", "v"))
    return CacheLayout("llama", (LayerLayout(0, LayerKind.FULL, tensors),))


def two_layers() -> CacheLayout:
    (first,) = layout("float32").layers
    return CacheLayout("llama", (first, LayerLayout(1, LayerKind.FULL, first.tensors)))


def paged(dtype: torch.dtype, block_tokens: int, backend: str = "CPU_ATTN") -> tuple[torch.Tensor, dict[str, Any]]:
    """An empty cache for one layer, and what `CacheViews` is made from beside the layout."""
    spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=HEADS, head_size=DIM, dtype=dtype)
    cache = torch.zeros(40, HEADS, block_tokens, 2 * DIM, dtype=dtype)
    module = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend))
    group = SimpleNamespace(layer_names=[LAYER], kv_cache_spec=spec)
    return cache, {
        "config": SimpleNamespace(kv_cache_groups=[group]),
        "kv_caches": {LAYER: cache},
        "layers": {LAYER: module},
    }


def rows(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    keys, values = torch.randn(2, TOKENS, HEADS, DIM, generator=generator).to(dtype)
    return keys, values


def blocks(count: int) -> tuple[tuple[int, ...], ...]:
    """Scattered, as they are in a server that has been at work for a while; never vLLM's null block."""
    return (tuple(39 - 7 * position % 38 for position in range(count)),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_tokens", [32, 128])
def test_what_the_kernel_wrote_reads_in_wire_order(dtype: torch.dtype, block_tokens: int) -> None:
    cache, parts = paged(dtype, block_tokens)
    keys, values = rows(dtype)
    table = blocks(-(-TOKENS // block_tokens))
    slots = torch.tensor([table[0][t // block_tokens] * block_tokens + t % block_tokens for t in range(TOKENS)])
    halves = cache.view(40, HEADS, 2 * block_tokens, DIM).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(keys, values, *halves, slots, _get_attn_isa(dtype, block_tokens, DIM))
    declared = layout(str(dtype).removeprefix("torch."))
    views = CacheViews(declared, **parts)
    for chunk in plan_chunks(declared, TOKENS, 70):
        span = slice(chunk.token_start, chunk.token_stop)
        expected = b"".join(part[span].contiguous().view(torch.uint8).numpy().tobytes() for part in (keys, values))
        assert bytes(views.read(chunk, table)) == expected


@pytest.mark.parametrize(("backend", "block_tokens"), [("CPU_ATTN", 32), ("CPU_ATTN", 128), ("FLASH_ATTN", 16)])
def test_a_cache_moves_between_block_sizes_bit_for_bit(backend: str, block_tokens: int) -> None:
    declared = layout("bfloat16")
    _, source_parts = paged(torch.bfloat16, 64)
    target, target_parts = paged(torch.bfloat16, block_tokens, backend)
    source, views = CacheViews(declared, **source_parts), CacheViews(declared, **target_parts)
    plan = plan_chunks(declared, TOKENS, 70)
    generator = torch.Generator().manual_seed(6)
    payloads = {
        chunk.index: torch.randint(0, 256, (chunk.payload_bytes,), dtype=torch.uint8, generator=generator).numpy().data
        for chunk in plan
    }
    there, here = blocks(5), blocks(-(-TOKENS // block_tokens))
    for chunk in plan:
        source.write(chunk, payloads[chunk.index], there, 0)
        views.write(chunk, memoryview(bytearray(source.read(chunk, there))), here, 0)
    assert all(bytes(views.read(chunk, here)) == bytes(payloads[chunk.index]) for chunk in plan)
    assert not target[0].any(), "the null block was written"


def test_rows_that_the_local_cache_has_are_left_alone() -> None:
    declared = layout("float32")
    _, parts = paged(torch.float32, 64)
    views = CacheViews(declared, **parts)
    (chunk,) = plan_chunks(declared, TOKENS, TOKENS)
    ones = memoryview(bytearray(b"\x01" * chunk.payload_bytes))
    views.write(chunk, ones, blocks(5), 128)
    rows_of_k = bytes(views.read(chunk, blocks(5)))[: TOKENS * HEADS * DIM * 4]
    assert rows_of_k == b"\x00" * (128 * HEADS * DIM * 4) + b"\x01" * ((TOKENS - 128) * HEADS * DIM * 4)


def test_tokens_without_a_block_are_refused() -> None:
    declared = layout("float32")
    _, parts = paged(torch.float32, 64)
    views = CacheViews(declared, **parts)
    (chunk,) = plan_chunks(declared, TOKENS, TOKENS)
    for table in (((5, 4, 3, 2),), ((5, 4, 0, 2, 1),)):  # too few; vLLM has dropped one
        with pytest.raises(LocalProtocolError, match="no blocks"):
            views.read(chunk, table)


@pytest.mark.parametrize(
    ("declared", "backend", "message"),
    [
        (layout("bfloat16"), "CPU_ATTN", "float32"),
        (layout("float32", heads=4), "CPU_ATTN", "2 heads"),
        (layout("float32"), "NEW_ATTN", "NEW_ATTN"),
        (two_layers(), "CPU_ATTN", "layer 1"),
    ],
    ids=["dtype", "heads", "backend", "missing layer"],
)
def test_a_cache_that_is_not_the_layouts_is_refused(declared: CacheLayout, backend: str, message: str) -> None:
    _, parts = paged(torch.float32, 64, backend)
    with pytest.raises(ConfigurationError, match=message) as refused:
        CacheViews(declared, **parts)
    assert refused.value.code == "model_unsupported"
