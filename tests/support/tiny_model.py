"""A deterministic "model" without torch whose cache really decides its tokens. Not a language model.

Each token's rows are a hash of all tokens before it, and the next token is a hash of every byte in the cache: full
rows, the window's rows and the recurrent state. Wrong, missing or reordered cache bytes give other tokens.
"""

import codecs
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from farfill.errors import ClientError
from farfill.kv.spec import CacheLayout, ChunkSpec, Extent, LayerKind, LayerLayout, TensorSpec

KEY_BYTES, VALUE_BYTES, WINDOW_ROW_BYTES, STATE_BYTES = 32, 16, 16, 32
WINDOW = 8  # the layer sees itself and 7 tokens before
FULL_LAYER, WINDOW_LAYER, STATE_LAYER = 0, 1, 2
BOS, EOS, TURN = 256, 257, 258
VOCAB_SIZE = 259
CANDIDATES = 8
# What the model says: printable ASCII, a line break, and the end.
_ALPHABET = (*range(32, 127), 10, EOS)

LAYOUT = CacheLayout(
    model_type="tiny",
    layers=(
        LayerLayout(
            FULL_LAYER,
            LayerKind.FULL,
            (
                TensorSpec("k", Extent.TOKENS, (2, KEY_BYTES // 2), "int8"),
                TensorSpec("v", Extent.TOKENS, (2, VALUE_BYTES // 2), "int8"),
            ),
        ),
        LayerLayout(
            WINDOW_LAYER,
            LayerKind.WINDOW,
            (TensorSpec("k", Extent.WINDOW, (1, WINDOW_ROW_BYTES), "int8"),),
            window=WINDOW,
        ),
        LayerLayout(STATE_LAYER, LayerKind.LINEAR, (TensorSpec("recurrent", Extent.STATE, (STATE_BYTES,), "int8"),)),
    ),
)


@dataclass(slots=True)
class TinyCache:
    """The state after `tokens` tokens."""

    tokens: int = 0
    keys: bytearray = field(default_factory=bytearray)
    values: bytearray = field(default_factory=bytearray)
    window: bytearray = field(default_factory=bytearray)
    state: bytes = bytes(STATE_BYTES)

    @property
    def held_bytes(self) -> int:
        return len(self.keys) + len(self.values) + len(self.window) + len(self.state)

    def copy(self) -> "TinyCache":
        return TinyCache(self.tokens, self.keys[:], self.values[:], self.window[:], self.state)

    def advance(self, token_id: int) -> None:
        digest = hashlib.blake2b(self.state + token_id.to_bytes(4, "little")).digest()
        self.keys += digest[:32]
        self.values += digest[32:48]
        self.window += digest[48:64]
        del self.window[: max(0, len(self.window) - (WINDOW - 1) * WINDOW_ROW_BYTES)]
        self.state = hashlib.blake2b(digest, digest_size=STATE_BYTES).digest()
        self.tokens += 1

    def candidates(self) -> list[tuple[int, float]]:
        """The likeliest next tokens, best first, with their log-probabilities."""
        digest = hashlib.blake2b(digest_size=64)
        for part in (self.keys, self.values, self.window, self.state):
            digest.update(part)
        tokens = list(dict.fromkeys(_ALPHABET[byte % len(_ALPHABET)] for byte in digest.digest()))[:CANDIDATES]
        return [(token, -0.7 * (rank + 1)) for rank, token in enumerate(tokens)]

    def export(self, chunk: ChunkSpec) -> bytes:
        """A chunk's payload, while this cache stands at the end of the chunk's grid range."""
        start, stop = chunk.token_start, chunk.token_stop
        if chunk.layer == FULL_LAYER:
            return bytes(
                self.keys[start * KEY_BYTES : stop * KEY_BYTES] + self.values[start * VALUE_BYTES : stop * VALUE_BYTES]
            )
        if chunk.layer == WINDOW_LAYER:
            first = self.tokens - len(self.window) // WINDOW_ROW_BYTES
            return bytes(self.window[(start - first) * WINDOW_ROW_BYTES : (stop - first) * WINDOW_ROW_BYTES])
        assert (chunk.is_state, chunk.token_start) == (True, self.tokens)
        return self.state

    def take(self, chunk: ChunkSpec, payload: memoryview) -> None:
        """Adds an imported chunk, in the plan's order."""
        assert len(payload) == chunk.payload_bytes
        tokens = chunk.token_stop - chunk.token_start
        if chunk.layer == FULL_LAYER:
            self.keys += payload[: tokens * KEY_BYTES]
            self.values += payload[tokens * KEY_BYTES :]
            self.tokens = chunk.token_stop
        elif chunk.layer == WINDOW_LAYER:
            self.window += payload
        else:
            self.state = bytes(payload)


class TinyDetokenizer:
    def __init__(self, skip_special_tokens: bool) -> None:
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(_bytes_of(token_id, self._skip))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class TinyTokenizer:
    """One token per UTF-8 byte, and three special ones."""

    vocab_size = VOCAB_SIZE

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return ([BOS] if add_special_tokens else []) + list(text.encode())

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        ids = [BOS]
        if tools:
            ids += [TURN, *f"tools\n{json.dumps(list(tools), sort_keys=True)}".encode()]
        for message in messages:
            if message["role"] not in ("system", "user", "assistant", "tool", "developer"):
                raise ClientError("invalid_request", f"unknown role {message['role']!r}", field="messages")
            ids += [TURN, *f"{message['role']}\n{message.get('content') or ''}".encode()]
        for key, value in sorted((template_kwargs or {}).items()):
            ids += [TURN, *f"{key}={value}".encode()]
        if add_generation_prompt and not continue_final_message:
            ids += [TURN, *b"assistant\n"]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(_bytes_of(token, skip_special_tokens) for token in token_ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return _bytes_of(token_id, False)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> TinyDetokenizer:
        return TinyDetokenizer(skip_special_tokens)


def _bytes_of(token_id: int, skip_special_tokens: bool) -> bytes:
    if token_id < 256:
        return bytes([token_id])
    return b"" if skip_special_tokens else {BOS: b"<bos>", EOS: b"<eos>", TURN: b"<turn>"}[token_id]
