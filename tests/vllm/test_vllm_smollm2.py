"""SmolLM2 in float32 on two vLLM servers: tokens identical to an aggregated server's, on each placement, in each failure.

Aggregated means: the decode server asked directly, without a transfer. It computes prompt and answer by itself.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_kit import Answer, VllmServer, complete_all, gateway, relay, running, token_ids, vllm_worker

from farfill.engines.hf.demo_model import ensure_demo_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

# 40 lengths from 5 to 3,000, evenly spaced on a logarithmic scale: most prompts are short, none is alike.
LENGTHS = [round(5 * 600 ** (step / 39)) for step in range(40)]
KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4


class Pair:
    """A prefill and a decode server, and what the decode server answers by itself."""

    def __init__(self, folder: Path) -> None:
        model = ensure_demo_model()
        arguments = ("--dtype", "float32", "--max-model-len", "3584", "--max-num-batched-tokens", "512")
        self.folder = folder
        self.prefill = VllmServer("east", "kv_producer", model, folder, arguments, cache_gib=2)
        self.decode = VllmServer("west", "kv_consumer", model, folder, arguments, cache_gib=2)
        self.prompts = [token_ids(length, length) for length in LENGTHS]

    @property
    def workers(self) -> list[dict[str, str]]:
        return [vllm_worker(self.prefill, "prefill"), vllm_worker(self.decode, "decode")]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("pair"))
    with running(made.prefill, made.decode):
        yield made


@pytest.fixture(scope="module")
def aggregated(pair: Pair) -> list[Answer]:
    return complete_all(pair.decode.url, pair.prompts)


@pytest.mark.parametrize("placement", ["producer", "consumer", "relay"])
def test_tokens_are_those_of_an_aggregated_server(pair: Pair, aggregated: list[Answer], placement: str) -> None:
    pair.decode.forget_prefixes()
    received = pair.decode.metric("vllm:farfill_transfer_bytes_total", direction="received")
    computed = pair.decode.metric("vllm:prompt_tokens_by_source_total", source="local_compute")
    legs = pair.prefill.metric("vllm:generation_tokens_total")
    with relay(pair.folder) as (relay_url, _), gateway(
        pair.folder, pair.workers, placement=placement, relay_url=relay_url
    ) as front:
        answers = complete_all(front.url, pair.prompts)
    for prompt, answer, expected in zip(pair.prompts, answers, aggregated, strict=True):
        assert answer.headers["x-farfill-path"] == "remote"
        assert int(answer.headers["x-farfill-kv-bytes"]) == (len(prompt) - 1) * KV_BYTES_PER_TOKEN
        assert answer.token_ids == expected.token_ids, f"a prompt of {len(prompt)} tokens"
    moved = pair.decode.metric("vllm:farfill_transfer_bytes_total", direction="received") - received
    assert moved > sum(len(prompt) - 1 for prompt in pair.prompts) * KV_BYTES_PER_TOKEN
    # Of each prompt the decode server computed the last token only; for each leg vLLM makes one token, and nobody
    # is sent it.
    now = pair.decode.metric("vllm:prompt_tokens_by_source_total", source="local_compute")
    assert now - computed == len(pair.prompts)
    assert pair.prefill.metric("vllm:generation_tokens_total") - legs == len(pair.prompts)
