"""The tree as text: it reads back, hides secrets, and the documented example is what the code says."""

from pathlib import Path

import pytest
import yaml

from farfill.config import effective_yaml, example_yaml, load
from farfill.config.schema import fields, leaves
from farfill.config.tree import Config

EXAMPLE = Path(__file__).parents[2] / "docs" / "config.example.yaml"


def test_the_documented_example_is_generated_from_the_tree() -> None:
    assert EXAMPLE.read_text() == example_yaml(), "run: farfill config example > docs/config.example.yaml"


def test_the_example_is_valid_and_states_the_defaults() -> None:
    assert load(EXAMPLE, {}).config == Config()


def test_the_example_names_every_field() -> None:
    text = EXAMPLE.read_text()
    for path, _ in leaves(Config):
        assert f"{path.rpartition('.')[2]}:" in text


def test_every_leaf_is_described() -> None:
    assert [path for path, field in leaves(Config) if not field.description] == []
    for path, field in leaves(Config):
        if field.items is not None:
            assert all(item.description for item in fields(field.items).values()), path


def test_effective_says_where_each_value_came_from_and_reads_back(tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text(
        "gateway: {workers: [{name: w, url: 'http://127.0.0.1:1', role: both, site: s}]}\nworker: {name: x}"
    )
    loaded = load(file, {"FARFILL_GATEWAY__PORT": "9"}, {"gateway.host": "localhost"})
    text = effective_yaml(loaded)
    lines = [line.strip() for line in text.splitlines()]
    assert "port: 9  # FARFILL_GATEWAY__PORT" in lines
    assert "host: localhost  # the command line" in lines
    assert "name: x  # site.yaml" in lines
    assert "workers:  # site.yaml" in lines
    assert "threshold_tokens: 512  # default" in lines
    again = tmp_path / "again.yaml"
    again.write_text(text)
    assert load(again, {}).config == loaded.config


@pytest.mark.parametrize("as_environment", [True, False])
def test_secrets_are_masked(tmp_path: Path, as_environment: bool) -> None:
    tenants = "[{name: a, api_key: sk-0123456789abcdef}]"
    file = tmp_path / "f.yaml"
    file.write_text("{}" if as_environment else f"gateway: {{tenants: {tenants}}}")
    text = effective_yaml(load(file, {"FARFILL_GATEWAY__TENANTS": tenants} if as_environment else {}))
    assert "0123456789abcdef" not in text
    assert yaml.safe_load(text)["gateway"]["tenants"] == [{"name": "a", "api_key": "***"}]
