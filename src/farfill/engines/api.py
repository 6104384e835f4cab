"""What an engine is to the rest of farfill: requests in, events out, cache chunks across.

No engine lives here, no torch, no HTTP and no wire format. `engines/hf` implements it on Transformers; a worker
(`engines/serving`) drives any implementation of it.

A request's life in an engine:

1. `generate` or `prefill` checks the request and queues it, or raises. It never blocks. Once it has returned, exactly
   one terminal event (`RequestFinished`, `RequestFailed`, `RequestAborted`) will follow, and nothing after it.
2. Events come on the engine's own thread, in order, through the callback given with the request. The callback must
   not block and must not call the engine, except `abort`.
3. `abort` may be called from any thread, at any time, for any id; the request ends with `RequestAborted` unless
   another terminal event came first.
4. Whatever way a request ends, the engine has by then released its memory, its sink and its imported cache.

Numbers: an engine computes the prompt's tokens but the last on the `chunk_tokens` grid, and the last token alone. A
local run, a prefill leg and a decode leg with the same grid therefore compute the same numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from farfill.errors import ClientError, FarfillError
from farfill.kv.spec import CacheLayout, ChunkIndex, ChunkSpec

if TYPE_CHECKING:
    from farfill.kv.fingerprint import Fingerprint

GREEDY_BELOW: Final = 1e-5  # logits divided by less would overflow; vLLM draws the line at the same place
LOGPROBS_MAX: Final = 20  # OpenAI's own limit for top_logprobs
STOP_STRINGS_MAX: Final = 16  # OpenAI allows 4, vLLM any number; each costs a search per token
STOP_STRING_CHARS_MAX: Final = 1024
CACHE_SALT_CHARS_MAX: Final = 256  # room for any digest, and for whatever clients call their users
CHOICES_MAX: Final = 128  # OpenAI's own limit for n; each choice holds a cache of its own


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens, and when to stop. Checked when made.

    Attributes:
        max_tokens: at most so many tokens for each choice; None: up to the model's maximum length.
        min_tokens: end-of-sequence and stop ids cannot be chosen, nor stop strings matched, before so many tokens.
        temperature: 0 (or under GREEDY_BELOW) is greedy: exact argmax, the lowest id at a tie; `seed` and the filters
            play no part.
        top_p, top_k, min_p: filters on the distribution after temperature; top_k 0 or -1: off.
        seed: choice i draws from its own generator seeded with `seed + i`; None: a fresh random seed.
        stop: strings that end a choice; not part of the text unless `include_stop`.
        stop_token_ids: ids that end a choice, beside the model's end-of-sequence ids.
        ignore_eos: the model's end-of-sequence ids do not end a choice.
        logprobs: None: none; 0: the chosen token's; k: also the k most likely tokens' (at most LOGPROBS_MAX).
        n: choices.
        presence_penalty, frequency_penalty: OpenAI's, over generated tokens, in [-2, 2].
        repetition_penalty: over prompt and generated tokens, > 0; 1: off.
        logit_bias: added to the logits of these ids, in [-100, 100].
        skip_special_tokens: special tokens give no text.

    Raises:
        ClientError: `invalid_request`, naming the field and what is allowed.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    include_stop: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        limit = self.max_tokens
        _require(limit is None or limit >= 1, "max_tokens", "at least 1", limit)
        _require(self.min_tokens >= 0, "min_tokens", "at least 0", self.min_tokens)
        _require(limit is None or self.min_tokens <= limit, "min_tokens", "at most max_tokens", self.min_tokens)
        _require(0 <= self.temperature <= 100, "temperature", "in [0, 100]", self.temperature)
        _require(0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p)
        _require(self.top_k >= -1, "top_k", "at least -1", self.top_k)
        _require(0 <= self.min_p <= 1, "min_p", "in [0, 1]", self.min_p)
        _require(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer", self.seed)
        _require(len(self.stop) <= STOP_STRINGS_MAX, "stop", f"at most {STOP_STRINGS_MAX} strings", len(self.stop))
        lengths_ok = all(1 <= len(text) <= STOP_STRING_CHARS_MAX for text in self.stop)
        _require(lengths_ok, "stop", f"strings of 1 to {STOP_STRING_CHARS_MAX} characters", self.stop)
        _require(self.logprobs is None or 0 <= self.logprobs <= LOGPROBS_MAX, "logprobs", "in [0, 20]", self.logprobs)
        _require(1 <= self.n <= CHOICES_MAX, "n", f"in [1, {CHOICES_MAX}]", self.n)
        _require(-2 <= self.presence_penalty <= 2, "presence_penalty", "in [-2, 2]", self.presence_penalty)
        _require(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "in [-2, 2]", self.frequency_penalty)
        _require(0 < self.repetition_penalty <= 100, "repetition_penalty", "in (0, 100]", self.repetition_penalty)
        _require(all(-100 <= b <= 100 for b in self.logit_bias.values()), "logit_bias", "in [-100, 100]", "a value")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def _require(holds: bool, name: str, allowed: str, value: object) -> None:
    if not holds:
        raise ClientError("invalid_request", f"{name} must be {allowed}, not {value!r}", field=name)


# --------------------------------------------------------------------------------------------- cache, across the border


class ChunkSink(Protocol):
    """Where a prefill puts its chunks. Called on the engine's thread.

    An exception fails this prefill only: with that very error if it is a `FarfillError`, else with `internal_error`.
    """

    def publish(self, spec: ChunkSpec, payload: memoryview) -> None:
        """Takes one data chunk, in the plan's order. Must not block.

        `payload` has `spec.payload_bytes` bytes, format "B", read-only. The engine never changes it afterwards: the
        sink may keep it for as long as it likes, and drops it to free the memory.
        """

    def finish(self, cached_tokens: int) -> None:
        """Every chunk of the plan was published; `cached_tokens` of them came from the engine's prefix cache."""


