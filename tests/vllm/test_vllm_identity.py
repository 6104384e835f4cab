"""What a vLLM says it serves: the same as `hf` says of the same folder; a difference is named by its field."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_models import build

from farfill.engines.vllm.identity import check_vllm, served_model
from farfill.errors import ConfigurationError, PeerError
from farfill.kv.digest import chat_template_digest, tokenizer_digest, weights_digest
from farfill.kv.fingerprint import Category, compare, fingerprint_from_config, require_compatible

pytestmark = pytest.mark.vllm

NO_GROUPS: Any = SimpleNamespace(kv_cache_groups=[])


def vllm_config(folder: Path, dtype: torch.dtype = torch.bfloat16, max_model_len: int = 2048, **changes: Any) -> Any:
    model = {
        "model": str(folder), "dtype": dtype, "served_model_name": "m", "hf_overrides": {}, "quantization": None,
        "max_model_len": max_model_len, "is_encoder_decoder": False,
    }  # fmt: skip
    parallel = {
        "pipeline_parallel_size": 1, "tensor_parallel_size": 1, "data_parallel_size": 1,
        "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1,
    }  # fmt: skip
    cache = {"cache_dtype": "auto", "block_size": 128}
    parts: dict[str, Any] = {"speculative_config": None, "lora_config": None}
    for part in (model, parallel, cache, parts):
        part.update({name: value for name, value in changes.items() if name in part})
    return SimpleNamespace(
        model_config=SimpleNamespace(**model),
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(**cache),
        **parts,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("gemma3", tmp_path_factory.mktemp("models") / "gemma3")


def test_it_is_what_hf_says_of_the_same_folder(folder: Path) -> None:
    """As `engines/hf/model.py` makes it: vLLM and `hf` cannot be imported in one environment."""
    theirs = fingerprint_from_config(
        json.loads((folder / "config.json").read_bytes()),
        weights_digest=weights_digest(folder),
        tokenizer_digest=tokenizer_digest(folder),
        chat_template_digest=chat_template_digest(folder),
        dtype="bfloat16",
        max_model_len=2048,
        engine="hf",
        engine_version="transformers",
    )
    ours = served_model(vllm_config(folder), NO_GROUPS, "0.32.0").fingerprint
    assert [one for one in compare(ours, theirs) if one.category is Category.MUST_EQUAL] == []


def test_a_difference_is_named(folder: Path, tmp_path: Path) -> None:
    ours = served_model(vllm_config(folder), NO_GROUPS, "0.32.0").fingerprint
    other_weights = build("gemma3", tmp_path / "weights", seed=1)
    other_tokenizer = build("gemma3", tmp_path / "tokenizer")
    file = other_tokenizer / "tokenizer.json"
    file.write_text(file.read_text().replace('"t7"', '"u7"'))
    for config, field in (
        (vllm_config(other_weights), "weights_digest"),
        (vllm_config(other_tokenizer), "tokenizer_digest"),
        (vllm_config(folder, torch.float32), "layout_digest"),
        (vllm_config(folder, hf_overrides={"rope_parameters": {"rope_theta": 7.0}}), "rope"),
        (vllm_config(folder, quantization="fp8"), "dtype"),
    ):
        theirs = served_model(config, NO_GROUPS, "0.32.0").fingerprint
        with pytest.raises(PeerError, match=field) as refused:
            require_compatible(ours, theirs)
        assert refused.value.field == field
    # Of two limits the smaller holds; that is no reason to refuse the pair.
    shorter = served_model(vllm_config(folder, max_model_len=1024), NO_GROUPS, "0.32.0")
    assert shorter.max_model_len == 1024
    require_compatible(ours, shorter.fingerprint)


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline-parallel-size"),
        ({"data_parallel_size": 2}, "data-parallel-size"),
        ({"speculative_config": object()}, "speculative-config"),
        ({"lora_config": object()}, "enable-lora"),
        ({"cache_dtype": "fp8"}, "kv-cache-dtype"),
        ({"is_encoder_decoder": True}, "model"),
    ],
)
def test_what_a_transfer_would_get_wrong_is_refused_at_start(
    folder: Path, changes: dict[str, Any], option: str
) -> None:
    check_vllm(vllm_config(folder))
    with pytest.raises(ConfigurationError, match=f"--{option}") as refused:
        check_vllm(vllm_config(folder, **changes))
    assert (refused.value.code, refused.value.field) == ("config_invalid", option)
