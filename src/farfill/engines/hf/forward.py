"""Running the model: one sequence, one forward at a time.

The batch is always one, on purpose: then a request's numbers do not depend on who else is being served, and a prefill
leg, a decode leg and a local run agree bit for bit. Throughput on a CPU gains little from batching prompts; a server
that needs it runs vLLM. Not here: in which order requests take turns (`scheduler`).
"""

from collections.abc import Sequence

import torch
from transformers import Cache, PreTrainedModel

from farfill.engines.hf.cache_io import new_cache


class Forward:
    """Not safe for several threads at once. Caches passed in are extended in place."""

    def __init__(self, network: PreTrainedModel) -> None:
        self._network = network
        self.config = network.config
        self.vocab_size = int(network.get_output_embeddings().weight.shape[0])  # type: ignore[no-untyped-call]

    def new_cache(self) -> Cache:
        return new_cache(self.config)

    def extend(self, cache: Cache, token_ids: Sequence[int], start: int) -> None:
        """Computes the cache of `token_ids`, the first of which stands at position `start`; no logits."""
        self._network.base_model(
            input_ids=torch.tensor([token_ids], dtype=torch.long),
            position_ids=torch.arange(start, start + len(token_ids))[None],
            cache=cache,
            use_cache=True,
        )

    def next_logits(self, cache: Cache, token_id: int, position: int) -> torch.Tensor:
        """Computes one token and returns the logits for the token after it: [vocabulary], float32."""
        output = self._network(
            input_ids=torch.tensor([[token_id]], dtype=torch.long),
            position_ids=torch.tensor([[position]]),
            cache=cache,
            use_cache=True,
        )
        logits: torch.Tensor = output.logits[0, -1].float()
        return logits
