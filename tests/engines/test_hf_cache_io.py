"""Rule: the manifest is complete: what a cache holds and what the layout declares are the same, both ways."""

import dataclasses
import hashlib

import pytest
import torch
from hf_kit import prompt_of
from tiny_models import CHUNK_TOKENS, KINDS
from transformers.cache_utils import DynamicSlidingWindowLayer

from farfill.engines.hf.cache_io import CacheExporter, CacheImporter, cache_bytes, clone_cache
from farfill.engines.hf.forward import Forward
from farfill.errors import LocalProtocolError, PeerError
from farfill.kv.layout import cache_bytes as layout_cache_bytes
from farfill.kv.plan import plan_chunks
from farfill.kv.spec import CacheLayout, Extent, LayerKind, LayerLayout, TensorSpec

pytestmark = pytest.mark.torch
PREFIX = 35


def computed(loaded, tokens=PREFIX):
    forward = Forward(loaded.network)
    cache, ids = forward.new_cache(), prompt_of(tokens)
    with torch.inference_mode():
        for start in range(0, tokens, CHUNK_TOKENS):
            forward.extend(cache, ids[start : start + CHUNK_TOKENS], start)
    return cache


def exported(cache, layout, tokens=PREFIX):
    exporter, plan = CacheExporter(layout), plan_chunks(layout, tokens, CHUNK_TOKENS)
    exporter.check(cache, tokens)
    return [(spec, exporter.chunk(cache, spec, tokens)) for spec in plan]


def imported(loaded, chunks, tokens=PREFIX):
    importer = CacheImporter(loaded.network.config, loaded.layout, tokens)
    for spec, payload in chunks:
        importer.add(spec, payload)
    return importer.finish()


def state_of(cache):
    """Everything that the cache's layers remember: digests of tensors, and all bookkeeping."""

    def seen(value):
        if isinstance(value, torch.Tensor):
            bits = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            return str(value.dtype), tuple(value.shape), hashlib.sha256(bits).hexdigest()
        return {key: seen(item) for key, item in value.items()} if isinstance(value, dict) else value

    return [{name: seen(value) for name, value in vars(layer).items()} for layer in cache.layers]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_round_trip_restores_every_tensor_and_all_bookkeeping(kind, dtype, tiny_loaded):
    loaded = tiny_loaded(kind, dtype)
    cache = computed(loaded)
    chunks = exported(cache, loaded.layout)
    again = imported(loaded, chunks)
    assert state_of(again) == state_of(cache)
    assert cache_bytes(again) == layout_cache_bytes(loaded.layout, PREFIX) == sum(len(p) for _, p in chunks)
    forward = Forward(loaded.network)
    with torch.inference_mode():
        for step in range(3):  # going on changes both alike, in-place states included
            logits = [forward.next_logits(c, 7 + step, PREFIX + step) for c in (cache, again)]
            assert torch.equal(*logits)
    assert state_of(again) == state_of(cache)


