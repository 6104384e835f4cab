"""The processes that the end-to-end tests share, and the reference that they are compared with."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import Cluster, Node

from farfill.cli.demo.children import Children
from farfill.engines.hf.demo_model import ensure_demo_model


@pytest.fixture(scope="session")
def model() -> Path:
    return ensure_demo_model()


@pytest.fixture
def cluster(tmp_path: Path, model: Path) -> Iterator[Cluster]:
    """An empty one, for tests that kill."""
    with Children(tmp_path) as children:
        yield Cluster(tmp_path, children, model)


@dataclass(frozen=True)
class Sites:
    cluster: Cluster
    east: Node
    west: Node
    relay: Node


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Sites]:
    """Two sites and a relay that nobody kills; each test brings its own gateway."""
    folder = tmp_path_factory.mktemp("sites")
    with Children(folder) as children:
        yield start_sites(Cluster(folder, children, model))


def start_sites(cluster: Cluster) -> Sites:
    children = [
        cluster.begin_worker("prefill-east", "prefill", "east"),
        cluster.begin_worker("decode-west", "decode", "west"),
        cluster.begin_relay(),
    ]
    with ThreadPoolExecutor(3) as pool:
        east, west, relay = pool.map(cluster.ready, children)
    return Sites(cluster, east, west, relay)
