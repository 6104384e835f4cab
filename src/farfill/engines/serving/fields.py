"""A JSON body and its fields, read one by one: each bad value is one `ClientError` that names the field.

Not here: which fields an endpoint has (`request`), or any HTTP.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from farfill.errors import ClientError

# What a token id, a seed or a count may be at most: a signed 64-bit number, which is what tensors and clients hold.
INTEGER_MAX: Final = 2**63 - 1


def decode_object(body: bytes) -> dict[str, Any]:
    """Reads a request body that must be one JSON object in UTF-8.

    Raises:
        ClientError: `invalid_encoding` for bytes that are not UTF-8, `invalid_json` for text that is not JSON
            (NaN, Infinity, lone surrogates and nesting deeper than the decoder's stack included),
            `invalid_request` for JSON that is not an object.
    """
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ClientError("invalid_encoding", f"the body is not UTF-8: byte {error.start} is invalid") from error
    try:
        value = msgspec.json.decode(body)
    except RecursionError as error:
        raise ClientError("invalid_json", "the body is nested too deeply") from error
    except msgspec.DecodeError as error:
        raise ClientError("invalid_json", f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ClientError("invalid_request", f"the body must be a JSON object, not {kind(value)}")
    return value


def kind(value: object) -> str:
    """JSON's name for a value's type, for messages."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
    return "an object"


def invalid(field: str, what: str) -> ClientError:
    return ClientError("invalid_request", f"{field} {what}", field=field)


class Fields:
    """Typed reading of one JSON object. A field that is absent or null has its default, as OpenAI servers do.

    Every name that is asked for is remembered, so that `unread` can say what nobody asked for.
    """

    def __init__(self, body: Mapping[str, Any], *, prefix: str = "") -> None:
        self._body = body
        self._prefix = prefix
        self._read: set[str] = set()

    def name(self, key: str) -> str:
        return f"{self._prefix}{key}"

    def raw(self, key: str) -> Any:
        self._read.add(key)
        return self._body.get(key)

    def unread(self) -> list[str]:
        """Names in the body that nobody asked for, sorted."""
        return sorted(set(self._body) - self._read)

    def invalid(self, key: str, what: str) -> ClientError:
        return invalid(self.name(key), what)

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.invalid(key, f"must be true or false, not {kind(value)}")
        return value

    def text(self, key: str) -> str | None:
        value = self.raw(key)
        if value is not None and not isinstance(value, str):
            raise self.invalid(key, f"must be a string, not {kind(value)}")
        return value

    def integer(self, key: str, *, least: int = -INTEGER_MAX - 1, most: int = INTEGER_MAX) -> int | None:
        """A whole number within [least, most]; 3.0 is one too, as JSON does not tell them apart."""
        value = self.raw(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.invalid(key, f"must be a whole number, not {value if isinstance(value, float) else kind(value)}")
        if not least <= value <= most:
            raise self.invalid(key, f"must be {_interval(least, most)}, not {_short(value)}")
        return value

    def number(self, key: str, *, least: float, most: float, above: float | None = None) -> float | None:
        """A finite number within [least, most], and greater than `above` where that is given."""
        value = self.raw(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.invalid(key, f"must be a number, not {kind(value)}")
        if (isinstance(value, int) and abs(value) > INTEGER_MAX) or not math.isfinite(value):
            raise self.invalid(key, "must be a finite number")
        if not least <= value <= most:
            raise self.invalid(key, f"must be {_interval(least, most)}, not {value}")
        if above is not None and value <= above:
            raise self.invalid(key, f"must be greater than {above}, not {value}")
        return float(value)

    def integers(self, key: str, *, least: int, most: int, count_max: int) -> tuple[int, ...]:
        value = self.raw(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self.invalid(key, f"must be an array of whole numbers, not {kind(value)}")
        if len(value) > count_max:
            raise self.invalid(key, f"may have at most {count_max} entries, not {len(value)}")
        for entry in value:
            if isinstance(entry, bool) or not isinstance(entry, int) or not least <= entry <= most:
                raise self.invalid(key, f"must hold whole numbers {_interval(least, most)}, not {_short(entry)}")
        return tuple(value)

    def texts(self, key: str, *, count_max: int) -> tuple[str, ...]:
        """A string or an array of strings; empty strings are refused."""
        value = self.raw(key)
        if value is None:
            return ()
        entries = [value] if isinstance(value, str) else value
        if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
            raise self.invalid(key, "must be a string or an array of strings")
        if len(entries) > count_max:
            raise self.invalid(key, f"may have at most {count_max} entries, not {len(entries)}")
        if "" in entries:
            raise self.invalid(key, "must not hold an empty string")
        return tuple(entries)

    def object(self, key: str) -> "Fields | None":
        """A nested object, whose fields are named `key.name` in errors."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.invalid(key, f"must be an object, not {kind(value)}")
        return Fields(value, prefix=f"{self.name(key)}.")

    def refuse(self, key: str, *, unless: tuple[Any, ...] = ()) -> None:
        """Refuses a parameter that would change the output and that no engine here supports.

        Absent, null, false and empty values ask for nothing and pass, and so do the values in `unless`.
        """
        value = self.raw(key)
        if value is None or value is False or value in ({}, [], "") or value in unless:
            return
        raise ClientError("unsupported_parameter", f"{self.name(key)} is not supported", field=self.name(key))


def _interval(least: float, most: float) -> str:
    return f"from {least} to {most}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
