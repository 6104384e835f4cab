"""Digests of a model folder: equal for copies, different for any changed byte, name, or missing file."""

import json
import os
from pathlib import Path

import pytest

from farfill.errors import ConfigurationError
from farfill.kv.digest import chat_template_digest, text_digest, tokenizer_digest, weights_digest


def folder_with(path: Path, **files: bytes) -> Path:
    path.mkdir()
    for name, content in files.items():
        (path / name.replace("__", ".")).write_bytes(content)
    return path


def test_copies_agree_and_changes_do_not(tmp_path: Path) -> None:
    one = folder_with(tmp_path / "one", a__safetensors=b"\1" * 3_000_000, b__safetensors=b"\2", config__json=b"{}")
    copy = folder_with(tmp_path / "copy", b__safetensors=b"\2", a__safetensors=b"\1" * 3_000_000, config__json=b"{1}")
    assert weights_digest(one) == weights_digest(copy)
    flipped = folder_with(tmp_path / "c", a__safetensors=b"\1" * 2_999_999 + b"\0", b__safetensors=b"\2")
    swapped = folder_with(tmp_path / "d", a__safetensors=b"\2", b__safetensors=b"\1" * 3_000_000)
    fewer = folder_with(tmp_path / "e", a__safetensors=b"\1" * 3_000_000)
    assert len({weights_digest(folder) for folder in (one, flipped, swapped, fewer)}) == 4


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", a__safetensors=b"\1" * 3_000_000, b__safetensors=b"\2" * 5)
    steps: list[int] = []
    weights_digest(folder, progress=steps.append)
    assert sum(steps) == 3_000_005
    assert len(steps) >= 4


def test_the_sidecar_spares_reading_until_a_file_changes(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", a__safetensors=b"\1" * 10, b__safetensors=b"\2" * 10)
    sidecar, steps = tmp_path / "digests.json", []
    first = weights_digest(folder, sidecar=sidecar, progress=steps.append)
    assert sum(steps) == 20
    steps.clear()
    assert weights_digest(folder, sidecar=sidecar, progress=steps.append) == first
    assert steps == [], "nothing was read again"
    (folder / "b.safetensors").write_bytes(b"\3" * 10)
    os.utime(folder / "b.safetensors", ns=(1, 1))
    second = weights_digest(folder, sidecar=sidecar, progress=steps.append)
    assert steps == [10], "only the changed file was read"
    assert second != first
    assert second == weights_digest(folder)
    (folder / "b.safetensors").unlink()
    assert weights_digest(folder, sidecar=sidecar) == weights_digest(folder)


@pytest.mark.parametrize("content", [b"", b"not json", b'{"a.safetensors": 5}', b"[]"])
def test_an_unreadable_sidecar_is_replaced(tmp_path: Path, content: bytes) -> None:
    folder = folder_with(tmp_path / "m", a__safetensors=b"\1" * 10)
    sidecar = tmp_path / "digests.json"
    sidecar.write_bytes(content)
    assert weights_digest(folder, sidecar=sidecar) == weights_digest(folder)
    assert list(json.loads(sidecar.read_bytes())) == ["a.safetensors"]


def test_the_tokenizer_is_its_one_file_or_its_parts(tmp_path: Path) -> None:
    fast = folder_with(tmp_path / "fast", tokenizer__json=b"{}", vocab__json=b"1")
    same = folder_with(tmp_path / "same", tokenizer__json=b"{}", vocab__json=b"2", tokenizer_config__json=b"{}")
    slow = folder_with(tmp_path / "slow", vocab__json=b"1", merges__txt=b"a b")
    other = folder_with(tmp_path / "other", vocab__json=b"1", merges__txt=b"b a")
    assert tokenizer_digest(fast) == tokenizer_digest(same)
    assert len({tokenizer_digest(folder) for folder in (fast, slow, other)}) == 3


def test_the_chat_template_is_found_in_either_place(tmp_path: Path) -> None:
    config = json.dumps({"chat_template": "{{ x }}"}).encode()
    inside = folder_with(tmp_path / "inside", tokenizer_config__json=config)
    beside = folder_with(tmp_path / "beside", chat_template__jinja=b"{{ x }}", tokenizer_config__json=b"{}")
    assert chat_template_digest(inside) == chat_template_digest(beside) == text_digest("{{ x }}")
    assert chat_template_digest(folder_with(tmp_path / "none")) == ""
    assert chat_template_digest(folder_with(tmp_path / "empty", tokenizer_config__json=b"{}")) == ""
    named = json.dumps({"chat_template": [{"name": "default", "template": "{{ x }}"}]}).encode()
    assert len(chat_template_digest(folder_with(tmp_path / "named", tokenizer_config__json=named))) == 64


def test_a_folder_without_a_model_is_an_error_that_says_so(tmp_path: Path) -> None:
    for digest in (weights_digest, tokenizer_digest):
        with pytest.raises(ConfigurationError) as caught:
            digest(tmp_path)
        assert (caught.value.code, caught.value.field) == ("model_not_found", "model")
    broken = folder_with(tmp_path / "broken", tokenizer_config__json=b"{")
    with pytest.raises(ConfigurationError) as caught:
        chat_template_digest(broken)
    assert caught.value.code == "model_not_found"
