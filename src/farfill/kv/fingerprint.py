"""The fingerprint: all that two sides must agree on before one may read the other's cache, and how they differ.

Not here: reading a model's files (`digest`), nor what a request carries.

Three categories, and what a difference means:

    must_equal     the other side's cache is not this model's: refused, with both values and what to do
    convertible    the cache fits after conversion, or within the smaller of two limits: served
    informational  shown to people, never compared for service
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import msgspec

from farfill.errors import PeerError
from farfill.kv.layout import layout_digest, layout_from_config
from farfill.kv.spec import WIRE_VERSION, CacheLayout

HASH_SCHEME: Final = "sha256-chain-1"
CODEC_NONE: Final = "none"


class Category(StrEnum):
    MUST_EQUAL = "must_equal"
    CONVERTIBLE = "convertible"
    INFORMATIONAL = "informational"


class MustEqual(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fields of which any difference is a refusal.

    Attributes:
        weights_digest, tokenizer_digest, chat_template_digest: SHA-256 in hex, see `digest`.
        architecture: model type and the numbers that shape its computation, as text.
        rope: the rotary embedding's parameters, as canonical JSON.
        layout_digest: `layout.layout_digest` of the cache, which covers heads, dims, windows, states, their dtypes.
        dtype: what the engine computes in. kv_dtype: what it keeps keys and values in.
        adapter: LoRA adapter's name and digest; "" for none.
    """

    weights_digest: str
    tokenizer_digest: str
    chat_template_digest: str
    architecture: str
    rope: str
    layout_digest: str
    dtype: str
    kv_dtype: str
    adapter: str = ""
    codec: str = CODEC_NONE
    hash_scheme: str = HASH_SCHEME
    wire_version: int = WIRE_VERSION


class Convertible(msgspec.Struct, frozen=True):
    """Fields that the engine-neutral wire form makes irrelevant, and limits of which the smaller holds."""

    max_model_len: int
    block_tokens: int = 1
    tensor_parallel: int = 1
    memory_layout: str = ""


class Informational(msgspec.Struct, frozen=True):
    engine: str
    engine_version: str
    model: str = ""
    hardware: str = ""


