"""The layout of a model's cache: sizes worked out by hand for fourteen public models; refusals, not guesses."""

import copy
import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_cases import EVERY_KIND, MODELS, layouts

from farfill.errors import ConfigurationError, PeerError
from farfill.kv.layout import (
    bytes_per_token,
    cache_bytes,
    check_layout,
    fixed_bytes,
    held_range,
    layout_digest,
    layout_from_builtins,
    layout_from_config,
    layout_to_builtins,
)
from farfill.kv.spec import CacheLayout, Extent, LayerKind, TensorSpec

# name: (bytes per token, fixed bytes, {kind: layers}), bf16 keys and values
SIZES: dict[str, tuple[int, int, dict[str, int]]] = {
    # 62 layers x (k + v) x 8 heads x 128 x 2 bytes = 62 x 4,096
    "MiniMaxAI--MiniMax-M2.5": (253_952, 0, {"full": 62}),
    # 28 x 2 x 8 x 128 x 2 = 28 x 4,096
    "Qwen--Qwen3-0.6B": (114_688, 0, {"full": 28}),
    # 94 x 2 x 4 x 128 x 2 = 94 x 2,048
    "Qwen--Qwen3-235B-A22B": (192_512, 0, {"full": 94}),
    # Each fourth of 60 layers is full: 15 x 2 x 2 heads x 256 x 2 = 15 x 2,048 = 30,720.
    # 45 GDN: recurrent 64 x 128 x 128 x 4 = 4,194,304; conv (2 x 16 x 128 + 64 x 128 = 12,288) x 4 x 2 = 98,304;
    # 45 x 4,292,608 = 193,167,360.
    "Qwen--Qwen3.5-397B-A17B": (30_720, 193_167_360, {"full": 15, "linear": 45}),
    # Full at 0, 5, 11, ..., 47: 9 x 4 heads x (192 + 128) x 2 = 9 x 2,560 = 23,040.
    # 39 windows x 8 heads x (192 + 128) x 2 = 5,120 a row, 128 rows before the own token: 39 x 655,360.
    "XiaomiMiMo--MiMo-V2-Flash": (23_040, 25_559_040, {"full": 9, "window": 39}),
    # 61 x (512 latent + 64 rope) x 2 = 61 x 1,152
    "deepseek-ai--DeepSeek-V3": (70_272, 0, {"mla": 61}),
    # 5 full x 2 x 2 global heads x 512 x 2 = 5 x 4,096 = 20,480.
    # 25 windows x 2 x 8 heads x 256 x 2 = 8,192 a row, 1,023 rows: 25 x 8,380,416.
    "google--gemma-4-26B-A4B": (20_480, 209_510_400, {"full": 5, "window": 25}),
    # Each fourth of 48 layers is full: 12 x 2 x 8 x 128 x 2 = 12 x 4,096 = 49,152.
    # 36 chunked, at most 8,191 rows of 4,096: 36 x 33,550,336.
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": (49_152, 1_207_812_096, {"full": 12, "chunked": 36}),
    # 80 x 2 x 8 x (8,192 / 64 = 128) x 2 = 80 x 4,096
    "meta-llama--Meta-Llama-3.1-70B": (327_680, 0, {"full": 80}),
    # 32 x 2 x 8 x (4,096 / 32 = 128) x 2 = 32 x 4,096
    "meta-llama--Meta-Llama-3.1-8B": (131_072, 0, {"full": 32}),
    # As Llama 3.1 8B; sliding_window is null.
    "mistralai--Mixtral-8x7B-v0.1": (131_072, 0, {"full": 32}),
    # 24 MLA x (512 + 64) x 2 = 24 x 1,152 = 27,648.
    # 69 KDA: recurrent 96 x 128 x 128 x 4 = 6,291,456; conv 3 x 96 x 128 = 36,864 x 4 x 2 = 294,912;
    # 69 x 6,586,368.
    "moonshotai--Kimi-K3": (27_648, 454_459_392, {"mla": 24, "linear": 69}),
    # 6 attention x 2 x 2 heads x 128 x 2 = 6 x 1,024 = 6,144; 23 expert blocks keep nothing.
    # 23 Mamba2: recurrent 64 x 64 x 128 x 4 = 2,097,152; conv (64 x 64 + 2 x 8 x 128 = 6,144) x 4 x 2 = 49,152;
    # 23 x 2,146,304.
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (6_144, 49_364_992, {"full": 6, "linear": 23, "none": 23}),
    # Every second of 36 layers is full: 18 x 2 x 8 x 64 x 2 = 18 x 2,048 = 36,864.
    # 18 windows, 127 rows of 2,048: 18 x 260,096.
    "openai--gpt-oss-120b": (36_864, 4_681_728, {"full": 18, "window": 18}),
}
# Published quantised, without a dtype of their own; what they are served with has to be said.
WITHOUT_DTYPE = {"MiniMaxAI--MiniMax-M2.5", "openai--gpt-oss-120b"}


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((MODELS / f"{name}.json").read_text())
    return config


