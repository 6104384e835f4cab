"""What each architecture's config.json says about its cache: a table from model type to a reading of its fields.

Not here: recurrent layers' shapes (`recurrent`), sizes and checks of a finished layout (`layout`).

Sources: the configuration and modeling code of Transformers 5.24, which the tests run against. A default is taken
only where it is the architecture's own definition there, and then it stands here with its reason. Everything else that
is missing is an error. Layers for multi-token prediction keep no cache of their own in the main model.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from farfill.errors import ConfigurationError
from farfill.kv import recurrent
from farfill.kv.config_fields import ConfigFields
from farfill.kv.recurrent import LayerShape, attention, latent, linear, nothing
from farfill.kv.spec import DTYPE_BYTES, CacheLayout, LayerKind, LayerLayout

_Reading = Callable[[ConfigFields, str], list[LayerShape]]


def read_config(config: Mapping[str, Any], *, dtype: str | None) -> CacheLayout:
    """See `layout.layout_from_config`."""
    outer = ConfigFields(config)
    fields = outer
    if outer.model_type not in _READINGS and outer.has("text_config"):
        # A multimodal model: what it caches is its language model's, whose own model type counts.
        inner = outer.raw("text_config")
        if not isinstance(inner, Mapping):
            raise outer.unsupported("text_config", "is not an object")
        fields = ConfigFields(inner, where="text_config.")
    reading = _READINGS.get(fields.model_type)
    if reading is None:
        raise fields.unsupported("model_type", f"is {fields.model_type!r}; known are {', '.join(sorted(_READINGS))}")
    shapes = reading(fields, _dtype(dtype, fields, outer))
    layers = tuple(LayerLayout(index, shape.kind, shape.tensors, shape.window) for index, shape in enumerate(shapes))
    assert len(layers) == fields.layers
    return CacheLayout(fields.model_type, layers)


def _dtype(override: str | None, *configs: ConfigFields) -> str:
    if override is not None:
        name = override.removeprefix("torch.")
        if name not in DTYPE_BYTES:
            raise ConfigurationError(
                "model_unsupported",
                f"dtype {override!r} is not known; known are {', '.join(DTYPE_BYTES)}",
                field="dtype",
            )
        return name
    for config in configs:
        for field in ("dtype", "torch_dtype"):
            if config.has(field):
                name = config.text(field).removeprefix("torch.")
                if name not in DTYPE_BYTES:
                    raise config.unsupported(field, f"is {name!r}; known are {', '.join(DTYPE_BYTES)}")
                return name
    raise configs[0].unsupported("dtype", "is missing (nor is there torch_dtype): say which dtype to serve with")


# Attention by heads. `head_dim` may be missing where the modeling code itself derives it from the hidden size.
_DERIVES_HEAD_DIM: Final = frozenset(
    {
        "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "phi3", "cohere2", "olmo2", "olmo3", "olmoe", "granite",
        "granitemoe", "smollm3", "granitemoehybrid", "bamba", "jamba", "lfm2", "lfm2_moe",
    }
)  # fmt: skip


def _head_dim(fields: ConfigFields) -> int:
    if not fields.has("head_dim") and fields.model_type in _DERIVES_HEAD_DIM:
        return fields.quotient("hidden_size", "num_attention_heads")
    return fields.number("head_dim")


def _heads(fields: ConfigFields, dtype: str, *, window: int | None = None) -> LayerShape:
    kind = LayerKind.FULL if window is None else LayerKind.WINDOW
    return attention(kind, fields.number("num_key_value_heads"), _head_dim(fields), dtype=dtype, window=window)


def _by_type(
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


def _full(fields: ConfigFields, dtype: str) -> list[LayerShape]:
    """Every layer sees everything."""
    if fields.has("sliding_window"):
        raise fields.unsupported("sliding_window", "is set, but this architecture has no window")
    types = fields.per_layer("layer_types") if fields.has("layer_types") else ["full_attention"] * fields.layers
    return _by_type(fields, types, {"full_attention": lambda: _heads(fields, dtype)})


def _windowed(default_types: Callable[[ConfigFields], list[str]]) -> _Reading:
    """Full and sliding layers: by `layer_types`, or by the architecture's own rule where an older config has none."""

    def reading(fields: ConfigFields, dtype: str) -> list[LayerShape]:
        types = fields.per_layer("layer_types") if fields.has("layer_types") else default_types(fields)
        if fields.has("use_bidirectional_attention") and fields.raw("use_bidirectional_attention") is True:
            raise fields.unsupported("use_bidirectional_attention", "is true: such a model does not decode")
        return _by_type(
            fields,
            types,
            {
                "full_attention": lambda: _heads(fields, dtype),
                "sliding_attention": lambda: _heads(fields, dtype, window=fields.number("sliding_window")),
            },
        )

    return reading


