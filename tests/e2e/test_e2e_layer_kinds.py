"""Every kind of layer over real sockets: what is decoded elsewhere is what Transformers says, on bad links too."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from bad_link import Proxy
from tiny_models import CHUNK_TOKENS, KINDS, build_tiny
from transformers import AutoModelForCausalLM
from worker_kit import Front, http_session

from farfill.config.tree import Role
from farfill.engines.hf.engine import HfEngine, HfEngineConfig, open_engine
from farfill.engines.serving.serve import RunningWorker, running_worker
from farfill.engines.serving.settings import WorkerSettings

pytestmark = [pytest.mark.e2e, pytest.mark.torch]

PROMPT = [3 + (7 * position + position * position // 5) % 370 for position in range(9 * CHUNK_TOKENS + 5)]
NEW_TOKENS = 12


@dataclass
class HfSite:
    running: RunningWorker
    engine: HfEngine

    @property
    def url(self) -> str:
        return self.running.url

    @property
    def name(self) -> str:
        return self.running.worker.identity.name

    @property
    def instance(self) -> str:
        return self.running.worker.identity.instance


@dataclass
class Hf:
    front: Front
    east: HfSite
    west: HfSite
    relay: HfSite


@contextlib.asynccontextmanager
async def hf_sites(folder: Path) -> AsyncIterator[Hf]:
    """Three workers over the same model; one connection for each transfer, so that cuts hit what they are meant for."""

    async with contextlib.AsyncExitStack() as stack:

        async def site(name: str, role: Role) -> HfSite:
            engine = open_engine(
                folder,
                HfEngineConfig(chunk_tokens=CHUNK_TOKENS, prefix_cache_bytes_max=0),
                name=None,
                dtype="float32",
                max_model_len=None,
            )
            stack.push_async_callback(asyncio.to_thread, engine.stop)
            settings = WorkerSettings(name=name, role=role, store_bytes=64 * 1024**2, connections=1)
            return HfSite(await stack.enter_async_context(running_worker(settings, engine)), engine)

        session = await stack.enter_async_context(http_session())
        east, west = await site("east", Role.PREFILL), await site("west", Role.DECODE)
        relay = await site("relay", Role.BOTH)
        yield Hf(Front(session, east, west, chunk_tokens=CHUNK_TOKENS), east, west, relay)  # type: ignore[arg-type]
        for one in (east, west, relay):
            ledger = one.running.worker.store.memory.ledger()
            assert ledger.free_bytes == ledger.total_bytes
            assert one.engine.stats().cache_bytes == 0


def transformers_own(folder: Path) -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([PROMPT]), do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS
        )
    return [int(token) for token in output[0, len(PROMPT) :]]


def body_for(folder: Path) -> dict[str, Any]:
    return {
        "model": folder.name,
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": NEW_TOKENS,
        "min_tokens": NEW_TOKENS,
        "ignore_eos": True,
    }


@pytest.mark.parametrize("kind", KINDS)
async def test_remote_says_what_transformers_says(kind: str, tmp_path: Path) -> None:
    """Through each placement, then over links of which both are cut three times."""
    folder = build_tiny(kind, tmp_path / kind)
    async with hf_sites(folder) as sites:
        expected = sites.west.engine.tokenizer.decode(transformers_own(folder))
        assert expected
        front = sites.front
        for place in (sites.east, sites.west, sites.relay):
            spec = await front.reserve(place, PROMPT)  # type: ignore[arg-type]
            (prefilled, answer), (status, decoded, headers) = await asyncio.gather(
                front.prefill(spec, PROMPT, model=folder.name), front.decode(spec, body_for(folder))
            )
            assert (prefilled, status) == (200, 200), (answer, decoded)
            assert decoded["choices"][0]["text"] == expected
            assert int(headers["X-Farfill-Kv-Bytes"]) > 0
            await front.release(place, spec)  # type: ignore[arg-type]
    async with hf_sites(folder) as sites:
        front = sites.front
        spec = await front.reserve(sites.relay, PROMPT)  # type: ignore[arg-type]
        up = Proxy(spec.store, cuts=(5_000, 9_000, 7_000))
        down = Proxy(spec.store, answer_cuts=(6_000, 8_000, 5_000))
        try:
            (prefilled, answer), (status, decoded, _) = await asyncio.gather(
                front.prefill(msgspec.structs.replace(spec, store=up.address), PROMPT, model=folder.name),
                front.decode(msgspec.structs.replace(spec, store=down.address), body_for(folder)),
            )
            assert (prefilled, status) == (200, 200), (answer, decoded)
            assert decoded["choices"][0]["text"] == expected
            assert (up.cuts_done, down.cuts_done) == (3, 3)
        finally:
            await asyncio.to_thread(up.stop)
            await asyncio.to_thread(down.stop)
        await front.release(sites.relay, spec)  # type: ignore[arg-type]
