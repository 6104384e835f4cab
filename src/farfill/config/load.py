"""Reads the tree from a YAML or TOML file, then the environment, then flags; the later source wins, field by field.

Not here: what may be set (`tree`), and rules between fields (`rules`).
Environment: FARFILL_SECTION__FIELD, deeper levels with another `__` (FARFILL_GATEWAY__CLOCKS__STALL_S=5). Lists are
given as YAML there. A name that begins like a section's but is no field is refused, as in a file.
"""

import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from farfill.config.schema import Field, fields, leaves, nearest
from farfill.config.tree import Config
from farfill.errors import ConfigurationError

PREFIX: Final = "FARFILL_"
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_FACTORS: Final = {"": 1} | {
    f"{letter}{suffix}".lower(): base ** (power + 1)
    for power, letter in enumerate("KMGT")
    for suffix, base in (("", 1000), ("i", 1024))
}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from. `text`: "farfill.yaml", "FARFILL_GATEWAY__PORT", "--port"."""

    text: str
    is_text: bool = False  # the source knows only text: "8000" is a number there
    folder: Path | None = None  # what relative paths are relative to


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, and for every leaf that was set where its value came from (the others are defaults)."""

    config: Config
    origins: Mapping[str, Origin]

    def sections(self) -> set[str]:
        """The sections in which something was set."""
        return {path.split(".")[0] for path in self.origins}


