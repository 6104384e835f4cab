"""Tiny randomly initialised models of every cache kind, saved as ordinary Hugging Face folders with a tokenizer.

Not trained: their text means nothing, but their caches have every shape that real ones have. Weights are drawn from a
fixed seed with a large spread, so that greedy choices have clear margins.

    folder = build_tiny("llama", tmp_path / "llama")
"""

from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    FalconH1Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    MiniMaxConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3NextConfig,
)

VOCAB_SIZE: Final = 384
WINDOW: Final = 16
CHUNK_TOKENS: Final = 8
MAX_MODEL_LEN: Final = 256
SEED: Final = 20240229

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ prefill or '' }}{% endif %}"
)
CORPUS: Final = (
    "The cache of a prompt is computed in one place and read in another.",
    "A chunk is the unit that is sent, verified, resumed and stored.",
    "Weiße Bären grüßen über die Brücke; 日本語のテキスト; смешанный текст; 🙂🚀.",
    "def handle(event, now): return [effect for effect in effects if effect]",
)

_COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_MODEL_LEN,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "initializer_range": 0.2,
}


def _configs() -> dict[str, Any]:
    return {
        "llama": LlamaConfig(**_COMMON, num_hidden_layers=3, num_key_value_heads=2, tie_word_embeddings=True),
        "gemma3": Gemma3TextConfig(
            **_COMMON,
            num_hidden_layers=4,
            num_key_value_heads=2,
            head_dim=16,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            query_pre_attn_scalar=16,
            tie_word_embeddings=False,  # tied, its scaled embeddings drown the cache's influence
        ),
        "qwen3_next": Qwen3NextConfig(
            **_COMMON,
            num_hidden_layers=4,
            num_key_value_heads=2,
            head_dim=16,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        ),
        "granite_hybrid": GraniteMoeHybridConfig(
            **_COMMON,
            num_hidden_layers=4,
            num_key_value_heads=2,
            layer_types=["mamba", "attention", "mamba", "mamba"],
            mamba_n_heads=8,
            mamba_d_head=16,
            mamba_d_state=16,
            mamba_n_groups=1,
            mamba_expand=2,
            mamba_chunk_size=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=32,
            position_embedding_type="rope",
        ),
        "deepseek_v3": DeepseekV3Config(
            **_COMMON,
            num_hidden_layers=3,
            num_key_value_heads=4,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            n_shared_experts=1,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
        ),
    }


def _more_configs() -> dict[str, Any]:
    """Further cache shapes: both kinds of state in one layer, convolution alone, recurrence alone, chunks, sinks."""
    common = _COMMON | {"num_hidden_layers": 3, "num_key_value_heads": 2}
    return {
        "falcon_h1": FalconH1Config(
            **common,
            head_dim=16,
            mamba_d_ssm=128,
            mamba_n_heads=8,
            mamba_d_head=16,
            mamba_n_groups=1,
            mamba_d_state=16,
            mamba_chunk_size=8,
        ),
        "lfm2": Lfm2Config(**common, layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False),
        "minimax": MiniMaxConfig(
            **common,
            head_dim=16,
            block_size=8,
            num_local_experts=2,
            num_experts_per_tok=1,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
        ),
        "llama4": Llama4TextConfig(
            **common,
            head_dim=16,
            intermediate_size_mlp=96,
            attention_chunk_size=WINDOW,
            num_local_experts=2,
            num_experts_per_tok=1,
            layer_types=["chunked_attention", "full_attention", "chunked_attention"],
            no_rope_layers=[1, 0, 1],
            moe_layers=[],
        ),
        "gpt_oss": GptOssConfig(
            **common,
            head_dim=16,
            sliding_window=WINDOW,
            num_local_experts=2,
            num_experts_per_tok=1,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        "mamba2": Mamba2Config(
            **_COMMON,
            num_hidden_layers=2,
            num_heads=8,
            head_dim=16,
            expand=2,
            state_size=16,
            n_groups=1,
            chunk_size=8,
        ),
        "qwen3": Qwen3Config(**common, head_dim=16),
    }


UNSUPPORTED_KINDS: Final = ("minimax",)  # Transformers gives it a cache class of its own
MORE_KINDS: Final = ("falcon_h1", "lfm2", "llama4", "gpt_oss", "mamba2", "qwen3")
KINDS: Final = ("llama", "gemma3", "qwen3_next", "granite_hybrid", "deepseek_v3")


def build_tiny(kind: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """Builds one model in `folder` and returns the folder. Deterministic for each kind.

    `kind`: one of KINDS, MORE_KINDS or UNSUPPORTED_KINDS.
    """
    config = (_configs() | _more_configs())[kind]
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with ChatML's special tokens; at most VOCAB_SIZE ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
