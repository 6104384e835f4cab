"""The tree as text for people: the effective configuration with each value's origin, and the documented example.

Not here: anything that reads configuration. Secrets are shown as "***", always.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import yaml

from farfill.config.load import Loaded
from farfill.config.schema import Field, fields
from farfill.config.tree import Config

MASK = "***"
_WIDTH = 118


def effective_yaml(loaded: Loaded) -> str:
    """The effective configuration as YAML that `load` reads again (but for the secrets), origins as comments."""
    return "\n".join(_effective(Config, loaded.config, "", 0, loaded)) + "\n"


def example_yaml() -> str:
    """Every field with its default, meaning and allowed values; a valid file that starts a loopback gateway."""
    lines = [
        "# farfill's configuration: every field, its default, what it means and what it may be.",
        "# Leave out what you do not change. A process reads the section of its own kind, and tls.",
        "# The environment overrides the file (FARFILL_GATEWAY__PORT=9000, FARFILL_GATEWAY__CLOCKS__STALL_S=5), flags",
        "# override both. Check with `farfill config check FILE`; see the result with `farfill config show FILE`.",
        "# Fields named _bytes also take text such as 512MiB or 4GiB. Relative paths start at this file's folder.",
        "",
    ]
    lines += _example(Config, 0)
    return "\n".join(lines).rstrip() + "\n"


def _effective(
    struct: type[msgspec.Struct], value: msgspec.Struct, prefix: str, depth: int, loaded: Loaded
) -> Iterator[str]:
    pad = "  " * depth
    for name, field in fields(struct).items():
        path, item = f"{prefix}{name}", getattr(value, name)
        if field.struct is not None and item is not None:
            yield f"{pad}{name}:"
            yield from _effective(field.struct, item, f"{path}.", depth + 1, loaded)
            continue
        origin = loaded.origins.get(path)
        note = f"  # {origin.text}" if origin is not None else "  # default"
        if field.items is not None and item:
            yield f"{pad}{name}:{note}"
            yield from _indent(_dump([_plain(field.items, one) for one in item]), pad + "  ")
        else:
            yield f"{pad}{name}: {_scalar(MASK if field.has('secret') else msgspec.to_builtins(item))}{note}"


def _plain(struct: type[msgspec.Struct], value: msgspec.Struct) -> dict[str, Any]:
    """A list's item as builtins; the items of today's tree are flat."""
    return {
        name: MASK if field.has("secret") else msgspec.to_builtins(getattr(value, name))
        for name, field in fields(struct).items()
    }


def _example(struct: type[msgspec.Struct], depth: int, *, commented: bool = False) -> Iterator[str]:
    pad = "  " * depth + ("# " if commented else "")
    for name, field in fields(struct).items():
        if field.struct is not None:
            optional = not field.required and field.default is None
            yield ""
            yield from _comment((field.struct.__doc__ or "").strip().splitlines()[0], "  " * depth)
            yield f"{pad}{'# ' if optional and not commented else ''}{name}:"
            yield from _example(field.struct, depth + 1, commented=commented or optional)
            continue
        yield from _comment(
            f"{field.description} ({field.allowed})" if field.description else f"({field.allowed})", "  " * depth
        )
        if field.required:
            yield f"{pad}{name}: {_placeholder(field)}"
        elif field.items is not None:
            yield f"{pad}{name}: []"
            yield from _example_item(field.items, "  " * (depth + 1))
        else:
            yield f"{pad}{name}: {_scalar(msgspec.to_builtins(field.default))}"


def _example_item(struct: type[msgspec.Struct], pad: str) -> Iterator[str]:
    for index, (name, field) in enumerate(fields(struct).items()):
        yield f"{pad}# {'- ' if index == 0 else '  '}{name}: {_placeholder(field)}  # {field.description}"


def _placeholder(field: Field) -> str:
    return f"<{field.name}>"


def _comment(text: str, pad: str) -> Iterator[str]:
    line = f"{pad}#"
    for word in text.split():
        if len(line) + 1 + len(word) > _WIDTH:
            yield line
            line = f"{pad}#"
        line += f" {word}"
    yield line


def _scalar(value: Any) -> str:
    return _dump(value).removesuffix("...\n").strip()


def _dump(value: Any) -> str:
    text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=10_000)
    assert isinstance(text, str)
    return text


def _indent(text: str, pad: str) -> Iterator[str]:
    return (pad + line for line in text.rstrip("\n").split("\n"))
