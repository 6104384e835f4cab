"""Digests of a model folder's files for the fingerprint: weights, tokenizer, chat template.

Not here: what is done with them (`fingerprint`), nor loading a model.

A digest is over file contents and names, so two copies of one folder agree and a single changed byte does not.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from farfill.errors import ConfigurationError

_READ_BYTES: Final = 1024**2
# What decides how text becomes token ids: one file for fast tokenizers, else the slow ones' parts.
_TOKENIZER_FILE: Final = "tokenizer.json"
_TOKENIZER_PARTS: Final = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json")


class _Known(msgspec.Struct, frozen=True):
    """A sidecar's entry: the digest that a file had when it had this size and modification time."""

    size_bytes: int
    mtime_ns: int
    sha256: str


def weights_digest(folder: Path, *, sidecar: Path | None = None, progress: Callable[[int], None] | None = None) -> str:
    """SHA-256 in hex over the folder's `*.safetensors` files, by name.

    Args:
        sidecar: a JSON file of digests by file, size and modification time, so that the next start does not read
            the weights again; written here. An unreadable one is ignored and replaced.
        progress: called with the number of bytes read since the last call.

    Raises:
        ConfigurationError: `model_not_found`, if there are none.
    """
    files = sorted(folder.glob("*.safetensors"), key=lambda path: path.name)
    if not files:
        raise ConfigurationError("model_not_found", f"{folder} has no *.safetensors files", field="model")
    known = _read_sidecar(sidecar)
    digests: dict[str, _Known] = {}
    for file in files:
        status, entry = file.stat(), known.get(file.name)
        if entry is None or (entry.size_bytes, entry.mtime_ns) != (status.st_size, status.st_mtime_ns):
            entry = _Known(status.st_size, status.st_mtime_ns, _file_digest(file, progress))
        digests[file.name] = entry
    if sidecar is not None and digests != known:
        partial = sidecar.with_name(sidecar.name + ".partial")
        partial.write_bytes(msgspec.json.encode(digests))
        partial.replace(sidecar)
    return _named_digest((name, entry.sha256) for name, entry in digests.items())


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 in hex over `tokenizer.json`, or over a slow tokenizer's files where there is none.

    Raises:
        ConfigurationError: `model_not_found`, if the folder has no tokenizer.
    """
    names = [_TOKENIZER_FILE] if (folder / _TOKENIZER_FILE).is_file() else list(_TOKENIZER_PARTS)
    files = [folder / name for name in names if (folder / name).is_file()]
    if not files:
        raise ConfigurationError("model_not_found", f"{folder} has no tokenizer ({_TOKENIZER_FILE})", field="model")
    return _named_digest((file.name, _file_digest(file, None)) for file in files)


def chat_template_digest(folder: Path) -> str:
    """SHA-256 in hex over the chat template: `chat_template.jinja`, or what `tokenizer_config.json` says; "" if none.

    Raises:
        ConfigurationError: `model_not_found`, if `tokenizer_config.json` cannot be read.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        return text_digest(file.read_text(encoding="utf-8"))
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return ""
    try:
        fields = json.loads(config.read_bytes())
    except ValueError as error:
        raise ConfigurationError("model_not_found", f"{config} is not JSON: {error}", field="model") from error
    template = fields.get("chat_template") if isinstance(fields, dict) else None
    if template is None:
        return ""
    return text_digest(template if isinstance(template, str) else json.dumps(template, sort_keys=True))


def text_digest(text: str) -> str:
    """SHA-256 in hex over a text's UTF-8 bytes."""
    return hashlib.sha256(text.encode()).hexdigest()


def _file_digest(file: Path, progress: Callable[[int], None] | None) -> str:
    hasher, buffer = hashlib.sha256(), memoryview(bytearray(_READ_BYTES))
    with file.open("rb", buffering=0) as stream:
        while read_bytes := stream.readinto(buffer):
            hasher.update(buffer[:read_bytes])
            if progress is not None:
                progress(read_bytes)
    return hasher.hexdigest()


def _named_digest(digests: Iterable[tuple[str, str]]) -> str:
    return text_digest("".join(f"{sha256} {name}\n" for name, sha256 in digests))


def _read_sidecar(sidecar: Path | None) -> dict[str, _Known]:
    if sidecar is None or not sidecar.is_file():
        return {}
    try:
        return msgspec.json.decode(sidecar.read_bytes(), type=dict[str, _Known])
    except msgspec.DecodeError:
        return {}
