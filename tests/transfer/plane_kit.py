"""Sites for the tests of the data plane: real stores, nodes, HTTP control, TLS."""

import asyncio
import hashlib
import secrets
import socket
import ssl
import threading
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from aiohttp import web
from bad_link import Proxy

from farfill import tls
from farfill.kv.fingerprint import Convertible, Fingerprint, Informational, MustEqual
from farfill.kv.layout import layout_digest
from farfill.kv.plan import plan_chunks, transfer_bytes
from farfill.kv.spec import CacheLayout, ChunkSpec, Extent, LayerKind, LayerLayout, TensorSpec, TransferId
from farfill.store.control import add_store_routes
from farfill.store.machine import StoreLimits
from farfill.store.protocol import Granted, LedgerSnapshot, Release, Reserve
from farfill.store.server import Security, StoreServer, StoreSettings
from farfill.transfer.events import LinkSettings
from farfill.transfer.node import TransferNode
from farfill.transfer.outgoing import Outgoing
from farfill.transfer.spec import Clocks, StoreAddress, TransferSpec

WAIT_S = 60.0  # an end to a hanging test; nothing is proved by it
GATEWAY = "gateway"
QUICK = LinkSettings(backoff_s=0.01)


def _tensor(name: str, extent: Extent, *shape: int) -> TensorSpec:
    return TensorSpec(name, extent, shape, "float32")


LAYOUT = CacheLayout(
    "test",
    (
        LayerLayout(0, LayerKind.FULL, (_tensor("k", Extent.TOKENS, 2, 64), _tensor("v", Extent.TOKENS, 2, 64))),
        LayerLayout(
            1, LayerKind.WINDOW, (_tensor("k", Extent.WINDOW, 1, 32), _tensor("v", Extent.WINDOW, 1, 32)), window=33
        ),
        LayerLayout(2, LayerKind.LINEAR, (_tensor("recurrent", Extent.STATE, 4, 256),)),
    ),
)


def fingerprint(weights: str = "w", layout: CacheLayout = LAYOUT) -> Fingerprint:
    must = MustEqual(
        weights_digest=weights,
        tokenizer_digest="t",
        chat_template_digest="c",
        architecture="a",
        rope="r",
        layout_digest=layout_digest(layout),
        dtype="float32",
        kv_dtype="float32",
    )
    return Fingerprint(must, Convertible(max_model_len=4096), Informational("test", "1"))


def payload_of(chunk: ChunkSpec, salt: str = "") -> bytes:
    """Bytes that tell every chunk, and every place in it, from every other."""
    seed = hashlib.sha256(f"{chunk}{salt}".encode()).digest()
    return hashlib.shake_256(seed).digest(chunk.payload_bytes)


class ControlThread:
    """An aiohttp application served in a thread of its own."""

    def __init__(self, app: web.Application, sock: socket.socket, context: ssl.SSLContext | None) -> None:
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        started = threading.Event()

        async def serve() -> None:
            runner = web.AppRunner(app)
            await runner.setup()
            await web.SockSite(runner, sock, ssl_context=context).start()
            started.set()
            await self._stop.wait()
            await runner.cleanup()

        def run() -> None:
            self._loop.run_until_complete(serve())
            self._loop.close()

        self._thread = threading.Thread(target=run, name="test-control")
        self._thread.start()
        assert started.wait(WAIT_S)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


class Certificates:
    """A development CA and what it signs, made once for a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        tls.write_development_ca(folder)
        self._files: dict[str, tls.TlsFiles] = {}

    def files(self, name: str) -> tls.TlsFiles:
        if name not in self._files:
            self._files[name] = tls.write_certificate(self._folder, name)
        return self._files[name]

    def client(self, name: str) -> ssl.SSLContext:
        return tls.client_context(self.files(name))

    def server(self, name: str) -> ssl.SSLContext:
        return tls.server_context(self.files(name))


class Site:
    """A process's worth: a store with its control API, and a node that uses it."""

    def __init__(
        self,
        name: str,
        certificates: Certificates | None,
        *,
        store_bytes: int = 64 * 1024**2,
        limits: StoreLimits | None = None,
        settings: LinkSettings = QUICK,
        data_port: int = 0,
        **node: int,
    ) -> None:
        self.name = name
        sock = socket.create_server(("127.0.0.1", 0))
        scheme = "https" if certificates else "http"
        self.store = StoreServer(
            StoreSettings(
                host="127.0.0.1",
                data_port=data_port,
                security=Security.MUTUAL_TLS if certificates else Security.LOOPBACK,
                control_url=f"{scheme}://127.0.0.1:{sock.getsockname()[1]}",
                limits=limits or StoreLimits(store_bytes),
            )
        )
        app = web.Application()
        add_store_routes(app, self.store)
        self._control = ControlThread(app, sock, certificates.server(name) if certificates else None)
        context = certificates.client(name) if certificates else None
        self.node = TransferNode(name, self.store.local(name), context, settings=settings, **node)

    def ledger(self) -> LedgerSnapshot:
        return self.store.memory.ledger()

    def stop(self) -> None:
        self.node.close()
        self._control.stop()
        self.store.stop()


