"""A whole, working engine over `tiny_model`: fast, deterministic, no torch. It implements `farfill.engines.api.Engine`.

Greedy tokens depend on every byte of the cache. Sampled ones depend on the seed too. Penalties have no effect.

    engine = TinyEngine()                      # the thread starts at once
    engine.generate(GenerationRequest("r1", [256, 104, 105], SamplingParams(temperature=0)), print)
    engine.stop()

`before_step(request_id, phase)` is called on the engine's thread before each step ("prefill" or "decode"), so that a
test can hold the engine at an exact point by waiting on an event of its own.
"""

import hashlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tiny_model import EOS, LAYOUT, VOCAB_SIZE, TinyCache, TinyDetokenizer, TinyTokenizer

from farfill.engines.api import (
    ChoiceFinished,
    EngineInfo,
    EngineStats,
    FinishReason,
    GenerationRequest,
    OnEvent,
    PrefillCompleted,
    PrefillRequest,
    RequestAborted,
    RequestFailed,
    RequestFinished,
    RequestStarted,
    SamplingParams,
    TokenLogprob,
    TokensGenerated,
    Usage,
)
from farfill.errors import ClientError, FarfillError, LocalProtocolError, OverloadError, PeerError
from farfill.kv.fingerprint import Convertible, Fingerprint, Informational, MustEqual
from farfill.kv.layout import layout_digest
from farfill.kv.plan import plan_chunks

_Key = tuple[str, tuple[int, ...]]  # the cache salt and the tokens
BeforeStep = Callable[[str, Literal["prefill", "decode"]], None]


@dataclass(slots=True, eq=False)
class _Choice:
    index: int
    cache: TinyCache
    detokenizer: TinyDetokenizer
    seed: int
    tokens: list[int] = field(default_factory=list)
    held: str = ""
    done: bool = False


@dataclass(slots=True, eq=False)
class _Job:
    request: GenerationRequest | PrefillRequest
    on_event: OnEvent
    cache: TinyCache
    cached_tokens: int = 0
    imported_tokens: int = 0
    computed_tokens: int = 0
    next_chunk: int = 0
    choices: list[_Choice] = field(default_factory=list)
    aborted: bool = False
    started: bool = False

    @property
    def prefix(self) -> Sequence[int]:
        return self.request.prompt_token_ids[:-1]


