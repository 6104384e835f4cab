"""Rule: what holds for tiny random models holds for real weights: SmolLM2-135M-Instruct, transferred, says the same."""

import threading

import pytest
import torch
from hf_kit import Recorder, reference_greedy, run, transfer

from farfill.engines.api import GenerationRequest, SamplingParams
from farfill.engines.hf.demo_model import MODEL_NAME, ensure_demo_model
from farfill.engines.hf.engine import HfEngine, HfEngineConfig
from farfill.engines.hf.model import load_model
from farfill.errors import ConfigurationError

pytestmark = [pytest.mark.slow, pytest.mark.torch]
CHUNK_TOKENS = 64
SAMPLING = SamplingParams(max_tokens=24, temperature=0.0, logprobs=5)
STORY = (
    "The lighthouse keeper wrote down the weather, the ships, and what the gulls had stolen from his breakfast. " * 12
)


@pytest.fixture(scope="module")
def loaded():
    return load_model(ensure_demo_model())


@pytest.fixture(scope="module")
def engines(loaded):
    config = HfEngineConfig(chunk_tokens=CHUNK_TOKENS, prefix_cache_bytes_max=0)
    pair = HfEngine(loaded, config), HfEngine(load_model(ensure_demo_model()), config)
    yield pair
    for engine in pair:
        engine.stop()
        assert engine.stats().cache_bytes == 0


def prompt_for(engine, question, story=STORY):
    return engine.tokenizer.apply_chat_template([{"role": "user", "content": f"{story}\n\n{question}"}])


def test_the_folder_is_an_ordinary_one(loaded):
    folder = ensure_demo_model()
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= {
        path.name for path in folder.iterdir()
    }
    assert '"quantization_config"' not in (folder / "config.json").read_text()
    network, tokenizer = loaded.network, loaded.tokenizer
    assert network.lm_head.weight.data_ptr() == network.model.embed_tokens.weight.data_ptr()  # tied again
    assert network.dtype == torch.float32
    assert [tokenizer.encode(token) for token in ("<|im_start|>", "<|im_end|>")] == [[1], [2]]
    assert loaded.eos_token_ids == frozenset({2})
    assert (loaded.name, loaded.max_model_len) == (MODEL_NAME, 8192)
    text = tokenizer.decode(prompt_for_text(tokenizer), skip_special_tokens=False)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def prompt_for_text(tokenizer):
    return tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])


def test_it_knows_the_capital_of_france(engines):
    """The weights are right, not only the same everywhere."""
    prompt = prompt_for(engines[0], "What is the capital of France? Answer in one word.", story="")
    assert "Paris" in run(engines[0], prompt, SAMPLING).text()


def test_local_remote_and_transformers_say_the_same(engines, loaded):
    producer, consumer = engines
    prompt = prompt_for(producer, "What did the gulls steal? Answer briefly.")
    assert len(prompt) > 4 * CHUNK_TOKENS
    local = run(producer, prompt, SAMPLING)
    remote = run(consumer, prompt, SAMPLING, imported=transfer(producer, prompt, CHUNK_TOKENS))
    assert remote.tokens() == local.tokens() == reference_greedy(loaded.network, prompt, 24)
    assert remote.logprobs() == local.logprobs()


def test_eight_at_once_by_transfer_say_what_they_say_alone(engines):
    producer, consumer = engines
    sampling = SamplingParams(max_tokens=10, temperature=0.0, logprobs=5)
    questions = [f"Name {count} things that a keeper of a lighthouse writes down." for count in range(2, 10)]
    prompts = [prompt_for(producer, question, story=STORY[:300]) for question in questions]
    alone = [run(producer, prompt, sampling) for prompt in prompts]
    sent = [transfer(producer, prompt, CHUNK_TOKENS) for prompt in prompts]
    recorders = [Recorder(hold_at=lambda event: True), *(Recorder() for _ in prompts[1:])]
    for i, (prompt, recorder) in enumerate(zip(prompts, recorders, strict=True)):
        consumer.generate(GenerationRequest(f"r{i}", prompt, sampling, imported=sent[i]), recorder)
    recorders[0].go.set()
    for expected, recorder in zip(alone, recorders, strict=True):
        assert recorder.finished().tokens() == expected.tokens()
        assert recorder.logprobs() == expected.logprobs()


def test_two_at_once_make_it_once(tmp_path):
    """Two threads, as two processes would: flock is per open file."""
    told, results = [], []
    threads = [
        threading.Thread(target=lambda: results.append(ensure_demo_model(tmp_path, told.append))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [tmp_path / MODEL_NAME] * 2
    assert told.count("writing the model") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".{MODEL_NAME}.lock", MODEL_NAME]
    first = load_model(ensure_demo_model()).fingerprint
    assert load_model(results[0]).fingerprint == first  # made twice, the same model


def test_where_it_cannot_be_written(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(ConfigurationError) as caught:
        ensure_demo_model(blocker / "models")
    assert caught.value.code == "model_not_found"