def assert_balanced(ledger: LedgerSnapshot) -> None:
    assert ledger.free_bytes + ledger.held_bytes + ledger.quarantined_bytes == ledger.total_bytes


@dataclass
class World:
    """Sites by name; at the end every ledger must be balanced and every thread gone."""

    certificates: Certificates | None
    sites: list[Site] = field(default_factory=list)
    proxies: list["Proxy"] = field(default_factory=list)

    def site(self, name: str, **options: object) -> Site:
        site = Site(name, self.certificates, **options)  # type: ignore[arg-type]
        self.sites.append(site)
        return site

    def proxy(self, store: StoreAddress, **faults: object) -> "Proxy":
        proxy = Proxy(store, **faults)  # type: ignore[arg-type]
        self.proxies.append(proxy)
        return proxy

    def close(self) -> None:
        """Releases what tests have left to leases, then expects every byte back."""
        for site in self.sites:
            site.node.close()
            assert site.node.buffered_bytes == 0, "a sender kept published chunks"
        for proxy in self.proxies:
            proxy.stop()
        for site in self.sites:
            assert_balanced(site.ledger())
            site.stop()


def reserve(
    site: Site,
    producer: str,
    consumer: str,
    *,
    prefix_tokens: int = 200,
    chunk_tokens: int = 64,
    layout: CacheLayout = LAYOUT,
    lease_s: float = 600.0,
    clocks: Clocks | None = None,
    store: StoreAddress | None = None,
    transfer_id: str | None = None,
) -> TransferSpec:
    """What the gateway does: reserves at the store, and makes the spec that both legs get."""
    plan = plan_chunks(layout, prefix_tokens, chunk_tokens)
    request = Reserve(
        transfer_id or secrets.token_hex(16), producer, consumer, transfer_bytes(plan), len(plan) + 2, lease_s
    )
    granted: Granted = site.store.reserve(GATEWAY, request).result(WAIT_S)
    return TransferSpec(
        transfer_id=TransferId(granted.transfer_id),
        epoch=granted.epoch,
        store=store or granted.store,
        producer=producer,
        consumer=consumer,
        prefix_tokens=prefix_tokens,
        chunk_tokens=chunk_tokens,
        key=secrets.token_bytes(32),
        clocks=clocks or Clocks(stall_s=WAIT_S, setup_s=WAIT_S, verify_s=WAIT_S),
    )


def release(site: Site, spec: TransferSpec) -> LedgerSnapshot:
    """Releases, and waits until nothing of it is left (a get may still be on its way out)."""
    site.store.release(GATEWAY, Release(spec.transfer_id, spec.epoch)).result(WAIT_S)
    ledger = site.store.memory.when(lambda now: now.free_bytes == now.total_bytes).result(WAIT_S)
    assert_balanced(ledger)
    return ledger


def tokens(spec: TransferSpec) -> list[int]:
    return list(range(spec.prefix_tokens))


def start_send(
    node: TransferNode, spec: TransferSpec, layout: CacheLayout = LAYOUT
) -> tuple[Outgoing, list[ChunkSpec]]:
    outgoing = node.send(spec, layout, fingerprint(layout=layout), tokens(spec))
    return outgoing, list(plan_chunks(layout, spec.prefix_tokens, spec.chunk_tokens))


def publish_all(outgoing: Outgoing, plan: list[ChunkSpec], cached_tokens: int = 0) -> None:
    for chunk in plan:
        outgoing.publish(chunk, memoryview(payload_of(chunk)))
    outgoing.finish(cached_tokens)


def with_store(spec: TransferSpec, store: StoreAddress) -> TransferSpec:
    """The same transfer by way of another address (a proxy's)."""
    return msgspec.structs.replace(spec, store=store)
