"""The simulated engine: a cache whose every byte depends on the prompt, and output tokens that depend on every byte.

No model and no timing (the actors time it). What it is for: a transfer that loses, mixes up or invents one byte
ends in other tokens, so "the right answer" can be checked without trusting anything that carried it.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from farfill.kv.layout import row_bytes, state_bytes
from farfill.kv.plan import plan_chunks
from farfill.kv.spec import CacheLayout, ChunkSpec, Extent, LayerKind, LayerLayout, TensorSpec

OUTPUT_TOKENS_MAX: Final = 8


def _rows(name: str, extent: Extent, dim: int) -> TensorSpec:
    return TensorSpec(name, extent, (1, dim), "float16")


# One layer of each kind that behaves differently on the wire: all rows, the last rows, a state of exact length.
LAYOUT: Final = CacheLayout(
    "simulated",
    (
        LayerLayout(0, LayerKind.FULL, (_rows("k", Extent.TOKENS, 4), _rows("v", Extent.TOKENS, 4))),
        LayerLayout(1, LayerKind.WINDOW, (_rows("k", Extent.WINDOW, 2), _rows("v", Extent.WINDOW, 2)), window=20),
        LayerLayout(2, LayerKind.LINEAR, (TensorSpec("recurrent", Extent.STATE, (2, 8), "float32"),)),
    ),
)


def _digest(*parts: bytes) -> bytes:
    state = hashlib.blake2b(digest_size=32)
    for part in parts:
        state.update(len(part).to_bytes(4, "big"))
        state.update(part)
    return state.digest()


def _stretch(seed: bytes, size_bytes: int) -> bytes:
    return hashlib.shake_128(seed).digest(size_bytes)


@lru_cache(maxsize=1024)
def chunk_bytes(prompt: tuple[int, ...], chunk: ChunkSpec) -> bytes:
    """The plaintext of one data chunk of this prompt's cache: `chunk.payload_bytes` bytes.

    Each token's rows depend on the layer and on all tokens up to it, as attention's do; a state on all of the prefix.
    """
    layer = LAYOUT.layers[chunk.layer]
    chain = _chain(prompt)
    name = chunk.layer.to_bytes(2, "big")
    if chunk.is_state:
        return _stretch(b"state" + name + chain[chunk.token_stop], state_bytes(layer))
    width = row_bytes(layer)
    return b"".join(
        _stretch(b"rows" + name + chain[position + 1], width) for position in range(chunk.token_start, chunk.token_stop)
    )


@lru_cache(maxsize=256)
def _chain(prompt: tuple[int, ...]) -> tuple[bytes, ...]:
    """`chain[n]` digests the first n tokens."""
    chain = [b""]
    for token in prompt:
        chain.append(hashlib.blake2b(token.to_bytes(4, "big"), key=chain[-1], digest_size=32).digest())
    return tuple(chain)


class DecodeCache:
    """What a decode worker holds for one request: zeros until chunks are written into it."""

    def __init__(self, plan: Sequence[ChunkSpec]) -> None:
        self._plan = plan
        self._buffers = {chunk.index: bytearray(chunk.payload_bytes) for chunk in plan}

    def buffer(self, index: int) -> bytearray:
        return self._buffers[index]  # type: ignore[index]

    def decode(self, last_token: int, count: int) -> tuple[int, ...]:
        """`count` output tokens from the cache as it is now."""
        held = _digest(*(bytes(self._buffers[chunk.index]) for chunk in self._plan), last_token.to_bytes(4, "big"))
        return tuple(int.from_bytes(_digest(held, bytes([step]))[:2], "big") for step in range(count))


@lru_cache(maxsize=256)
def reference_output(prompt: tuple[int, ...], chunk_tokens: int, count: int) -> tuple[int, ...]:
    """What one process that prefills and decodes by itself says to this prompt."""
    if len(prompt) < 2:
        return DecodeCache(()).decode(prompt[-1], count)
    cache = DecodeCache(plan_chunks(LAYOUT, len(prompt) - 1, chunk_tokens))
    for chunk in plan_chunks(LAYOUT, len(prompt) - 1, chunk_tokens):
        cache.buffer(chunk.index)[:] = chunk_bytes(prompt, chunk)
    return cache.decode(prompt[-1], count)
