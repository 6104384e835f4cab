"""scripts/venv where it cannot work: a clear message, nothing of the user's removed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/venv", "Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def make_venv(checkout: Path, python: str, level: str = "hf") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": python}
    return subprocess.run(
        [checkout / "scripts" / "venv", level], env=environment, capture_output=True, text=True, check=False
    )


def test_no_python_is_told_with_what_to_do(checkout: Path) -> None:
    old = checkout / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")  # what an interpreter answers to `sys.exit(not (3, 11) <= ...)`
    old.chmod(0o755)
    done = make_venv(checkout, str(old))
    assert done.returncode == 1
    assert "needs Python 3.11 or newer" in done.stderr
    assert "PYTHON=" in done.stderr
    assert not (checkout / ".venv").exists()


def test_a_folder_that_is_no_environment_is_not_removed(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "precious").write_text("data")
    done = make_venv(checkout, "python3")
    assert done.returncode == 1
    assert ".venv is not a virtual environment" in done.stderr
    assert (checkout / ".venv" / "precious").read_text() == "data"


def test_wrong_level_is_usage(checkout: Path) -> None:
    done = make_venv(checkout, "python3", "everything")
    assert (done.returncode, done.stderr) == (2, "usage: scripts/venv hf|dev\n")


def test_make_help_names_the_targets() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for target in ("demo", "up", "test", "check", "clean"):
        assert f"make {target} " in done.stdout
