"""What the config.json of a model with recurrent layers says about its cache: one function for each architecture.

Not here: the table of all architectures (`architectures`), the shapes of single layers (`layer_shapes`).

Each takes the config's fields and the dtype, gives one shape for each layer, and raises what `ConfigFields` raises.
"""

from farfill.kv import layer_shapes
from farfill.kv.config_fields import ConfigFields
from farfill.kv.layer_shapes import LayerShape, by_type, grouped_heads, latent, linear, nothing
from farfill.kv.spec import LayerKind


def kimi_linear(fields: ConfigFields, dtype: str) -> list[LayerShape]:
    """KDA layers and MLA layers, listed by number, the first being 1."""
    lists = fields.part("linear_attn_config")
    full, kda = lists.sequence("full_attn_layers"), lists.sequence("kda_layers")
    if sorted([*full, *kda]) != list(range(1, fields.layers + 1)):
        raise lists.unsupported("kda_layers", "and full_attn_layers do not name each layer exactly once")
    kda_shape = layer_shapes.kda(lists, dtype)
    return [kda_shape if number in kda else latent(fields, dtype) for number in range(1, fields.layers + 1)]


def gdn(fields: ConfigFields, dtype: str) -> list[LayerShape]:
    """Gated delta net, with a full layer at each `full_attention_interval`."""
    if fields.has("layer_types"):
        types = fields.per_layer("layer_types")
    else:
        period = fields.number("full_attention_interval")
        types = ["linear_attention" if (i + 1) % period else "full_attention" for i in range(fields.layers)]
    return by_type(
        fields,
        types,
        {
            "full_attention": lambda: grouped_heads(fields, dtype),
            "linear_attention": lambda: layer_shapes.gdn(fields, dtype),
        },
    )


def nemotron_h(fields: ConfigFields, dtype: str) -> list[LayerShape]:
    """One block a layer: M Mamba2, * attention, E experts, - MLP; the last two keep nothing."""
    if fields.has("hybrid_override_pattern"):
        names = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
        types = [names.get(letter, letter) for letter in fields.per_layer("hybrid_override_pattern")]
    elif fields.has("num_hidden_layers"):
        types = list(fields.per_layer("layers_block_type"))
    else:
        # Transformers 5 saves the list alone; it is the number of layers.
        types = list(fields.sequence("layers_block_type"))
    layer_shapes.require_float32_state(fields, "mamba_ssm_cache_dtype")
    inner = fields.number("mamba_num_heads") * fields.number("mamba_head_dim")

    def mamba() -> LayerShape:
        return layer_shapes.mamba2(
            inner=inner,
            heads=fields.number("mamba_num_heads"),
            head_dim=fields.number("mamba_head_dim"),
            state=fields.number("ssm_state_size"),
            groups=fields.number("n_groups"),
            kernel=fields.number("conv_kernel"),
            dtype=dtype,
        )

    return by_type(
        fields,
        types,
        {
            "linear_attention": mamba,
            "mamba": mamba,
            "full_attention": lambda: grouped_heads(fields, dtype),
            "attention": lambda: grouped_heads(fields, dtype),
            "moe": nothing,
            "mlp": nothing,
        },
    )


def granite_hybrid(fields: ConfigFields, dtype: str) -> list[LayerShape]:
    """Granite 4: Mamba2 and attention layers."""
    name = "layer_types" if fields.has("layer_types") else "layers_block_type"

    def mamba() -> LayerShape:
        return layer_shapes.mamba2_expanded(fields, dtype)

    def full() -> LayerShape:
        return grouped_heads(fields, dtype)

    shapes = {"mamba": mamba, "linear_attention": mamba, "attention": full, "full_attention": full}
    return by_type(fields, fields.per_layer(name), shapes)


def bamba(fields: ConfigFields, dtype: str) -> list[LayerShape]:
    at = fields.sequence("attn_layer_indices")
    shape = layer_shapes.mamba2_expanded(fields, dtype)
    return [grouped_heads(fields, dtype) if layer in at else shape for layer in range(fields.layers)]


def falcon_h1(fields: ConfigFields, dtype: str) -> list[LayerShape]:
    """Attention and Mamba2 side by side in each layer."""
    shape = layer_shapes.mamba2(
        inner=fields.number("mamba_d_ssm"),
        heads=fields.number("mamba_n_heads"),
        head_dim=fields.number("mamba_d_head"),
        state=fields.number("mamba_d_state"),
        groups=fields.number("mamba_n_groups"),
        kernel=fields.number("mamba_d_conv"),
        dtype=dtype,
    )
    rows = grouped_heads(fields, dtype)
    return [LayerShape(LayerKind.FULL, rows.tensors + shape.tensors) for _ in range(fields.layers)]


def jamba(fields: ConfigFields, dtype: str) -> list[LayerShape]:
    """Mamba (1), with attention at `attn_layer_offset` of each `attn_layer_period` layers."""
    period, offset = fields.number("attn_layer_period"), fields.count("attn_layer_offset")
    shape = layer_shapes.mamba1(fields, dtype)
    return [grouped_heads(fields, dtype) if layer % period == offset else shape for layer in range(fields.layers)]


def mamba2(fields: ConfigFields, dtype: str) -> list[LayerShape]:
    shape = layer_shapes.mamba2(
        inner=fields.number("num_heads") * fields.number("head_dim"),
        heads=fields.number("num_heads"),
        head_dim=fields.number("head_dim"),
        state=fields.number("state_size"),
        groups=fields.number("n_groups"),
        kernel=fields.number("conv_kernel"),
        dtype=dtype,
    )
    return [shape] * fields.layers


def minimax(fields: ConfigFields, dtype: str) -> list[LayerShape]:
    """Lightning attention; older configs say 0 (lightning) or 1 (full) for each layer in `attn_type_list`."""
    if fields.has("layer_types"):
        types = list(fields.per_layer("layer_types"))
    else:
        names = {0: "linear_attention", 1: "full_attention"}
        types = [names.get(number, number) for number in fields.per_layer("attn_type_list")]
    return by_type(
        fields,
        types,
        {
            "full_attention": lambda: grouped_heads(fields, dtype),
            "linear_attention": lambda: layer_shapes.lightning(fields, dtype),
        },
    )


def lfm2(fields: ConfigFields, dtype: str) -> list[LayerShape]:
    """Short convolutions, with attention at `full_attn_idxs` where there are no `layer_types`."""
    if fields.has("layer_types"):
        types = fields.per_layer("layer_types")
    else:
        at = fields.sequence("full_attn_idxs")
        types = ["full_attention" if layer in at else "conv" for layer in range(fields.layers)]
    return by_type(
        fields,
        types,
        {
            "full_attention": lambda: grouped_heads(fields, dtype),
            "conv": lambda: linear(conv=(fields.number("hidden_size"), fields.number("conv_L_cache")), dtype=dtype),
        },
    )
