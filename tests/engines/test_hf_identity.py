"""Rule: a cache that went through bytes into another engine decodes exactly what a local run decodes; every kind."""

import pytest
from hf_kit import GREEDY, MemoryTransfer, Recorder, prompt_of, reference_greedy, run, transfer
from tiny_models import CHUNK_TOKENS, KINDS, MORE_KINDS, WINDOW

from farfill.engines.api import GenerationRequest, SamplingParams

pytestmark = pytest.mark.torch

# Around one chunk, two chunks, the window and the window with a chunk more. The prefix is one token shorter.
LENGTHS = (
    2,
    3,
    CHUNK_TOKENS,
    CHUNK_TOKENS + 1,
    CHUNK_TOKENS + 2,
    WINDOW,
    WINDOW + 1,
    WINDOW + 2,
    3 * CHUNK_TOKENS + 2,
    61,
)
WITH_LOGPROBS = SamplingParams(max_tokens=12, temperature=0.0, logprobs=5)


@pytest.mark.parametrize("kind", KINDS)
def test_local_remote_and_transformers_agree(kind, open_tiny, tiny_loaded):
    producer, consumer = open_tiny(kind), open_tiny(kind)
    for length in LENGTHS:
        prompt = prompt_of(length)
        expected = reference_greedy(tiny_loaded(kind).network, prompt, 12)
        local = run(producer, prompt, WITH_LOGPROBS)
        sent = transfer(producer, prompt, CHUNK_TOKENS)
        remote = run(consumer, prompt, WITH_LOGPROBS, imported=sent)
        assert local.tokens() == expected, f"{kind}, {length} tokens"
        assert remote.tokens() == expected, f"{kind}, {length} tokens"
        assert remote.logprobs() == local.logprobs()  # not close: equal
        assert remote.text() == local.text()
        assert sent.releases == 1
        assert remote.prefilled.imported_tokens == length - 1
    assert consumer.stats().prefill_tokens_total == len(LENGTHS)  # the last prompt token each, and nothing else


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_tokens", [1, 5, 64])
def test_any_grid(kind, chunk_tokens, open_tiny):
    producer, consumer = open_tiny(kind), open_tiny(kind)
    prompt = prompt_of(35)
    local = run(producer, prompt, WITH_LOGPROBS, chunk_tokens=chunk_tokens)
    remote = run(consumer, prompt, WITH_LOGPROBS, imported=transfer(producer, prompt, chunk_tokens))
    assert (remote.tokens(), remote.logprobs()) == (local.tokens(), local.logprobs())


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16(kind, open_tiny):
    producer, consumer = open_tiny(kind, "bfloat16"), open_tiny(kind, "bfloat16")
    prompt = prompt_of(35)
    local = run(producer, prompt, WITH_LOGPROBS)
    remote = run(consumer, prompt, WITH_LOGPROBS, imported=transfer(producer, prompt, CHUNK_TOKENS))
    assert (remote.tokens(), remote.logprobs()) == (local.tokens(), local.logprobs())


@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_of_the_cache_matters(kind, open_tiny):
    """The identity above could not hold by chance: with any one layer's chunks zeroed, the numbers change."""
    producer, consumer = open_tiny(kind), open_tiny(kind)
    prompt = prompt_of(35)
    sent = transfer(producer, prompt, CHUNK_TOKENS)
    right = run(consumer, prompt, WITH_LOGPROBS, imported=sent)
    for layer in {spec.layer for spec in sent.specs}:
        damaged = MemoryTransfer()
        damaged.specs, damaged.cached_tokens, damaged.prefix_tokens = sent.specs, 0, sent.prefix_tokens
        damaged.payloads = {
            spec.index: bytes(spec.payload_bytes) if spec.layer == layer else sent.payloads[spec.index]
            for spec in sent.specs
        }
        wrong = run(consumer, prompt, WITH_LOGPROBS, imported=damaged)
        assert wrong.logprobs() != right.logprobs(), f"{kind}: layer {layer} has no influence"


@pytest.mark.parametrize("kind", KINDS)
def test_eight_interleaved_requests_get_the_tokens_they_get_alone(kind, open_tiny):
    engine, alone = open_tiny(kind, running_max=8), open_tiny(kind)
    prompts = [prompt_of(length, seed=1) for length in (2, 9, 17, 18, 25, 33, 40, 61)]
    # Half of them come by transfer, so that imports, prefills and decodes take turns.
    imports = [transfer(alone, prompt, CHUNK_TOKENS) if i % 2 else None for i, prompt in enumerate(prompts)]
    recorders = [Recorder() for _ in prompts]
    # The first request's first event holds the engine until all are queued: they really run side by side.
    recorders[0] = Recorder(hold_at=lambda event: True)
    for i, prompt in enumerate(prompts):
        engine.generate(GenerationRequest(f"r{i}", prompt, WITH_LOGPROBS, imported=imports[i]), recorders[i])
    recorders[0].go.set()
    together = [recorder.finished() for recorder in recorders]
    for prompt, recorder in zip(prompts, together, strict=True):
        expected = run(alone, prompt, WITH_LOGPROBS)
        assert (recorder.tokens(), recorder.logprobs()) == (expected.tokens(), expected.logprobs())


@pytest.mark.parametrize("kind", KINDS)
def test_several_choices_from_one_import(kind, open_tiny):
    """Each choice goes on from a cache of its own, recurrent state included."""
    producer, consumer = open_tiny(kind), open_tiny(kind)
    prompt = prompt_of(21)
    sampling = SamplingParams(max_tokens=10, temperature=1.0, seed=5, n=3, ignore_eos=True)
    local = run(producer, prompt, sampling)
    remote = run(consumer, prompt, sampling, imported=transfer(producer, prompt, CHUNK_TOKENS))
    assert [remote.tokens(i) for i in range(3)] == [local.tokens(i) for i in range(3)]
    assert len({tuple(local.tokens(i)) for i in range(3)}) == 3
    for i in range(3):
        single = SamplingParams(max_tokens=10, temperature=1.0, seed=5 + i, ignore_eos=True)
        assert run(producer, prompt, single).tokens() == local.tokens(i)


@pytest.mark.parametrize("kind", MORE_KINDS)
def test_further_architectures(kind, open_tiny, tiny_loaded):
    producer, consumer = open_tiny(kind), open_tiny(kind)
    for length in (2, CHUNK_TOKENS + 1, WINDOW + 2, 35):
        prompt = prompt_of(length)
        local = run(producer, prompt, WITH_LOGPROBS)
        remote = run(consumer, prompt, WITH_LOGPROBS, imported=transfer(producer, prompt, CHUNK_TOKENS))
        assert local.tokens() == reference_greedy(tiny_loaded(kind).network, prompt, 12)
        assert (remote.tokens(), remote.logprobs()) == (local.tokens(), local.logprobs())


def test_one_token_prompt(open_tiny, tiny_loaded):
    for kind in KINDS:
        assert run(open_tiny(kind), [5], GREEDY).tokens() == reference_greedy(tiny_loaded(kind).network, [5], 12)
