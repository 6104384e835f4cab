"""Choosing the next token from logits: penalties, filters, seeded draws, log-probabilities.

Not here: when a choice ends (`choice`). One sampler serves one choice and keeps its generator and token counts.
"""

from collections.abc import Sequence

import torch

from farfill.engines.api import SamplingParams, TokenLogprob
from farfill.errors import OperationError


class Sampler:
    """Takes one position's logits, returns the token; the same seed, parameters and logits give the same tokens.

    Order: logit_bias, forbidden ids, repetition, frequency and presence penalties; then greedy, or temperature, min_p,
    top_k, top_p and a draw. Greedy is argmax; at a tie the lowest id.

    Args:
        prompt_token_ids: for the repetition penalty.
        seed: of this choice's generator.
        forbidden_before_min: ids that may not be chosen before `min_tokens` (end of sequence, stop ids).
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
        seed: int,
        forbidden_before_min: Sequence[int],
    ) -> None:
        self._params = params
        self._forbidden = torch.tensor([i for i in forbidden_before_min if i < vocab_size], dtype=torch.long)
        self._generator = torch.Generator().manual_seed(seed)
        self._generated = 0
        bias = [(token_id, value) for token_id, value in params.logit_bias.items() if 0 <= token_id < vocab_size]
        self._bias_ids = torch.tensor([token_id for token_id, _ in bias], dtype=torch.long)
        self._bias = torch.tensor([value for _, value in bias], dtype=torch.float32)
        penalised = params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
        self._counts = torch.zeros(vocab_size, dtype=torch.float32) if penalised else None
        self._seen = torch.zeros(vocab_size, dtype=torch.bool) if params.repetition_penalty != 1 else None
        if self._seen is not None:
            self._seen[torch.tensor(list(prompt_token_ids), dtype=torch.long)] = True

    def sample(self, logits: torch.Tensor) -> tuple[int, TokenLogprob | None]:
        """`logits`: [vocabulary], float32; not changed.

        Raises:
            OperationError: `engine_failed` where the model has computed NaN.
        """
        if bool(torch.isnan(logits).any()):
            raise OperationError("engine_failed", "the model computed logits that are not numbers")
        token_id = self._choose(self._shaped(logits.clone()))
        self._generated += 1
        if self._counts is not None:
            self._counts[token_id] += 1
        if self._seen is not None:
            self._seen[token_id] = True
        return token_id, self._logprob(logits, token_id)

    def _shaped(self, logits: torch.Tensor) -> torch.Tensor:
        params = self._params
        if len(self._bias_ids):
            logits[self._bias_ids] += self._bias
        if self._generated < params.min_tokens and len(self._forbidden):
            logits[self._forbidden] = -torch.inf
        if self._seen is not None:
            factor = params.repetition_penalty
            logits = torch.where(self._seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
        if self._counts is not None:
            logits -= params.frequency_penalty * self._counts + params.presence_penalty * (self._counts > 0)
        return logits

    def _choose(self, logits: torch.Tensor) -> int:
        params = self._params
        if params.greedy:
            return int(torch.argmax(logits))
        probabilities = torch.softmax(logits / params.temperature, dim=-1)
        if params.min_p > 0:
            probabilities[probabilities < params.min_p * probabilities.max()] = 0
        if 0 < params.top_k < len(probabilities) or params.top_p < 1:
            ranked, ids = torch.sort(probabilities, descending=True, stable=True)
            if params.top_k > 0:
                ranked[params.top_k :] = 0
            if params.top_p < 1:  # keeps the fewest most likely tokens that together reach top_p, at least one
                ranked /= ranked.sum()
                ranked[torch.cumsum(ranked, dim=-1) - ranked >= params.top_p] = 0
            return int(ids[torch.multinomial(ranked, 1, generator=self._generator)])
        return int(torch.multinomial(probabilities, 1, generator=self._generator))

    def _logprob(self, logits: torch.Tensor, token_id: int) -> TokenLogprob | None:
        if self._params.logprobs is None:
            return None
        logprobs = torch.log_softmax(logits, dim=-1)
        values, ids = torch.topk(logprobs, self._params.logprobs)
        top = tuple((int(index), float(value)) for index, value in zip(ids, values, strict=True))
        return TokenLogprob(token_id, float(logprobs[token_id]), top)
