"""The chunk plan covers exactly what the layout holds, once, within limits, and is bounded in what it reserves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_cases import EVERY_KIND, fingerprint_of, layouts

from farfill.errors import ConfigurationError, PeerError
from farfill.kv.layout import cache_bytes, held_range, row_bytes, state_bytes
from farfill.kv.limits import CHUNK_BYTES_MAX, CHUNKS_MAX, TOKENS_MAX, check_size
from farfill.kv.manifest import ClosingRecord, encode_closing, encode_manifest, manifest_for
from farfill.kv.plan import (
    MANIFEST_INDEX,
    closing_bytes_max,
    closing_index,
    manifest_bytes_max,
    plan_chunks,
    sealed_bytes_max,
    transfer_bytes,
)
from farfill.kv.sealing import SEAL_OVERHEAD_BYTES
from farfill.kv.spec import CacheLayout, Extent, LayerKind, LayerLayout, TensorSpec, TransferId


@given(layouts(), st.integers(1, 120), st.integers(1, 150))
def test_the_chunks_cover_exactly_what_is_held_and_nothing_twice(
    layout: CacheLayout, prefix_tokens: int, chunk_tokens: int
) -> None:
    plan = plan_chunks(layout, prefix_tokens, chunk_tokens)
    rows: dict[int, list[int]] = {layer.index: [] for layer in layout.layers}
    states: list[int] = []
    for position, chunk in enumerate(plan):
        assert chunk.index == position + 1
        layer = layout.layers[chunk.layer]
        if chunk.is_state:
            states.append(chunk.layer)
            assert (chunk.token_start, chunk.token_stop) == (prefix_tokens, prefix_tokens)
            assert chunk.payload_bytes == state_bytes(layer) > 0
        else:
            covered = range(chunk.token_start, chunk.token_stop)
            assert len({token // chunk_tokens for token in covered}) == 1, "a chunk lies in one cell of the grid"
            assert chunk.payload_bytes == len(covered) * row_bytes(layer) > 0
            rows[chunk.layer].extend(covered)
    for layer in layout.layers:
        expected = list(range(*held_range(layer, prefix_tokens))) if row_bytes(layer) else []
        assert rows[layer.index] == expected, "every held row once, in token order"
    assert states == [layer.index for layer in layout.layers if state_bytes(layer)]
    assert sum(chunk.payload_bytes for chunk in plan) == cache_bytes(layout, prefix_tokens)


@given(layouts(), st.integers(1, 120), st.integers(1, 150))
def test_the_order_is_the_order_in_which_prefill_makes_them(
    layout: CacheLayout, prefix_tokens: int, chunk_tokens: int
) -> None:
    plan = plan_chunks(layout, prefix_tokens, chunk_tokens)
    order = [
        (chunk.is_state, 0 if chunk.is_state else chunk.token_start // chunk_tokens, chunk.layer) for chunk in plan
    ]
    assert order == sorted(order)


def test_a_plan_worked_out_by_hand() -> None:
    # Rows of 40, 32, 40, 16 and 8 bytes; states of 96 + 128 and 48 bytes. 21 tokens on a grid of 8: the window of layer
    # 1 holds 17..21, the chunk of layer 3 begins at 16.
    plan = plan_chunks(EVERY_KIND, 21, 8)
    seen = [(c.index, c.layer, c.token_start, c.token_stop, c.is_state, c.payload_bytes) for c in plan]
    assert seen == [
        (1, 0, 0, 8, False, 320),
        (2, 2, 0, 8, False, 320),
        (3, 6, 0, 8, False, 64),
        (4, 0, 8, 16, False, 320),
        (5, 2, 8, 16, False, 320),
        (6, 6, 8, 16, False, 64),
        (7, 0, 16, 21, False, 200),
        (8, 1, 17, 21, False, 128),
        (9, 2, 16, 21, False, 200),
        (10, 3, 16, 21, False, 80),
        (11, 6, 16, 21, False, 40),
        (12, 4, 21, 21, True, 224),
        (13, 6, 21, 21, True, 48),
    ]
    assert MANIFEST_INDEX == 0
    assert closing_index(plan) == 14


def test_a_window_is_clipped_across_the_grid() -> None:
    window = LayerLayout(0, LayerKind.WINDOW, (TensorSpec("k", Extent.WINDOW, (1, 1), "int8"),), 10)
    plan = plan_chunks(CacheLayout("w", (window,)), 21, 8)
    assert [(chunk.token_start, chunk.token_stop) for chunk in plan] == [(12, 16), (16, 21)]


@given(layouts(), st.integers(1, 60), st.integers(1, 80))
def test_what_is_reserved_is_enough_and_little_more(layout: CacheLayout, prefix_tokens: int, chunk_tokens: int) -> None:
    plan = plan_chunks(layout, prefix_tokens, chunk_tokens)
    transfer_id = TransferId("f" * 32)
    manifest = encode_manifest(
        manifest_for(
            transfer_id=transfer_id,
            epoch=2**62,
            fingerprint=fingerprint_of(layout),
            layout=layout,
            prefix_token_ids=[2**32 - 1] * prefix_tokens,
            chunk_tokens=chunk_tokens,
        )
    )
    closing = encode_closing(ClosingRecord(transfer_id, 2**62, tuple(bytes(16) for _ in plan), prefix_tokens))
    assert len(manifest) <= manifest_bytes_max(plan)
    assert len(closing) <= closing_bytes_max(plan)
    sealed = [sealed_bytes_max(plan, index) for index in range(closing_index(plan) + 1)]
    assert sum(sealed) == transfer_bytes(plan)
    assert sealed[1:-1] == [chunk.payload_bytes + SEAL_OVERHEAD_BYTES for chunk in plan]
    with pytest.raises(IndexError):
        sealed_bytes_max(plan, closing_index(plan) + 1)
    with pytest.raises(IndexError):
        sealed_bytes_max(plan, -1)


def test_the_largest_chunk_entry_fits_its_bound() -> None:
    """The bound on a manifest holds also where each number takes its longest form."""
    layer = LayerLayout(300, LayerKind.FULL, (TensorSpec("k", Extent.TOKENS, (1, 1), "int8"),))
    few = CacheLayout("deep", tuple(LayerLayout(i, layer.kind, layer.tensors) for i in range(301)))
    plan = plan_chunks(few, 70_000, 70_000)
    manifest = manifest_for(
        transfer_id=TransferId("f" * 32),
        epoch=1,
        fingerprint=fingerprint_of(few),
        layout=few,
        prefix_token_ids=[0] * 70_000,
        chunk_tokens=70_000,
    )
    assert len(encode_manifest(manifest)) <= manifest_bytes_max(plan)


@pytest.mark.parametrize(
    ("prefix_tokens", "chunk_tokens", "field"),
    [(0, 8, "prefix_tokens"), (-1, 8, "prefix_tokens"), (TOKENS_MAX + 1, 512, "prefix_tokens"), (8, 0, "chunk_tokens")],
)
def test_numbers_out_of_range_are_refused(prefix_tokens: int, chunk_tokens: int, field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        plan_chunks(EVERY_KIND, prefix_tokens, chunk_tokens)
    assert (caught.value.code, caught.value.field) == ("config_invalid", field)


def one_full_layer(row_elements: int, layers: int = 1) -> CacheLayout:
    tensor = TensorSpec("k", Extent.TOKENS, (1, row_elements), "int8")
    return CacheLayout("m", tuple(LayerLayout(index, LayerKind.FULL, (tensor,)) for index in range(layers)))


def test_a_grid_that_makes_chunks_too_large_or_too_many_is_refused() -> None:
    exact = plan_chunks(one_full_layer(2**20), 64, 64)
    assert exact[0].payload_bytes == CHUNK_BYTES_MAX
    with pytest.raises(ConfigurationError, match="smaller"):
        plan_chunks(one_full_layer(2**20), 65, 65)
    assert len(plan_chunks(one_full_layer(1), CHUNKS_MAX, 1)) == CHUNKS_MAX
    with pytest.raises(ConfigurationError, match="larger"):
        plan_chunks(one_full_layer(1), CHUNKS_MAX + 1, 1)


def test_a_transfer_over_its_limit_is_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        plan_chunks(one_full_layer(2**20, layers=2), 41_000, 64)
    assert caught.value.field == "prefix_tokens"


@pytest.mark.parametrize("value", [0, 1, 10])
def test_sizes_within_the_limits_pass(value: int) -> None:
    assert check_size("size", value, 10) == value


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (11, "frame_too_large"),
        (-1, "protocol_violation"),
        (True, "protocol_violation"),
        (1.0, "protocol_violation"),
        ("1", "protocol_violation"),
        (None, "protocol_violation"),
    ],
)
def test_any_other_size_from_the_network_is_refused(value: object, code: str) -> None:
    with pytest.raises(PeerError) as caught:
        check_size("size", value, 10)
    assert (caught.value.code, caught.value.field) == (code, "size")
