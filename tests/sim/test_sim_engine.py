"""The simulated engine cannot be right by accident: each byte of the cache decides the tokens."""

from farfill.kv.plan import plan_chunks
from farfill.kv.spec import ChunkSpec
from farfill.sim.engine import LAYOUT, DecodeCache, chunk_bytes, reference_output

PROMPT = tuple(range(100, 171))
PLAN = plan_chunks(LAYOUT, len(PROMPT) - 1, 16)


def filled(prompt: tuple[int, ...] = PROMPT) -> DecodeCache:
    cache = DecodeCache(PLAN)
    for chunk in PLAN:
        cache.buffer(chunk.index)[:] = chunk_bytes(prompt, chunk)
    return cache


def kinds() -> set[tuple[int, bool]]:
    return {(chunk.layer, chunk.is_state) for chunk in PLAN}


def test_a_filled_cache_gives_the_reference() -> None:
    assert kinds() == {(0, False), (1, False), (2, True)}  # all rows, a window's rows, a state
    assert filled().decode(PROMPT[-1], 5) == reference_output(PROMPT, 16, 5)
    assert reference_output(PROMPT[:1], 16, 5) == DecodeCache(()).decode(PROMPT[0], 5)


def test_any_one_altered_bit_gives_other_tokens() -> None:
    reference = reference_output(PROMPT, 16, 5)
    for chunk in PLAN:
        for place in (0, chunk.payload_bytes // 2, chunk.payload_bytes - 1):
            cache = filled()
            cache.buffer(chunk.index)[place] ^= 1
            assert cache.decode(PROMPT[-1], 5) != reference


def test_a_missing_or_foreign_chunk_gives_other_tokens() -> None:
    reference, other = reference_output(PROMPT, 16, 5), (1, *PROMPT[1:])
    for chunk in PLAN:
        for content in (bytes(chunk.payload_bytes), chunk_bytes(other, chunk)):
            cache = filled()
            cache.buffer(chunk.index)[:] = content
            assert cache.decode(PROMPT[-1], 5) != reference


def test_another_last_token_gives_other_tokens() -> None:
    assert filled().decode(PROMPT[-1] + 1, 5) != reference_output(PROMPT, 16, 5)


def test_a_chunk_has_the_size_that_the_plan_says() -> None:
    def size(chunk: ChunkSpec) -> int:
        return len(chunk_bytes(PROMPT, chunk))

    assert [size(chunk) for chunk in PLAN] == [chunk.payload_bytes for chunk in PLAN]