def load(
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Loaded:
    """Reads the configuration.

    Args:
        file: `.yaml`, `.yml` or `.toml`; None: no file.
        environ: the process's environment if None.
        flags: dotted path -> value (text is read as in the environment); None values are not set.

    Raises:
        ConfigurationError: `config_unreadable`, `config_unknown_field` or `config_invalid`, naming the field, the
            value, what is allowed, and the source.
    """
    values: dict[str, tuple[Any, Origin]] = {}
    if file is not None:
        _flatten(Config, read_file(file), "", Origin(file.name, folder=file.absolute().parent), values)
    for path, value, origin in _from_environment(os.environ if environ is None else environ):
        values[path] = (value, origin)
    known = dict(leaves(Config))
    for path, value in (flags or {}).items():
        if value is None:
            continue
        if path not in known:
            raise _unknown(path, "the command line", known)
        if isinstance(value, str):
            value = _value_of(known[path], value, path)
        values[path] = (value, Origin("the command line", is_text=isinstance(value, str)))
    config = _build(Config, "", values)
    assert isinstance(config, Config)
    return Loaded(config, {path: origin for path, (_, origin) in values.items()})


def read_file(file: Path) -> Mapping[str, Any]:
    """The file's fields as they stand there.

    Raises:
        ConfigurationError: `config_unreadable`.
    """
    if file.suffix not in (".yaml", ".yml", ".toml"):
        raise _unreadable(file, "must be named .yaml, .yml or .toml")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _unreadable(file, f"is not UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise _unreadable(file, f"cannot be read: {error.strerror}") from error
    try:
        tree = tomllib.loads(text) if file.suffix == ".toml" else yaml.load(text, _UniqueKeys)
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise _unreadable(file, f"is not {file.suffix[1:].upper()}: {' '.join(str(error).split())}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise _unreadable(file, f"must hold sections ({', '.join(fields(Config))}), not {type(tree).__name__}")
    return tree


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a field set twice is an error, not the last one's victory."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key_node.value} is set twice", key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _flatten(
    struct: type[msgspec.Struct], raw: Any, prefix: str, origin: Origin, values: dict[str, tuple[Any, Origin]]
) -> None:
    """Checks names and levels; puts every leaf of `raw` into `values`."""
    if not isinstance(raw, Mapping):
        raise _invalid(prefix.rstrip("."), raw, "a section of fields", origin)
    known = fields(struct)
    for name, value in raw.items():
        if name not in known:
            raise _unknown(f"{prefix}{name}", origin.text, known, name)
        field, path = known[name], f"{prefix}{name}"
        if field.struct is not None:
            if value is not None:
                _flatten(field.struct, value, f"{path}.", origin, values)
            continue
        values[path] = (value, origin)


def _build_item(struct: type[msgspec.Struct], raw: Any, prefix: str, origin: Origin) -> msgspec.Struct:
    """Checks and builds one item of a list."""
    values: dict[str, tuple[Any, Origin]] = {}
    _flatten(struct, raw, prefix, origin, values)
    return _build(struct, prefix, values)


def _from_environment(environ: Mapping[str, str]) -> list[tuple[str, Any, Origin]]:
    known = dict(leaves(Config))
    by_name = {PREFIX + path.upper().replace(".", "__"): path for path in known}
    sections = tuple(f"{PREFIX}{section.upper()}_" for section in fields(Config))
    found = []
    for name, text in environ.items():
        path = by_name.get(name)
        if path is not None:
            found.append((path, _value_of(known[path], text, name), Origin(name, is_text=True)))
        elif name.startswith(sections):
            raise _unknown(name, "the environment", by_name, name)
    return found


def _value_of(field: Field, text: str, name: str) -> Any:
    if field.items is None:
        return text
    try:
        return yaml.load(text, _UniqueKeys)
    except yaml.YAMLError as error:
        raise ConfigurationError("config_unreadable", f"{name} is not YAML: {' '.join(str(error).split())}") from error


def _build(struct: type[msgspec.Struct], prefix: str, values: Mapping[str, tuple[Any, Origin]]) -> msgspec.Struct:
    arguments: dict[str, Any] = {}
    missing: str | None = None
    for name, field in fields(struct).items():
        path = f"{prefix}{name}"
        if field.struct is not None:
            if any(set_path.startswith(f"{path}.") for set_path in values):
                arguments[name] = _build(field.struct, f"{path}.", values)
        elif path in values:
            arguments[name] = _convert(field, path, *values[path])
        elif field.required:
            missing = missing or path
    if missing is not None:
        field = fields(struct)[missing.rpartition(".")[2]]
        raise ConfigurationError(
            "config_invalid", f"{missing} is missing; it must be {field.allowed}: {field.description}", field=missing
        )
    return struct(**arguments)


def _convert(field: Field, path: str, value: Any, origin: Origin) -> Any:
    if field.items is not None:
        if not isinstance(value, list | tuple):
            raise _invalid(path, value, "a list", origin)
        built = tuple(_build_item(field.items, item, f"{path}[{i}].", origin) for i, item in enumerate(value))
        most = next((meta.max_length for meta in field.metas if meta.max_length is not None), None)
        if most is not None and len(built) > most:
            raise _invalid(path, f"{len(built)} items", f"a list of at most {most} items", origin)
        return built
    if field.name.endswith("_bytes") and isinstance(value, str):
        value = _size(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise _invalid(path, value, field.allowed, origin)
    try:
        converted = msgspec.convert(value, field.type, strict=not origin.is_text)
    except msgspec.ValidationError as error:
        shown = "..." if field.has("secret") else value
        raise _invalid(path, shown, field.allowed, origin) from error
    if field.has("path") and converted and origin.folder is not None:
        converted = str(origin.folder / Path(converted).expanduser())
    return converted


def _size(text: str) -> int | str:
    """ "4GiB" as bytes; other text as it is, to be refused like any wrong value."""
    match = _SIZE.fullmatch(text.strip()) if len(text) <= 32 else None
    return round(float(match[1]) * _FACTORS[(match[2] or "").lower()]) if match else text


def _invalid(path: str, value: Any, allowed: str, origin: Origin) -> ConfigurationError:
    shown = repr(value) if isinstance(value, str | int | float | bool) or value is None else type(value).__name__
    return ConfigurationError(
        "config_invalid", f"{path} must be {allowed}, not {shown[:200]} (in {origin.text})", field=path
    )


def _unknown(path: str, source: str, known: Mapping[str, Any], name: str | None = None) -> ConfigurationError:
    return ConfigurationError(
        "config_unknown_field", f"there is no field {path} (in {source}){nearest(str(name or path), known)}", field=path
    )


def _unreadable(file: Path, reason: str) -> ConfigurationError:
    return ConfigurationError("config_unreadable", f"{file} {reason}")
