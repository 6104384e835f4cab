"""Which decode worker probably still has which prefix: a bounded memory of block names, to estimate uncached tokens.

An estimate, never a promise: a worker may have evicted a block, and then it computes it again. No tokens are kept here.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

BLOCK_TOKENS: Final = 64
# 32-byte names and two dictionary entries: about 300 bytes each, so some 80 MB at the most.
BLOCKS_MAX: Final = 262_144


class PrefixIndex:
    """Least recently used (worker, block name) pairs. Names come from `kv.prefix.prefix_block_hashes`.

    Args:
        block_tokens: tokens of one block; blocks_max: pairs remembered, over all workers.
    """

    def __init__(self, block_tokens: int = BLOCK_TOKENS, blocks_max: int = BLOCKS_MAX) -> None:
        assert block_tokens >= 1
        assert blocks_max >= 1
        self.block_tokens = block_tokens
        self._blocks_max = blocks_max
        self._seen: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def cached_tokens(self, worker: str, names: Sequence[bytes]) -> int:
        """Tokens of the prefix that `worker` has seen, a multiple of `block_tokens`; refreshes what it finds."""
        found = 0
        for name in names:
            if (worker, name) not in self._seen:
                break
            found += 1
        self._touch(worker, names[:found])
        return found * self.block_tokens

    def remember(self, worker: str, names: Sequence[bytes]) -> None:
        """`worker` now has these blocks; more than `blocks_max` of one prompt: only its beginning counts."""
        self._touch(worker, names[: self._blocks_max])
        while len(self._seen) > self._blocks_max:
            self._seen.popitem(last=False)

    def forget_worker(self, worker: str) -> None:
        """It started anew, or serves other weights."""
        for key in [key for key in self._seen if key[0] == worker]:
            del self._seen[key]

    def _touch(self, worker: str, names: Sequence[bytes]) -> None:
        # From the end, so that a prefix outlives what follows it: without its beginning a block is of no use.
        for name in reversed(names):
            self._seen[worker, name] = None
            self._seen.move_to_end((worker, name))