class Fingerprint(msgspec.Struct, frozen=True):
    must_equal: MustEqual
    convertible: Convertible
    informational: Informational


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One field in which two fingerprints differ. `remedy` is a sentence: what the operator should do."""

    field: str
    category: Category
    ours: str
    theirs: str
    remedy: str


_NOTHING: Final = "nothing to do"
_REMEDIES: Final[Mapping[str, str]] = {
    "weights_digest": "load the same weights on both sides (same repository revision, same files)",
    "tokenizer_digest": "copy tokenizer.json and its companions from one side to the other",
    "chat_template_digest": "use the same chat template on both sides",
    "architecture": "the two sides serve different models: give both the same config.json",
    "rope": "give both sides the same rope settings (rope_theta, rope_scaling, rope_parameters)",
    "layout_digest": "the caches have different shapes or dtypes: compare the `layout` of both sides' /farfill/v1/info",
    "dtype": "start both engines with the same dtype",
    "kv_dtype": "start both engines with the same KV-cache dtype",
    "adapter": "load the same adapter on both sides, or send the request without one",
    "codec": "configure the same codec on both sides",
    "hash_scheme": "run the same farfill version on both sides",
    "wire_version": "run farfill versions with the same wire version on both sides",
    "max_model_len": "nothing to do; requests longer than the smaller one are refused by that side",
}


def compare(ours: Fingerprint, theirs: Fingerprint) -> list[Mismatch]:
    """Every field in which they differ, must_equal first, in the order of the fields."""
    mismatches = []
    for category in Category:
        our_group, their_group = getattr(ours, category.value), getattr(theirs, category.value)
        for field in our_group.__struct_fields__:
            our_value, their_value = getattr(our_group, field), getattr(their_group, field)
            if our_value != their_value:
                remedy = _REMEDIES.get(field, _NOTHING)
                mismatches.append(Mismatch(field, category, str(our_value), str(their_value), remedy))
    return mismatches


def require_compatible(ours: Fingerprint, theirs: Fingerprint) -> None:
    """Refuses a peer whose cache this side may not read.

    Raises:
        PeerError: `fingerprint_mismatch`, with every must_equal field that differs, both values and what to do;
            `field` is the first of them.
    """
    refused = [mismatch for mismatch in compare(ours, theirs) if mismatch.category is Category.MUST_EQUAL]
    if refused:
        text = "; ".join(
            f"{mismatch.field}: ours is {mismatch.ours!r}, theirs is {mismatch.theirs!r} ({mismatch.remedy})"
            for mismatch in refused
        )
        raise PeerError(
            "fingerprint_mismatch", f"the two sides may not exchange caches: {text}", field=refused[0].field
        )


def digest(fingerprint: Fingerprint) -> str:
    """SHA-256 in hex over the must_equal fields: equal exactly if neither side would refuse the other."""
    return hashlib.sha256(msgspec.json.encode(fingerprint.must_equal, order="deterministic")).hexdigest()


def fingerprint_to_builtins(fingerprint: Fingerprint) -> dict[str, Any]:
    """The fingerprint as a JSON value."""
    builtins: dict[str, Any] = msgspec.to_builtins(fingerprint)
    return builtins


def fingerprint_from_builtins(value: object) -> Fingerprint:
    """Reads a fingerprint that another process sent as JSON.

    Raises:
        PeerError: `fingerprint_mismatch`, for anything that is not a fingerprint of this version.
    """
    try:
        return msgspec.convert(value, Fingerprint)
    except msgspec.ValidationError as error:
        raise PeerError("fingerprint_mismatch", f"not a fingerprint of this version: {error}") from error


def fingerprint_from_config(
    config: Mapping[str, Any],
    *,
    weights_digest: str,
    tokenizer_digest: str,
    chat_template_digest: str,
    dtype: str,
    kv_dtype: str | None = None,
    max_model_len: int,
    engine: str,
    engine_version: str,
    model: str = "",
    adapter: str = "",
    layout: CacheLayout | None = None,
    block_tokens: int = 1,
    tensor_parallel: int = 1,
    memory_layout: str = "",
    hardware: str = "",
) -> Fingerprint:
    """A worker's fingerprint.

    Args:
        config: the model's config.json.
        dtype, kv_dtype: what the engine computes in and keeps keys and values in (the same, if None).
        layout: what the engine declares, if it is not what `layout_from_config` says for `kv_dtype`.

    Raises:
        ConfigurationError: `model_unsupported`, from `layout_from_config`.
    """
    kv_dtype = kv_dtype or dtype
    layout = layout or layout_from_config(config, dtype=kv_dtype)
    text = _text_config(config)
    return Fingerprint(
        must_equal=MustEqual(
            weights_digest=weights_digest,
            tokenizer_digest=tokenizer_digest,
            chat_template_digest=chat_template_digest,
            architecture=_canonical({name: text[name] for name in _ARCHITECTURE_FIELDS if text.get(name) is not None}),
            rope=_canonical({name: text[name] for name in _ROPE_FIELDS if text.get(name) is not None}),
            layout_digest=layout_digest(layout),
            dtype=dtype,
            kv_dtype=kv_dtype,
            adapter=adapter,
        ),
        convertible=Convertible(max_model_len, block_tokens, tensor_parallel, memory_layout),
        informational=Informational(engine, engine_version, model, hardware),
    )


_ARCHITECTURE_FIELDS: Final = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "sliding_window",
    "kv_lora_rank",
    "num_experts_per_tok",
)
_ROPE_FIELDS: Final = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rope_local_base_freq",
    "swa_rope_theta",
    "partial_rotary_factor",
    "rotary_dim",
)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _canonical(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
