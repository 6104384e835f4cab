"""Caches of earlier prompts, within a number of bytes: a prompt that begins the same computes only the rest.

Not here: anything that changes tokens. An entry is used only for the same grid, and only where going on from it
computes what would have been computed anyway: a model that keeps rows of all tokens can be cut at any grid border; a
model with windows or recurrent state only goes on from exactly where the entry ends.
Not shared between processes. Requests of another cache salt find nothing, as if there were one cache for each salt.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import Cache

from farfill.engines.hf.cache_io import cache_bytes, clone_cache
from farfill.kv.prefix import prefix_block_hashes, token_digest
from farfill.kv.spec import CacheLayout, Extent

_SALT = b"engines.hf.prefix_cache"  # the hashes never leave this process


@dataclass(frozen=True, slots=True)
class _Entry:
    cache: Cache
    bytes_held: int
    keys: tuple[tuple[int, bytes], ...]


class PrefixCache:
    """Least recently used goes first. Used by the engine's thread only.

    Attributes: `can_cut`: the model keeps rows of all tokens and nothing else; `bytes_held`.
    """

    def __init__(self, layout: CacheLayout, bytes_max: int) -> None:
        extents = {tensor.extent for layer in layout.layers for tensor in layer.tensors}
        self.can_cut = extents <= {Extent.TOKENS}
        self._bytes_max = bytes_max
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._by_key: dict[tuple[int, bytes], list[int]] = {}  # (grid, prefix hash) to entries, newest last
        self._next_id = 0
        self.bytes_held = 0

    def find(self, token_ids: Sequence[int], chunk_tokens: int, cache_salt: str = "") -> tuple[Cache, int] | None:
        """The longest usable beginning of `token_ids`: (a cache of its own, its length in tokens), or None."""
        if not self._entries:
            return None
        for length, key in _keys(token_ids, chunk_tokens, cache_salt):
            if holders := self._by_key.get(key):
                entry_id = holders[-1]
                self._entries.move_to_end(entry_id)
                cache = self._entries[entry_id].cache
                return clone_cache(cache, tokens=length if self.can_cut else None), length
        return None

    def keep(self, token_ids: Sequence[int], chunk_tokens: int, cache: Cache, cache_salt: str = "") -> None:
        """Keeps a copy of `cache`, which holds exactly `token_ids`, computed on this grid from the beginning."""
        named = _keys(token_ids, chunk_tokens, cache_salt)
        keys = tuple(key for length, key in named if self.can_cut or length == len(token_ids))
        if known := self._by_key.get(keys[0]):
            self._entries.move_to_end(known[-1])
            return
        clone = clone_cache(cache)
        size = cache_bytes(clone)
        if size > self._bytes_max:
            return
        while self.bytes_held + size > self._bytes_max:
            self._drop_oldest()
        self._entries[self._next_id] = _Entry(clone, size, keys)
        for key in keys:
            self._by_key.setdefault(key, []).append(self._next_id)
        self._next_id += 1
        self.bytes_held += size

    def clear(self) -> None:
        while self._entries:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        entry_id, entry = self._entries.popitem(last=False)
        self.bytes_held -= entry.bytes_held
        for key in entry.keys:
            self._by_key[key].remove(entry_id)
            if not self._by_key[key]:
                del self._by_key[key]


def _keys(token_ids: Sequence[int], chunk_tokens: int, cache_salt: str) -> list[tuple[int, tuple[int, bytes]]]:
    """(length, key) of every beginning that ends at a grid border, and of the whole; longest first."""
    salt = hashlib.sha256(_SALT + cache_salt.encode()).digest()
    blocks = prefix_block_hashes(token_ids, chunk_tokens, salt=salt)
    keys = [((order + 1) * chunk_tokens, (chunk_tokens, block)) for order, block in enumerate(blocks)]
    if len(token_ids) % chunk_tokens:
        keys.append((len(token_ids), (chunk_tokens, b"whole" + salt + token_digest(token_ids))))
    return keys[::-1]
