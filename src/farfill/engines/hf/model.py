"""A model folder in memory: weights, tokenizer, cache layout, fingerprint.

Not here: the demo model's making (`demo_model`), and running the model (`forward`).
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from farfill.engines.hf.cache_io import CacheExporter
from farfill.engines.hf.forward import Forward
from farfill.engines.hf.tokenizer import HfTokenizer
from farfill.errors import ConfigurationError, FarfillError
from farfill.kv.digest import chat_template_digest, tokenizer_digest, weights_digest
from farfill.kv.fingerprint import Fingerprint, fingerprint_from_config
from farfill.kv.layout import layout_from_config
from farfill.kv.spec import CacheLayout

DTYPES: Final = ("float32", "bfloat16", "float16")
DIGESTS_FILE: Final = ".farfill-digests.json"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Attributes: `name` is the folder's name unless another was given; `max_model_len` is in tokens."""

    name: str
    network: PreTrainedModel
    tokenizer: HfTokenizer
    layout: CacheLayout
    fingerprint: Fingerprint
    max_model_len: int
    eos_token_ids: frozenset[int]


def load_model(
    folder: Path, *, name: str | None = None, dtype: str = "float32", max_model_len: int | None = None
) -> LoadedModel:
    """Loads a local Hugging Face folder (config.json, *.safetensors, tokenizer.json). Never asks a model hub.

    Args:
        name: what clients call the model; None: the folder's name.
        dtype: of weights, computation and cache, one of DTYPES. CPUs with matrix units are
            faster in bfloat16, others in float32.
        max_model_len: at most the model's own; None: the model's own.

    Raises:
        ConfigurationError: `model_not_found`, `model_unsupported`, `config_invalid`.
    """
    if dtype not in DTYPES:
        raise ConfigurationError(
            "config_invalid", f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}", field="dtype"
        )
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigurationError("model_not_found", f"{folder} is no model folder: {error}", field="model") from error
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    layout = layout_from_config(config, dtype=dtype)
    sidecar = folder / DIGESTS_FILE if os.access(folder, os.W_OK) else None
    digest = weights_digest(folder, sidecar=sidecar)
    try:
        load: Any = AutoModelForCausalLM.from_pretrained  # its annotations do not know output_loading_info
        network: PreTrainedModel
        network, loading = load(folder, dtype=getattr(torch, dtype), local_files_only=True, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # damaged files make these libraries raise all kinds, bare Exception among them
        raise ConfigurationError(
            "model_not_found", f"cannot load {folder}: {type(error).__name__}: {error}", field="model"
        ) from error
    # Transformers fills weights that are not there with random numbers, and only warns.
    if wrong := [*loading["missing_keys"], *loading["mismatched_keys"], *loading["error_msgs"]]:
        raise ConfigurationError(
            "model_not_found",
            f"{folder} lacks weights that its config.json asks for: {', '.join(map(str, sorted(wrong, key=str)[:5]))}",
            field="model",
        )
    network.requires_grad_(False)
    network.eval()  # type: ignore[no-untyped-call]
    _check_cache(network, layout)
    own_max = _positions(network)
    if max_model_len is not None and not 2 <= max_model_len <= own_max:
        raise ConfigurationError(
            "config_invalid", f"max_model_len must be in [2, {own_max}], not {max_model_len}", field="max_model_len"
        )
    name = name or folder.resolve().name
    fingerprint = fingerprint_from_config(
        config,
        weights_digest=digest,
        tokenizer_digest=tokenizer_digest(folder),
        chat_template_digest=chat_template_digest(folder),
        dtype=dtype,
        max_model_len=max_model_len or own_max,
        engine="hf",
        engine_version=f"transformers {transformers.__version__}, torch {torch.__version__}",
        model=name,
        layout=layout,
    )
    return LoadedModel(
        name=name,
        network=network,
        tokenizer=HfTokenizer(tokenizer),
        layout=layout,
        fingerprint=fingerprint,
        max_model_len=max_model_len or own_max,
        eos_token_ids=_eos_ids(network),
    )


def _check_cache(network: PreTrainedModel, layout: CacheLayout) -> None:
    """Computes two tokens and compares what the cache then holds with the layout, before anybody is served."""
    forward = Forward(network)
    cache = forward.new_cache()
    try:
        with torch.inference_mode():
            forward.extend(cache, [0, 0], 0)
        CacheExporter(layout).check(cache, 2)
    except (ValueError, TypeError, AttributeError, RuntimeError, FarfillError) as error:
        raise ConfigurationError(
            "model_unsupported", f"the model's cache is not what its config.json says: {error}", field="model"
        ) from error


def _positions(network: PreTrainedModel) -> int:
    positions = getattr(network.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 2:
        raise ConfigurationError("model_unsupported", "config.json has no max_position_embeddings", field="model")
    return positions


def _eos_ids(network: PreTrainedModel) -> frozenset[int]:
    """End-of-sequence ids: the generation config's, which chat models extend, else the config's."""
    for source in (network.generation_config, network.config):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            return frozenset(value if isinstance(value, Iterable) else (value,))
    return frozenset()
