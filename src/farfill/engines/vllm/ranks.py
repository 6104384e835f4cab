"""The tensor-parallel ranks of one vLLM: what each holds of a layer's heads, and moving rows between them and rank 0.

Rank 0 has the transfers; the others have only their part of the cache. All ranks run the same steps with the same plan,
so that each of them comes to each exchange, in the same order; whatever goes wrong on one rank must not keep it away.
Not here: anything that crosses a link.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed


@dataclass(frozen=True, slots=True)
class Ranks:
    """`group` exchanges CPU tensors; `root` is rank 0's global number. None, where there is one rank only."""

    rank: int = 0
    size: int = 1
    group: Any = None
    root: int = 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def heads(self, total: int, rank: int | None = None) -> tuple[int, int]:
        """The half-open range of a layer's KV heads that a rank (this one) holds; several ranks may hold one."""
        rank = self.rank if rank is None else rank
        count = max(1, total // self.size)
        start = rank * total // self.size
        return start, start + count

    def gather(self, part: torch.Tensor) -> list[torch.Tensor] | None:
        """Every rank's part (all of one size, uint8), in order of rank; None on the other ranks."""
        if self.size == 1:
            return [part]
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.is_first else None
        torch.distributed.gather(part, parts, dst=self.root, group=self.group)
        return parts

    def broadcast(self, payload: torch.Tensor) -> None:
        """Rank 0's bytes (uint8) into the other ranks' tensor of the same size."""
        if self.size > 1:
            torch.distributed.broadcast(payload, src=self.root, group=self.group)


def own_ranks() -> Ranks:
    """Those of the vLLM worker that this process is."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return Ranks(group.rank_in_group, group.world_size, group.cpu_group, group.ranks[0])
