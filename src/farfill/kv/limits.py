"""The limits on everything of the kv layer that comes from outside, each with its reason, and the one check for them.

Not here: what an operator tunes (quotas, leases, clocks); these are what no honest peer exceeds.
"""

from typing import Final

from farfill.errors import PeerError

# One layer's rows for one token range. The grid aims at 1 to 4 MiB; uncompressed 128-head attention on a grid of 512
# tokens, the widest known, is 32 MiB. Twice that is a bug or an attack.
CHUNK_BYTES_MAX: Final = 64 * 1024**2
# A 128K-token prompt of a 70B GQA model is about 40 GB; twice that is a bug or an attack.
TRANSFER_BYTES_MAX: Final = 80 * 1024**3
# A million tokens of an 80-layer model on a grid of 512 tokens are 160,000 chunks. Also keeps the manifest (33 bytes
# a chunk) and the closing record (16 bytes a chunk) well inside one chunk.
CHUNKS_MAX: Final = 2**18
# The longest context announced by a public model is ten million tokens.
TOKENS_MAX: Final = 2**24
# Four times the deepest public model (126 layers).
LAYERS_MAX: Final = 512
# Keys, values, their scales, an index: nobody needs more than eight.
TENSORS_PER_LAYER_MAX: Final = 8
# One dimension of a tensor; the largest known is a fused convolution's channels, about 50,000.
DIMENSION_MAX: Final = 2**20
# Tensor names, dtypes and model types, in characters.
NAME_CHARS_MAX: Final = 64
# A manifest without its chunk list: a fingerprint (the longest rope description known is 5 KB) and a layout
# (100 layers are about 7 KB).
MANIFEST_HEAD_BYTES_MAX: Final = 128 * 1024


def check_size(what: str, value: object, maximum: int, *, minimum: int = 0) -> int:
    """Checks one size or count that came from the network, and returns it.

    Every such number passes here before anything is allocated or indexed by it.

    Args:
        what: its name, for the message ("payload_bytes").
        value: the number; anything but an int is refused too.
        maximum, minimum: inclusive.

    Raises:
        PeerError: `frame_too_large` over the maximum; `protocol_violation` under the minimum or not an integer.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise PeerError("protocol_violation", f"{what} must be an integer, not {type(value).__name__}", field=what)
    if value < minimum:
        raise PeerError("protocol_violation", f"{what} is {value}; at least {minimum} is needed", field=what)
    if value > maximum:
        raise PeerError("frame_too_large", f"{what} is {value}; the limit is {maximum}", field=what)
    return value
