"""SmolLM2 in float32 on two vLLM servers: tokens identical to an aggregated server's, with each placement.

Aggregated means: the decode server asked directly, without a transfer. It computes prompt and answer by itself.
"""

import pytest
from vllm_kit import KV_BYTES_PER_TOKEN, Answer, Pair, complete, complete_all, gateway, relay, token_ids

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

# 40 lengths from 5 to 3,000, evenly spaced on a logarithmic scale: most prompts are short, none is alike.
LENGTHS = [round(5 * 600 ** (step / 39)) for step in range(40)]
PROMPTS = [token_ids(length, length) for length in LENGTHS]


@pytest.fixture(scope="module")
def aggregated(pair: Pair) -> list[Answer]:
    return complete_all(pair.decode.url, PROMPTS)


@pytest.mark.parametrize("placement", ["producer", "consumer", "relay"])
def test_tokens_are_those_of_an_aggregated_server(pair: Pair, aggregated: list[Answer], placement: str) -> None:
    pair.decode.forget_prefixes()
    received = pair.decode.metric("vllm:farfill_transfer_bytes_total", direction="received")
    computed = pair.decode.metric("vllm:prompt_tokens_by_source_total", source="local_compute")
    legs = pair.prefill.metric("vllm:generation_tokens_total")
    with (
        relay(pair.folder) as (relay_url, _),
        gateway(pair.folder, pair.workers, placement=placement, relay_url=relay_url) as front,
    ):
        answers = complete_all(front.url, PROMPTS)
    for prompt, answer, expected in zip(PROMPTS, answers, aggregated, strict=True):
        assert answer.headers["x-farfill-path"] == "remote"
        assert int(answer.headers["x-farfill-kv-bytes"]) == (len(prompt) - 1) * KV_BYTES_PER_TOKEN
        assert answer.token_ids == expected.token_ids, f"a prompt of {len(prompt)} tokens"
    moved = pair.decode.metric("vllm:farfill_transfer_bytes_total", direction="received") - received
    assert moved > sum(len(prompt) - 1 for prompt in PROMPTS) * KV_BYTES_PER_TOKEN
    # Of each prompt the decode server computed the last token only; for each leg vLLM makes one token, and nobody
    # is sent it.
    now = pair.decode.metric("vllm:prompt_tokens_by_source_total", source="local_compute")
    assert now - computed == len(PROMPTS)
    assert pair.prefill.metric("vllm:generation_tokens_total") - legs == len(PROMPTS)


def test_a_second_prompt_with_the_same_beginning_moves_its_new_part(pair: Pair) -> None:
    """2,000 tokens are shared. The decode server's prefix cache keeps whole blocks of 128 of them, 1,920, and chunks
    are of 256 tokens: seven of them, 1,792 tokens, do not travel again."""
    shared = token_ids(2000, 5001)
    first, second = shared + token_ids(50, 5002), shared + token_ids(200, 5003)
    with gateway(pair.folder, pair.workers, chunk_tokens=256) as front:
        answers = [complete(front.url, prompt) for prompt in (first, second)]
    moved = [int(answer.headers["x-farfill-kv-bytes"]) for answer in answers]
    assert moved == [2049 * KV_BYTES_PER_TOKEN, (2199 - 1792) * KV_BYTES_PER_TOKEN]
    pair.decode.forget_prefixes()
    assert answers[1].token_ids == complete(pair.decode.url, second).token_ids
