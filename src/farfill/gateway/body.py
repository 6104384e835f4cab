"""Reading a client's request body: its bounds, its JSON, and the few fields that the gateway itself needs.

Not here: what a parameter means. The decode engine checks its own, so that a client sees one and the same error on
every path.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from aiohttp import web

from farfill.errors import ClientError, FarfillError, OperationError

# A client that sends its body slower than this for so long holds a place that others need.
BODY_S: Final = 120.0
# Workers have the same bound; one that comes from here is a digest, so the client's own must be checked here.
CACHE_SALT_CHARS_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class Body:
    """A JSON object as the client sent it."""

    raw: bytes
    fields: Mapping[str, Any]

    @property
    def model(self) -> str | None:
        """Raises ClientError: `invalid_request` where it is not a string."""
        model = self.fields.get("model")
        if model is not None and not isinstance(model, str):
            raise ClientError("invalid_request", "model must be a string", field="model")
        return model

    @property
    def stream(self) -> bool:
        """Raises ClientError: `invalid_request` where it is not a boolean."""
        stream = self.fields.get("stream")
        if stream is not None and not isinstance(stream, bool):
            raise ClientError("invalid_request", "stream must be true or false", field="stream")
        return bool(stream)


async def read_raw(request: web.Request, limit_bytes: int) -> bytes:
    """The body's bytes.

    Raises:
        ClientError: `body_too_large` over the limit, `unsupported_parameter` for a compressed body.
        OperationError: `request_timeout` where it does not arrive.
    """
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ClientError("unsupported_parameter", "send the body uncompressed", field="Content-Encoding")
    too_large = ClientError("body_too_large", f"the body is larger than the limit of {limit_bytes} bytes")
    if request.content_length is not None and request.content_length > limit_bytes:
        raise too_large
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for data in request.content.iter_any():
                raw += data
                if len(raw) > limit_bytes:
                    raise too_large
    except TimeoutError:
        raise OperationError("request_timeout", f"the body did not arrive within {BODY_S:g} s") from None
    return bytes(raw)


class BodyStream:
    """A body that goes on to a worker as it comes; it can be sent only once.

    `failure` tells afterwards whether it was the client's body that broke the leg off.

    Raises:
        ClientError: `body_too_large` where the headers promise too much.
    """

    def __init__(self, request: web.Request, limit_bytes: int) -> None:
        self._content = request.content
        self._limit_bytes = limit_bytes
        self.failure: FarfillError | None = None
        if request.content_length is not None and request.content_length > limit_bytes:
            raise self._too_large()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        seen = 0
        async for data in self._content.iter_any():
            seen += len(data)
            if seen > self._limit_bytes:
                self.failure = self._too_large()
                raise self.failure
            yield data

    def _too_large(self) -> ClientError:
        return ClientError("body_too_large", f"the body is larger than the limit of {self._limit_bytes} bytes")


def parse(raw: bytes) -> Body:
    """Raises ClientError: `invalid_encoding`, `invalid_json`, `invalid_request`, `unsupported_parameter`."""
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ClientError("invalid_encoding", f"the body is not UTF-8: byte {error.start} is invalid") from None
    try:
        value = msgspec.json.decode(raw)
    except RecursionError:
        raise ClientError("invalid_json", "the body is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise ClientError("invalid_json", f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ClientError("invalid_request", "the body must be a JSON object")
    if value.get("kv_transfer_params") is not None:
        raise ClientError(
            "unsupported_parameter",
            "kv_transfer_params is between the gateway and its workers; leave it out",
            field="kv_transfer_params",
        )
    salt = value.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= CACHE_SALT_CHARS_MAX):
        raise ClientError(
            "invalid_request",
            f"cache_salt must be a string of 1 to {CACHE_SALT_CHARS_MAX} characters",
            field="cache_salt",
        )
    return Body(raw, value)


# What /tokenize takes of a client's body: all that changes the prompt's token ids, nothing else.
_TOKENIZE_FIELDS: Final = (
    "model",
    "prompt",
    "messages",
    "tools",
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
)


def token_ids_given(fields: Mapping[str, Any]) -> list[int] | None:
    """The prompt's token ids where the client sent those, as one array or as an array of one; else None."""
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(type(token) is int and 0 <= token < 2**32 for token in prompt):
        return prompt
    return None


def tokenize_body(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """The body for the worker's `/tokenize`; None where there is no text (the engine will say what is wrong)."""
    body = {name: fields[name] for name in _TOKENIZE_FIELDS if fields.get(name) is not None}
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        body["prompt"] = prompt = prompt[0]
    if isinstance(prompt, str) or isinstance(body.get("messages"), list):
        return body
    return None


def cache_salt(fields: Mapping[str, Any], tenant: str | None) -> str | None:
    """What keeps engines' prefix caches apart: by tenant where there are tenants (`tenant` not None), and as the
    client asks. None: nothing does.
    """
    own: str | None = fields.get("cache_salt")
    if tenant is None:
        return own
    return hashlib.sha256(b"farfill-cache-salt-1\0" + _framed(tenant) + _framed(own or "")).hexdigest()


def _framed(text: str) -> bytes:
    """With its length in front, so that no two pairs of texts are one."""
    encoded = text.encode()
    return len(encoded).to_bytes(4, "little") + encoded


def local_body(body: bytes, fields: Mapping[str, Any], salt: str | None) -> bytes:
    """The body of a leg that computes everything: the client's own bytes, unless another salt has to stand in them."""
    if salt == fields.get("cache_salt"):
        return body
    return msgspec.json.encode({**fields, "cache_salt": salt})


def prefill_body(
    model: str, token_ids: list[int], kv_transfer_params: Mapping[str, Any], salt: str | None = None
) -> dict[str, Any]:
    """The prefill leg's body: a whitelist. Patching the client's would carry over what contradicts `max_tokens` 1.

    Args:
        token_ids: the prompt; for a connector, which computes all that it is given, the prompt without its last token.
    """
    body = {
        "model": model,
        "prompt": token_ids,
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": dict(kv_transfer_params),
    }
    return body if salt is None else {**body, "cache_salt": salt}


def decode_body(
    fields: Mapping[str, Any], kv_transfer_params: Mapping[str, Any], salt: str | None = None
) -> dict[str, Any]:
    """The decode leg's body: the client's, and where the prompt's cache comes from."""
    body = {**fields, "kv_transfer_params": dict(kv_transfer_params)}
    return body if salt is None else {**body, "cache_salt": salt}
