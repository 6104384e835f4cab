"""Layouts against what Transformers really caches: tiny random models, every tensor's shape and dtype compared.

The configs go through a saved config.json, as a real model folder's do.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from farfill.kv.layout import check_layout, held_range, layout_from_config
from farfill.kv.spec import CacheLayout, Extent, LayerKind

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.torch

TOKENS = 21
COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
}
MAMBA2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 24, "mamba_n_groups": 2}
GDN: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 32,
}
NEMOTRON: dict[str, Any] = {
    "ssm_state_size": 24,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}
KIMI_LINEAR_ATTENTION: dict[str, Any] = {
    "full_attn_layers": [2],
    "kda_layers": [1],
    "head_dim": 16,
    "num_heads": 4,
    "short_conv_kernel_size": 4,
}
ALTERNATING = ["sliding_attention", "full_attention"]

# case: (model type, its own fields, the kinds of its layers)
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", {"num_hidden_layers": 2}, "full full"),
    "mistral": ("mistral", {"num_hidden_layers": 2, "sliding_window": 8}, "window window"),
    "mixtral": (
        "mixtral",
        {"num_hidden_layers": 1, "sliding_window": None, "num_local_experts": 2, "num_experts_per_tok": 1},
        "full",
    ),
    "phi3": ("phi3", {"num_hidden_layers": 1, "sliding_window": None}, "full"),
    "qwen2": (
        "qwen2",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        "full window window",
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {**EXPERTS, "num_hidden_layers": 1, "shared_expert_intermediate_size": 32, "use_sliding_window": False},
        "full",
    ),
    "qwen3": ("qwen3", {"num_hidden_layers": 1, "head_dim": 24}, "full"),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "num_hidden_layers": 1, "head_dim": 24}, "full"),
    "gemma": ("gemma", {"num_hidden_layers": 1, "head_dim": 24}, "full"),
    "gemma2": ("gemma2", {"num_hidden_layers": 2, "head_dim": 24, "sliding_window": 8}, "window full"),
    "gemma3": (
        "gemma3_text",
        {"num_hidden_layers": 7, "head_dim": 24, "sliding_window": 8},
        "window window window window window full window",
    ),
    "gemma4": (
        "gemma4_text",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 8,
            "layer_types": ALTERNATING * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 64,
        },
        "window full none none",
    ),
    "gpt_oss": (
        "gpt_oss",
        {"num_hidden_layers": 2, "head_dim": 24, "sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
        | {"layer_types": ALTERNATING},
        "window full",
    ),
    "cohere2": ("cohere2", {"num_hidden_layers": 4, "sliding_window": 8}, "window window window full"),
    "olmo2": ("olmo2", {"num_hidden_layers": 1}, "full"),
    "olmo3": ("olmo3", {"num_hidden_layers": 2, "sliding_window": 8, "layer_types": ALTERNATING}, "window full"),
    "olmoe": ("olmoe", {"num_hidden_layers": 1, "num_experts": 2, "num_experts_per_tok": 1}, "full"),
    "granite": ("granite", {"num_hidden_layers": 1}, "full"),
    "granitemoe": ("granitemoe", {"num_hidden_layers": 1, "num_local_experts": 2, "num_experts_per_tok": 1}, "full"),
    "glm4": ("glm4", {"num_hidden_layers": 1, "head_dim": 16}, "full"),
    "glm4_moe": (
        "glm4_moe",
        {"num_hidden_layers": 1, "head_dim": 16, "n_routed_experts": 2, "num_experts_per_tok": 1}
        | {"moe_intermediate_size": 32, "n_group": 1, "topk_group": 1},
        "full",
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 1}, "full"),
    "minimax_m2": (
        "minimax_m2",
        {"num_hidden_layers": 1, "head_dim": 24, "num_local_experts": 2, "num_experts_per_tok": 1},
        "full",
    ),
    "llama4": (
        "llama4_text",
        {"num_hidden_layers": 4, "head_dim": 16, "attention_chunk_size": 8, "num_local_experts": 2}
        | {"num_experts_per_tok": 1, "intermediate_size_mlp": 32},
        "chunked chunked chunked full",
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {**LATENT, "num_hidden_layers": 2, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
        | {"first_k_dense_replace": 1},
        "mla mla",
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {**LATENT, "num_hidden_layers": 2, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
        | {"first_k_dense_replace": 1},
        "mla mla",
    ),
    "qwen3_next": ("qwen3_next", {**EXPERTS, **GDN, "num_hidden_layers": 4}, "linear linear linear full"),
    "qwen3_5": ("qwen3_5_text", {**GDN, "num_hidden_layers": 4}, "linear linear linear full"),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**EXPERTS, **GDN, "num_hidden_layers": 4}, "linear linear linear full"),
    "granite_hybrid": (
        "granitemoehybrid",
        {**MAMBA2, "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 2}
        | {"num_experts_per_tok": 1, "shared_intermediate_size": 32},
        "linear full linear",
    ),
    "bamba": ("bamba", {**MAMBA2, "num_hidden_layers": 2, "attn_layer_indices": [1]}, "linear full"),
    "falcon_h1": ("falcon_h1", {**MAMBA2, "num_hidden_layers": 2, "mamba_d_ssm": 128, "head_dim": 16}, "full full"),
    "jamba": (
        "jamba",
        {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "num_experts": 2}
        | {"num_experts_per_tok": 1, "mamba_dt_rank": 4, "mamba_expand": 2},
        "linear full",
    ),
    "lfm2": (
        "lfm2",
        {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
        "linear full",
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {**EXPERTS, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
        | {"num_dense_layers": 1},
        "linear full",
    ),
    "mamba2": (
        "mamba2",
        {"num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "state_size": 24, "n_groups": 2, "conv_kernel": 4},
        "linear linear",
    ),
    "minimax": (
        "minimax",
        {"num_hidden_layers": 2, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 8},
        "full linear",
    ),
    "kimi_linear": (
        "kimi_linear",
        {**LATENT, "num_hidden_layers": 2, "num_local_experts": 4, "linear_head_dim": 16, "linear_num_heads": 4}
        | {"layer_types": ["linear_attention", "full_attention"]}
        | {"linear_attn_config": KIMI_LINEAR_ATTENTION},
        "linear mla",
    ),
    "nemotron_h": (
        "nemotron_h",
        {"layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"], "head_dim": 16, **NEMOTRON},
        "linear full none none",
    ),
}
# Configs as their makers publish them, with fields that Transformers renames when it loads them.
PUBLISHED: dict[str, tuple[dict[str, Any], str]] = {
    "kimi_linear": (
        {**LATENT, "model_type": "kimi_linear", "num_hidden_layers": 2, "num_local_experts": 4}
        | {"linear_attn_config": KIMI_LINEAR_ATTENTION},
        "linear mla",
    ),
    "nemotron_h": (
        {"model_type": "nemotron_h", "num_hidden_layers": 4, "hybrid_override_pattern": "M*-E", "head_dim": 16}
        | {**NEMOTRON, "mamba_ssm_cache_dtype": "float32"},
        "linear full none none",
    ),
    "mimo_v2_flash": (
        {"model_type": "mimo_v2_flash", "num_hidden_layers": 2, "hybrid_layer_pattern": [0, 1]}
        | {"head_dim": 24, "v_head_dim": 16, "sliding_window": 8, "sliding_window_size": 8, "swa_head_dim": 24}
        | {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_v_head_dim": 16, "n_routed_experts": 4}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1},
        "full window",
    ),
    "gemma4": (
        {"model_type": "gemma4_text", "num_hidden_layers": 3, "head_dim": 16, "global_head_dim": 32}
        | {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "sliding_window": 8, "num_kv_shared_layers": 0}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
        | {"hidden_size_per_layer_input": 0},
        "window window full",
    ),
    "qwen3_next": (
        {**EXPERTS, **GDN, "model_type": "qwen3_next", "num_hidden_layers": 2, "full_attention_interval": 2},
        "linear full",
    ),
    "gemma3": (
        {"model_type": "gemma3_text", "num_hidden_layers": 2, "head_dim": 16, "sliding_window": 8}
        | {"sliding_window_pattern": 2},
        "window full",
    ),
    "minimax": (
        {"model_type": "minimax", "num_hidden_layers": 2, "head_dim": 16, "num_local_experts": 2, "block_size": 8}
        | {"num_experts_per_tok": 1, "layer_types": ["linear_attention", "full_attention"]},
        "linear full",
    ),
}
DTYPES = ("float32", "bfloat16")


def cached_by(config: Any, dtype: str) -> Any:
    """The cache of a random model after one prompt of TOKENS tokens."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    with torch.no_grad():
        output = model(torch.randint(3, 63, (1, TOKENS)), use_cache=True)
    for name in ("cache", "past_key_values", "cache_params"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    raise AssertionError("the model gave no cache")


def tensors_of(cache: Any, index: int) -> list[tuple[str, tuple[int, ...], str]]:
    """(role, shape without the batch, dtype) of what one layer of a cache holds."""
    found: list[tuple[str, Any]] = []
    layer = cache.layers[index] if index < len(cache.layers) else None
    if getattr(layer, "keys", None) is not None:
        found += [("rows", layer.keys), ("rows", layer.values)]
    for role in ("conv_states", "recurrent_states"):
        found += [("state", state) for state in getattr(layer, role, {}).values() if state is not None]
    if index < len(getattr(cache, "linear_cache", [])) and len(cache.linear_cache[index]):
        found.append(("state", cache.linear_cache[index]))
    assert all(tensor.shape[0] == 1 for _, tensor in found)
    return [(role, tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch.")) for role, tensor in found]


def expected_of(layout: CacheLayout, index: int) -> list[tuple[str, tuple[int, ...], str]]:
    """The same by the layout. Rows lie as (heads, tokens, dim) in Transformers, as (tokens, heads, dim) on the wire."""
    layer, expected = layout.layers[index], []
    start, stop = held_range(layer, TOKENS)
    if layer.kind is LayerKind.CHUNKED:
        # Transformers keeps as much as a window; what lies before the last border is never looked at again.
        assert layer.window is not None
        assert (start, stop) == (16, TOKENS)
        start = TOKENS - (layer.window - 1)
        assert start <= 16
    for tensor in layer.tensors:
        if tensor.extent is Extent.STATE:
            expected.append(("state", tensor.row_shape, tensor.dtype))
        else:
            heads, dim = tensor.row_shape
            expected.append(("rows", (heads, stop - start, dim), tensor.dtype))
    return expected


def assert_layout_is_what_is_cached(layout: CacheLayout, config: Any, dtype: str) -> None:
    check_layout(layout)
    cache = cached_by(config, dtype)
    for index in range(len(layout.layers)):
        assert tensors_of(cache, index) == expected_of(layout, index), f"layer {index}"
    assert len(cache.layers) <= len(layout.layers)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_the_layout_is_what_transformers_caches(case: str, dtype: str, tmp_path: Path) -> None:
    model_type, fields, kinds = CASES[case]
    config = transformers.AutoConfig.for_model(model_type, **{**COMMON, **fields})
    config.save_pretrained(tmp_path)
    layout = layout_from_config(json.loads((tmp_path / "config.json").read_text()), dtype=dtype)
    assert [layer.kind.value for layer in layout.layers] == kinds.split()
    assert_layout_is_what_is_cached(layout, config, dtype)


@pytest.mark.parametrize("case", PUBLISHED)
def test_configs_as_published_give_the_layout_that_transformers_caches(case: str) -> None:
    fields, kinds = PUBLISHED[case]
    published = {**COMMON, **fields}
    layout = layout_from_config(published, dtype="bfloat16")
    assert [layer.kind.value for layer in layout.layers] == kinds.split()
    assert_layout_is_what_is_cached(layout, transformers.AutoConfig.for_model(**published), "bfloat16")
