"""Layouts for the kv tests: one of every layer kind, and a Hypothesis strategy over any mixture of them."""

from collections.abc import Iterator
from pathlib import Path

from hypothesis import strategies as st

from farfill.kv.fingerprint import Convertible, Fingerprint, Informational, MustEqual
from farfill.kv.layout import layout_digest
from farfill.kv.spec import CacheLayout, Extent, LayerKind, LayerLayout, TensorSpec

MODELS = Path(__file__).parent.parent / "data" / "models"

_DTYPES = st.sampled_from(["float32", "bfloat16", "int8"])


def _rows(name: str, extent: Extent, heads: int, dim: int, dtype: str = "bfloat16") -> TensorSpec:
    return TensorSpec(name, extent, (heads, dim), dtype)


# Full, latent, window, chunked, recurrent, both in one layer, and nothing.
EVERY_KIND = CacheLayout(
    "mixture",
    (
        LayerLayout(0, LayerKind.FULL, (_rows("k", Extent.TOKENS, 2, 4), _rows("v", Extent.TOKENS, 2, 6))),
        LayerLayout(1, LayerKind.WINDOW, (_rows("k", Extent.WINDOW, 1, 8), _rows("v", Extent.WINDOW, 1, 8)), 5),
        LayerLayout(2, LayerKind.MLA, (_rows("latent", Extent.TOKENS, 1, 16), _rows("rope_key", Extent.TOKENS, 1, 4))),
        LayerLayout(3, LayerKind.CHUNKED, (_rows("k", Extent.WINDOW, 1, 4), _rows("v", Extent.WINDOW, 1, 4)), 8),
        LayerLayout(
            4,
            LayerKind.LINEAR,
            (
                TensorSpec("conv", Extent.STATE, (12, 4), "bfloat16"),
                TensorSpec("recurrent", Extent.STATE, (2, 4, 4), "float32"),
            ),
        ),
        LayerLayout(5, LayerKind.NONE, ()),
        LayerLayout(
            6,
            LayerKind.FULL,
            (_rows("k", Extent.TOKENS, 1, 4), TensorSpec("conv", Extent.STATE, (6, 4), "bfloat16")),
        ),
    ),
)


@st.composite
def _layers(draw: st.DrawFn, index: int) -> LayerLayout:
    kind = draw(st.sampled_from(LayerKind))
    dims = st.integers(1, 6)
    if kind is LayerKind.NONE:
        return LayerLayout(index, kind, ())
    if kind is LayerKind.LINEAR:
        names = draw(st.sampled_from([("conv",), ("recurrent",), ("conv", "recurrent")]))
        shape = st.lists(dims, min_size=1, max_size=3).map(tuple)
        return LayerLayout(
            index, kind, tuple(TensorSpec(name, Extent.STATE, draw(shape), draw(_DTYPES)) for name in names)
        )
    windowed = kind in (LayerKind.WINDOW, LayerKind.CHUNKED)
    extent = Extent.WINDOW if windowed else Extent.TOKENS
    tensors = [TensorSpec(name, extent, (draw(dims), draw(dims)), draw(_DTYPES)) for name in ("k", "v")]
    if draw(st.booleans()):
        tensors.append(TensorSpec("conv", Extent.STATE, (draw(dims), 4), "bfloat16"))
    return LayerLayout(index, kind, tuple(tensors), draw(st.integers(1, 40)) if windowed else None)


@st.composite
def layouts(draw: st.DrawFn) -> CacheLayout:
    count = draw(st.integers(1, 6))
    return CacheLayout("any", tuple(draw(_layers(index)) for index in range(count)))


def fingerprint_of(layout: CacheLayout, **must_equal: str | int) -> Fingerprint:
    fields: dict[str, str | int] = {
        "weights_digest": "a" * 64,
        "tokenizer_digest": "b" * 64,
        "chat_template_digest": "c" * 64,
        "architecture": '{"model_type":"mixture"}',
        "rope": "{}",
        "layout_digest": layout_digest(layout),
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
    }
    return Fingerprint(
        MustEqual(**{**fields, **must_equal}),  # type: ignore[arg-type]
        Convertible(max_model_len=4096),
        Informational(engine="hf", engine_version="1"),
    )


def counting_salts() -> Iterator[bytes]:
    """32-byte salts 0, 1, 2, ...: a repeatable source for `Sealer(salts=...)`."""
    number = 0
    while True:
        yield number.to_bytes(32, "big")
        number += 1
