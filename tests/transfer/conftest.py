"""The world of a data-plane test: with mutual TLS or on bare loopback; it must end balanced and without threads."""

import threading
from collections.abc import Iterator

import pytest
from plane_kit import Certificates, World


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), f"{thread.name} is left behind"


@pytest.fixture
def world(certificates: Certificates, no_thread_left: None) -> Iterator[World]:
    """With mutual TLS."""
    world = World(certificates)
    yield world
    world.close()


@pytest.fixture
def bare_world(no_thread_left: None) -> Iterator[World]:
    """On loopback, without TLS."""
    world = World(None)
    yield world
    world.close()
