"""Models with recurrent states and windows on two vLLM servers: tokens identical to an aggregated server's.

Prompts cross the borders of blocks (128 tokens), windows (200) and chunks (64).
"""

from pathlib import Path

import pytest
from vllm_kit import VllmServer, complete, gateway, running, token_ids, vllm_worker
from vllm_models import VOCABULARY, build

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LENGTHS = (1, 2, 127, 128, 129, 130, 255, 257, 1000)


# vLLM's Mamba2 layers on CPUs fail with its prefix cache (an IndexError, without any connector too).
@pytest.mark.parametrize(
    ("kind", "options"),
    [("qwen3_next", ()), ("granite_hybrid", ("--no-enable-prefix-caching",)), ("gemma3", ())],
    ids=["qwen3_next", "granite_hybrid", "gemma3"],
)
def test_tokens_are_those_of_an_aggregated_server(kind: str, options: tuple[str, ...], tmp_path: Path) -> None:
    model = build(kind, tmp_path / kind)
    arguments = ("--dtype", "bfloat16", "--max-model-len", "2048", *options)
    prefill = VllmServer("east", "kv_producer", model, tmp_path, arguments)
    decode = VllmServer("west", "kv_consumer", model, tmp_path, arguments)
    prompts = [token_ids(length, length, VOCABULARY) for length in LENGTHS]
    with running(prefill, decode):
        aggregated = [complete(decode.url, prompt, tokens=24) for prompt in prompts]
        decode.forget_prefixes()
        workers = [vllm_worker(prefill, "prefill"), vllm_worker(decode, "decode")]
        with gateway(tmp_path, workers, chunk_tokens=64) as front:
            answers = [complete(front.url, prompt, tokens=24) for prompt in prompts]
    for prompt, answer, expected in zip(prompts, answers, aggregated, strict=True):
        # There is nothing to transfer of a prompt of one token.
        assert answer.headers["x-farfill-path"] == ("remote" if len(prompt) > 1 else "local"), answer.headers
        assert len(set(expected.token_ids)) > 1, "a model that says one thing only would prove nothing"
        assert answer.token_ids == expected.token_ids, f"a prompt of {len(prompt)} tokens"
