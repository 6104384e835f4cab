"""All tests here start vLLM servers; without vLLM there is nothing to start."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; see docs/vllm.md")
