"""Models with recurrent states and windows on two vLLM servers: identical to an aggregated server's.

Prompts cross the borders of blocks (128 tokens; 640 with Qwen3-Next), windows (200) and chunks (64).

Tokens are compared, in float32 and bfloat16; but vLLM's CPU kernels for Qwen3-Next take bfloat16 only, and its GDN
kernels for many tokens and for one round differently. So an aggregated server says other things of a prompt computed in
one step than of the same prompt computed but for its last token, then the last one, which is what two servers do. That
is shown first; then what two servers say of the next token is compared, to the last bit, with the aggregated run that
has the same border.
"""

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from vllm_kit import VllmServer, complete, gateway, running, token_ids, vllm_worker
from vllm_models import VOCABULARY, build

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LENGTHS = (1, 2, 127, 128, 129, 130, 255, 257, 1000)
PROMPTS = [token_ids(length, length, VOCABULARY) for length in LENGTHS]


# With its prefix cache on, vLLM 0.32 raised an IndexError in its Mamba2 layers on CPUs. Seen on an aggregated request
# to a server that had the connector loaded; not tried on one without it.
@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [
        ("granite_hybrid", "float32", ("--no-enable-prefix-caching",)),
        ("gemma3", "bfloat16", ()),
    ],
    ids=["granite_hybrid", "gemma3"],
)
def test_tokens_are_those_of_an_aggregated_server(
    kind: str, dtype: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    model = build(kind, tmp_path / kind, dtype=getattr(torch, dtype))
    arguments = ("--dtype", dtype, "--max-model-len", "2048", *options)
    prefill = VllmServer("east", "kv_producer", model, tmp_path, arguments)
    decode = VllmServer("west", "kv_consumer", model, tmp_path, arguments)
    with running(prefill, decode):
        aggregated = [complete(decode.url, prompt, tokens=24) for prompt in PROMPTS]
        decode.forget_prefixes()
        workers = [vllm_worker(prefill, "prefill"), vllm_worker(decode, "decode")]
        with gateway(tmp_path, workers, chunk_tokens=64) as front:
            answers = [complete(front.url, prompt, tokens=24) for prompt in PROMPTS]
    for prompt, answer, expected in zip(PROMPTS, answers, aggregated, strict=True):
        # There is nothing to transfer of a prompt of one token.
        assert answer.headers["x-farfill-path"] == ("remote" if len(prompt) > 1 else "local"), answer.headers
        assert len(set(expected.token_ids)) > 1, "a model that says one thing only would prove nothing"
        assert answer.token_ids == expected.token_ids, f"a prompt of {len(prompt)} tokens"


def test_qwen3_next_says_what_an_aggregated_server_says_with_the_same_border(tmp_path: Path) -> None:
    model = build("qwen3_next", tmp_path / "qwen3_next")
    arguments = ("--dtype", "bfloat16", "--max-model-len", "2048")
    prefill = VllmServer("east", "kv_producer", model, tmp_path, arguments)
    decode = VllmServer("west", "kv_consumer", model, tmp_path, arguments)
    prompts = PROMPTS[1:]
    with running(prefill, decode):
        whole = [_top(decode.url, prompt) for prompt in prompts]
        split = [_top_with_border(decode.url, prompt) for prompt in prompts]
        decode.forget_prefixes()
        workers = [vllm_worker(prefill, "prefill"), vllm_worker(decode, "decode")]
        with gateway(tmp_path, workers, chunk_tokens=64) as front:
            answers = [_top(front.url, prompt) for prompt in prompts]
    assert whole != split, "there is no need for the borders' sake: compare tokens"
    assert answers == split


def _top(url: str, prompt: list[int]) -> dict[str, float]:
    """The log-probabilities of the five likeliest tokens after the prompt."""
    return _logprobs(url, {"prompt": prompt, "max_tokens": 1})[0]


def _top_with_border(url: str, prompt: list[int]) -> dict[str, float]:
    """The same, of a server that computes all but the last token first: it generates that one, for it may no other.

    vLLM reports log-probabilities as they are before such limits.
    """
    found = _logprobs(url, {"prompt": prompt[:-1], "max_tokens": 2, "allowed_token_ids": [prompt[-1]]})[1]
    likeliest = sorted(found, key=lambda token: -found[token])[:5]  # beside them it has the one that was chosen
    return {token: found[token] for token in likeliest}


def _logprobs(url: str, fields: dict[str, Any]) -> list[dict[str, float]]:
    body = {"model": "m", "temperature": 0, "logprobs": 5, "ignore_eos": True, **fields}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=600, trust_env=False)
    assert response.status_code == 200, response.text
    assert response.headers.get("x-farfill-path", "remote") == "remote"
    top: list[dict[str, float]] = response.json()["choices"][0]["logprobs"]["top_logprobs"]
    return top