def _all_sliding_if_set(fields: ConfigFields) -> list[str]:
    return ["sliding_attention" if fields.has("sliding_window") else "full_attention"] * fields.layers


def _qwen_windows(fields: ConfigFields) -> list[str]:
    """Qwen 2 and 3: windows only if switched on, and only from `max_window_layers` on."""
    if not fields.has("sliding_window") or not fields.flag("use_sliding_window"):
        return ["full_attention"] * fields.layers
    if fields.model_type not in ("qwen2", "qwen3"):
        raise fields.unsupported("layer_types", "is missing, and use_sliding_window is true")
    first = fields.count("max_window_layers")
    return ["sliding_attention" if layer >= first else "full_attention" for layer in range(fields.layers)]


def _every(period_field: str, default_period: int | None) -> Callable[[ConfigFields], list[str]]:
    """Each `period`-th layer is full, the others slide. The default is the one in the architecture's definition."""

    def types(fields: ConfigFields) -> list[str]:
        if default_period is not None and not fields.has(period_field):
            period = default_period
        else:
            period = fields.number(period_field)
        return ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(fields.layers)]

    return types


def _must_say(fields: ConfigFields) -> list[str]:
    raise fields.unsupported("layer_types", "is missing")


def _gemma4(fields: ConfigFields, dtype: str) -> list[LayerShape]:
    """Full layers have heads of their own size; the last layers read an earlier layer's cache and keep none."""
    if fields.has("per_layer_config"):
        raise fields.unsupported("per_layer_config", "is not understood")

    def full() -> LayerShape:
        own = fields.flag("attention_k_eq_v") and fields.has("num_global_key_value_heads")
        heads = fields.number("num_global_key_value_heads" if own else "num_key_value_heads")
        return attention(LayerKind.FULL, heads, fields.number("global_head_dim"), dtype=dtype)

    layers = _by_type(
        fields,
        fields.per_layer("layer_types"),
        {
            "full_attention": full,
            "sliding_attention": lambda: _heads(fields, dtype, window=fields.number("sliding_window")),
        },
    )
    keeping = fields.layers - fields.count("num_kv_shared_layers")
    return layers[:keeping] + [nothing() for _ in layers[keeping:]]


def _llama4(fields: ConfigFields, dtype: str) -> list[LayerShape]:
    """Layers with rope attend within chunks, those without see everything."""
    if fields.has("layer_types"):
        types = fields.per_layer("layer_types")
    else:
        if fields.has("no_rope_layers") and fields.raw("no_rope_layers") != []:
            ropes = fields.per_layer("no_rope_layers")
        else:
            # Llama 4's own definition: each fourth layer is without rope, if the config does not say otherwise.
            period = fields.number("no_rope_layer_interval") if fields.has("no_rope_layer_interval") else 4
            ropes = [int((layer + 1) % period != 0) for layer in range(fields.layers)]
        types = ["chunked_attention" if rope else "full_attention" for rope in ropes]
    heads, head_dim = fields.number("num_key_value_heads"), fields.number("head_dim")
    return _by_type(
        fields,
        types,
        {
            "full_attention": lambda: attention(LayerKind.FULL, heads, head_dim, dtype=dtype),
            "chunked_attention": lambda: attention(
                LayerKind.CHUNKED, heads, head_dim, dtype=dtype, window=fields.number("attention_chunk_size")
            ),
        },
    )


