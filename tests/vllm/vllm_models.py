"""Tiny randomly initialised models whose shapes vLLM's CPU kernels take, with every kind of cache it keeps.

    folder = build("qwen3_next", tmp_path)

Qwen3-Next (GDN): linear head dims 128 and equal, attention head dim 64, bfloat16. GraniteMoeHybrid (Mamba2), Gemma3
(sliding window). Weights come from a fixed seed with a spread that gives greedy choices clear margins.
"""

import json
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    GraniteMoeHybridConfig,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
)

VOCABULARY: Final = 512
WINDOW: Final = 200  # neither a multiple of a block nor of a chunk
_COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "initializer_range": 0.2,
}


def _config(kind: str) -> Any:
    match kind:
        case "qwen3_next":
            return Qwen3NextConfig(
                **_COMMON,
                num_hidden_layers=4,
                num_key_value_heads=2,
                head_dim=64,
                linear_key_head_dim=128,
                linear_value_head_dim=128,
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
                shared_expert_intermediate_size=64,
                layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            )
        case "granite_hybrid":
            return GraniteMoeHybridConfig(
                **_COMMON,
                num_hidden_layers=4,
                num_key_value_heads=2,
                layer_types=["mamba", "attention", "mamba", "mamba"],
                mamba_n_heads=8,
                mamba_d_head=32,
                mamba_d_state=64,
                mamba_n_groups=1,
                mamba_expand=2,
                mamba_chunk_size=64,
                num_local_experts=4,
                num_experts_per_tok=2,
                shared_intermediate_size=64,
                position_embedding_type="rope",
            )
        case "gemma3":
            return Gemma3TextConfig(
                **_COMMON,
                num_hidden_layers=4,
                num_key_value_heads=2,
                head_dim=64,
                sliding_window=WINDOW,
                layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
                query_pre_attn_scalar=64,
                tie_word_embeddings=False,  # tied, its scaled embeddings drown the cache's influence
            )
        case "deepseek_v3":
            return DeepseekV3Config(
                **_COMMON,
                num_hidden_layers=3,
                num_key_value_heads=2,
                q_lora_rank=64,
                kv_lora_rank=512,
                qk_nope_head_dim=128,
                qk_rope_head_dim=64,
                v_head_dim=128,
                n_routed_experts=4,
                num_experts_per_tok=2,
                n_group=1,
                topk_group=1,
                n_shared_experts=1,
                moe_intermediate_size=64,
                first_k_dense_replace=1,
            )
        case _:
            raise ValueError(kind)


def build(kind: str, folder: Path, *, dtype: torch.dtype = torch.bfloat16, seed: int = 20240229) -> Path:
    """A Hugging Face folder with random weights and a tokenizer of one token per number."""
    torch.manual_seed(seed)
    network = AutoModelForCausalLM.from_config(_config(kind), dtype=dtype)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if name.endswith("A_log"):
                weight.copy_(torch.linspace(0.5, 2.0, weight.numel()).log().view_as(weight))
            elif name.endswith("dt_bias"):
                weight.uniform_(-3.0, -1.0)
    network.save_pretrained(folder)
    words = {f"t{number}": number for number in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t1")), bos_token="t0", eos_token="t2"
    )
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_bytes())
    assert config["model_type"], folder
    return folder
