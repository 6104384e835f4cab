"""Reading single fields out of a config.json, strictly: what is missing or of another type is an error that names it.

Not here: which fields an architecture has (`architectures`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from farfill.errors import ConfigurationError
from farfill.kv.limits import DIMENSION_MAX, LAYERS_MAX


class ConfigFields:
    """The fields of one (part of a) config. `where` is the path to it, for messages: "" or "text_config."."""

    __slots__ = ("_fields", "_where", "model_type")

    def __init__(self, fields: Mapping[str, Any], *, where: str = "", model_type: str = "") -> None:
        self._fields = fields
        self._where = where
        self.model_type = model_type or self.text("model_type")

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._fields.get(name) is not None

    def raw(self, name: str) -> Any:
        """The field's value; it must be there and not null."""
        value = self._fields.get(name)
        if value is None:
            raise self.unsupported(name, "is missing")
        return value

    def raw_names(self) -> list[str]:
        """The names of all fields, in the config's order."""
        return list(self._fields)

    def number(self, name: str, *, maximum: int = DIMENSION_MAX) -> int:
        """A positive integer."""
        value = self.raw(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= maximum:
            raise self.unsupported(name, f"is {value!r}; an integer of 1 to {maximum} is needed")
        return value

    def count(self, name: str) -> int:
        """An integer of 0 or more."""
        return 0 if self.raw(name) == 0 and not isinstance(self.raw(name), bool) else self.number(name)

    def text(self, name: str) -> str:
        value = self.raw(name)
        if not isinstance(value, str) or not value:
            raise self.unsupported(name, f"is {value!r}; a text is needed")
        return value

    def flag(self, name: str) -> bool:
        value = self.raw(name)
        if not isinstance(value, bool):
            raise self.unsupported(name, f"is {value!r}; true or false is needed")
        return value

    def part(self, name: str) -> "ConfigFields":
        """A nested object."""
        value = self.raw(name)
        if not isinstance(value, Mapping):
            raise self.unsupported(name, f"is {value!r}; an object is needed")
        return ConfigFields(value, where=f"{self._where}{name}.", model_type=self.model_type)

    def sequence(self, name: str) -> Sequence[Any]:
        """A list of one to LAYERS_MAX entries."""
        value = self.raw(name)
        if not isinstance(value, list | tuple) or not 1 <= len(value) <= LAYERS_MAX:
            raise self.unsupported(name, f"is {value!r}; a list of 1 to {LAYERS_MAX} entries is needed")
        return value

    def per_layer(self, name: str) -> Sequence[Any]:
        """A list (or a pattern string) with one entry for each of `num_hidden_layers` layers."""
        value = self.raw(name)
        if not isinstance(value, list | tuple | str):
            raise self.unsupported(name, f"is {value!r}; a list with an entry for each layer is needed")
        if len(value) != self.layers:
            raise self.unsupported(name, f"has {len(value)} entries for {self.layers} layers")
        return value

    @property
    def layers(self) -> int:
        return self.number("num_hidden_layers", maximum=LAYERS_MAX)

    def quotient(self, numerator: str, denominator: str) -> int:
        """`numerator / denominator`, which must be a whole number."""
        above, below = self.number(numerator), self.number(denominator)
        if above % below:
            raise self.unsupported(numerator, f"is {above}, which {denominator} = {below} does not divide")
        return above // below

    def unsupported(self, name: str, what: str) -> ConfigurationError:
        """The error for a field that is missing, or that says something which is not understood."""
        model = f" of model type {self.model_type!r}" if getattr(self, "model_type", "") else ""
        return ConfigurationError(
            "model_unsupported",
            f"config.json{model}: field {self._where}{name} {what}",
            field=f"{self._where}{name}",
        )