def _mimo(fields: ConfigFields, dtype: str) -> list[LayerShape]:
    """Window layers have heads of their own number and size, and keys are wider than values."""

    def full() -> LayerShape:
        return attention(
            LayerKind.FULL,
            fields.number("num_key_value_heads"),
            fields.number("head_dim"),
            value_dim=fields.number("v_head_dim"),
            dtype=dtype,
        )

    def sliding() -> LayerShape:
        # `sliding_window_size` counts the tokens before the own one; a window here counts the own one too.
        window = fields.number("sliding_window_size") + 1
        return attention(
            LayerKind.WINDOW,
            fields.number("swa_num_key_value_heads"),
            fields.number("swa_head_dim"),
            value_dim=fields.number("swa_v_head_dim"),
            dtype=dtype,
            window=window,
        )

    kinds = {0: full, 1: sliding}
    layers = []
    for position, kind in enumerate(fields.per_layer("hybrid_layer_pattern")):
        if kind not in kinds:
            raise fields.unsupported("hybrid_layer_pattern", f"has {kind!r} at layer {position}; known are 0 and 1")
        layers.append(kinds[kind]())
    return layers


def _mla(fields: ConfigFields, dtype: str) -> list[LayerShape]:
    return [latent(fields, dtype) for _ in range(fields.layers)]


def _kimi_linear(fields: ConfigFields, dtype: str) -> list[LayerShape]:
    """KDA layers and MLA layers, listed by number, the first being 1."""
    lists = fields.part("linear_attn_config")
    full, kda = lists.sequence("full_attn_layers"), lists.sequence("kda_layers")
    if sorted([*full, *kda]) != list(range(1, fields.layers + 1)):
        raise lists.unsupported("kda_layers", "and full_attn_layers do not name each layer exactly once")
    kda_shape = recurrent.kda(lists, dtype)
    return [kda_shape if number in kda else latent(fields, dtype) for number in range(1, fields.layers + 1)]


def _gdn(fields: ConfigFields, dtype: str) -> list[LayerShape]:
    """Gated delta net, with a full layer at each `full_attention_interval`."""
    if fields.has("layer_types"):
        types = fields.per_layer("layer_types")
    else:
        period = fields.number("full_attention_interval")
        types = ["linear_attention" if (i + 1) % period else "full_attention" for i in range(fields.layers)]
    return _by_type(
        fields,
        types,
        {"full_attention": lambda: _heads(fields, dtype), "linear_attention": lambda: recurrent.gdn(fields, dtype)},
    )


def _nemotron_h(fields: ConfigFields, dtype: str) -> list[LayerShape]:
    """One block a layer: M Mamba2, * attention, E experts, - MLP; the last two keep nothing."""
    if fields.has("hybrid_override_pattern"):
        names = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
        types = [names.get(letter, letter) for letter in fields.per_layer("hybrid_override_pattern")]
    else:
        types = list(fields.per_layer("layers_block_type"))
    recurrent.require_float32_state(fields, "mamba_ssm_cache_dtype")
    inner = fields.number("mamba_num_heads") * fields.number("mamba_head_dim")

    def mamba() -> LayerShape:
        return recurrent.mamba2(
            inner=inner,
            heads=fields.number("mamba_num_heads"),
            head_dim=fields.number("mamba_head_dim"),
            state=fields.number("ssm_state_size"),
            groups=fields.number("n_groups"),
            kernel=fields.number("conv_kernel"),
            dtype=dtype,
        )

    return _by_type(
        fields,
        types,
        {
            "linear_attention": mamba,
            "mamba": mamba,
            "full_attention": lambda: _heads(fields, dtype),
            "attention": lambda: _heads(fields, dtype),
            "moe": nothing,
            "mlp": nothing,
        },
    )


def _granite_hybrid(fields: ConfigFields, dtype: str) -> list[LayerShape]:
    """Granite 4: Mamba2 and attention layers."""
    name = "layer_types" if fields.has("layer_types") else "layers_block_type"

    def mamba() -> LayerShape:
        return recurrent.mamba2_expanded(fields, dtype)

    def full() -> LayerShape:
        return _heads(fields, dtype)

    shapes = {"mamba": mamba, "linear_attention": mamba, "attention": full, "full_attention": full}
    return _by_type(fields, fields.per_layer(name), shapes)


def _bamba(fields: ConfigFields, dtype: str) -> list[LayerShape]:
    at = fields.sequence("attn_layer_indices")
    shape = recurrent.mamba2_expanded(fields, dtype)
    return [_heads(fields, dtype) if layer in at else shape for layer in range(fields.layers)]