def test_every_config_in_the_data_folder_has_a_hand_worked_size() -> None:
    assert {file.stem for file in MODELS.glob("*.json")} == set(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_those_worked_out_by_hand(name: str) -> None:
    layout = layout_from_config(config_of(name), dtype="bfloat16" if name in WITHOUT_DTYPE else None)
    per_token, fixed, kinds = SIZES[name]
    assert bytes_per_token(layout) == per_token
    assert fixed_bytes(layout) == fixed
    counted = {kind: sum(layer.kind == kind for layer in layout.layers) for kind in LayerKind}
    assert {kind: count for kind, count in counted.items() if count} == kinds
    check_layout(layout)
    assert layout_from_builtins(json.loads(json.dumps(layout_to_builtins(layout)))) == layout


@pytest.mark.parametrize("name", sorted(WITHOUT_DTYPE))
def test_a_missing_dtype_is_not_guessed(name: str) -> None:
    with pytest.raises(ConfigurationError, match="dtype") as caught:
        layout_from_config(config_of(name))
    assert (caught.value.code, caught.value.field) == ("model_unsupported", "dtype")


# Every field that a layout is read from, for each model: removing it must be an error that names it, for nothing else
# says the same.
NEEDED = [
    ("Qwen--Qwen3-0.6B", "model_type", "model_type"),
    ("Qwen--Qwen3-0.6B", "num_hidden_layers", "num_hidden_layers"),
    ("Qwen--Qwen3-0.6B", "num_key_value_heads", "num_key_value_heads"),
    ("Qwen--Qwen3-0.6B", "head_dim", "head_dim"),  # not hidden_size / heads = 64, which would be wrong here
    ("Qwen--Qwen3-0.6B", "torch_dtype", "dtype"),
    ("meta-llama--Meta-Llama-3.1-8B", "hidden_size", "hidden_size"),
    ("meta-llama--Meta-Llama-3.1-8B", "num_attention_heads", "num_attention_heads"),
    ("deepseek-ai--DeepSeek-V3", "kv_lora_rank", "kv_lora_rank"),
    ("deepseek-ai--DeepSeek-V3", "qk_rope_head_dim", "qk_rope_head_dim"),
    ("openai--gpt-oss-120b", "layer_types", "layer_types"),
    ("openai--gpt-oss-120b", "sliding_window", "sliding_window"),
    ("XiaomiMiMo--MiMo-V2-Flash", "hybrid_layer_pattern", "hybrid_layer_pattern"),
    ("XiaomiMiMo--MiMo-V2-Flash", "swa_v_head_dim", "swa_v_head_dim"),
    ("XiaomiMiMo--MiMo-V2-Flash", "sliding_window_size", "sliding_window_size"),
    ("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "hybrid_override_pattern", "layers_block_type"),
    ("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "ssm_state_size", "ssm_state_size"),
    ("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "conv_kernel", "conv_kernel"),
    ("Qwen--Qwen3.5-397B-A17B", "text_config.linear_num_value_heads", "text_config.linear_num_value_heads"),
    ("Qwen--Qwen3.5-397B-A17B", "text_config.linear_conv_kernel_dim", "text_config.linear_conv_kernel_dim"),
    ("google--gemma-4-26B-A4B", "text_config.global_head_dim", "text_config.global_head_dim"),
    ("google--gemma-4-26B-A4B", "text_config.num_kv_shared_layers", "text_config.num_kv_shared_layers"),
    (
        "meta-llama--Llama-4-Scout-17B-16E-Instruct",
        "text_config.attention_chunk_size",
        "text_config.attention_chunk_size",
    ),
    ("moonshotai--Kimi-K3", "text_config.linear_attn_config", "text_config.linear_attn_config"),
    (
        "moonshotai--Kimi-K3",
        "text_config.linear_attn_config.num_heads",
        "text_config.linear_attn_config.num_heads",
    ),
]


@pytest.mark.parametrize(("name", "removed", "named"), NEEDED)
def test_a_missing_field_is_an_error_that_names_it(name: str, removed: str, named: str) -> None:
    config = copy.deepcopy(config_of(name))
    part = config
    *path, last = removed.split(".")
    for step in path:
        part = part[step]
    del part[last]
    with pytest.raises(ConfigurationError) as caught:
        layout_from_config(config, dtype="bfloat16" if name in WITHOUT_DTYPE else None)
    assert (caught.value.code, caught.value.field) == ("model_unsupported", named)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "llamb"}, "model_type"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": "28"}, "num_hidden_layers"),
        ({"num_key_value_heads": True}, "num_key_value_heads"),
        ({"head_dim": -1}, "head_dim"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention"] * 27 + ["dense_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 28}, "sliding_window"),
        ({"sliding_window": 4096, "use_sliding_window": "no"}, "use_sliding_window"),
        ({"torch_dtype": "float12"}, "torch_dtype"),
        ({"torch_dtype": 16}, "torch_dtype"),
    ],
)
def test_a_field_that_makes_no_sense_is_an_error_that_names_it(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        layout_from_config({**config_of("Qwen--Qwen3-0.6B"), **change})
    assert (caught.value.code, caught.value.field) == ("model_unsupported", field)


def test_an_unknown_override_of_the_dtype_is_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        layout_from_config(config_of("Qwen--Qwen3-0.6B"), dtype="bf16")
    assert caught.value.field == "dtype"


def test_kimi_layers_that_are_listed_twice_or_not_at_all_are_refused() -> None:
    config = config_of("moonshotai--Kimi-K3")
    config["text_config"]["linear_attn_config"]["kda_layers"].remove(7)
    with pytest.raises(ConfigurationError) as caught:
        layout_from_config(config)
    assert caught.value.field == "text_config.linear_attn_config.kda_layers"


def test_a_recurrent_state_of_another_dtype_than_the_engines_keep_is_refused() -> None:
    config = {**config_of("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"), "mamba_ssm_cache_dtype": "float16"}
    with pytest.raises(ConfigurationError) as caught:
        layout_from_config(config)
    assert caught.value.field == "mamba_ssm_cache_dtype"


def test_the_dtype_override_changes_rows_and_conv_but_not_recurrent_states() -> None:
    config = config_of("Qwen--Qwen3.5-397B-A17B")
    layout = layout_from_config(config, dtype="float32")
    dtypes = {tensor.name: tensor.dtype for layer in layout.layers for tensor in layer.tensors}
    assert dtypes == {"k": "float32", "v": "float32", "conv": "float32", "recurrent": "float32"}
    dtypes = {tensor.name: tensor.dtype for layer in layout_from_config(config).layers for tensor in layer.tensors}
    assert dtypes == {"k": "bfloat16", "v": "bfloat16", "conv": "bfloat16", "recurrent": "float32"}


def test_rules_of_older_configs_without_layer_types() -> None:
    qwen = {**config_of("Qwen--Qwen3-0.6B"), "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 20}
    assert [layer.window for layer in layout_from_config(qwen).layers] == [None] * 20 + [64] * 8
    # Qwen's mixture-of-experts configs say it in layer_types only
    with pytest.raises(ConfigurationError) as caught:
        layout_from_config({**qwen, "model_type": "qwen3_moe"})
    assert caught.value.field == "layer_types"
    mistral = {**config_of("mistralai--Mixtral-8x7B-v0.1"), "sliding_window": 64}
    assert {layer.kind for layer in layout_from_config(mistral).layers} == {LayerKind.WINDOW}
    with pytest.raises(ConfigurationError) as caught:
        layout_from_config({**config_of("meta-llama--Meta-Llama-3.1-8B"), "sliding_window": 64})
    assert caught.value.field == "sliding_window"


def test_layers_that_read_an_earlier_layers_cache_keep_none() -> None:
    config = config_of("google--gemma-4-26B-A4B")
    config["text_config"]["num_kv_shared_layers"] = 6
    kinds = [layer.kind for layer in layout_from_config(config).layers]
    assert kinds[24:] == [LayerKind.NONE] * 6
    assert LayerKind.NONE not in kinds[:24]


def test_held_ranges() -> None:
    full, window, chunked = EVERY_KIND.layers[0], EVERY_KIND.layers[1], EVERY_KIND.layers[3]
    assert held_range(full, 21) == (0, 21)
    assert [held_range(window, tokens) for tokens in (1, 4, 5, 21)] == [(0, 1), (0, 4), (1, 5), (17, 21)]
    assert [held_range(chunked, tokens) for tokens in (7, 8, 9, 21)] == [(0, 7), (8, 8), (8, 9), (16, 21)]


@given(layouts(), st.integers(1, 200))
def test_the_cache_is_never_larger_than_rows_and_fixed_part_together(layout: CacheLayout, tokens: int) -> None:
    size = cache_bytes(layout, tokens)
    assert size <= bytes_per_token(layout) * tokens + fixed_bytes(layout)
    assert size >= bytes_per_token(layout) * tokens
    assert cache_bytes(layout, tokens + 1) - size >= bytes_per_token(layout) - fixed_bytes(layout)


@given(layouts())
def test_layouts_survive_json(layout: CacheLayout) -> None:
    check_layout(layout)
    encoded = msgspec.json.encode(layout_to_builtins(layout))
    assert layout_from_builtins(msgspec.json.decode(encoded)) == layout


def test_the_digest_sees_every_part_of_a_layout() -> None:
    first = EVERY_KIND.layers[0]
    k = first.tensors[0]
    changed = [
        replace(EVERY_KIND, model_type="other"),
        replace(EVERY_KIND, layers=EVERY_KIND.layers[:-1]),
        *(
            replace(EVERY_KIND, layers=(replace(first, tensors=(tensor, first.tensors[1])), *EVERY_KIND.layers[1:]))
            for tensor in (replace(k, name="q"), replace(k, row_shape=(4, 2)), replace(k, dtype="float16"))
        ),
        replace(EVERY_KIND, layers=(first, replace(EVERY_KIND.layers[1], window=6), *EVERY_KIND.layers[2:])),
    ]
    assert len({layout_digest(layout) for layout in [EVERY_KIND, *changed]}) == len(changed) + 1


@pytest.mark.parametrize(
    ("path", "value", "code"),
    [
        (["layers", 1, "index"], 3, "layout_mismatch"),
        (["layers", 1, "window"], None, "layout_mismatch"),
        (["layers", 0, "window"], 4, "layout_mismatch"),
        (["layers", 1, "window"], 0, "protocol_violation"),
        (["layers", 0, "kind"], "fuller", "layout_mismatch"),
        (["layers", 0, "kind"], "none", "layout_mismatch"),
        (["layers", 4, "kind"], "none", "layout_mismatch"),
        (["layers", 0, "tensors", 0, "dtype"], "float12", "layout_mismatch"),
        (["layers", 0, "tensors", 0, "name"], "v", "layout_mismatch"),
        (["layers", 0, "tensors", 0, "name"], "", "protocol_violation"),
        (["layers", 0, "tensors", 0, "extent"], "window", "layout_mismatch"),
        (["layers", 0, "tensors", 0, "row_shape"], [], "protocol_violation"),
        (["layers", 0, "tensors", 0, "row_shape"], [-2, 4], "protocol_violation"),
        (["layers", 0, "tensors", 0, "row_shape"], [2, 2**40], "frame_too_large"),
        (["layers", 0, "tensors", 0, "row_shape"], "24", "layout_mismatch"),
        (["layers"], [], "protocol_violation"),
        (["model_type"], "x" * 1000, "frame_too_large"),
    ],
)
def test_a_peers_layout_is_checked(path: list[Any], value: object, code: str) -> None:
    builtins = json.loads(json.dumps(layout_to_builtins(EVERY_KIND)))
    part = builtins
    for step in path[:-1]:
        part = part[step]
    part[path[-1]] = value
    with pytest.raises(PeerError) as caught:
        layout_from_builtins(builtins)
    assert caught.value.code == code


def test_a_peers_layout_may_not_be_of_any_size() -> None:
    layer = EVERY_KIND.layers[0]
    too_deep = CacheLayout("deep", tuple(replace(layer, index=index) for index in range(513)))
    tensors = tuple(TensorSpec(f"t{number}", Extent.TOKENS, (1, 1), "int8") for number in range(9))
    for layout in (too_deep, CacheLayout("wide", (replace(layer, tensors=tensors),))):
        with pytest.raises(PeerError) as caught:
            layout_from_builtins(layout_to_builtins(layout))
        assert caught.value.code == "frame_too_large"