@pytest.mark.parametrize("kind", KINDS)
def test_wire_form_is_tokens_by_heads_by_dim(kind, tiny_loaded):
    loaded = tiny_loaded(kind)
    cache = computed(loaded)
    for spec, payload in exported(cache, loaded.layout):
        layer, held = loaded.layout.layers[spec.layer], cache.layers[spec.layer]
        values = torch.frombuffer(bytearray(payload), dtype=torch.float32)
        if spec.is_state:
            expected = torch.cat([held.conv_states[0].flatten(), held.recurrent_states[0].flatten()])
        else:
            first = PREFIX - held.keys.shape[-2]
            rows = [
                torch.stack([tensor[0, :, token - first] for token in range(spec.token_start, spec.token_stop)])
                for tensor in (held.keys, held.values)
            ]
            assert [tuple(part.shape[1:]) for part in rows] == [tensor.row_shape for tensor in layer.tensors]
            expected = torch.cat([part.flatten() for part in rows])
        assert torch.equal(values, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_export_refuses_a_layout_that_lacks_a_tensor_or_has_one_too_many(kind, tiny_loaded):
    loaded = tiny_loaded(kind)
    cache, layout = computed(loaded), loaded.layout

    def with_tensors(position, tensors):
        layers = list(layout.layers)
        layers[position] = dataclasses.replace(layers[position], tensors=tensors)
        return CacheLayout(layout.model_type, tuple(layers))

    for position, layer in enumerate(layout.layers):
        for tensor in layer.tensors:
            fewer = tuple(other for other in layer.tensors if other is not tensor)
            with pytest.raises(LocalProtocolError, match="does not declare"):
                CacheExporter(with_tensors(position, fewer)).check(cache, PREFIX)
            for changed in (
                dataclasses.replace(tensor, dtype="bfloat16"),
                dataclasses.replace(tensor, row_shape=(*tensor.row_shape[:-1], tensor.row_shape[-1] + 1)),
            ):
                tensors = tuple(changed if other is tensor else other for other in layer.tensors)
                with pytest.raises(LocalProtocolError, match="the layout says"):
                    CacheExporter(with_tensors(position, tensors)).check(cache, PREFIX)
        more = (*layer.tensors, TensorSpec("index_key", Extent.STATE, (4,), "float32"))
        with pytest.raises(LocalProtocolError, match="lacks index_key"):
            CacheExporter(with_tensors(position, more)).check(cache, PREFIX)
    with pytest.raises(LocalProtocolError, match="layers"):
        CacheExporter(CacheLayout(layout.model_type, layout.layers[:-1])).check(cache, PREFIX)


def test_export_refuses_state_that_a_layer_grew_on_the_side(tiny_loaded):
    loaded = tiny_loaded("llama")
    cache = computed(loaded)
    cache.layers[1].key_scales = torch.ones(1, 2, PREFIX)
    with pytest.raises(LocalProtocolError, match="layer 1 .*key_scales"):
        CacheExporter(loaded.layout).check(cache, PREFIX)


def test_export_refuses_a_cache_of_another_length(tiny_loaded):
    loaded = tiny_loaded("gemma3")
    with pytest.raises(LocalProtocolError, match="rows at"):
        CacheExporter(loaded.layout).check(computed(loaded), PREFIX + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_import_refuses_any_missing_or_repeated_chunk(kind, tiny_loaded):
    loaded = tiny_loaded(kind)
    chunks = exported(computed(loaded), loaded.layout)
    for missing in range(len(chunks)):
        with pytest.raises(PeerError) as caught:
            imported(loaded, chunks[:missing] + chunks[missing + 1 :])
        assert caught.value.code in ("manifest_incomplete", "manifest_invalid")
        with pytest.raises(PeerError) as caught:
            imported(loaded, [*chunks, chunks[missing]])
        assert caught.value.code == "manifest_invalid"


def test_import_refuses_what_does_not_fit(tiny_loaded):
    loaded = tiny_loaded("granite_hybrid")
    (first, payload), *_, (state, state_payload) = exported(computed(loaded), loaded.layout)
    bad = [
        (dataclasses.replace(first, layer=99), payload),
        (dataclasses.replace(first, layer=-1), payload),
        (first, payload[:-4]),
        (dataclasses.replace(first, payload_bytes=first.payload_bytes - 4), payload[:-4]),
        (dataclasses.replace(first, token_stop=PREFIX + 1), payload),
        (dataclasses.replace(first, token_stop=first.token_start), payload[:0]),
        (dataclasses.replace(first, is_state=True, token_start=PREFIX, token_stop=PREFIX), payload),
        (dataclasses.replace(state, token_start=3, token_stop=3), state_payload),
    ]
    for spec, part in bad:
        importer = CacheImporter(loaded.network.config, loaded.layout, PREFIX)
        with pytest.raises(PeerError) as caught:
            importer.add(spec, part)
        assert caught.value.code == "manifest_invalid", spec


@pytest.mark.parametrize("kind", KINDS)
def test_a_clone_and_its_original_do_not_change_each_other(kind, tiny_loaded):
    loaded = tiny_loaded(kind)
    forward, cache = Forward(loaded.network), computed(loaded)
    before, clone = state_of(cache), clone_cache(cache)
    assert state_of(clone) == before
    with torch.inference_mode():
        one = forward.next_logits(clone, 9, PREFIX)
        forward.extend(clone, [4, 5, 6], PREFIX + 1)
        assert state_of(cache) == before
        assert torch.equal(forward.next_logits(cache, 9, PREFIX), one)


def test_chunked_attention_rows_before_the_border_are_not_sent():
    """Transformers keeps window - 1 rows, the wire only those since the border; the mask hides the rest."""
    rows = tuple(TensorSpec(name, Extent.WINDOW, (2, 4), "float32") for name in ("k", "v"))
    layout = CacheLayout("llama4_text", (LayerLayout(0, LayerKind.CHUNKED, rows, window=8),))
    layer = DynamicSlidingWindowLayer(sliding_window=8)
    keys, values = torch.randn(2, 1, 2, 21, 4).unbind(0)
    layer.update(keys, values)

    class OneLayer:
        layers = [layer]  # noqa: RUF012

    chunks = exported(OneLayer, layout, tokens=21)
    assert [(spec.token_start, spec.token_stop) for spec, _ in chunks] == [(16, 21)]
    sent = torch.frombuffer(bytearray(chunks[0][1]), dtype=torch.float32).reshape(2, 5, 2, 4)
    assert torch.equal(sent[0], keys[0, :, 16:].transpose(0, 1))
    assert torch.equal(sent[1], values[0, :, 16:].transpose(0, 1))
