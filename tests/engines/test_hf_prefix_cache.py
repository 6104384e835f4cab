"""Rule: the prefix cache changes what is computed, never what comes out."""

import pytest
from hf_kit import Recorder, prompt_of, run, transfer
from tiny_models import CHUNK_TOKENS, KINDS

from farfill.engines.api import GenerationRequest, SamplingParams
from farfill.engines.hf.forward import Forward
from farfill.engines.hf.prefix_cache import PrefixCache
from farfill.kv.layout import cache_bytes

pytestmark = pytest.mark.torch
SAMPLING = SamplingParams(max_tokens=6, temperature=0.0, logprobs=5)
CUTTABLE = ("llama", "deepseek_v3")
BIG = 1 << 24


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_numbers_are_those_without_it(kind, open_tiny):
    cached, plain = open_tiny(kind, prefix_cache_bytes_max=BIG), open_tiny(kind)
    base = prompt_of(60)
    # Prompts that share beginnings of many lengths, some exactly an earlier prefix, some diverging within a chunk.
    prompts = [base[:n] for n in (34, 34, 33, 17, 25, 60, 18)]
    prompts += [base[:20] + prompt_of(10, seed=7), base[:33] + [9] * 9]
    hits = 0
    for prompt in prompts:
        one, other = run(cached, prompt, SAMPLING), run(plain, prompt, SAMPLING)
        assert (one.tokens(), one.logprobs()) == (other.tokens(), other.logprobs())
        hits += one.prefilled.cached_tokens > 0
        assert one.prefilled.computed_tokens + one.prefilled.cached_tokens == len(prompt) - 1
        assert one.events[-1].usage.cached_tokens == one.prefilled.cached_tokens
    assert hits >= 2
    assert cached.stats().cached_tokens_total > 0


@pytest.mark.parametrize("kind", KINDS)
def test_published_chunks_are_those_without_it(kind, open_tiny):
    cached, plain = open_tiny(kind, prefix_cache_bytes_max=BIG), open_tiny(kind)
    prompt = prompt_of(4 * CHUNK_TOKENS + 1)
    for length in (2 * CHUNK_TOKENS + 1, 2 * CHUNK_TOKENS + 1, 4 * CHUNK_TOKENS + 1):
        one = transfer(cached, prompt[:length], CHUNK_TOKENS)
        assert one.payloads == transfer(plain, prompt[:length], CHUNK_TOKENS).payloads
    assert one.cached_tokens == 2 * CHUNK_TOKENS


def cached_tokens(engine, prompt, **request):
    return run(engine, prompt, SAMPLING, **request).prefilled.cached_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_reused(kind, open_tiny):
    engine = open_tiny(kind, prefix_cache_bytes_max=BIG)
    base = prompt_of(60)
    assert cached_tokens(engine, base[:36]) == 0
    assert cached_tokens(engine, base[:36]) == 35  # the very same prefix, off the grid
    longer = cached_tokens(engine, base[:50])
    shorter = cached_tokens(engine, base[:20])
    if kind in CUTTABLE:
        assert (longer, shorter) == (32, 16)  # at the last border within both
    else:
        assert (longer, shorter) == (32, 0)  # only from where an earlier prompt had its last border
        assert cached_tokens(engine, base[:20]) == 19
        assert cached_tokens(engine, base[:30]) == 16


def test_another_grid_and_another_prompt_reuse_nothing(open_tiny):
    engine = open_tiny("llama", prefix_cache_bytes_max=BIG)
    prompt = prompt_of(41)
    assert cached_tokens(engine, prompt) == 0
    assert cached_tokens(engine, prompt, chunk_tokens=10) == 0
    assert cached_tokens(engine, [prompt[0] + 1, *prompt[1:]]) == 0
    assert cached_tokens(engine, [5]) == 0


