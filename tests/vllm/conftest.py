"""All tests here start vLLM servers; without vLLM there is nothing to start."""

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; see docs/vllm.md")

from vllm_kit import Pair, running


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """One pair of servers for all tests that need SmolLM2; a test that kills one starts it again."""
    made = Pair(tmp_path_factory.mktemp("pair"))
    with running(made.prefill, made.decode):
        yield made
