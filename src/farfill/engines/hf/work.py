"""What the engine does for one request, as a generator: at each `yield` another request may take its turn.

Between two yields there is at most one forward pass, or one slice of an import. Closing the generator ends the work;
what it held goes with it. Not here: turns, queues, aborts and terminal events (`scheduler`).
"""

import secrets
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Final

from transformers import Cache

from farfill.engines.api import (
    GenerationRequest,
    ImportedCache,
    OnEvent,
    PrefillCompleted,
    PrefillRequest,
    RequestStarted,
    SamplingParams,
    Usage,
)
from farfill.engines.hf.cache_io import CacheExporter, CacheImporter, cache_bytes, clone_cache
from farfill.engines.hf.choice import Choice
from farfill.engines.hf.forward import Forward
from farfill.engines.hf.model import LoadedModel
from farfill.engines.hf.prefix_cache import PrefixCache
from farfill.kv.plan import plan_chunks

# Copied between two turns of other requests: some milliseconds, like a decode step.
IMPORT_SLICE_BYTES: Final = 32 * 1024**2

Steps = Generator[None, None, Usage]


@dataclass(slots=True)
class Totals:
    """Counts since the engine's start. Written by its thread only."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    imported_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class Held:
    """What one request holds now: its caches, and the transfer that it still reads."""

    imported: ImportedCache | None = None
    caches: list[Cache] = field(default_factory=list)
    importer: CacheImporter | None = None

    def release_imported(self) -> None:
        imported, self.imported = self.imported, None
        if imported is not None:
            imported.release()

    def let_go(self) -> None:
        self.caches, self.importer = [], None
        self.release_imported()

    def bytes_held(self) -> int:
        importing = 0 if self.importer is None else self.importer.bytes_held
        return importing + sum(cache_bytes(cache) for cache in self.caches)


class Work:
    """Makes the generators. One for each engine, used by its thread only."""

    def __init__(self, model: LoadedModel, prefix_cache: PrefixCache, chunk_tokens: int, totals: Totals) -> None:
        self._model = model
        self._forward = Forward(model.network)
        self._prefix_cache = prefix_cache
        self._chunk_tokens = chunk_tokens
        self._totals = totals

    @property
    def vocab_size(self) -> int:
        return self._forward.vocab_size

    def prefill(self, request: PrefillRequest, emit: OnEvent, held: Held) -> Steps:
        """Computes all tokens but the last and publishes each chunk after the step that completed it."""
        emit(RequestStarted())
        prefix = request.prompt_token_ids[:-1]
        layout, sink = self._model.layout, request.sink
        exporter = CacheExporter(layout)
        plan = plan_chunks(layout, len(prefix), request.chunk_tokens)
        published = 0

        def publish(cache: Cache, tokens: int) -> None:
            nonlocal published
            exporter.check(cache, tokens)
            while published < len(plan):
                chunk = plan[published]
                # States come last in the plan and hold at the prefix's end only.
                if tokens < (len(prefix) if chunk.is_state else chunk.token_stop):
                    break
                sink.publish(chunk, exporter.chunk(cache, chunk, tokens))
                published += 1

        cached_tokens = yield from self._prefix(prefix, request.chunk_tokens, request.cache_salt, held, publish)
        assert published == len(plan), (published, len(plan))
        sink.finish(cached_tokens)
        emit(PrefillCompleted(len(prefix) - cached_tokens, cached_tokens, 0))
        return Usage(len(request.prompt_token_ids), 0, cached_tokens)

    def generate(self, request: GenerationRequest, emit: OnEvent, held: Held) -> Steps:
        """The prefix, by import or on the grid; the last prompt token alone; then each choice's tokens in turn."""
        emit(RequestStarted())
        prompt, params = request.prompt_token_ids, request.sampling
        prefix = prompt[:-1]
        if held.imported is not None:
            cached_tokens = held.imported.cached_tokens
            yield from self._import(held.imported, request, held)
            emit(PrefillCompleted(0, cached_tokens, len(prefix)))
        else:
            grid = request.chunk_tokens or self._chunk_tokens
            cached_tokens = yield from self._prefix(prefix, grid, request.cache_salt, held, lambda cache, tokens: None)
            emit(PrefillCompleted(len(prefix) - cached_tokens, cached_tokens, 0))
        logits = self._forward.next_logits(held.caches[0], prompt[-1], len(prefix))
        self._totals.prefill_tokens += 1
        choices = self._choices(prompt, params)
        running: list[tuple[Choice, Cache]] = []
        for choice in choices:
            for event in choice.take(logits):
                emit(event)
            if not choice.finished:
                running.append((choice, clone_cache(held.caches[0]) if params.n > 1 else held.caches[0]))
        held.caches = [cache for _, cache in running]
        self._totals.decode_tokens += len(choices)
        while running:
            for choice, cache in running:
                yield
                position = len(prompt) + len(choice.token_ids) - 1
                logits = self._forward.next_logits(cache, choice.token_ids[-1], position)
                self._totals.decode_tokens += 1
                for event in choice.take(logits):
                    emit(event)
            running = [(choice, cache) for choice, cache in running if not choice.finished]
            held.caches = [cache for _, cache in running]
        return Usage(len(prompt), sum(len(choice.token_ids) for choice in choices), cached_tokens)

    def _choices(self, prompt: Sequence[int], params: SamplingParams) -> list[Choice]:
        model = self._model
        seed = secrets.randbits(62) if params.seed is None else params.seed
        room = model.max_model_len - len(prompt)
        tokens_max = room if params.max_tokens is None else min(room, params.max_tokens)
        return [
            Choice(i, params, prompt, model.tokenizer, self.vocab_size, model.eos_token_ids, seed, tokens_max)
            for i in range(params.n)
        ]

    def _prefix(
        self, prefix: Sequence[int], grid: int, salt: str, held: Held, on_progress: Callable[[Cache, int], None]
    ) -> Generator[None, None, int]:
        """Computes `prefix` on the grid into `held.caches[0]`; returns how many tokens the prefix cache gave.

        `on_progress(cache, tokens)` is called after each step, with the tokens that the cache holds then.
        """
        found = self._prefix_cache.find(prefix, grid, salt)
        cache, done = found if found else (self._forward.new_cache(), 0)
        cached_tokens = done
        self._totals.cached_tokens += done
        held.caches = [cache]
        if done:
            on_progress(cache, done)
        while done < len(prefix):
            stop = min(done + grid, len(prefix))
            self._forward.extend(cache, prefix[done:stop], done)
            self._totals.prefill_tokens += stop - done
            done = stop
            on_progress(cache, done)
            # A cache that cannot be cut is also kept at the last border, where a longer prompt can go on from it.
            if done == len(prefix) or (not self._prefix_cache.can_cut and done == len(prefix) // grid * grid):
                self._prefix_cache.keep(prefix[:done], grid, cache, salt)
            yield
        return cached_tokens

    def _import(self, imported: ImportedCache, request: GenerationRequest, held: Held) -> Generator[None, None, None]:
        """Builds the cache into `held.caches[0]`; the prefix cache keeps it as it keeps a computed one."""
        importer = CacheImporter(self._forward.config, self._model.layout, imported.prefix_tokens)
        held.importer = importer
        slice_bytes = 0
        for chunk in imported.plan:
            importer.add(chunk, imported.payload(chunk.index))
            slice_bytes += chunk.payload_bytes
            if slice_bytes >= IMPORT_SLICE_BYTES:
                slice_bytes = 0
                yield
        held.caches, held.importer = [importer.finish()], None
        grid = request.chunk_tokens or self._chunk_tokens
        # The grid decides the numbers: a transfer on another one is not what would have been computed here.
        if tuple(imported.plan) == plan_chunks(self._model.layout, imported.prefix_tokens, grid):
            self._prefix_cache.keep(request.prompt_token_ids[:-1], grid, held.caches[0], request.cache_salt)
        held.release_imported()
        self._totals.imported_tokens += imported.prefix_tokens
