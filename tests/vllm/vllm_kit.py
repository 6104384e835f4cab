"""Real vLLM servers with the connector, a gateway and a relay as processes, and what tests ask them. No test here.

A server takes 20 to 60 s to start on two cores, so the tests share as few of them as they can.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from farfill.engines.hf.demo_model import ensure_demo_model

START_S = 300.0  # two servers at once on two slow cores


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


@dataclass
class Process:
    """A child in its own process group, so that what it has started ends with it."""

    child: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> None:
        """As `kill -9` of all of it. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


def start(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Process:
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    return Process(child, log)


@dataclass
class VllmServer:
    """One vLLM server with the connector. `role`: kv_producer, kv_consumer or kv_both."""

    name: str
    role: str
    model: Path
    folder: Path
    arguments: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    cache_gib: int = 1
    cores: str = "nobind"
    port: int = field(default_factory=free_port)
    process: Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ready_file(self) -> Path:
        return self.folder / f"{self.name}.ready"

    @property
    def control_url(self) -> str:
        return str(json.loads(self.ready_file.read_bytes())["url"])

    def start(self) -> None:
        transfer = {
            "kv_connector": "FarfillConnector",
            "kv_connector_module_path": "farfill.engines.vllm.connector",
            "kv_role": self.role,
            "kv_connector_extra_config": {
                "name": self.name,
                "site": self.name,
                "port": 0,
                "data_port": 0,
                "ready_file": str(self.ready_file),
                **self.extra,
            },
        }
        self.ready_file.unlink(missing_ok=True)
        self.process = start(
            [
                sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model),
                "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager",
                "--kv-transfer-config", json.dumps(transfer), *self.arguments,
            ],
            self.folder / f"{self.name}.log",
            {
                "VLLM_CPU_KVCACHE_SPACE": str(self.cache_gib),
                "VLLM_CPU_OMP_THREADS_BIND": self.cores,
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
            },
        )  # fmt: skip

    def wait(self) -> None:
        """Until it serves; fails with its log if it ends before."""
        assert self.process is not None
        until = time.monotonic() + START_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", trust_env=False).status_code == 200:
                    return
            assert self.process.child.poll() is None, self.process.tail()
            assert time.monotonic() < until, self.process.tail()
            time.sleep(0.25)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of vLLM's samples of this name with these labels."""
        return metric(httpx.get(f"{self.url}/metrics", trust_env=False).text, name, **labels)

    def forget_prefixes(self) -> None:
        """Empties vLLM's prefix cache; it must be idle."""
        answer = httpx.post(f"{self.url}/reset_prefix_cache", trust_env=False)
        assert answer.status_code == 200, answer.text


KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4  # SmolLM2 in float32: layers, keys and values, heads, dim


class Pair:
    """Two servers of SmolLM2 in float32, one that prefills and one that decodes."""

    def __init__(self, folder: Path) -> None:
        model = ensure_demo_model()
        # Short steps, so that chunks of a long prompt come one after the other.
        arguments = ("--dtype", "float32", "--max-model-len", "3584", "--max-num-batched-tokens", "512")
        self.folder = folder
        self.prefill = VllmServer("east", "kv_producer", model, folder, arguments, cache_gib=2)
        self.decode = VllmServer("west", "kv_consumer", model, folder, arguments, cache_gib=2)

    @property
    def workers(self) -> list[dict[str, str]]:
        return [vllm_worker(self.prefill, "prefill"), vllm_worker(self.decode, "decode")]


def metric(text: str, name: str, **labels: str) -> float:
    total = 0.0
    for line in text.splitlines():
        if line.startswith((f"{name}{{", f"{name} ")) and all(
            f'{key}="{value}"' in line for key, value in labels.items()
        ):
            total += float(line.rsplit(" ", 1)[1])
    return total


@contextlib.contextmanager
def running(*servers: VllmServer) -> Iterator[None]:
    """Starts them together, waits for all, kills all."""
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait()
        yield
    finally:
        for server in servers:
            if server.process is not None:
                server.process.kill()


