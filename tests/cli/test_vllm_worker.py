"""`farfill worker --engine vllm`: the command line that it becomes. vLLM itself is not started here."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from farfill.cli import vllm_worker
from farfill.cli.commands import farfill
from farfill.config import load
from farfill.engines.vllm import versions
from farfill.errors import ConfigurationError


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a supported vLLM were installed under its own name."""
    monkeypatch.setattr(versions, "version", lambda package: "0.32.0")
    monkeypatch.setattr(vllm_worker, "version", lambda package: "0.32.0")


def test_the_connectors_json_is_made_from_the_configuration(tmp_path: Path) -> None:
    flags = {"worker.name": "west-1", "worker.role": "decode", "worker.site": "west", "worker.data_port": "9102"}
    made = vllm_worker.command(load(None, flags=flags).config, tmp_path / "ready", ["org/model", "--port", "8000"])
    assert made[:7] == [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "--model", "org/model", "--port"]
    transfer = json.loads(made[made.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_module_path"] == "farfill.engines.vllm.connector"
    assert transfer["kv_role"] == "kv_consumer"
    extra = transfer["kv_connector_extra_config"]
    assert (extra["name"], extra["site"], extra["data_port"]) == ("west-1", "west", 9102)
    assert extra["ready_file"] == str(tmp_path / "ready")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "name a model"), (["m", "--kv-transfer-config={}"], "leave it out")],
)
def test_what_cannot_be_started_is_said_before(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as refused:
        vllm_worker.command(load(None, flags={}).config, None, arguments)
    assert refused.value.code == "config_invalid"


@pytest.mark.parametrize("found", ["0.31.2", "0.33.0", "1.0.0"])
def test_an_untested_vllm_is_refused_by_both_versions(found: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"vLLM {found} is installed.* 0\.32") as refused:
        versions.require_supported(found)
    assert refused.value.code == "dependency_missing"


@pytest.mark.parametrize("found", ["0.32.0", "0.32.1+cu130", "0.32.0rc1"])
def test_a_tested_vllm_is_taken(found: str) -> None:
    versions.require_supported(found)


def test_arguments_for_vllm_are_refused_for_another_engine() -> None:
    answer = CliRunner().invoke(farfill, ["worker", "--", "org/model"])
    assert answer.exit_code == 2
    assert "are for --engine vllm" in answer.output
