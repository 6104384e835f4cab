"""The shapes of single layers: rows of attention, latents, and the fixed states of recurrent layers.

Not here: which layer of a model is which (`architectures`, `hybrids`).

Recurrent states are float32 whatever the model's dtype, for that is how Transformers 5.24 keeps them (and how vLLM does
by default for these models); the one exception is Lightning attention. Convolution states have the full kernel's
width and the model's dtype.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from farfill.kv.config_fields import ConfigFields
from farfill.kv.spec import Extent, LayerKind, TensorSpec

_STATE_DTYPE: Final = "float32"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """A layer's state before it has a place in the model."""

    kind: LayerKind
    tensors: tuple[TensorSpec, ...] = ()
    window: int | None = None


def nothing() -> LayerShape:
    """A layer that keeps no state."""
    return LayerShape(LayerKind.NONE)


def attention(
    kind: LayerKind, heads: int, key_dim: int, *, dtype: str, value_dim: int | None = None, window: int | None = None
) -> LayerShape:
    """Keys and values, (heads, dim) a token."""
    extent = Extent.TOKENS if kind is LayerKind.FULL else Extent.WINDOW
    value_dim = key_dim if value_dim is None else value_dim
    return LayerShape(
        kind,
        (TensorSpec("k", extent, (heads, key_dim), dtype), TensorSpec("v", extent, (heads, value_dim), dtype)),
        window,
    )


# Attention by heads. `head_dim` may be missing where the modeling code itself derives it from the hidden size.
_DERIVES_HEAD_DIM: Final = frozenset(
    {
        "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "phi3", "cohere2", "olmo2", "olmo3", "olmoe", "granite",
        "granitemoe", "smollm3", "granitemoehybrid", "bamba", "jamba", "lfm2", "lfm2_moe",
    }
)  # fmt: skip


def head_dim_of(fields: ConfigFields) -> int:
    if not fields.has("head_dim") and fields.model_type in _DERIVES_HEAD_DIM:
        return fields.quotient("hidden_size", "num_attention_heads")
    return fields.number("head_dim")


def grouped_heads(fields: ConfigFields, dtype: str, *, window: int | None = None) -> LayerShape:
    kind = LayerKind.FULL if window is None else LayerKind.WINDOW
    return attention(kind, fields.number("num_key_value_heads"), head_dim_of(fields), dtype=dtype, window=window)


def by_type(
    fields: ConfigFields, types: Sequence[Any], shapes: Mapping[str, Callable[[], LayerShape]]
) -> list[LayerShape]:
    """One layer for each entry of `types`; an entry that `shapes` has not is an error."""
    layers = []
    for position, name in enumerate(types):
        shape = shapes.get(name) if isinstance(name, str) else None
        if shape is None:
            raise fields.unsupported("layer_types", f"has {name!r} at layer {position}; known are {', '.join(shapes)}")
        layers.append(shape())
    return layers


def latent(fields: ConfigFields, dtype: str) -> LayerShape:
    """MLA: the compressed latent and the shared rope key, one of each a token."""
    return LayerShape(
        LayerKind.MLA,
        (
            TensorSpec("latent", Extent.TOKENS, (1, fields.number("kv_lora_rank")), dtype),
            TensorSpec("rope_key", Extent.TOKENS, (1, fields.number("qk_rope_head_dim")), dtype),
        ),
    )


def linear(
    *,
    dtype: str,
    conv: tuple[int, ...] | None = None,
    recurrent: tuple[int, ...] | None = None,
    recurrent_dtype: str = _STATE_DTYPE,
) -> LayerShape:
    """A recurrent layer: a convolution state (channels, kernel) and a recurrent state."""
    tensors = []
    if conv is not None:
        tensors.append(TensorSpec("conv", Extent.STATE, conv, dtype))
    if recurrent is not None:
        tensors.append(TensorSpec("recurrent", Extent.STATE, recurrent, recurrent_dtype))
    return LayerShape(LayerKind.LINEAR, tuple(tensors))


def gdn(fields: ConfigFields, dtype: str) -> LayerShape:
    """Gated delta net: conv over queries, keys and values; a key x value matrix for each value head."""
    require_float32_state(fields, "mamba_ssm_dtype")
    key_heads, value_heads = fields.number("linear_num_key_heads"), fields.number("linear_num_value_heads")
    key_dim, value_dim = fields.number("linear_key_head_dim"), fields.number("linear_value_head_dim")
    return linear(
        conv=(2 * key_heads * key_dim + value_heads * value_dim, fields.number("linear_conv_kernel_dim")),
        recurrent=(value_heads, key_dim, value_dim),
        dtype=dtype,
    )


def kda(fields: ConfigFields, dtype: str) -> LayerShape:
    """Kimi delta attention: conv over queries, keys and values; a square matrix for each head."""
    heads, dim = fields.number("num_heads"), fields.number("head_dim")
    return linear(
        conv=(3 * heads * dim, fields.number("short_conv_kernel_size")), recurrent=(heads, dim, dim), dtype=dtype
    )


def mamba1(fields: ConfigFields, dtype: str) -> LayerShape:
    """Mamba: conv over the inner channels; a state vector for each of them."""
    inner = fields.number("mamba_expand") * fields.number("hidden_size")
    return linear(
        conv=(inner, fields.number("mamba_d_conv")), recurrent=(inner, fields.number("mamba_d_state")), dtype=dtype
    )


def mamba2(*, inner: int, heads: int, head_dim: int, state: int, groups: int, kernel: int, dtype: str) -> LayerShape:
    """Mamba2: conv over the inner channels and each group's B and C; head_dim x state for each head."""
    return linear(conv=(inner + 2 * groups * state, kernel), recurrent=(heads, head_dim, state), dtype=dtype)


def mamba2_expanded(fields: ConfigFields, dtype: str) -> LayerShape:
    """Mamba2 where the config gives an expansion of the hidden size (Granite 4, Bamba)."""
    inner, heads = fields.number("mamba_expand") * fields.number("hidden_size"), fields.number("mamba_n_heads")
    if fields.raw("mamba_d_head") == "auto":
        if inner % heads:
            raise fields.unsupported("mamba_n_heads", f"is {heads}, which does not divide the {inner} inner channels")
        head_dim = inner // heads
    else:
        head_dim = fields.number("mamba_d_head")
    if head_dim * heads != inner:
        raise fields.unsupported("mamba_d_head", f"is {head_dim}: {heads} heads do not make {inner} inner channels")
    return mamba2(
        inner=inner,
        heads=heads,
        head_dim=head_dim,
        state=fields.number("mamba_d_state"),
        groups=fields.number("mamba_n_groups"),
        kernel=fields.number("mamba_d_conv"),
        dtype=dtype,
    )


def lightning(fields: ConfigFields, dtype: str) -> LayerShape:
    """Lightning attention: a square matrix for each query head, in the model's dtype."""
    heads, dim = fields.number("num_attention_heads"), fields.number("head_dim")
    return linear(recurrent=(heads, dim, dim), recurrent_dtype=dtype, dtype=dtype)


def require_float32_state(fields: ConfigFields, name: str) -> None:
    """Some configs say what the recurrent state's dtype is to be; the engines at hand keep float32."""
    if fields.has(name) and fields.text(name) != _STATE_DTYPE:
        raise fields.unsupported(name, f"is {fields.text(name)!r}; only {_STATE_DTYPE!r} is supported")