@dataclass
class Gateway:
    url: str
    process: Process

    def metric(self, name: str, **labels: str) -> float:
        return metric(httpx.get(f"{self.url}/metrics", trust_env=False).text, name, **labels)


@contextlib.contextmanager
def gateway(
    folder: Path,
    workers: Sequence[Mapping[str, str]],
    *,
    placement: str = "producer",
    relay_url: str = "",
    clocks: Mapping[str, float] | None = None,
    chunk_tokens: int = 256,
) -> Iterator[Gateway]:
    """A gateway that sends every prompt to a prefill worker."""
    file = folder / "gateway.ready"
    file.unlink(missing_ok=True)
    config: dict[str, Any] = {
        "port": 0,
        "threshold_tokens": 0,
        "placement": placement,
        "chunk_tokens": chunk_tokens,
        "workers": list(workers),
        # One step of prefill takes seconds on a core that others use too; who tests clocks sets his own.
        "clocks": {"setup_s": 30, "queue_s": 300, "stall_s": 120, "transfer_s": 600, **(clocks or {})},
    }
    if relay_url:
        config["relay"] = {"name": "relay", "url": relay_url}
    (folder / "gateway.yaml").write_text(json.dumps({"gateway": config}))  # JSON is YAML
    process = start(
        [
            sys.executable,
            "-m",
            "farfill",
            "gateway",
            "--config",
            str(folder / "gateway.yaml"),
            "--ready-file",
            str(file),
        ],
        folder / "gateway.log",
    )
    try:
        yield Gateway(ready(process, file)["url"], process)
    finally:
        process.kill()


@contextlib.contextmanager
def relay(folder: Path) -> Iterator[tuple[str, Process]]:
    """(its URL, its process)"""
    file = folder / "relay.ready"
    file.unlink(missing_ok=True)
    (folder / "relay.yaml").write_text(json.dumps({"relay": {"port": 0, "data_port": 0}}))
    process = start(
        [sys.executable, "-m", "farfill", "relay", "--config", str(folder / "relay.yaml"), "--ready-file", str(file)],
        folder / "relay.log",
    )
    try:
        yield ready(process, file)["url"], process
    finally:
        process.kill()


def ready(process: Process, file: Path) -> dict[str, Any]:
    until = time.monotonic() + 60
    while not file.exists():
        assert process.child.poll() is None, process.tail()
        assert time.monotonic() < until, process.tail()
        time.sleep(0.05)
    return json.loads(file.read_bytes())


def vllm_worker(server: VllmServer, role: str) -> dict[str, str]:
    return {
        "name": server.name, "url": server.url, "control_url": server.control_url, "role": role, "site": server.name,
    }  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """A streamed completion. `token_ids` as vLLM reports them."""

    token_ids: tuple[int, ...]
    headers: Mapping[str, str]


def complete(url: str, prompt: Sequence[int], *, tokens: int = 16, **fields: Any) -> Answer:
    """A greedy completion, streamed, that does not stop before `tokens` tokens.

    Raises:
        AssertionError: an error instead of an answer: "502: ..."; or within it: {"error": ..., "received": token ids}.
    """
    body = {
        "model": "m", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "return_token_ids": True, **fields,
    }  # fmt: skip
    found: list[int] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600, trust_env=False) as response:
        if response.status_code != 200:
            raise AssertionError(f"{response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise AssertionError(event | {"received": found})
                for choice in event["choices"]:
                    found += choice.get("token_ids") or []
        return Answer(tuple(found), dict(response.headers))


def complete_all(url: str, prompts: Sequence[Sequence[int]], *, at_once: int = 8, tokens: int = 16) -> list[Answer]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda prompt: complete(url, prompt, tokens=tokens), prompts))


def token_ids(count: int, seed: int, vocabulary: int = 49_000) -> list[int]:
    """Fixed pseudo-random token ids; no two seeds share a prefix of any length that matters."""
    state, made = (seed + 1) * 2_654_435_761 % 2**32, []
    for _ in range(count):
        state = (1_664_525 * state + 1_013_904_223) % 2**32
        made.append(1 + (state >> 8) % (vocabulary - 1))
    return made
