"""Workers over the tests' small engine, on real sockets, and what a gateway does with two of them.

    async with worker_site() as site:
        ...
A site that is left checks that nothing is kept: no request, no cache bytes, no staging, no buffered chunk.
"""

import asyncio
import contextlib
import secrets
import ssl
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from tiny_engine import TinyEngine

from farfill.config.tree import Role
from farfill.engines.serving.call import settled
from farfill.engines.serving.serve import RunningWorker, running_worker
from farfill.engines.serving.settings import WorkerSettings
from farfill.kv.plan import plan_chunks, transfer_bytes
from farfill.kv.spec import TransferId
from farfill.store.control import StoreControl
from farfill.store.protocol import Release, Reserve
from farfill.tls import TlsFiles
from farfill.transfer.spec import Clocks, StoreAddress, TransferSpec, to_kv_transfer_params

WAIT_S = 60.0  # after which a test has failed; nothing waits so long that works


@dataclass(frozen=True)
class Site:
    running: RunningWorker
    engine: TinyEngine

    @property
    def url(self) -> str:
        return self.running.url

    @property
    def instance(self) -> str:
        return self.running.worker.identity.instance

    @property
    def name(self) -> str:
        return self.running.worker.identity.name

    @property
    def store(self) -> StoreAddress:
        return self.running.worker.store.address

    def metric(self, name: str, **labels: str) -> float:
        return self.running.worker.metrics.registry.get_sample_value(name, labels) or 0.0

    async def nothing_kept(self) -> None:
        """Waits until requests, caches and staging are free again; the wait is for ends under way, not for leases."""
        async with asyncio.timeout(WAIT_S):
            await self.running.worker.admission.idle()
            assert await asyncio.to_thread(self.engine.wait_idle, WAIT_S)
            free = self.running.worker.store.memory.when(
                lambda ledger: ledger.free_bytes == ledger.total_bytes and ledger.gets_parked == 0
            )
            ledger = await settled(free)
        assert ledger.held_bytes == ledger.quarantined_bytes == 0
        assert self.engine.stats().cache_bytes == 0


@contextlib.asynccontextmanager
async def worker_site(
    *,
    engine: TinyEngine | None = None,
    role: Role = Role.BOTH,
    name: str = "worker",
    tls: TlsFiles | None = None,
    keeps_leases: bool = False,
    **settings: Any,
) -> AsyncIterator[Site]:
    """A running worker. `keeps_leases`: the test leaves a lease on purpose, so staging is not checked."""
    engine = engine or TinyEngine()
    try:
        options: dict[str, Any] = {"store_bytes": 64 * 1024**2, **settings}
        async with running_worker(WorkerSettings(name=name, role=role, tls=tls, **options), engine) as running:
            site = Site(running, engine)
            yield site
            if not keeps_leases:
                await site.nothing_kept()
        assert site.running.worker.node.buffered_bytes == 0
    finally:
        await asyncio.to_thread(engine.stop)


@dataclass
class Front:
    """What a gateway does, in a few lines: reserves, starts both legs, releases."""

    session: aiohttp.ClientSession
    producer: Site
    consumer: Site
    chunk_tokens: int = 16
    clocks: Clocks = field(default_factory=Clocks)

    async def reserve(self, at: Site, prompt: Sequence[int], **changes: Any) -> TransferSpec:
        transfer_id = TransferId(secrets.token_hex(16))
        plan = plan_chunks(self.producer.engine.info.layout, len(prompt) - 1, self.chunk_tokens)
        granted = await StoreControl(self.session, at.url).reserve(
            Reserve(
                transfer_id=transfer_id,
                producer=self.producer.name,
                consumer=self.consumer.name,
                bytes=transfer_bytes(plan),
                chunks=len(plan) + 2,
                lease_s=60.0,
            )
        )
        whole: dict[str, Any] = {
            "transfer_id": transfer_id,
            "epoch": granted.epoch,
            "store": granted.store,
            "producer": self.producer.instance,
            "consumer": self.consumer.instance,
            "prefix_tokens": len(prompt) - 1,
            "chunk_tokens": self.chunk_tokens,
            "key": secrets.token_bytes(32),
            "clocks": self.clocks,
        }
        return TransferSpec(**{**whole, **changes})

    async def release(self, at: Site, spec: TransferSpec) -> None:
        await StoreControl(self.session, at.url).release(Release(spec.transfer_id, spec.epoch))

    async def prefill(self, spec: TransferSpec, prompt: Sequence[int], **more: Any) -> tuple[int, dict[str, Any]]:
        body = {
            "model": "tiny",
            "prompt": list(prompt),
            "max_tokens": 1,
            "kv_transfer_params": to_kv_transfer_params(spec, leg="prefill"),
            **more,
        }
        async with self.session.post(f"{self.producer.url}/v1/completions", json=body) as response:
            return response.status, await response.json()

    async def decode(
        self, spec: TransferSpec, body: dict[str, Any], path: str = "/v1/completions"
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        full = {**body, "kv_transfer_params": to_kv_transfer_params(spec, leg="decode")}
        async with self.session.post(f"{self.consumer.url}{path}", json=full) as response:
            return response.status, await response.json(), dict(response.headers)


@contextlib.asynccontextmanager
async def http_session(context: ssl.SSLContext | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(ssl=True if context is None else context, limit=0)
    timeout = aiohttp.ClientTimeout(total=WAIT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield session
