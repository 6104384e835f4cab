"""Two sides that differ: in engine (vLLM and `hf`), in block size, in the number of tensor-parallel ranks.

vLLM and farfill's `hf` extra want different versions of Transformers, so `hf` runs from another environment, whose
Python `FARFILL_HF_PYTHON` names.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from vllm_kit import (
    KV_BYTES_PER_TOKEN,
    Pair,
    VllmServer,
    complete,
    gateway,
    ready,
    running,
    start,
    token_ids,
    vllm_worker,
)
from vllm_models import VOCABULARY, build

from farfill.engines.hf.demo_model import ensure_demo_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = [token_ids(length, 7000 + length) for length in (2, 31, 129, 257, 600)]
SOURCE = Path(__file__).parents[2] / "src"


@contextlib.contextmanager
def hf_worker(folder: Path, role: str) -> Iterator[dict[str, str]]:
    python = os.environ.get("FARFILL_HF_PYTHON", sys.executable)
    probe = subprocess.run(
        [python, "-c", "import transformers as t; print(t.__version__)"], capture_output=True, text=True
    )
    if tuple(map(int, probe.stdout.split(".")[:2] or ("0",))) < (5, 24):
        pytest.fail("FARFILL_HF_PYTHON must name a Python with farfill's hf extra, as `make test-vllm` does")
    file = folder / "hf.ready"
    file.unlink(missing_ok=True)
    config = {
        "name": "hf", "role": role, "site": "hf", "model": str(ensure_demo_model()), "served_name": "m", "port": 0,
        "data_port": 0, "max_model_len": 3584,
    }  # fmt: skip
    (folder / "hf.yaml").write_text(json.dumps({"worker": config}))
    process = start(
        [python, "-m", "farfill", "worker", "--config", str(folder / "hf.yaml"), "--ready-file", str(file)],
        folder / "hf.log",
        {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
    )
    try:
        yield {"name": "hf", "url": ready(process, file)["url"], "role": role, "site": "hf"}
    finally:
        process.kill()


def texts(url: str) -> list[tuple[str, dict[str, str]]]:
    """The answers' texts, for `hf` does not report token ids."""
    found = []
    for prompt in PROMPTS:
        body = {"model": "m", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=600, trust_env=False)
        assert response.status_code == 200, response.text
        found.append((response.json()["choices"][0]["text"], dict(response.headers)))
    return found


@pytest.mark.parametrize("direction", ["vLLM to hf", "hf to vLLM"])
def test_one_engine_prefills_for_the_other(pair: Pair, direction: str) -> None:
    pair.decode.forget_prefixes()
    prefilling = direction == "hf to vLLM"
    ours = vllm_worker(pair.decode, "decode") if prefilling else vllm_worker(pair.prefill, "prefill")
    with hf_worker(pair.folder, "prefill" if prefilling else "decode") as theirs:
        with gateway(pair.folder, [ours, theirs]) as front:
            answers = texts(front.url)
        # Whoever decodes, asked directly.
        expected = texts(pair.decode.url if prefilling else theirs["url"])
    for prompt, (text, headers), (alone, _) in zip(PROMPTS, answers, expected, strict=True):
        assert headers["x-farfill-path"] == "remote", headers
        assert int(headers["x-farfill-kv-bytes"]) == (len(prompt) - 1) * KV_BYTES_PER_TOKEN
        assert text == alone, f"a prompt of {len(prompt)} tokens"


def test_blocks_of_32_tokens_are_read_into_blocks_of_128(pair: Pair, tmp_path: Path) -> None:
    arguments = ("--dtype", "float32", "--max-model-len", "3584", "--block-size", "32")
    small = VllmServer("small", "kv_both", ensure_demo_model(), tmp_path, arguments)
    with running(small):
        for prefill, decode in ((small, pair.decode), (pair.prefill, small)):
            decode.forget_prefixes()
            with gateway(tmp_path, [vllm_worker(prefill, "prefill"), vllm_worker(decode, "decode")]) as front:
                answers = [complete(front.url, prompt) for prompt in PROMPTS]
            assert [answer.headers["x-farfill-path"] for answer in answers] == ["remote"] * len(PROMPTS)
            decode.forget_prefixes()
            assert [a.token_ids for a in answers] == [complete(decode.url, p).token_ids for p in PROMPTS]


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)], ids=["2 ranks to 1", "1 rank to 2"])
def test_each_rank_gets_the_heads_it_needs(ranks: tuple[int, int], tmp_path: Path) -> None:
    model = build("gemma3", tmp_path / "gemma3", dtype=torch.float32)
    prompts = [token_ids(length, 8000 + length, VOCABULARY) for length in (2, 127, 129, 300, 1000)]

    def server(name: str, role: str, count: int) -> VllmServer:
        arguments = ("--dtype", "float32", "--max-model-len", "2048", "--tensor-parallel-size", str(count))
        return VllmServer(name, role, model, tmp_path, arguments, cores="0|1" if count == 2 else "nobind")

    prefill, decode = server("east", "kv_producer", ranks[0]), server("west", "kv_consumer", ranks[1])
    with running(prefill, decode):
        with gateway(tmp_path, [vllm_worker(prefill, "prefill"), vllm_worker(decode, "decode")]) as front:
            answers = [complete(front.url, prompt) for prompt in prompts]
        decode.forget_prefixes()
        expected = [complete(decode.url, prompt) for prompt in prompts]
    assert [answer.headers["x-farfill-path"] for answer in answers] == ["remote"] * len(prompts)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
