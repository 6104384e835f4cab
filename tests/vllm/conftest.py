"""All tests here need vLLM, and most start its servers; without it there is nothing to collect."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from farfill.engines.vllm.versions import vllm_version
from farfill.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm_kit import Pair

try:
    vllm_version()
except ConfigurationError:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Pair]":
    """One pair of servers for all tests that need SmolLM2; a test that kills one starts it again."""
    from vllm_kit import Pair, running

    made = Pair(tmp_path_factory.mktemp("pair"))
    with running(made.prefill, made.decode):
        yield made