class ImportedCache(Protocol):
    """A VERIFIED transfer, as the decode engine reads it. Each payload is read at most once, on the engine's thread."""

    @property
    def plan(self) -> Sequence[ChunkSpec]:
        """Every data chunk, in order: `kv.plan.plan_chunks(engine.info.layout, prefix_tokens, chunk_tokens)`."""

    @property
    def prefix_tokens(self) -> int:
        """Tokens whose cache this is: prompt tokens minus one."""

    @property
    def cached_tokens(self) -> int:
        """How many of them the prefill side took from its prefix cache."""

    def payload(self, index: ChunkIndex) -> memoryview:
        """The plaintext of data chunk `index`: `payload_bytes` bytes. The engine copies what it keeps."""

    def release(self) -> None:
        """The engine wants no more payloads. Called once for every accepted request, before its terminal event."""


# ------------------------------------------------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Generate from token ids.

    Attributes:
        request_id: unique among the requests in the engine.
        prompt_token_ids: at least 1.
        imported: the prefix's cache from a transfer; None: the engine computes it.
        chunk_tokens: the grid on which the prefix is computed; None: the engine's own.
        cache_salt: prefix caches are shared only among requests of the same one.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    imported: ImportedCache | None = None
    chunk_tokens: int | None = None
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """Compute the cache of all prompt tokens but the last (so at least 2), and publish it chunk by chunk.

    `cache_salt`: as `GenerationRequest`'s.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    chunk_tokens: int
    sink: ChunkSink
    cache_salt: str = ""


# --------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One generated token's log-probability (natural, of the model's distribution before temperature and filters).

    `top` has the most likely tokens, best first, as (token id, log-probability).
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """`cached_tokens` of `prompt_tokens` came from a prefix cache, here or at the prefill side."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """The request has left the queue; the engine is at work on it."""


@dataclass(frozen=True, slots=True)
class PrefillCompleted:
    """The prompt's prefix is there (computed, cached or imported); the first token comes next."""

    computed_tokens: int
    cached_tokens: int
    imported_tokens: int


