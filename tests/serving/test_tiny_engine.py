"""The tests' own engine: its cache decides its tokens, and it keeps the engine contract."""

import queue
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from tiny_engine import TinyEngine
from tiny_model import LAYOUT

from farfill.engines.api import (
    ChoiceFinished,
    EngineEvent,
    GenerationRequest,
    PrefillRequest,
    RequestAborted,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    TokensGenerated,
)
from farfill.kv.plan import plan_chunks
from farfill.kv.spec import ChunkIndex, ChunkSpec

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@dataclass
class Shelf:
    """A sink that is an imported cache afterwards."""

    prefix_tokens: int
    grid: int
    payloads: dict[int, bytes] = field(default_factory=dict)
    cached_tokens: int = -1
    released: int = 0

    @property
    def plan(self) -> tuple[ChunkSpec, ...]:
        return plan_chunks(LAYOUT, self.prefix_tokens, self.grid)

    def publish(self, spec: ChunkSpec, payload: memoryview) -> None:
        assert len(payload) == spec.payload_bytes
        self.payloads[spec.index] = bytes(payload)

    def finish(self, cached_tokens: int) -> None:
        self.cached_tokens = cached_tokens

    def payload(self, index: ChunkIndex) -> memoryview:
        return memoryview(self.payloads[index])

    def release(self) -> None:
        self.released += 1


@pytest.fixture
def engine() -> Iterator[TinyEngine]:
    engine = TinyEngine(prefix_cache=True)
    yield engine
    engine.stop()
    assert engine.stats().cache_bytes == 0


def run(engine: TinyEngine, request: GenerationRequest | PrefillRequest) -> list[EngineEvent]:
    events: queue.Queue[EngineEvent] = queue.Queue()
    if isinstance(request, PrefillRequest):
        engine.prefill(request, events.put)
    else:
        engine.generate(request, events.put)
    seen = [events.get(timeout=30)]
    while not isinstance(seen[-1], RequestFinished | RequestFailed | RequestAborted):
        seen.append(events.get(timeout=30))
    assert isinstance(seen[-1], RequestFinished), seen[-1]
    return seen


def tokens_of(events: list[EngineEvent]) -> list[int]:
    return [token for event in events if isinstance(event, TokensGenerated) for token in event.token_ids]


def shelf(engine: TinyEngine, prompt: list[int], grid: int = 16) -> Shelf:
    target = Shelf(len(prompt) - 1, grid)
    run(engine, PrefillRequest("p", prompt, grid, target))
    assert list(target.payloads) == [chunk.index for chunk in target.plan]
    return target


PROMPTS = [list(range(60, 60 + length)) for length in (2, 7, 8, 16, 17, 18, 40, 97)]


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
@pytest.mark.parametrize("grid", [1, 5, 16])
def test_imported_cache_gives_the_local_tokens(engine: TinyEngine, prompt: list[int], grid: int) -> None:
    local = tokens_of(run(engine, GenerationRequest("l", prompt, GREEDY)))
    target = shelf(engine, prompt, grid)
    again = tokens_of(run(engine, GenerationRequest("r", prompt, GREEDY, imported=target, chunk_tokens=grid)))
    assert again == local
    assert target.released == 1


@pytest.mark.parametrize("chunk", range(1, 6))
def test_every_chunk_decides_the_tokens(engine: TinyEngine, chunk: int) -> None:
    prompt = PROMPTS[-2]
    local = tokens_of(run(engine, GenerationRequest("l", prompt, GREEDY)))
    target = shelf(engine, prompt)
    assert len(target.plan) == 5
    flipped = bytearray(target.payloads[chunk])
    flipped[-1] ^= 1
    target.payloads[chunk] = bytes(flipped)
    assert tokens_of(run(engine, GenerationRequest("r", prompt, GREEDY, imported=target, chunk_tokens=16))) != local


def test_prefix_cache_is_counted_and_changes_nothing(engine: TinyEngine) -> None:
    prompt = PROMPTS[-1]
    first, second = (run(engine, GenerationRequest(name, prompt, GREEDY)) for name in "ab")
    assert tokens_of(first) == tokens_of(second)
    finished = second[-1]
    assert isinstance(finished, RequestFinished)
    assert finished.usage.cached_tokens == 96
    assert shelf(engine, prompt).cached_tokens == 96


def test_stop_string_ends_the_text_before_it(engine: TinyEngine) -> None:
    events = run(engine, GenerationRequest("a", PROMPTS[3], GREEDY))
    whole = engine.tokenizer.decode(tokens_of(events))
    stop = whole[8:11]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=(stop,))
    events = run(engine, GenerationRequest("b", PROMPTS[3], params))
    text = "".join(event.text for event in events if isinstance(event, TokensGenerated | ChoiceFinished))
    assert text == whole[: whole.index(stop)]


@pytest.mark.parametrize("prompt", PROMPTS[3:], ids=len)
def test_an_imported_prefix_is_kept_for_its_cache_salt(engine: TinyEngine, prompt: list[int]) -> None:
    target = shelf(engine, prompt)
    first = run(engine, GenerationRequest("r", prompt, GREEDY, imported=target, chunk_tokens=16, cache_salt="a"))
    for salt, cached in (("a", len(prompt) - 1), ("b", 0)):
        again = run(engine, GenerationRequest("l", prompt, GREEDY, cache_salt=salt))
        assert tokens_of(again) == tokens_of(first)
        assert isinstance(again[-1], RequestFinished)
        assert again[-1].usage.cached_tokens == cached
