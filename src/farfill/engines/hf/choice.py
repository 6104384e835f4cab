"""One choice of a generation: from logits to token to text, and when it ends.

Not here: running the model. A choice is told logits and answers with events.
"""

from collections.abc import Sequence
from typing import Final

import torch

from farfill.engines.api import (
    ChoiceFinished,
    EngineEvent,
    FinishReason,
    SamplingParams,
    TokenLogprob,
    TokensGenerated,
)
from farfill.engines.hf.detokenize import StopStrings
from farfill.engines.hf.sampling import Sampler
from farfill.engines.hf.tokenizer import HfTokenizer

_SEED_MODULUS: Final = 2**64


class Choice:
    """Attributes: `token_ids` generated so far; `finished`.

    Args:
        index: of the choice in its request.
        seed: the request's; the choice draws with `seed + index`.
        tokens_max: after so many tokens it ends with "length".
    """

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        tokenizer: HfTokenizer,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        seed: int,
        tokens_max: int,
    ) -> None:
        self.token_ids: list[int] = []
        self.finished = False
        self._index = index
        self._params = params
        self._tokens_max = tokens_max
        self._eos = frozenset() if params.ignore_eos else eos_token_ids
        forbidden = sorted(self._eos.union(params.stop_token_ids))
        self._sampler = Sampler(params, prompt_token_ids, vocab_size, (seed + index) % _SEED_MODULUS, forbidden)
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens)
        self._stops = StopStrings(params.stop, include_stop=params.include_stop)

    def take(self, logits: torch.Tensor) -> list[EngineEvent]:
        """Chooses the next token from one position's logits ([vocabulary], float32); at most one event is terminal."""
        token_id, logprob = self._sampler.sample(logits)
        self.token_ids.append(token_id)
        # Checked only where the token may end the choice; min_tokens also forbids sampling these ids before.
        if token_id in self._eos or token_id in self._params.stop_token_ids:
            stop_reason = None if token_id in self._eos else token_id
            return self._finish(token_id, "", logprob, "stop", stop_reason)
        text = self._detokenizer.push(token_id)
        if len(self.token_ids) >= self._params.min_tokens:
            text, stop = self._stops.push(text)
            if stop is not None:
                self.finished = True
                return [self._tokens(token_id, text, logprob), ChoiceFinished(self._index, "", "stop", stop)]
        if len(self.token_ids) >= self._tokens_max:
            return self._finish(token_id, text, logprob, "length", None)
        return [self._tokens(token_id, text, logprob)]

    def _finish(
        self,
        token_id: int,
        text: str,
        logprob: TokenLogprob | None,
        reason: FinishReason,
        stop_reason: str | int | None,
    ) -> list[EngineEvent]:
        self.finished = True
        tail = self._detokenizer.flush()
        if len(self.token_ids) >= self._params.min_tokens:
            tail, stop = self._stops.push(tail)  # what was held back of a character may complete a stop string
            if stop is None:
                tail += self._stops.flush()
            else:
                reason, stop_reason = "stop", stop
        return [self._tokens(token_id, text, logprob), ChoiceFinished(self._index, tail, reason, stop_reason)]

    def _tokens(self, token_id: int, text: str, logprob: TokenLogprob | None) -> TokensGenerated:
        return TokensGenerated(self._index, (token_id,), text, None if logprob is None else (logprob,))
