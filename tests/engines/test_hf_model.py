"""Rule: a model folder is read once, checked, and said exactly what it is; a wrong one is the operator's to change."""

import dataclasses
import json
import shutil

import pytest
from safetensors.torch import load_file, save_file
from tiny_models import KINDS, MAX_MODEL_LEN, UNSUPPORTED_KINDS

from farfill.engines.hf.model import load_model
from farfill.errors import ConfigurationError
from farfill.kv.fingerprint import compare, digest
from farfill.kv.layout import layout_from_config
from farfill.kv.spec import CacheLayout

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_twice_is_the_same_model(kind, tiny_folder, tmp_path):
    one = load_model(tiny_folder(kind), name="a")
    shutil.copytree(tiny_folder(kind), tmp_path / "copy")
    two = load_model(tmp_path / "copy", name="b", max_model_len=100)
    assert digest(one.fingerprint) == digest(two.fingerprint)
    assert {mismatch.field for mismatch in compare(one.fingerprint, two.fingerprint)} == {"model", "max_model_len"}
    assert (one.max_model_len, two.max_model_len) == (MAX_MODEL_LEN, 100)
    assert one.eos_token_ids == frozenset({2})
    assert not one.network.training


def test_weights_that_are_missing_are_not_made_up(tiny_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder("llama"), folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"layers\.1\.mlp\.up_proj") as caught:
        load_model(folder)
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("kind", UNSUPPORTED_KINDS)
def test_a_model_whose_cache_is_not_what_the_layout_says_is_refused_at_once(kind, tiny_folder):
    with pytest.raises(ConfigurationError) as caught:
        load_model(tiny_folder(kind))
    assert caught.value.code == "model_unsupported"


def test_a_layout_that_does_not_fit_is_refused_at_once(tiny_folder, monkeypatch):
    """As if the reading of config.json had forgotten the convolution states."""

    def forgetful(config, *, dtype):
        layout = layout_from_config(config, dtype=dtype)
        layers = [
            dataclasses.replace(layer, tensors=tuple(tensor for tensor in layer.tensors if tensor.name != "conv"))
            for layer in layout.layers
        ]
        return CacheLayout(layout.model_type, tuple(layers))

    monkeypatch.setattr("farfill.engines.hf.model.layout_from_config", forgetful)
    with pytest.raises(ConfigurationError, match="conv_states.*does not declare") as caught:
        load_model(tiny_folder("qwen3_next"))
    assert caught.value.code == "model_unsupported"


def test_another_dtype_is_another_fingerprint(tiny_folder):
    one, two = load_model(tiny_folder("llama")), load_model(tiny_folder("llama"), dtype="bfloat16")
    assert {"dtype", "layout_digest"} <= {mismatch.field for mismatch in compare(one.fingerprint, two.fingerprint)}


def test_several_end_of_sequence_ids(tiny_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder("llama"), folder)
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [2, 7]}))
    assert load_model(folder).eos_token_ids == frozenset({2, 7})


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda folder: shutil.rmtree(folder), "model_not_found"),
        (lambda folder: (folder / "config.json").unlink(), "model_not_found"),
        (lambda folder: (folder / "config.json").write_text("{"), "model_not_found"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "unheard-of"}'), "model_unsupported"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model_not_found"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x08" + bytes(20)), "model_not_found"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "model_not_found"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "model_not_found"),
    ],
)
def test_folders_that_are_no_models(damage, code, tiny_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder("llama"), folder)
    damage(folder)
    with pytest.raises(ConfigurationError) as caught:
        load_model(folder)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"dtype": "int4"}, "dtype"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"max_model_len": 10**6}, "max_model_len"),
    ],
)
def test_options_out_of_range(options, field, tiny_folder):
    with pytest.raises(ConfigurationError) as caught:
        load_model(tiny_folder("llama"), **options)
    assert (caught.value.code, caught.value.field) == ("config_invalid", field)
