"""Names of prefix blocks: a SHA-256 chain over token ids, salted with everything that changes what a block holds.

Not here: who has which block (`router`), nor any use of these names as secrets.
"""

import hashlib
import struct
from collections.abc import Sequence

from farfill.errors import LocalProtocolError


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32, the form that every digest over tokens takes.

    Raises:
        LocalProtocolError: an id is negative or does not fit 32 bits (a request's ids are checked at the door).
    """
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as error:
        raise LocalProtocolError(f"token ids must be integers of 0 to 2**32 - 1: {error}") from error


def token_digest(token_ids: Sequence[int]) -> bytes:
    """SHA-256 over a prefix's token ids (32 bytes)."""
    return hashlib.sha256(pack_token_ids(token_ids)).digest()


def prefix_salt(fingerprint_digest: str, *, tenant: str, adapter: str) -> bytes:
    """The salt for `prefix_block_hashes` (32 bytes): equal only if fingerprint, tenant and adapter are.

    Args:
        fingerprint_digest: `fingerprint.digest(...)`.
        tenant: whose request it is; two tenants never share a block's name.
        adapter: the LoRA adapter's name and digest; "" for none.
    """
    hasher = hashlib.sha256(b"farfill-prefix-salt-1")
    for part in (fingerprint_digest, tenant, adapter):
        encoded = part.encode()
        hasher.update(struct.pack("<I", len(encoded)) + encoded)
    return hasher.digest()


def prefix_block_hashes(token_ids: Sequence[int], block_tokens: int, *, salt: bytes) -> list[bytes]:
    """The names of a prompt's full blocks, each 32 bytes, in order.

    `name[i] = SHA-256(name[i - 1] | tokens of block i)`, with `name[-1] = SHA-256(domain | block_tokens | salt)`. So a
    block's name stands for the whole prefix up to its end; a rest shorter than a block has no name.
    """
    if block_tokens < 1:
        raise LocalProtocolError(f"block_tokens is {block_tokens}; at least 1 is needed")
    name = hashlib.sha256(b"farfill-prefix-block-1" + struct.pack("<I", block_tokens) + salt).digest()
    names = []
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        name = hashlib.sha256(name + pack_token_ids(token_ids[start : start + block_tokens])).digest()
        names.append(name)
    return names