def test_an_aborted_prefill_leaves_nothing_in_it(open_tiny):
    engine = open_tiny("llama", prefix_cache_bytes_max=BIG)
    recorder = Recorder(hold_at=lambda event: True)
    engine.generate(GenerationRequest("g", prompt_of(61), SAMPLING), recorder)
    assert recorder.held.wait(60)
    engine.abort("g")
    recorder.go.set()
    recorder.wait()
    assert engine.stats().prefix_cache_bytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_bounded_and_the_least_recently_used_goes(kind, tiny_loaded):
    loaded = tiny_loaded(kind)
    forward, size = Forward(loaded.network), cache_bytes(loaded.layout, 16)
    prefixes = [prompt_of(16, seed=s) for s in range(4)]
    store = PrefixCache(loaded.layout, 2 * size)

    def keep(ids):
        cache = forward.new_cache()
        forward.extend(cache, ids, 0)
        store.keep(ids, CHUNK_TOKENS, cache)
        assert store.bytes_held <= 2 * size

    keep(prefixes[0])
    keep(prefixes[1])
    keep(prefixes[0])  # known: nothing twice, but used just now
    assert store.bytes_held == 2 * size
    keep(prefixes[2])
    assert store.find(prefixes[1], CHUNK_TOKENS) is None
    assert store.find(prefixes[0], CHUNK_TOKENS)[1] == 16
    assert store.find(prefixes[2], CHUNK_TOKENS)[1] == 16
    store.clear()
    assert store.bytes_held == 0
    assert store.find(prefixes[0], CHUNK_TOKENS) is None
    tiny = PrefixCache(loaded.layout, size - 1)
    cache = forward.new_cache()
    forward.extend(cache, prefixes[0], 0)
    tiny.keep(prefixes[0], CHUNK_TOKENS, cache)
    assert tiny.bytes_held == 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_imported_cache_is_kept_like_a_computed_one(kind, open_tiny):
    producer, plain = open_tiny(kind), open_tiny(kind)
    consumer = open_tiny(kind, prefix_cache_bytes_max=BIG)
    base = prompt_of(60)
    for length in (33, 36):  # a prefix that ends on the grid, and one that does not
        sent = transfer(producer, base[:length], CHUNK_TOKENS)
        remote = run(consumer, base[:length], SAMPLING, imported=sent)
        again, other = run(consumer, base[:length], SAMPLING), run(plain, base[:length], SAMPLING)
        assert (again.tokens(), again.logprobs()) == (other.tokens(), other.logprobs())
        assert (remote.tokens(), remote.logprobs()) == (other.tokens(), other.logprobs())
        assert remote.events[-1].usage.cached_tokens == 0  # the prefill side's word, not ours
        assert again.events[-1].usage.cached_tokens == length - 1
        assert again.prefilled.computed_tokens == 0
    longer, other = run(consumer, base, SAMPLING), run(plain, base, SAMPLING)
    assert (longer.tokens(), longer.logprobs()) == (other.tokens(), other.logprobs())
    assert longer.prefilled.cached_tokens == 32
    assert longer.prefilled.computed_tokens == 59 - 32


def test_a_cache_imported_on_another_grid_is_not_kept(open_tiny):
    producer, consumer = open_tiny("llama"), open_tiny("llama", prefix_cache_bytes_max=BIG)
    prompt = prompt_of(36)
    run(consumer, prompt, SAMPLING, imported=transfer(producer, prompt, 5))  # the request says: on the engine's grid
    assert cached_tokens(consumer, prompt) == 0
    run(consumer, prompt, SAMPLING, imported=transfer(producer, prompt, 5), chunk_tokens=5)
    assert cached_tokens(consumer, prompt, chunk_tokens=5) == 35


def test_imported_caches_stay_within_the_bytes(open_tiny):
    producer, consumer = open_tiny("llama"), open_tiny("llama", prefix_cache_bytes_max=10)
    prompt = prompt_of(36)
    run(consumer, prompt, SAMPLING, imported=transfer(producer, prompt, CHUNK_TOKENS))
    assert consumer.stats().prefix_cache_bytes == 0
    assert cached_tokens(consumer, prompt) == 0


@pytest.mark.parametrize("kind", ["llama", KINDS[-1]])
def test_another_cache_salt_finds_nothing(kind, open_tiny):
    producer, engine = open_tiny(kind), open_tiny(kind, prefix_cache_bytes_max=BIG)
    for length in (33, 36):
        prompt = prompt_of(length)
        run(engine, prompt, SAMPLING, imported=transfer(producer, prompt, CHUNK_TOKENS), cache_salt="a")
        assert cached_tokens(engine, prompt, cache_salt="b") == 0
        assert cached_tokens(engine, prompt) == 0
        for salt in ("a", "b", ""):  # each its own, the imported one too
            assert cached_tokens(engine, prompt, cache_salt=salt) == length - 1
