"""Runs one serving process: checks its configuration, sets up logging, hands over to the part that serves.

Not here: what a gateway, worker or relay does.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from farfill import tls
from farfill.cli.progress import activity, demo_model
from farfill.config import Config, WorkerSettings, check_gateway, check_relay, check_worker
from farfill.engines.api import Engine
from farfill.errors import ConfigurationError

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def gateway(config: Config, ready_file: Path | None, stop_with_stdin: bool) -> None:
    """Serves until a stop signal."""
    check_gateway(config)
    _check_identity("gateway", config.gateway.name, config)
    from farfill.cli.slices import gateway_settings
    from farfill.gateway.serve import serve_gateway

    _begin(stop_with_stdin)
    asyncio.run(serve_gateway(gateway_settings(config, ready_file)))


def worker(config: Config, ready_file: Path | None, stop_with_stdin: bool) -> None:
    """Loads the model, then serves until a stop signal."""
    check_worker(config)
    _check_identity("worker", config.worker.name, config)
    folder = _model_folder(config.worker)
    from farfill.cli.slices import worker_settings
    from farfill.engines.serving.serve import serve_worker

    _begin(stop_with_stdin)
    engine = _open_engine(config.worker, folder)
    asyncio.run(serve_worker(worker_settings(config, ready_file), engine))


def vllm_worker(config: Config, ready_file: Path | None, arguments: Sequence[str]) -> None:
    """Becomes a vLLM server with the connector; does not return."""
    check_worker(config)
    _check_identity("worker", config.worker.name, config)
    from farfill.cli.vllm_worker import run

    run(config, ready_file, arguments)


def relay(config: Config, ready_file: Path | None, stop_with_stdin: bool) -> None:
    """Serves until a stop signal."""
    check_relay(config)
    _check_identity("relay", config.relay.name, config)
    from farfill.cli.relay import serve_relay

    _begin(stop_with_stdin)
    asyncio.run(serve_relay(config.relay, config.tls, ready_file))


def _check_identity(section: str, name: str, config: Config) -> None:
    """Told before anything is loaded.

    Raises:
        ConfigurationError: `certificate_invalid`, or `config_invalid` where the certificate is another peer's.
    """
    if config.tls is None:
        return
    proven = tls.check_files(config.tls.files()).name
    if proven != name:
        raise ConfigurationError(
            "config_invalid",
            f"{section}.name is {name!r}, but {config.tls.certificate} proves {proven!r}; peers go by the certificate",
            field=f"{section}.name",
        )


def _model_folder(worker: WorkerSettings) -> Path:
    folder = Path(worker.model) if worker.model else demo_model()
    if not (folder / "config.json").is_file():
        raise ConfigurationError(
            "model_not_found", f"{folder} has no config.json: name a Hugging Face model folder", field="worker.model"
        )
    return folder


def _open_engine(worker: WorkerSettings, folder: Path) -> Engine:
    """Loads the model, with progress.

    Raises:
        ConfigurationError: `model_not_found`, `model_unsupported`, `dependency_missing`, `config_invalid`.
    """
    try:
        from farfill.engines.hf.engine import HfEngineConfig, open_engine
    except ImportError as error:
        raise ConfigurationError(
            "dependency_missing", f"{error.name} is not installed; install farfill with its hf extra", field="engine"
        ) from error
    tuning = HfEngineConfig(
        chunk_tokens=worker.chunk_tokens,
        running_max=worker.running,
        waiting_max=worker.requests,
        prefix_cache_bytes_max=worker.prefix_cache_bytes,
        threads=worker.threads,
    )
    with activity(f"loading {folder}"):
        return open_engine(
            folder,
            tuning,
            name=worker.served_name or None,
            dtype=worker.dtype,
            max_model_len=worker.max_model_len or None,
        )


def _begin(stop_with_stdin: bool) -> None:
    logging.basicConfig(level=logging.INFO, format=_FORMAT, stream=sys.stderr)
    if stop_with_stdin:
        threading.Thread(target=_stop_when_stdin_ends, name="farfill-stdin", daemon=True).start()


def _stop_when_stdin_ends() -> None:
    """Our parent holds the other end, so its end is ours too, however it came about."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
