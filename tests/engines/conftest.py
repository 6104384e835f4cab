"""Tiny models and engines on them, made once for all tests here; torch is imported only where one is used."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """tiny_folder(kind): the folder of a tiny model."""
    from tiny_models import build_tiny

    root, made = tmp_path_factory.mktemp("tiny-models"), {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = build_tiny(kind, root / kind)
        return made[kind]

    return folder


@pytest.fixture(scope="session")
def tiny_loaded(tiny_folder: Callable[[str], Path]) -> Callable[..., Any]:
    """tiny_loaded(kind, dtype="float32"): a `LoadedModel`, which several engines may share one after the other."""
    from farfill.engines.hf.model import load_model

    made: dict[tuple[str, str], Any] = {}

    def loaded(kind: str, dtype: str = "float32") -> Any:
        if (kind, dtype) not in made:
            made[kind, dtype] = load_model(tiny_folder(kind), dtype=dtype)
        return made[kind, dtype]

    return loaded


@pytest.fixture
def open_tiny(tiny_folder: Callable[[str], Path]) -> Iterator[Callable[..., Any]]:
    """open_tiny(kind, dtype="float32", **config): an engine with weights of its own, stopped after the test.

    At its end every engine must be idle and hold no cache, and no event may have followed a terminal one.
    """
    from hf_kit import AFTER_THE_END
    from tiny_models import CHUNK_TOKENS

    from farfill.engines.hf.engine import HfEngine, HfEngineConfig
    from farfill.engines.hf.model import load_model

    engines: list[HfEngine] = []

    def open_one(kind: str, dtype: str = "float32", **config: Any) -> HfEngine:
        settings = {"chunk_tokens": CHUNK_TOKENS, "prefix_cache_bytes_max": 0} | config
        engines.append(HfEngine(load_model(tiny_folder(kind), dtype=dtype), HfEngineConfig(**settings)))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.stop()
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.cache_bytes, stats.prefix_cache_bytes) == (0, 0, 0, 0)
    late, AFTER_THE_END[:] = list(AFTER_THE_END), []
    assert late == []
