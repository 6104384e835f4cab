"""Fingerprints: a difference that matters is refused, naming the field, both values and the remedy; others are not."""

import json
from typing import Any

import msgspec
import pytest
from kv_cases import EVERY_KIND, MODELS, fingerprint_of

from farfill.errors import PeerError
from farfill.kv.fingerprint import (
    Category,
    Fingerprint,
    compare,
    digest,
    fingerprint_from_builtins,
    fingerprint_from_config,
    fingerprint_to_builtins,
    require_compatible,
)
from farfill.kv.layout import layout_digest, layout_from_config

OURS = fingerprint_of(EVERY_KIND)


def with_field(category: Category, field: str, value: object) -> Fingerprint:
    group = msgspec.structs.replace(getattr(OURS, category.value), **{field: value})
    return msgspec.structs.replace(OURS, **{category.value: group})


def fields_of(category: Category) -> list[tuple[str, object]]:
    group = getattr(OURS, category.value)
    return [(field, 99 if isinstance(getattr(group, field), int) else "other") for field in group.__struct_fields__]


@pytest.mark.parametrize(("field", "value"), fields_of(Category.MUST_EQUAL))
def test_every_must_equal_field_is_refused_with_both_values_and_what_to_do(field: str, value: object) -> None:
    theirs = with_field(Category.MUST_EQUAL, field, value)
    (mismatch,) = compare(OURS, theirs)
    ours_text = str(getattr(OURS.must_equal, field))
    assert (mismatch.field, mismatch.category) == (field, Category.MUST_EQUAL)
    assert (mismatch.ours, mismatch.theirs) == (ours_text, str(value))
    assert mismatch.remedy != "nothing to do"
    with pytest.raises(PeerError) as caught:
        require_compatible(OURS, theirs)
    error = caught.value
    assert (error.code, error.field) == ("fingerprint_mismatch", field)
    for part in (field, repr(ours_text), repr(str(value)), mismatch.remedy):
        assert part in error.message
    assert digest(OURS) != digest(theirs)


@pytest.mark.parametrize(
    ("category", "field", "value"),
    [
        (category, *entry)
        for category in (Category.CONVERTIBLE, Category.INFORMATIONAL)
        for entry in fields_of(category)
    ],
)
def test_other_fields_are_told_but_not_refused(category: Category, field: str, value: object) -> None:
    theirs = with_field(category, field, value)
    require_compatible(OURS, theirs)
    (mismatch,) = compare(OURS, theirs)
    assert (mismatch.field, mismatch.category) == (field, category)
    assert digest(OURS) == digest(theirs)


def test_equal_fingerprints_have_nothing_to_tell() -> None:
    again = fingerprint_from_builtins(json.loads(json.dumps(fingerprint_to_builtins(OURS))))
    assert again == OURS
    assert compare(OURS, again) == []
    require_compatible(OURS, again)


def test_several_mismatches_are_all_named_in_the_order_of_the_fields() -> None:
    theirs = fingerprint_of(EVERY_KIND, dtype="float32", weights_digest="d" * 64)
    with pytest.raises(PeerError) as caught:
        require_compatible(OURS, theirs)
    assert caught.value.field == "weights_digest"
    assert caught.value.message.index("weights_digest") < caught.value.message.index("dtype: ours is 'bfloat16'")


@pytest.mark.parametrize("value", [None, {}, {"must_equal": {}}, {"must_equal": {"new_field": 1}}, "text"])
def test_what_is_no_fingerprint_is_refused(value: object) -> None:
    with pytest.raises(PeerError) as caught:
        fingerprint_from_builtins(value)
    assert caught.value.code == "fingerprint_mismatch"


def test_a_must_equal_field_that_we_do_not_know_is_refused_and_others_are_not() -> None:
    builtins = fingerprint_to_builtins(OURS)
    builtins["informational"]["rack"] = "7"
    assert fingerprint_from_builtins(builtins) == OURS
    builtins["must_equal"]["sparsity"] = "2:4"
    with pytest.raises(PeerError, match="sparsity"):
        fingerprint_from_builtins(builtins)


def from_config(name: str, change: dict[str, Any] | None = None, **arguments: Any) -> Fingerprint:
    config = json.loads((MODELS / f"{name}.json").read_text())
    config.update(change or {})
    given = {
        "weights_digest": "a" * 64,
        "tokenizer_digest": "b" * 64,
        "chat_template_digest": "",
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "engine": "hf",
        "engine_version": "5.24",
    }
    return fingerprint_from_config(config, **{**given, **arguments})


def test_a_fingerprint_from_a_config() -> None:
    name = "meta-llama--Meta-Llama-3.1-8B"
    fingerprint = from_config(name)
    config = json.loads((MODELS / f"{name}.json").read_text())
    assert fingerprint.must_equal.layout_digest == layout_digest(layout_from_config(config))
    assert fingerprint.must_equal.kv_dtype == "bfloat16"
    assert json.loads(fingerprint.must_equal.rope)["rope_scaling"]["factor"] == 8.0
    assert json.loads(fingerprint.must_equal.architecture)["num_key_value_heads"] == 8
    assert fingerprint == from_config(name)


@pytest.mark.parametrize(
    ("change", "arguments", "fields"),
    [
        ({"rope_theta": 1.0}, {}, ["rope"]),
        ({"rope_scaling": None}, {}, ["rope"]),
        ({"num_hidden_layers": 31}, {}, ["architecture", "layout_digest"]),
        ({"intermediate_size": 1}, {}, ["architecture"]),
        ({}, {"kv_dtype": "float8_e4m3fn"}, ["layout_digest", "kv_dtype"]),
        ({}, {"dtype": "float32"}, ["layout_digest", "dtype", "kv_dtype"]),
        ({}, {"adapter": "sql:1234"}, ["adapter"]),
        ({}, {"engine": "vllm", "tensor_parallel": 4, "block_tokens": 16}, []),
        ({"transformers_version": "9", "initializer_range": 1.0}, {}, []),
    ],
)
def test_what_a_config_change_means(change: dict[str, Any], arguments: dict[str, Any], fields: list[str]) -> None:
    name = "meta-llama--Meta-Llama-3.1-8B"
    mismatches = compare(from_config(name), from_config(name, change, **arguments))
    assert [mismatch.field for mismatch in mismatches if mismatch.category is Category.MUST_EQUAL] == fields


def test_a_multimodal_models_text_part_is_what_counts() -> None:
    fingerprint = from_config("Qwen--Qwen3.5-397B-A17B")
    assert json.loads(fingerprint.must_equal.architecture)["model_type"] == "qwen3_5_moe_text"
    assert "mrope_section" in fingerprint.must_equal.rope
