"""The embedded engine: Hugging Face Transformers on CPU, behind `farfill.engines.api.Engine`.

Not fast, and not meant to be: it is the default where nothing else is installed, and the reference for correctness.
Requests take turns of one forward pass each, always with batch size one, so that the numbers of a request do not depend
on who else runs; local, prefill and decode runs on the same grid agree bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from farfill.engines.api import EngineInfo, EngineStats, GenerationRequest, OnEvent, PrefillRequest
from farfill.engines.hf.model import LoadedModel, load_model
from farfill.engines.hf.prefix_cache import PrefixCache
from farfill.engines.hf.scheduler import Scheduler, Task
from farfill.engines.hf.tokenizer import HfTokenizer
from farfill.engines.hf.work import Held, Totals, Work
from farfill.errors import ClientError, PeerError
from farfill.kv.plan import plan_chunks


@dataclass(frozen=True, slots=True)
class HfEngineConfig:
    """What an operator may tune.

    Attributes:
        chunk_tokens: the engine's own grid. Larger computes a little faster; smaller streams sooner and lets other
            requests take their turns sooner.
        running_max: requests that take turns; each holds a cache of up to the model's maximum length.
        waiting_max: requests that wait; one more is refused with `queue_full`.
        prefix_cache_bytes_max: 0 switches the prefix cache off.
        threads: PyTorch's threads for one operation. Sites that must agree bit for bit use the same number.
    """

    chunk_tokens: int = 256
    running_max: int = 8
    waiting_max: int = 64
    prefix_cache_bytes_max: int = 256 * 1024**2
    threads: int = 1


class HfEngine:
    """Implements `Engine`. Its thread starts at once; `stop` ends it."""

    def __init__(self, model: LoadedModel, config: HfEngineConfig | None = None) -> None:
        config = config or HfEngineConfig()
        self._model = model
        self._totals = Totals()
        self._prefix_cache = PrefixCache(model.layout, config.prefix_cache_bytes_max)
        self._work = Work(model, self._prefix_cache, config.chunk_tokens, self._totals)
        self._info = EngineInfo(
            engine="hf",
            model=model.name,
            max_model_len=model.max_model_len,
            chunk_tokens=config.chunk_tokens,
            layout=model.layout,
            fingerprint=model.fingerprint,
            eos_token_ids=model.eos_token_ids,
        )
        self._scheduler = Scheduler(
            running_max=config.running_max, waiting_max=config.waiting_max, threads=config.threads
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def tokenizer(self) -> HfTokenizer:
        return self._model.tokenizer

    def generate(self, request: GenerationRequest, on_event: OnEvent) -> None:
        self._check_prompt(request.prompt_token_ids)
        prompt_tokens, asked = len(request.prompt_token_ids), request.sampling.max_tokens
        if prompt_tokens + (asked or 1) > self._model.max_model_len:
            raise ClientError(
                "context_length_exceeded",
                f"{prompt_tokens} prompt tokens and {asked or 1} to generate are more than the model's maximum of"
                f" {self._model.max_model_len}",
                field="prompt" if prompt_tokens >= self._model.max_model_len else "max_tokens",
            )
        if request.chunk_tokens is not None and request.chunk_tokens < 1:
            raise ClientError("invalid_request", "chunk_tokens must be at least 1", field="chunk_tokens")
        imported = request.imported
        if imported is not None and imported.prefix_tokens != prompt_tokens - 1:
            raise PeerError(
                "prompt_mismatch",
                f"the transferred cache is of {imported.prefix_tokens} tokens, this prompt's prefix has"
                f" {prompt_tokens - 1}",
            )
        held = Held(imported)
        self._scheduler.submit(
            Task(request.request_id, on_event, held, lambda: self._work.generate(request, on_event, held))
        )

    def prefill(self, request: PrefillRequest, on_event: OnEvent) -> None:
        self._check_prompt(request.prompt_token_ids)
        prompt_tokens, held = len(request.prompt_token_ids), Held()
        if prompt_tokens < 2:
            raise ClientError(
                "invalid_request", "a prompt of one token has no prefix to compute elsewhere", field="prompt"
            )
        if prompt_tokens > self._model.max_model_len:
            raise ClientError(
                "context_length_exceeded",
                f"{prompt_tokens} prompt tokens are more than the model's maximum of {self._model.max_model_len}",
                field="prompt",
            )
        plan_chunks(self._model.layout, prompt_tokens - 1, request.chunk_tokens)  # refuses an impossible grid now
        self._scheduler.submit(
            Task(request.request_id, on_event, held, lambda: self._work.prefill(request, on_event, held))
        )

    def _check_prompt(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise ClientError("empty_prompt", "the prompt has no tokens", field="prompt")
        if not all(0 <= token_id < self._work.vocab_size for token_id in token_ids):
            raise ClientError("invalid_request", f"token ids must be in [0, {self._work.vocab_size})", field="prompt")

    def abort(self, request_id: str) -> None:
        self._scheduler.abort(request_id)

    def stop(self, drain_s: float = 0.0) -> None:
        self._scheduler.stop(drain_s)
        self._prefix_cache.clear()

    def stats(self) -> EngineStats:
        running, waiting, cache_bytes = self._scheduler.counts()
        totals, ended = self._totals, self._scheduler.ended
        return EngineStats(
            running=running,
            waiting=waiting,
            prefill_tokens_total=totals.prefill_tokens,
            decode_tokens_total=totals.decode_tokens,
            imported_tokens_total=totals.imported_tokens,
            cached_tokens_total=totals.cached_tokens,
            cache_bytes=cache_bytes,
            prefix_cache_bytes=self._prefix_cache.bytes_held,
            finished_total=ended.finished,
            failed_total=ended.failed,
            aborted_total=ended.aborted,
        )


def open_engine(
    folder: Path,
    config: HfEngineConfig | None = None,
    *,
    name: str | None = None,
    dtype: str = "float32",
    max_model_len: int | None = None,
) -> HfEngine:
    """Loads a model folder (see `load_model`) and starts an engine on it."""
    return HfEngine(load_model(folder, name=name, dtype=dtype, max_model_len=max_model_len), config)
