"""What the tests of the embedded engine share: recording events, a transfer in memory, Transformers' own answer."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from farfill.engines.api import (
    ChoiceFinished,
    EngineEvent,
    GenerationRequest,
    PrefillCompleted,
    PrefillRequest,
    RequestAborted,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    TokensGenerated,
)
from farfill.kv.plan import plan_chunks
from farfill.kv.spec import ChunkIndex, ChunkSpec

WAIT_S = 60.0  # only for hanging tests to end
AFTER_THE_END: list[EngineEvent] = []  # events after a terminal one; `open_tiny` checks that there were none
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


class Recorder:
    """An `OnEvent` that keeps the events. `hold_at(event)` true: the engine's thread stands still until `go`."""

    def __init__(self, hold_at: Callable[[EngineEvent], bool] = lambda event: False) -> None:
        self.events: list[EngineEvent] = []
        self.held, self.go, self.ended = threading.Event(), threading.Event(), threading.Event()
        self._hold_at = hold_at

    def __call__(self, event: EngineEvent) -> None:
        if self.ended.is_set():
            AFTER_THE_END.append(event)
        self.events.append(event)
        if self._hold_at(event) and not self.held.is_set():
            self.held.set()
            assert self.go.wait(WAIT_S)
        if isinstance(event, RequestFinished | RequestFailed | RequestAborted):
            self.ended.set()

    def wait(self) -> "Recorder":
        assert self.ended.wait(WAIT_S), f"no terminal event; so far {self.events}"
        return self

    def finished(self) -> "Recorder":
        self.wait()
        assert isinstance(self.events[-1], RequestFinished), self.events[-1]
        return self

    def failed(self) -> str:
        self.wait()
        assert isinstance(self.events[-1], RequestFailed), self.events[-1]
        return self.events[-1].error.code

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def tokens(self, choice: int = 0) -> list[int]:
        return [t for event in self.of(TokensGenerated) if event.choice == choice for t in event.token_ids]

    def text(self, choice: int = 0) -> str:
        return "".join(
            event.text for event in self.of(TokensGenerated) + self.of(ChoiceFinished) if event.choice == choice
        )

    def logprobs(self, choice: int = 0) -> list[Any]:
        return [p for event in self.of(TokensGenerated) if event.choice == choice for p in event.logprobs or ()]

    def end(self, choice: int = 0) -> ChoiceFinished:
        (end,) = [event for event in self.of(ChoiceFinished) if event.choice == choice]
        return end

    @property
    def prefilled(self) -> PrefillCompleted:
        (event,) = self.of(PrefillCompleted)
        return event


class MemoryTransfer:
    """A `ChunkSink` that copies every payload, and the `ImportedCache` made of those bytes."""

    def __init__(self) -> None:
        self.specs: list[ChunkSpec] = []
        self.payloads: dict[int, bytes] = {}
        self.cached_tokens = -1
        self.prefix_tokens = -1
        self.releases = 0

    def publish(self, spec: ChunkSpec, payload: memoryview) -> None:
        assert payload.readonly
        assert payload.format == "B"
        assert payload.nbytes == spec.payload_bytes
        self.specs.append(spec)
        self.payloads[spec.index] = bytes(payload)

    def finish(self, cached_tokens: int) -> None:
        assert self.cached_tokens == -1
        self.cached_tokens = cached_tokens

    @property
    def plan(self) -> Sequence[ChunkSpec]:
        return self.specs

    def payload(self, index: ChunkIndex) -> memoryview:
        assert not self.releases
        return memoryview(self.payloads[index])

    def release(self) -> None:
        self.releases += 1


def run(engine: Any, prompt: Sequence[int], sampling: SamplingParams = GREEDY, **request: Any) -> Recorder:
    recorder = Recorder()
    engine.generate(GenerationRequest("generate", prompt, sampling, **request), recorder)
    return recorder.finished()


def transfer(engine: Any, prompt: Sequence[int], chunk_tokens: int) -> MemoryTransfer:
    """Prefills on `engine`; what comes out is exactly the plan."""
    sink, recorder = MemoryTransfer(), Recorder()
    engine.prefill(PrefillRequest("prefill", prompt, chunk_tokens, sink), recorder)
    recorder.finished()
    sink.prefix_tokens = len(prompt) - 1
    assert tuple(sink.specs) == plan_chunks(engine.info.layout, len(prompt) - 1, chunk_tokens)
    assert sink.cached_tokens == recorder.prefilled.cached_tokens
    return sink


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + tokens)
    return torch.randint(3, 300, (tokens,), generator=generator).tolist()


def reference_greedy(network: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What Transformers itself generates: the whole prompt in one forward, then token by token."""
    with torch.inference_mode():
        ids = torch.tensor([list(prompt)])
        output = network.generate(ids, do_sample=False, max_new_tokens=max_tokens, attention_mask=torch.ones_like(ids))
    return output[0, len(prompt) :].tolist()
