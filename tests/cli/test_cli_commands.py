"""The command line: help without PyTorch, errors in a line with the right exit code, certs and config."""

import subprocess
import sys
from pathlib import Path

import pytest

from farfill.cli import run
from farfill.config import example_yaml

# Imports of these fail, as on a machine where the hf extra is not installed.
WITHOUT_HF = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers", "numpy", "safetensors", "tokenizers", "accelerate", "gguf"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""


def python_without_hf(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT_HF + code], capture_output=True, text=True, check=False)


COMMANDS = [
    "",
    "gateway",
    "worker",
    "relay",
    "demo",
    "certs",
    "certs init",
    "certs issue",
    "config",
    "config check",
    "model",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command.split(), "--help"]) == 0
    assert "Usage: farfill" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["gateway", "worker", "relay", "demo", "certs", "config"])
def test_help_has_examples_to_copy(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    run([command, "--help"])
    out = capsys.readouterr().out
    assert f"\n    farfill {command} " in out.split("Examples:")[1]


def test_core_and_help_work_without_torch() -> None:
    """Rule: `farfill` alone installs light; only the engine needs PyTorch."""
    done = python_without_hf(
        "import farfill, farfill.tls, farfill.config, farfill.gateway.settings\n"
        "from farfill.cli import run\n"
        f"for command in {COMMANDS!r}:\n"
        "    assert run([*command.split(), '--help']) == 0, command\n"
        "assert run(['config', 'example']) == 0\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    assert done.returncode == 0, done.stderr


def test_the_block_of_the_test_above_blocks() -> None:
    assert "No module named 'torch'" in python_without_hf("import torch").stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["worker", "--port", "many"], "config_invalid"),
        (["worker", "--set", "worker.prot=1"], "config_unknown_field"),
        (["worker", "--host", "0.0.0.0"], "insecure_listener"),
        (["relay", "--config", "absent.yaml"], "config_unreadable"),
        (["relay", "--host", "10.1.2.3"], "insecure_listener"),
        (["gateway"], "config_invalid"),
        (["config", "check", "absent.yaml"], "config_unreadable"),
        (["certs", "issue", "absent", "worker"], "certificate_invalid"),
        (["worker", "--model", "absent"], "model_not_found"),
    ],
)
def test_configuration_errors_are_a_line_and_exit_code_2(
    arguments: list[str], code: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"farfill: [{code}] ")
    assert len(captured.err.splitlines()) <= 2
    assert "Traceback" not in captured.err


def test_wrong_usage_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["worker", "--set", "port"]) == 2
    assert "--set takes FIELD=VALUE" in capsys.readouterr().err
    assert run(["workr"]) == 2
    assert "No such command 'workr'" in capsys.readouterr().err


def test_flags_win_over_set_over_file(tmp_path: Path) -> None:
    from farfill.cli.commands import effective

    file = tmp_path / "f.yaml"
    file.write_text("worker: {port: 1, data_port: 1, site: a}")
    settings = ("worker.port=2", "worker.data_port = 2")
    worker = effective(file, settings, {"worker.port": "3", "worker.site": None}).config.worker
    assert (worker.port, worker.data_port, worker.site) == (3, 2, "a")


def test_certs_from_nothing_to_a_checked_identity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "certs")
    assert run(["certs", "init", folder]) == 0
    assert run(["certs", "issue", folder, "east", "--host", "east.example"]) == 0
    assert run(["certs", "issue", folder, "front", "--role", "gateway"]) == 0
    capsys.readouterr()
    assert run(["certs", "check", f"{folder}/ca.pem", f"{folder}/front.pem", f"{folder}/front.key"]) == 0
    assert capsys.readouterr().out == "front, role gateway\n"
    assert run(["certs", "check", f"{folder}/ca.pem", f"{folder}/front.pem", f"{folder}/east.key"]) == 2
    assert "is not the key of" in capsys.readouterr().err
    assert run(["certs", "init", folder]) == 2


def test_config_example_is_checked_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "example"]) == 0
    assert capsys.readouterr().out == example_yaml()
    file = tmp_path / "farfill.yaml"
    file.write_text("worker: {name: east}\nrelay: {port: 0}")
    assert run(["config", "check", str(file)]) == 0
    assert "good (worker, relay)" in capsys.readouterr().out


def test_config_check_knows_the_rules_between_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "farfill.yaml"
    file.write_text("gateway: {host: 0.0.0.0}")
    assert run(["config", "check", str(file)]) == 2
    assert "[insecure_listener]" in capsys.readouterr().err


def test_config_check_reads_certificates_on_demand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "farfill.yaml"
    file.write_text("tls: {ca: ca.pem, certificate: w.pem, key: w.key}")
    assert run(["config", "check", str(file)]) == 0
    assert run(["config", "check", str(file), "--certificates"]) == 2
    assert f"{tmp_path}/ca.pem does not exist" in capsys.readouterr().err


def test_config_show_takes_environment_and_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "farfill.yaml"
    file.write_text("gateway: {port: 1}")
    monkeypatch.setenv("FARFILL_GATEWAY__THRESHOLD_TOKENS", "7")
    assert run(["config", "show", str(file)]) == 0
    out = capsys.readouterr().out
    assert "port: 1  # farfill.yaml" in out
    assert "threshold_tokens: 7  # FARFILL_GATEWAY__THRESHOLD_TOKENS" in out


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -m farfill config example | head -1",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "farfill's configuration" in done.stdout
    assert done.stderr == ""