class TinyEngine:
    """See the module. `model_seed` stands for the weights: it goes into the fingerprint and into the first state."""

    def __init__(
        self,
        *,
        model: str = "tiny",
        model_seed: str = "weights-1",
        max_model_len: int = 4096,
        chunk_tokens: int = 16,
        max_running: int = 8,
        max_waiting: int = 64,
        prefix_cache: bool = False,
        before_step: BeforeStep | None = None,
    ) -> None:
        self.info = EngineInfo(
            engine="tiny",
            model=model,
            max_model_len=max_model_len,
            chunk_tokens=chunk_tokens,
            layout=LAYOUT,
            fingerprint=_fingerprint(model, model_seed, max_model_len),
            eos_token_ids=frozenset({EOS}),
        )
        self.tokenizer = TinyTokenizer()
        self._first_state = hashlib.blake2b(model_seed.encode(), digest_size=32).digest()
        self._limits = (max_running, max_waiting)
        self._before_step = before_step or (lambda request_id, phase: None)
        self._prefixes: OrderedDict[_Key, TinyCache] | None = OrderedDict() if prefix_cache else None
        self._changed = threading.Condition()
        self._jobs: dict[str, _Job] = {}  # in order of arrival; the first max_running of them run
        self.has_aborted_all = threading.Event()  # for tests: `stop` has come to its end
        self._accepting = True
        self._stopping = False
        self._totals = dict.fromkeys(("prefill", "decode", "imported", "cached", "finished", "failed", "aborted"), 0)
        self._thread = threading.Thread(target=self._run, name="tiny-engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------ Engine's methods

    def generate(self, request: GenerationRequest, on_event: OnEvent) -> None:
        sampling, prompt = request.sampling, request.prompt_token_ids
        self._check_prompt(prompt, 1 if sampling.max_tokens is None else sampling.max_tokens)
        imported = request.imported
        if imported is not None:
            if imported.prefix_tokens != len(prompt) - 1:
                raise PeerError("prompt_mismatch", f"{imported.prefix_tokens} tokens came for {len(prompt)} of prompt")
            grid = max(chunk.token_stop - chunk.token_start for chunk in imported.plan)
            if tuple(imported.plan) != plan_chunks(LAYOUT, imported.prefix_tokens, request.chunk_tokens or grid):
                raise PeerError("layout_mismatch", "the transfer's chunks are not this model's")
        self._accept(_Job(request, on_event, TinyCache(state=self._first_state)))

    def prefill(self, request: PrefillRequest, on_event: OnEvent) -> None:
        self._check_prompt(request.prompt_token_ids, 1)
        if len(request.prompt_token_ids) < 2:
            raise ClientError("invalid_request", "a prompt of one token has no prefix to prefill", field="prompt")
        self._accept(_Job(request, on_event, TinyCache(state=self._first_state)))

    def abort(self, request_id: str) -> None:
        with self._changed:
            if request_id in self._jobs:
                self._jobs[request_id].aborted = True
                self._changed.notify_all()

    def stop(self, drain_s: float = 0.0) -> None:
        until = time.monotonic() + drain_s
        with self._changed:
            self._accepting = False
            self._changed.wait_for(lambda: not self._jobs, timeout=max(0.0, until - time.monotonic()))
            for job in self._jobs.values():
                job.aborted = True
            self._stopping = True
            self._changed.notify_all()
        self.has_aborted_all.set()
        self._thread.join()

    def stats(self) -> EngineStats:
        with self._changed:
            running = min(len(self._jobs), self._limits[0])
            return EngineStats(
                running=running,
                waiting=len(self._jobs) - running,
                prefill_tokens_total=self._totals["prefill"],
                decode_tokens_total=self._totals["decode"],
                imported_tokens_total=self._totals["imported"],
                cached_tokens_total=self._totals["cached"],
                cache_bytes=sum(_held_bytes(job) for job in self._jobs.values() if job.started),
                prefix_cache_bytes=sum(cache.held_bytes for cache in (self._prefixes or {}).values()),
                finished_total=self._totals["finished"],
                failed_total=self._totals["failed"],
                aborted_total=self._totals["aborted"],
            )

    def wait_idle(self, timeout_s: float = 30.0) -> bool:
        """For tests: blocks until no request is left; whether that came within `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, timeout=timeout_s)

    # --------------------------------------------------------------------------------------------------------- inside

    def _check_prompt(self, prompt: Sequence[int], wanted_tokens: int) -> None:
        if not prompt:
            raise ClientError("empty_prompt", "the prompt must not be empty", field="prompt")
        if any(not 0 <= token < VOCAB_SIZE for token in prompt):
            raise ClientError("invalid_request", f"prompt token ids must be under {VOCAB_SIZE}", field="prompt")
        if len(prompt) + wanted_tokens > self.info.max_model_len:
            raise ClientError(
                "context_length_exceeded",
                f"the model's maximum length is {self.info.max_model_len} tokens; the prompt has {len(prompt)} and "
                f"{wanted_tokens} more are asked for",
                field="prompt",
            )

    def _accept(self, job: _Job) -> None:
        with self._changed:
            if not self._accepting:
                raise OverloadError("draining", "the engine is stopping")
            if job.request.request_id in self._jobs:
                raise ClientError("invalid_request", "the request id is in use", field="request_id")
            if len(self._jobs) >= sum(self._limits):
                raise OverloadError("queue_full", "the engine's queue is full", retry_after_s=1.0)
            self._jobs[job.request.request_id] = job
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._jobs) or self._stopping)
                if not self._jobs:
                    return
                running = list(self._jobs.values())[: self._limits[0]]
                doomed = [job for job in self._jobs.values() if job.aborted and job not in running]
            for job in doomed:
                self._end(job, RequestAborted(), "aborted")
            for job in running:
                try:
                    self._step(job)
                except FarfillError as error:
                    self._end(job, RequestFailed(error), "failed")
                except Exception as error:  # noqa: BLE001 - the request ends loudly, the engine goes on
                    self._end(job, RequestFailed(LocalProtocolError(repr(error))), "failed")

    def _step(self, job: _Job) -> None:
        request = job.request
        if not job.aborted:
            self._before_step(request.request_id, "decode" if job.choices else "prefill")
        if job.aborted:
            self._end(job, RequestAborted(), "aborted")
        elif not job.started:
            job.started = True
            job.on_event(RequestStarted())
            if isinstance(request, GenerationRequest) and request.imported is not None:
                for chunk in request.imported.plan:
                    job.cache.take(chunk, request.imported.payload(chunk.index))
                job.imported_tokens = job.cache.tokens
                job.cached_tokens = request.imported.cached_tokens
                self._totals["imported"] += job.imported_tokens
                self._keep(job)
            elif self._prefixes is not None:
                self._reuse(job, self._prefixes)
        elif job.cache.tokens < len(job.prefix) or (isinstance(request, PrefillRequest) and not job.choices):
            self._prefill_step(job)
        elif not job.choices:
            assert isinstance(request, GenerationRequest)
            self._begin_decoding(job, request)
        else:
            assert isinstance(request, GenerationRequest)
            for choice in [choice for choice in job.choices if not choice.done]:
                self._decode_step(job, request.sampling, choice)
            if all(choice.done for choice in job.choices):
                completed = sum(len(choice.tokens) for choice in job.choices)
                self._end(
                    job,
                    RequestFinished(Usage(len(request.prompt_token_ids), completed, job.cached_tokens)),
                    "finished",
                )

    def _reuse(self, job: _Job, prefixes: OrderedDict[_Key, TinyCache]) -> None:
        tokens, salt, grid = tuple(job.prefix), job.request.cache_salt, self.info.chunk_tokens
        for length in (len(tokens), *range(len(tokens) // grid * grid, 0, -grid)):
            if (salt, tokens[:length]) in prefixes:
                job.cache = prefixes[salt, tokens[:length]].copy()
                job.cached_tokens = length
                self._totals["cached"] += length
                return

    def _keep(self, job: _Job) -> None:
        if self._prefixes is None or not job.cache.tokens:
            return
        self._prefixes[job.request.cache_salt, tuple(job.prefix[: job.cache.tokens])] = job.cache.copy()
        while len(self._prefixes) > 256:
            self._prefixes.popitem(last=False)

    def _prefill_step(self, job: _Job) -> None:
        request, prefix = job.request, job.prefix
        grid = request.chunk_tokens or self.info.chunk_tokens
        if isinstance(request, PrefillRequest) and job.cached_tokens and job.next_chunk == 0:
            # A cached prefix is published from its own snapshots: compute it again, so that each chunk is exported
            # where the cache stands at its end. Only the accounting says "cached".
            job.cache = TinyCache(state=self._first_state)
        stop = min(len(prefix), (job.cache.tokens // grid + 1) * grid)
        while job.cache.tokens < stop:
            if job.cache.tokens >= job.cached_tokens:
                job.computed_tokens += 1
                self._totals["prefill"] += 1
            job.cache.advance(prefix[job.cache.tokens])
        if stop % self.info.chunk_tokens == 0 or stop == len(prefix):
            self._keep(job)
        if not isinstance(request, PrefillRequest):
            return
        plan = plan_chunks(LAYOUT, len(prefix), grid)
        done = stop == len(prefix)
        while job.next_chunk < len(plan) and (done or plan[job.next_chunk].token_stop <= stop):
            chunk = plan[job.next_chunk]
            job.next_chunk += 1
            request.sink.publish(chunk, memoryview(job.cache.export(chunk)))
        if done:
            job.on_event(PrefillCompleted(job.computed_tokens, job.cached_tokens, 0))
            request.sink.finish(job.cached_tokens)
            usage = Usage(len(request.prompt_token_ids), 0, job.cached_tokens)
            self._end(job, RequestFinished(usage), "finished")

    def _begin_decoding(self, job: _Job, request: GenerationRequest) -> None:
        job.on_event(PrefillCompleted(job.computed_tokens, job.cached_tokens, job.imported_tokens))
        job.cache.advance(request.prompt_token_ids[-1])
        seed = secrets.randbits(63) if request.sampling.seed is None else request.sampling.seed
        for index in range(request.sampling.n):
            detokenizer = TinyDetokenizer(request.sampling.skip_special_tokens)
            job.choices.append(_Choice(index, job.cache.copy(), detokenizer, seed + index))
        job.cache = TinyCache(job.cache.tokens)

    def _decode_step(self, job: _Job, sampling: SamplingParams, choice: _Choice) -> None:
        banned: set[int] = set() if not sampling.ignore_eos else {EOS}
        if len(choice.tokens) < sampling.min_tokens:
            banned |= {EOS, *sampling.stop_token_ids}
        candidates = [(token, logprob) for token, logprob in choice.cache.candidates() if token not in banned]
        token, logprob = candidates[0]
        if sampling.temperature > 0:
            draw = hashlib.blake2b(f"{choice.seed}/{len(choice.tokens)}".encode(), digest_size=8).digest()
            token, logprob = candidates[draw[0] % min(4, len(candidates))]
        choice.tokens.append(token)
        self._totals["decode"] += 1
        choice.cache.advance(token)
        ends = token == EOS and not sampling.ignore_eos
        stop_id = token in sampling.stop_token_ids and len(choice.tokens) >= sampling.min_tokens
        new = "" if ends or stop_id else choice.detokenizer.push(token)
        logprobs = None
        if sampling.logprobs is not None:
            logprobs = (TokenLogprob(token, logprob, tuple(candidates[: sampling.logprobs])),)
        choice.held += new
        finish: FinishReason | None = "stop" if ends or stop_id else None
        reason: str | int | None = token if stop_id and not ends else None
        matched = _first_stop(choice.held, sampling.stop) if len(choice.tokens) >= sampling.min_tokens else None
        if finish is None and matched is not None:
            position, stop = matched
            choice.held = choice.held[: position + (len(stop) if sampling.include_stop else 0)]
            finish, reason = "stop", stop
        full = job.cache.tokens + len(choice.tokens) >= self.info.max_model_len
        if finish is None and (full or len(choice.tokens) == sampling.max_tokens):
            finish = "length"
        if finish is not None and not isinstance(reason, str):
            choice.held += choice.detokenizer.flush()
        keep = 0 if finish else max((len(stop) - 1 for stop in sampling.stop), default=0)
        ready = choice.held[: len(choice.held) - keep] if keep else choice.held
        choice.held = choice.held[len(ready) :]
        if finish is None:
            job.on_event(TokensGenerated(choice.index, (token,), ready, logprobs))
            return
        job.on_event(TokensGenerated(choice.index, (token,), "", logprobs))
        job.on_event(ChoiceFinished(choice.index, ready, finish, reason))
        choice.done = True
        choice.cache = TinyCache()

    def _end(self, job: _Job, event: RequestFinished | RequestFailed | RequestAborted, total: str) -> None:
        """Frees everything, then tells: when the terminal event is out, nothing of the request is held."""
        request = job.request
        if isinstance(request, GenerationRequest) and request.imported is not None:
            request.imported.release()
        with self._changed:
            del self._jobs[request.request_id]
            self._totals[total] += 1
            self._changed.notify_all()
        job.on_event(event)


def _held_bytes(job: _Job) -> int:
    return job.cache.held_bytes + sum(choice.cache.held_bytes for choice in job.choices)


def _first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    return min(found) if found else None


def _fingerprint(model: str, model_seed: str, max_model_len: int) -> Fingerprint:
    weights = hashlib.sha256(model_seed.encode()).hexdigest()
    return Fingerprint(
        MustEqual(
            weights_digest=weights,
            tokenizer_digest=hashlib.sha256(b"bytes").hexdigest(),
            chat_template_digest=hashlib.sha256(b"turns").hexdigest(),
            architecture="tiny",
            rope="{}",
            layout_digest=layout_digest(LAYOUT),
            dtype="int8",
            kv_dtype="int8",
        ),
        Convertible(max_model_len=max_model_len),
        Informational(engine="tiny", engine_version="1", model=model),
    )
