"""No setting is decoration: changing any field of the tree changes what the constructor gets."""

import pytest

from farfill.cli.slices import gateway_settings, worker_settings
from farfill.config import load
from farfill.config.schema import leaves
from farfill.config.tree import Config
from farfill.errors import FailureClass

# Of the engine, which is made from the tree directly (`serve._open_engine`).
ENGINE = {
    "engine",
    "model",
    "served_name",
    "dtype",
    "max_model_len",
    "threads",
    "chunk_tokens",
    "running",
    "prefix_cache_bytes",
}
OTHER = {
    "gateway.placement": "consumer",
    "gateway.workers": "[{name: w, url: 'http://127.0.0.1:1', role: both, site: s}]",
    "gateway.tenants": "[{name: t, api_key: 0123456789abcdef}]",
    "gateway.relay.name": "r",
    "gateway.relay.url": "http://127.0.0.1:1",
    "worker.role": "prefill",
    "worker.store_bytes": "2GiB",
}
GATEWAY = [path for path, _ in leaves(Config) if path.startswith("gateway.")]
WORKER = [path for path, _ in leaves(Config) if path.startswith("worker.") and path.split(".")[1] not in ENGINE]


def changed(path: str) -> Config:
    default = dict(leaves(Config))[path]
    if path in OTHER:
        value = OTHER[path]
    elif default.allowed == "one of local, fail":
        value = "fail"
    elif default.allowed.startswith("text"):
        value = "other"
    else:
        value = str(default.default + 1)
    flags = {path: value}
    if path.startswith("gateway.relay"):
        flags |= {"gateway.relay.name": "r", "gateway.relay.url": "http://127.0.0.1:1"}
    return load(None, {}, flags).config


@pytest.mark.parametrize("path", GATEWAY)
def test_every_gateway_field_arrives(path: str) -> None:
    assert gateway_settings(changed(path), None) != gateway_settings(Config(), None)


@pytest.mark.parametrize("path", WORKER)
def test_every_worker_field_arrives(path: str) -> None:
    assert worker_settings(changed(path), None) != worker_settings(Config(), None)


def test_each_failure_class_has_its_own_answer() -> None:
    for one in FailureClass:
        policy = gateway_settings(changed(f"gateway.fallback.{one.value}"), None).fallback.policy
        assert [other for other in FailureClass if policy.answer(other) == "fail"] == [one]


def test_the_defaults_of_tree_and_constructors_agree() -> None:
    from dataclasses import replace

    from farfill.engines.serving.settings import WorkerSettings
    from farfill.gateway.settings import GatewaySettings

    assert gateway_settings(Config(), None) == replace(GatewaySettings(workers=()), port=8000)
    assert worker_settings(Config(), None) == replace(WorkerSettings(), port=8101, data_port=8102)
