"""The tree from file, environment and flags: order, refusals with field, value and allowed, and origins."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfill.config import Role, load
from farfill.config.schema import leaves
from farfill.config.tree import Config
from farfill.errors import ConfigurationError
from farfill.router.policy import Placement

WORKERS = """
gateway:
  workers:
    - {name: east, url: "https://127.0.0.1:8101", role: prefill, site: east}
    - {name: west, url: "https://127.0.0.1:8102", role: decode, site: west}
"""


def write(folder: Path, text: str, name: str = "farfill.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refusal(file: Path | None = None, environ: dict[str, str] | None = None, **flags: object) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        load(file, environ or {}, {path.replace("__", "."): value for path, value in flags.items()})
    return caught.value


def test_defaults_need_nothing() -> None:
    loaded = load(environ={})
    assert loaded.config == Config()
    assert loaded.origins == {}


def test_later_sources_win_field_by_field(tmp_path: Path) -> None:
    file = write(tmp_path, "gateway: {port: 1, threshold_tokens: 1, host: localhost}")
    environ = {"FARFILL_GATEWAY__PORT": "2", "FARFILL_GATEWAY__THRESHOLD_TOKENS": "2", "HOME": "/"}
    loaded = load(file, environ, {"gateway.port": "3", "gateway.name": None})
    gateway = loaded.config.gateway
    assert (gateway.port, gateway.threshold_tokens, gateway.host, gateway.name) == (3, 2, "localhost", "gateway")
    assert {path: origin.text for path, origin in loaded.origins.items()} == {
        "gateway.port": "the command line",
        "gateway.threshold_tokens": "FARFILL_GATEWAY__THRESHOLD_TOKENS",
        "gateway.host": "farfill.yaml",
    }
    assert loaded.sections() == {"gateway"}


def test_yaml_and_toml_say_the_same(tmp_path: Path) -> None:
    toml = """
    [[gateway.workers]]
    name = "east"
    url = "https://127.0.0.1:8101"
    role = "prefill"
    site = "east"
    [[gateway.workers]]
    name = "west"
    url = "https://127.0.0.1:8102"
    role = "decode"
    site = "west"
    """
    from_yaml = load(write(tmp_path, WORKERS), {}).config
    assert load(write(tmp_path, toml, "f.toml"), {}).config == from_yaml
    assert [worker.role for worker in from_yaml.gateway.workers] == [Role.PREFILL, Role.DECODE]


def test_deep_fields_and_lists_from_the_environment() -> None:
    environ = {
        "FARFILL_GATEWAY__CLOCKS__STALL_S": "2.5",
        "FARFILL_GATEWAY__PLACEMENT": "consumer",
        "FARFILL_GATEWAY__RELAY__NAME": "middle",
        "FARFILL_GATEWAY__RELAY__URL": "https://127.0.0.1:9",
        "FARFILL_GATEWAY__TENANTS": "[{name: a, api_key: 0123456789abcdef}]",
    }
    gateway = load(None, environ).config.gateway
    assert gateway.clocks.stall_s == 2.5
    assert gateway.placement is Placement.CONSUMER
    assert gateway.relay is not None
    assert gateway.relay.name == "middle"
    assert gateway.tenants[0].api_key == "0123456789abcdef"


@pytest.mark.parametrize(
    ("text", "size"), [("1MiB", 1024**2), ("2 GiB", 2 * 1024**3), ("1.5GB", 1_500_000_000), ("4g", 4 * 10**9)]
)
def test_sizes_may_be_written_for_people(text: str, size: int) -> None:
    assert load(None, {"FARFILL_WORKER__STORE_BYTES": text}).config.worker.store_bytes == size


@pytest.mark.parametrize("text", ["lots", "1Gib/s", "-1", "", "1e99GB", "9" * 400 + "GB"])
def test_other_sizes_are_refused(text: str) -> None:
    error = refusal(environ={"FARFILL_WORKER__STORE_BYTES": text})
    assert (error.code, error.field) == ("config_invalid", "worker.store_bytes")


@pytest.mark.parametrize(
    ("text", "field", "hint"),
    [
        ("gatway: {}", "gatway", "did you mean gateway?"),
        ("gateway: {threshold: 1}", "gateway.threshold", "did you mean threshold_tokens?"),
        ("gateway: {clocks: {stall: 1}}", "gateway.clocks.stall", "did you mean stall_s?"),
        ("gateway: {workers: [{nme: a}]}", "gateway.workers[0].nme", "did you mean name?"),
        ("gateway: {qqqqqqq: 1}", "gateway.qqqqqqq", "there are: name, host, port"),
        ("tls: {cert: a.pem}", "tls.cert", "did you mean"),
        ("gateway: {1: 2}", "gateway.1", "there are"),
    ],
)
def test_unknown_fields_are_refused_with_the_nearest(tmp_path: Path, text: str, field: str, hint: str) -> None:
    error = refusal(write(tmp_path, text))
    assert (error.code, error.field) == ("config_unknown_field", field)
    assert hint in error.message
    assert "farfill.yaml" in error.message


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("FARFILL_GATEWAY__PROT", "did you mean FARFILL_GATEWAY__PORT?"),
        ("FARFILL_GATEWAY_PORT", "did you mean FARFILL_GATEWAY__PORT?"),
        ("FARFILL_TLS__CERT", "did you mean FARFILL_TLS__"),
    ],
)
def test_unknown_environment_names_are_refused(name: str, hint: str) -> None:
    error = refusal(environ={name: "1"})
    assert (error.code, error.field) == ("config_unknown_field", name)
    assert hint in error.message


def test_unknown_flag_is_refused() -> None:
    assert refusal(gateway__prt="1").code == "config_unknown_field"


@pytest.mark.parametrize(
    ("text", "field", "parts"),
    [
        ("gateway: {port: 70000}", "gateway.port", ["an integer from 0 to 65535", "not 70000"]),
        ("gateway: {port: '8000'}", "gateway.port", ["an integer from 0 to 65535", "not '8000'"]),
        ("gateway: {port: true}", "gateway.port", ["an integer", "not True"]),
        ("gateway: {port: null}", "gateway.port", ["an integer", "not None"]),
        ("gateway: {placement: middle}", "gateway.placement", ["one of producer, consumer, relay", "not 'middle'"]),
        ("gateway: {clocks: {stall_s: 0}}", "gateway.clocks.stall_s", ["a number above 0 and up to 86400", "not 0"]),
        ("gateway: {clocks: {stall_s: .nan}}", "gateway.clocks.stall_s", ["a number above 0", "not nan"]),
        ("gateway: {clocks: {stall_s: .inf}}", "gateway.clocks.stall_s", ["a number above 0", "not inf"]),
        ("gateway: {clocks: 3}", "gateway.clocks", ["a section of fields", "not 3"]),
        ("gateway: [1]", "gateway", ["a section of fields", "not list"]),
        ("gateway: {fallback: {miss: retry}}", "gateway.fallback.miss", ["one of local, fail", "not 'retry'"]),
        ("gateway: {workers: {}}", "gateway.workers", ["a list", "not dict"]),
        ("gateway: {workers: [7]}", "gateway.workers[0]", ["a section of fields", "not 7"]),
        ("worker: {name: a b}", "worker.name", ["that matches", "not 'a b'"]),
        ("worker: {engine: magic}", "worker.engine", ["one of hf", "not 'magic'"]),
        ("tls: {ca: a.pem, key: b.pem}", "tls.certificate", ["is missing", "PEM file of the own certificate"]),
        ("gateway: {relay: {name: r}}", "gateway.relay.url", ["is missing", "https://host:port"]),
    ],
)
def test_wrong_values_name_field_value_and_allowed(tmp_path: Path, text: str, field: str, parts: list[str]) -> None:
    error = refusal(write(tmp_path, text))
    assert (error.code, error.field) == ("config_invalid", field)
    assert field in error.message
    for part in parts:
        assert part in error.message


def test_a_refused_secret_is_not_repeated(tmp_path: Path) -> None:
    error = refusal(write(tmp_path, "gateway: {tenants: [{name: a, api_key: hunter2}]}"))
    assert error.field == "gateway.tenants[0].api_key"
    assert "hunter2" not in str(error)
    assert "16 to 256 characters" in error.message


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("f.yaml", b"gateway: {port: 1", "is not YAML"),
        ("f.yaml", b"gateway: {port: 1}\ngateway: {port: 2}", "gateway is set twice"),
        ("f.yaml", b"gateway:\n  port: 1\n  port: 2", "port is set twice"),
        ("f.yaml", b"- 1\n- 2", "must hold sections"),
        ("f.yaml", b"\xff\xfe", "is not UTF-8"),
        ("f.toml", b"[gateway\n", "is not TOML"),
        ("f.yaml", b"gateway: !!python/object:os.system {}", "is not YAML"),
        ("f.json", b"{}", "must be named .yaml, .yml or .toml"),
    ],
)
def test_unreadable_files_say_why(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    error = refusal(path)
    assert error.code == "config_unreadable"
    assert reason in error.message
    assert str(path) in error.message
    assert "\n" not in error.message


def test_absent_file_and_folder(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "absent.yaml").message
    folder = tmp_path / "folder.yaml"
    folder.mkdir()
    assert "cannot be read" in refusal(folder).message


def test_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert load(write(tmp_path, "# nothing\n"), {}).config == Config()


def test_paths_in_a_file_start_at_its_folder(tmp_path: Path) -> None:
    file = write(tmp_path, "tls: {ca: certs/ca.pem, certificate: /etc/w.pem, key: w.key}\nworker: {model: models/m}")
    config = load(file, {"FARFILL_TLS__KEY": "k.pem"}).config
    assert config.tls is not None
    assert config.tls.ca == str(tmp_path / "certs/ca.pem")
    assert config.tls.certificate == "/etc/w.pem"
    assert config.tls.key == "k.pem"  # the environment has no folder
    assert config.worker.model == str(tmp_path / "models/m")
    assert load(write(tmp_path, "worker: {model: ''}"), {}).config.worker.model == ""


LEAVES = sorted(path for path, _ in leaves(Config))


@given(path=st.sampled_from(LEAVES), text=st.text(max_size=20))
def test_any_text_is_taken_or_refused_with_its_field(path: str, text: str) -> None:
    """Rule: a wrong value is a ConfigurationError that names a field, never another exception."""
    environ = {"FARFILL_" + path.upper().replace(".", "__"): text}
    try:
        load(None, environ)
    except ConfigurationError as error:
        if error.code == "config_invalid":
            section, _, rest = path.partition(".")
            assert error.field is not None
            assert error.field.startswith(section)
            assert rest.split(".")[0] in error.field or section in ("tls", "gateway")
        else:
            assert error.code in ("config_unreadable", "config_unknown_field")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["gateway", "workers", "port", "clocks", "tls", "relay", "name", "stall_s"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_any_tree_is_taken_or_refused(tree: object) -> None:
    """Rule: whatever a file holds, the answer is a configuration or one ConfigurationError."""
    from farfill.config.load import Origin, _build, _flatten

    values: dict[str, tuple[object, Origin]] = {}
    try:
        _flatten(Config, tree, "", Origin("f.yaml"), values)
        built = _build(Config, "", values)
    except ConfigurationError as error:
        assert error.code in ("config_invalid", "config_unknown_field")
    else:
        assert isinstance(built, Config)
