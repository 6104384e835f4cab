"""`farfill worker --engine vllm -- ...`: becomes a vLLM server with the connector, its JSON from our configuration.

Not here: the connector (`farfill.engines.vllm`). This is a convenience: `vllm serve` with the same JSON is as good.
"""

import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from farfill.config import Config
from farfill.config.tree import Role
from farfill.engines.vllm.versions import require_supported, vllm_version
from farfill.errors import ConfigurationError

_KV_ROLES: Final = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", Role.BOTH: "kv_both"}
_OURS: Final = "--kv-transfer-config"


def transfer_config(config: Config, ready_file: Path | None) -> dict[str, Any]:
    """The value of vLLM's `--kv-transfer-config`. `worker.port` is the connector's control API; vLLM has its own."""
    worker = config.worker
    extra: dict[str, Any] = {
        "name": worker.name,
        "site": worker.site,
        "host": worker.host,
        "port": worker.port,
        "data_port": worker.data_port,
        "advertise_host": worker.advertise_host,
        "store_bytes": worker.store_bytes,
        "connections": worker.connections,
    }
    if config.tls is not None:
        files = config.tls.files()
        extra["tls"] = {"ca": str(files.ca), "certificate": str(files.certificate), "key": str(files.key)}
    if ready_file is not None:
        extra["ready_file"] = str(ready_file)
    return {
        "kv_connector": "FarfillConnector",
        "kv_connector_module_path": "farfill.engines.vllm.connector",
        "kv_role": _KV_ROLES[worker.role],
        "kv_connector_extra_config": extra,
    }


def command(config: Config, ready_file: Path | None, arguments: Sequence[str]) -> list[str]:
    """The program and its arguments.

    Args:
        arguments: those of `vllm serve`: a model first, unless the configuration names one.

    Raises:
        ConfigurationError: `dependency_missing`; `config_invalid` where there is no model, or the option that is ours.
    """
    require_supported(vllm_version())
    if any(argument.split("=")[0] == _OURS for argument in arguments):
        raise ConfigurationError("config_invalid", f"{_OURS} is what this command writes; leave it out", field=_OURS)
    rest = list(arguments)
    model = rest.pop(0) if rest and not rest[0].startswith("-") else config.worker.model
    if not model and "--model" not in rest:
        raise ConfigurationError("config_invalid", "name a model: farfill worker --engine vllm -- MODEL", field="model")
    named = ["--model", model] if model else []
    if config.worker.served_name and "--served-model-name" not in rest:
        named += ["--served-model-name", config.worker.served_name]
    ours = [_OURS, json.dumps(transfer_config(config, ready_file))]
    return [sys.executable, "-m", *_program(), *named, *rest, *ours]


def _program() -> list[str]:
    """`vllm serve`, or the same server's module where vLLM is a build under another package's name."""
    try:
        version("vllm")
    except PackageNotFoundError:
        return ["vllm.entrypoints.openai.api_server"]
    return ["vllm.entrypoints.cli.main", "serve"]


def run(config: Config, ready_file: Path | None, arguments: Sequence[str]) -> None:
    """Replaces this process by the server's, which gets our signals as its own. Does not return."""
    made = command(config, ready_file, arguments)
    os.execv(made[0], made)