def _falcon_h1(fields: ConfigFields, dtype: str) -> list[LayerShape]:
    """Attention and Mamba2 side by side in each layer."""
    shape = recurrent.mamba2(
        inner=fields.number("mamba_d_ssm"),
        heads=fields.number("mamba_n_heads"),
        head_dim=fields.number("mamba_d_head"),
        state=fields.number("mamba_d_state"),
        groups=fields.number("mamba_n_groups"),
        kernel=fields.number("mamba_d_conv"),
        dtype=dtype,
    )
    rows = _heads(fields, dtype)
    return [LayerShape(LayerKind.FULL, rows.tensors + shape.tensors) for _ in range(fields.layers)]


def _jamba(fields: ConfigFields, dtype: str) -> list[LayerShape]:
    """Mamba (1), with attention at `attn_layer_offset` of each `attn_layer_period` layers."""
    period, offset = fields.number("attn_layer_period"), fields.count("attn_layer_offset")
    shape = recurrent.mamba1(fields, dtype)
    return [_heads(fields, dtype) if layer % period == offset else shape for layer in range(fields.layers)]


def _mamba2(fields: ConfigFields, dtype: str) -> list[LayerShape]:
    shape = recurrent.mamba2(
        inner=fields.number("num_heads") * fields.number("head_dim"),
        heads=fields.number("num_heads"),
        head_dim=fields.number("head_dim"),
        state=fields.number("state_size"),
        groups=fields.number("n_groups"),
        kernel=fields.number("conv_kernel"),
        dtype=dtype,
    )
    return [shape] * fields.layers


def _minimax(fields: ConfigFields, dtype: str) -> list[LayerShape]:
    """Lightning attention; older configs say 0 (lightning) or 1 (full) for each layer in `attn_type_list`."""
    if fields.has("layer_types"):
        types = list(fields.per_layer("layer_types"))
    else:
        names = {0: "linear_attention", 1: "full_attention"}
        types = [names.get(number, number) for number in fields.per_layer("attn_type_list")]
    return _by_type(
        fields,
        types,
        {
            "full_attention": lambda: _heads(fields, dtype),
            "linear_attention": lambda: recurrent.lightning(fields, dtype),
        },
    )


def _lfm2(fields: ConfigFields, dtype: str) -> list[LayerShape]:
    """Short convolutions, with attention at `full_attn_idxs` where there are no `layer_types`."""
    if fields.has("layer_types"):
        types = fields.per_layer("layer_types")
    else:
        at = fields.sequence("full_attn_idxs")
        types = ["full_attention" if layer in at else "conv" for layer in range(fields.layers)]
    return _by_type(
        fields,
        types,
        {
            "full_attention": lambda: _heads(fields, dtype),
            "conv": lambda: linear(conv=(fields.number("hidden_size"), fields.number("conv_L_cache")), dtype=dtype),
        },
    )


_READINGS: Final[Mapping[str, _Reading]] = {
    **dict.fromkeys(
        ("llama", "gemma", "glm4", "glm4_moe", "granite", "granitemoe", "minimax_m2", "olmo2", "olmoe", "smollm3"),
        _full,
    ),
    **dict.fromkeys(("mistral", "mixtral", "phi3"), _windowed(_all_sliding_if_set)),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), _windowed(_qwen_windows)),
    # Gemma 2's definition alternates, beginning with a window; Gemma 3's and Cohere 2's have these periods.
    "gemma2": _windowed(_every("sliding_window_pattern", 2)),
    "gemma3_text": _windowed(_every("sliding_window_pattern", 6)),
    "cohere2": _windowed(_every("sliding_window_pattern", 4)),
    **dict.fromkeys(("gpt_oss", "olmo3"), _windowed(_must_say)),
    "gemma4_text": _gemma4,
    "llama4_text": _llama4,
    "mimo_v2_flash": _mimo,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _mla),
    "kimi_linear": _kimi_linear,
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _gdn),
    "nemotron_h": _nemotron_h,
    "granitemoehybrid": _granite_hybrid,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "jamba": _jamba,
    "mamba2": _mamba2,
    "minimax": _minimax,
    **dict.fromkeys(("lfm2", "lfm2_moe"), _lfm2),
}
