"""What this vLLM serves, in farfill's words: layout, fingerprint, and what of vLLM's configuration is refused.

Not here: vLLM's memory (`kv_views`). The fingerprint is made from the same files and by the same functions as
`engines/hf` makes its own, so that the two engines agree where the models do.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from farfill.errors import ConfigurationError
from farfill.kv.digest import chat_template_digest, tokenizer_digest, weights_digest
from farfill.kv.fingerprint import Fingerprint, fingerprint_from_config
from farfill.kv.layout import layout_from_config
from farfill.kv.spec import DTYPE_BYTES, CacheLayout, Extent

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_DIGESTS_FILE: Final = ".farfill-digests.json"  # the one that `engines/hf` writes too


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`name` is what clients call it; `max_model_len` is in tokens."""

    name: str
    max_model_len: int
    layout: CacheLayout
    fingerprint: Fingerprint


def check_vllm(config: "VllmConfig") -> None:
    """Refuses what a transfer would get wrong, before anything is loaded.

    Raises:
        ConfigurationError: `config_invalid`, naming vLLM's option.
    """
    parallel = config.parallel_config
    for option, value, allowed in (
        ("pipeline-parallel-size", parallel.pipeline_parallel_size, 1),
        ("data-parallel-size", parallel.data_parallel_size, 1),
        ("decode-context-parallel-size", parallel.decode_context_parallel_size, 1),
        ("prefill-context-parallel-size", parallel.prefill_context_parallel_size, 1),
    ):
        if value != allowed:
            raise _refused(option, f"is {value}; the connector works with {allowed}")
    if config.speculative_config is not None:
        raise _refused("speculative-config", "is set; the draft model's cache would not travel")
    if config.lora_config is not None:
        raise _refused("enable-lora", "is set; a cache under an adapter is another model's")
    if config.model_config.is_encoder_decoder:
        raise _refused("model", "is an encoder-decoder model; its cross-attention cache would not travel")
    if config.cache_config.cache_dtype not in ("auto", _name(config.model_config.dtype)):
        raise _refused(
            "kv-cache-dtype",
            f"is {config.cache_config.cache_dtype!r}; the connector carries the model's own dtype only ('auto')",
        )


def served_model(config: "VllmConfig", kv_cache_config: "KVCacheConfig", version: str) -> ServedModel:
    """Reads the model's files; large weights take a while the first time.

    Raises:
        ConfigurationError: `model_not_found`, `model_unsupported`, `config_invalid`.
    """
    model = config.model_config
    folder = _folder(model)
    try:
        fields: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigurationError("model_not_found", f"{folder} is no model folder: {error}", field="model") from error
    overrides = model.hf_overrides
    if overrides:
        if not isinstance(overrides, Mapping):
            raise _refused("hf-overrides", "is a function; what it changes cannot be told to a peer")
        fields = {**fields, **overrides}
    dtype = _name(model.dtype)
    if dtype not in DTYPE_BYTES:
        raise _refused("dtype", f"is {dtype}; known are {', '.join(DTYPE_BYTES)}")
    layout = _with_own_states(layout_from_config(fields, dtype=dtype), kv_cache_config)
    name = model.served_model_name
    name = name[0] if isinstance(name, list) else name or model.model
    sidecar = folder / _DIGESTS_FILE if os.access(folder, os.W_OK) else None
    quantised = model.quantization is not None and "quantization_config" not in fields
    fingerprint = fingerprint_from_config(
        fields,
        weights_digest=weights_digest(folder, sidecar=sidecar),
        tokenizer_digest=tokenizer_digest(folder),
        chat_template_digest=chat_template_digest(folder),
        # Weights that are quantised at loading compute other numbers than the same files do.
        dtype=f"{dtype} with {model.quantization} weights" if quantised else dtype,
        kv_dtype=dtype,
        max_model_len=model.max_model_len,
        engine="vllm",
        engine_version=f"vllm {version}",
        model=name,
        layout=layout,
        block_tokens=config.cache_config.block_size,
        tensor_parallel=config.parallel_config.tensor_parallel_size,
    )
    return ServedModel(name, model.max_model_len, layout, fingerprint)


def _folder(model: Any) -> Path:
    folder = Path(model.model)
    if folder.is_dir():
        return folder
    # A name on a model hub: vLLM has fetched it already, or has found it in the local cache.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError) as error:
        raise ConfigurationError(
            "model_not_found", f"{model.model} is neither a folder nor in the local model cache: {error}", field="model"
        ) from error


def _with_own_states(layout: CacheLayout, config: "KVCacheConfig") -> CacheLayout:
    """The layout with the dtypes that this vLLM keeps states in (`--mamba-cache-dtype`, `--mamba-ssm-cache-dtype`)."""
    from vllm.model_executor.models.utils import extract_layer_index
    from vllm.v1.kv_cache_interface import MambaSpec

    dtypes: dict[int, tuple[str, ...]] = {}
    for group in config.kv_cache_groups:
        for name in group.layer_names:
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            if isinstance(spec, MambaSpec):
                dtypes[extract_layer_index(name)] = tuple(_name(dtype) for dtype in spec.dtypes)
    layers = []
    for layer in layout.layers:
        states = [tensor for tensor in layer.tensors if tensor.extent is Extent.STATE]
        own = dtypes.get(layer.index, ())
        if len(own) == len(states):
            by_name = {tensor.name: dtype for tensor, dtype in zip(states, own, strict=True)}
            tensors = tuple(replace(t, dtype=by_name.get(t.name, t.dtype)) for t in layer.tensors)
            layers.append(replace(layer, tensors=tensors))
        else:
            layers.append(layer)  # `kv_views` will say what does not fit
    return replace(layout, layers=tuple(layers))


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _refused(option: str, why: str) -> ConfigurationError:
    return ConfigurationError("config_invalid", f"vLLM's --{option} {why}", field=option)
