"""What each architecture's config.json says about its cache: a table from model type to a reading of its fields.

Not here: models with recurrent layers (`hybrids`), the shapes of single layers (`layer_shapes`), sizes and checks of
a finished layout (`layout`).

Sources: the configuration and modeling code of Transformers 5.24, which the tests run against. A default is taken
only where it is the architecture's own definition there, and then it stands here with its reason. Everything else that
is missing is an error. Layers for multi-token prediction keep no cache of their own in the main model.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from farfill.errors import ConfigurationError
from farfill.kv import hybrids
from farfill.kv.config_fields import ConfigFields
from farfill.kv.layer_shapes import LayerShape, attention, by_type, grouped_heads, latent, nothing
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
    if fields.has("per_layer_config") and fields.raw("per_layer_config") and reading is not _gemma4:
        raise fields.unsupported("per_layer_config", "is not understood for this architecture")
    shapes = reading(fields, _dtype(dtype, fields, outer))
    layers = tuple(LayerLayout(index, shape.kind, shape.tensors, shape.window) for index, shape in enumerate(shapes))
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


def _full(fields: ConfigFields, dtype: str) -> list[LayerShape]:
    """Every layer sees everything."""
    if fields.has("sliding_window"):
        raise fields.unsupported("sliding_window", "is set, but this architecture has no window")
    types = fields.per_layer("layer_types") if fields.has("layer_types") else ["full_attention"] * fields.layers
    return by_type(fields, types, {"full_attention": lambda: grouped_heads(fields, dtype)})


def _windowed(default_types: Callable[[ConfigFields], list[str]]) -> _Reading:
    """Full and sliding layers: by `layer_types`, or by the architecture's own rule where an older config has none."""

    def reading(fields: ConfigFields, dtype: str) -> list[LayerShape]:
        types = fields.per_layer("layer_types") if fields.has("layer_types") else default_types(fields)
        if fields.has("use_bidirectional_attention") and fields.raw("use_bidirectional_attention") is True:
            raise fields.unsupported("use_bidirectional_attention", "is true: such a model does not decode")
        return by_type(
            fields,
            types,
            {
                "full_attention": lambda: grouped_heads(fields, dtype),
                "sliding_attention": lambda: grouped_heads(fields, dtype, window=fields.number("sliding_window")),
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
    """Full layers have heads of their own size; the last layers read an earlier layer's cache and keep none.

    Published configs say the full layers' sizes in two fields, those that Transformers 5 saves layer by layer.
    """
    layers = []
    for position, name in enumerate(fields.per_layer("layer_types")):
        if name not in ("full_attention", "sliding_attention"):
            raise fields.unsupported("layer_types", f"has {name!r} at layer {position}")
        full = name == "full_attention"
        if fields.has("per_layer_config"):
            heads, head_dim = _own_heads(fields, position)
        elif full:
            own = fields.flag("attention_k_eq_v") and fields.has("num_global_key_value_heads")
            heads = fields.number("num_global_key_value_heads" if own else "num_key_value_heads")
            head_dim = fields.number("global_head_dim")
        else:
            heads, head_dim = fields.number("num_key_value_heads"), fields.number("head_dim")
        window = None if full else fields.number("sliding_window")
        layers.append(
            attention(LayerKind.FULL if full else LayerKind.WINDOW, heads, head_dim, dtype=dtype, window=window)
        )
    keeping = fields.layers - fields.count("num_kv_shared_layers")
    if keeping < 1:
        raise fields.unsupported("num_kv_shared_layers", f"leaves no layer of {fields.layers} with a cache")
    return layers[:keeping] + [nothing() for _ in layers[keeping:]]


def _own_heads(fields: ConfigFields, position: int) -> tuple[int, int]:
    """(heads, head_dim) of one layer, where `per_layer_config` says what differs from the general fields."""
    overrides = fields.part("per_layer_config")
    if not overrides.has(str(position)):
        return fields.number("num_key_value_heads"), fields.number("head_dim")
    own = overrides.part(str(position))
    unknown = [name for name in own.raw_names() if name not in ("head_dim", "num_key_value_heads")]
    if unknown:
        raise own.unsupported(unknown[0], "is not understood")
    heads = (own if own.has("num_key_value_heads") else fields).number("num_key_value_heads")
    head_dim = (own if own.has("head_dim") else fields).number("head_dim")
    return heads, head_dim


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
    return by_type(
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
    # Kimi K2 is DeepSeek-V3's architecture under a name of its own.
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _mla),
    "kimi_linear": hybrids.kimi_linear,
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), hybrids.gdn),
    "nemotron_h": hybrids.nemotron_h,
    "granitemoehybrid": hybrids.granite_hybrid,
    "bamba": hybrids.bamba,
    "falcon_h1": hybrids.falcon_h1,
    "jamba": hybrids.jamba,
    "mamba2": hybrids.mamba2,
    "minimax": hybrids.minimax,
    **dict.fromkeys(("lfm2", "lfm2_moe"), hybrids.lfm2),
}