@dataclass(frozen=True, slots=True)
class TokensGenerated:
    """New tokens of one choice. `text` may lag behind the tokens (half a character, a possible stop string)."""

    choice: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None


FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """One choice has ended.

    Attributes:
        text: the rest of its text, if some was held back.
        finish_reason: "stop": end of sequence, stop id or stop string; "length": max_tokens or the model's maximum.
        stop_reason: the stop string or stop id that matched; None for end of sequence and for "length".
    """

    choice: int
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """Terminal: all choices have ended, or every chunk is published and the sink's `finish` has returned."""

    usage: Usage


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """Terminal: this request cannot go on; others are not touched."""

    error: FarfillError


@dataclass(frozen=True, slots=True)
class RequestAborted:
    """Terminal: `abort` ended it."""


EngineEvent = (
    RequestStarted
    | PrefillCompleted
    | TokensGenerated
    | ChoiceFinished
    | RequestFinished
    | RequestFailed
    | RequestAborted
)
OnEvent = Callable[[EngineEvent], None]


# -------------------------------------------------------------------------------------------------------------- engines


class IncrementalDetokenizer(Protocol):
    """Token ids in, text out, never half a character. The pieces joined are the whole text's decoding."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str:
        """What is still held back; an incomplete character becomes U+FFFD."""


class Tokenizer(Protocol):
    """Safe to call from any thread."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Messages to token ids.

        Raises:
            ClientError: `invalid_request` where the model has no template or the template refuses the messages.
        """

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token stands for, special tokens by their name; not always whole UTF-8."""

    def detokenizer(self, *, skip_special_tokens: bool = True) -> IncrementalDetokenizer: ...


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What does not change while an engine lives.

    Attributes:
        engine: "hf", "synthetic", ...
        model: the name clients use.
        max_model_len: prompt and generated tokens together.
        chunk_tokens: the engine's own grid; local and remote runs agree exactly where they use the same one.
        layout: every state tensor of the model's cache.
        fingerprint: what two sides must agree on.
        eos_token_ids: ids that end a choice.
    """

    engine: str
    model: str
    max_model_len: int
    chunk_tokens: int
    layout: CacheLayout
    fingerprint: "Fingerprint"
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Totals count from the engine's start; `cache_bytes` is what requests hold, and zero when idle."""

    running: int = 0
    waiting: int = 0
    prefill_tokens_total: int = 0
    decode_tokens_total: int = 0
    imported_tokens_total: int = 0
    cached_tokens_total: int = 0
    cache_bytes: int = 0
    prefix_cache_bytes: int = 0
    finished_total: int = 0
    failed_total: int = 0
    aborted_total: int = 0
    extra: Mapping[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """One model, ready to work. Every method may be called from any thread."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def generate(self, request: GenerationRequest, on_event: OnEvent) -> None:
        """Queues a generation.

        Raises (then the request was not accepted, no event follows, and `imported` is still the caller's):
            ClientError: `empty_prompt`, `context_length_exceeded`, `invalid_request`.
            PeerError: `layout_mismatch`, `prompt_mismatch`: `imported` is not this prompt's or not of this layout.
            OverloadError: `queue_full`, `draining`.
        """

    def prefill(self, request: PrefillRequest, on_event: OnEvent) -> None:
        """Queues a prefill. Raises as `generate`."""

    def abort(self, request_id: str) -> None:
        """Ends a request soon; does nothing for an unknown or ended one."""

    def stop(self, drain_s: float = 0.0) -> None:
        """Accepts nothing more, lets requests go on for up to `drain_s` seconds, aborts the rest, joins the thread.

        Blocks until then. A second call is harmless.
        """

    def stats(self) -> EngineStats: ...
