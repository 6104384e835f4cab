"""What the tree's types allow, in words: field kinds, nearest names, "an integer from 0 to 65535".

Not here: the tree itself (`tree`), values and where they come from (`load`).
"""

import difflib
import types
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta, Struct


class Field:
    """One field of a struct: its name, bare type, metadata and default."""

    def __init__(self, info: msgspec.structs.FieldInfo) -> None:
        self.name = info.encode_name
        self.type = info.type
        self.bare, self.metas = _unwrap(info.type)
        self._default = info.default
        self.required = info.default is msgspec.NODEFAULT

    @property
    def default(self) -> Any:
        assert not self.required
        return self._default

    @property
    def struct(self) -> type[Struct] | None:
        """The struct that this field holds, also where it may be absent; None for a leaf."""
        options = [one for one in _options(self.bare) if one is not type(None)]
        if len(options) == 1 and isinstance(options[0], type) and issubclass(options[0], Struct):
            return options[0]
        return None

    @property
    def items(self) -> type[Struct] | None:
        """The struct that this field holds a list of."""
        if get_origin(self.bare) is tuple and issubclass(get_args(self.bare)[0], Struct):
            found = get_args(self.bare)[0]
            assert isinstance(found, type)
            return found
        return None

    @property
    def description(self) -> str:
        return next((meta.description for meta in reversed(self.metas) if meta.description), "")

    def has(self, mark: str) -> bool:
        """Whether the field bears a mark ("secret", "path")."""
        return any(meta.extra and meta.extra.get(mark) for meta in self.metas)

    @property
    def allowed(self) -> str:
        """What it may be, as the end of "must be ..."."""
        return _allowed(self.bare, self.metas)


@cache
def fields(struct: type[Struct]) -> dict[str, Field]:
    """The struct's fields by name, in order."""
    return {info.encode_name: Field(info) for info in msgspec.structs.fields(struct)}


def leaves(struct: type[Struct], prefix: str = "") -> Iterator[tuple[str, Field]]:
    """Every settable leaf as (dotted path, field); a list of structs is one leaf."""
    for name, field in fields(struct).items():
        if field.struct is not None:
            yield from leaves(field.struct, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def nearest(name: str, names: Iterable[str]) -> str:
    """'; did you mean X?', or what there is where nothing is near."""
    names = list(names)
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else f"; there are: {', '.join(names)}"


def _unwrap(type_: Any) -> tuple[Any, list[Meta]]:
    metas: list[Meta] = []
    while get_origin(type_) is Annotated:
        type_, *annotations = get_args(type_)
        metas[:0] = [one for one in annotations if isinstance(one, Meta)]
    return type_, metas


def _options(bare: Any) -> tuple[Any, ...]:
    return get_args(bare) if get_origin(bare) in (Union, types.UnionType) else (bare,)


def _allowed(bare: Any, metas: list[Meta]) -> str:
    if get_origin(bare) is Literal:
        return f"one of {', '.join(map(str, get_args(bare)))}"
    if isinstance(bare, type) and issubclass(bare, Enum):
        return f"one of {', '.join(str(one.value) for one in bare)}"
    if bare is bool:
        return "true or false"
    if bare in (int, float):
        return ("an integer" if bare is int else "a number") + _range(metas)
    if bare is str:
        return "text" + _text(metas)
    if get_origin(bare) is tuple:
        return "a list"
    return "a section of fields"


def _range(metas: list[Meta]) -> str:
    low = next((f"from {meta.ge}" for meta in metas if meta.ge is not None), None)
    low = low or next((f"above {meta.gt}" for meta in metas if meta.gt is not None), None)
    high = next((meta.le for meta in metas if meta.le is not None), None)
    if high is None:
        return f" {low}" if low else ""
    return f" {low} to {high}" if low and low.startswith("from") else f" {low} and up to {high}"


def _text(metas: list[Meta]) -> str:
    parts = []
    for meta in metas:
        if meta.min_length or meta.max_length is not None:
            most = f" to {meta.max_length}" if meta.max_length is not None else " or more"
            parts.append(f"of {meta.min_length or 0}{most} characters")
        if meta.pattern:
            parts.append(f"that matches {meta.pattern}")
    return "".join(f" {part}" for part in parts)
