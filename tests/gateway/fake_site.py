"""Small working workers for the gateway's tests: real sockets and HTTP, bytes for tokens, no engine and no KV.

A `Site` is the world they share: which transfers were published, which leases are held. Text is a function of the
prompt and the choice's number alone, so that every path must give the same. What can go wrong is set on a worker:
`fail` (an error for the next calls), `hold` (an event to wait for), `cut_after` (pieces, then the connection dies).
"""

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from farfill.errors import ClientError, FarfillError, OperationError
from farfill.gateway.gateway import Gateway
from farfill.gateway.serve import running_gateway
from farfill.gateway.settings import (
    FallbackRules,
    GatewayClocks,
    GatewaySettings,
    Limits,
    RelayAddress,
    Tenant,
    WorkerAddress,
)
from farfill.kv.fingerprint import Convertible, Fingerprint, Informational, MustEqual, fingerprint_to_builtins
from farfill.kv.layout import layout_digest, layout_to_builtins
from farfill.kv.spec import CacheLayout, Extent, LayerKind, LayerLayout, TensorSpec
from farfill.router.policy import Placement, RouterSettings
from farfill.store.protocol import (
    Granted,
    LedgerSnapshot,
    Release,
    Released,
    Renew,
    Renewed,
    Reserve,
    StoreStatus,
)
from farfill.transfer.spec import Clocks, StoreAddress, TransferSpec, from_kv_transfer_params

MODEL = "fake"
LAYOUT = CacheLayout(
    "fake", (LayerLayout(0, LayerKind.FULL, (TensorSpec("k", Extent.TOKENS, (1, 8), "float32"),)),)
)  # fmt: skip


def words_of(prompt: bytes, choice: int, count: int) -> list[str]:
    digest = hashlib.sha256(prompt + bytes([choice])).hexdigest()
    return [f"{digest[i % 60 : i % 60 + 4]} " for i in range(count)]


def completion_text(prompt: str, count: int, choice: int = 0) -> str:
    return "".join(words_of(prompt.encode(), choice, count))


@dataclass
class Lease:
    request: Reserve
    epoch: int
    released: bool = False
    renewals: int = 0


class Site:
    """What the workers of one test share."""

    def __init__(self) -> None:
        self.published: dict[str, asyncio.Event] = {}
        self.leases: dict[str, Lease] = {}
        self.changed = asyncio.Condition()

    def of(self, transfer_id: str) -> asyncio.Event:
        return self.published.setdefault(transfer_id, asyncio.Event())

    @property
    def held(self) -> int:
        return sum(not lease.released for lease in self.leases.values())

    async def tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, condition: Any) -> None:
        """Returns when the condition holds; it is looked at whenever something has changed."""
        async with asyncio.timeout(20), self.changed:
            await self.changed.wait_for(condition)


@dataclass
class FakeWorker:
    site: Site
    name: str
    role: str
    place: str
    weights: str = "w1"
    max_model_len: int = 4096
    model: str = MODEL
    fail: dict[str, FarfillError] = field(default_factory=dict)  # endpoint or "prefill", "decode", "local", "reserve"
    hold: dict[str, asyncio.Event] = field(default_factory=dict)
    cut_after: int | None = None
    says_nothing_moved: bool = False
    store_bytes: int = 2**30
    draining: bool = False
    lease_s: float | None = None  # granted instead of what was asked
    seen: list[tuple[str, Mapping[str, str], dict[str, Any]]] = field(default_factory=list)
    active: Counter[str] = field(default_factory=Counter)
    stalled: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""
    runner: web.AppRunner | None = None

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/farfill/v1/info", self._info)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._completions)
        app.router.add_route("*", "/v1/echo", self._echo)
        app.router.add_get("/v1/endless", self._endless)
        for name in ("reserve", "renew", "release"):
            app.router.add_post(f"/farfill/v1/store/{name}", getattr(self, f"_{name}"))
        app.router.add_get("/farfill/v1/store/status", self._store_status)
        self.runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.05)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self.runner is not None:
            runner, self.runner = self.runner, None
            await runner.cleanup()

    @property
    def address(self) -> WorkerAddress:
        return WorkerAddress(self.name, self.url, self.role, self.place)

    @contextlib.asynccontextmanager
    async def _in(self, what: str) -> AsyncIterator[None]:
        self.active[what] += 1
        await self.site.tell()
        try:
            if what in self.hold:
                await self.hold[what].wait()
            if what in self.fail:
                raise self.fail[what]
            yield
        finally:
            self.active[what] -= 1
            # the handler may be ending by cancellation: whoever waits is told by a task of its own
            self.teller = asyncio.ensure_future(self.site.tell())

    # --- endpoints --------------------------------------------------------------------------------------------------

    def fingerprint(self) -> Fingerprint:
        must = MustEqual(
            weights_digest=self.weights,
            tokenizer_digest="t",
            chat_template_digest="c",
            architecture="fake",
            rope="{}",
            layout_digest=layout_digest(LAYOUT),
            dtype="float32",
            kv_dtype="float32",
        )
        return Fingerprint(must, Convertible(self.max_model_len), Informational("fake", "1"))

    async def _info(self, request: web.Request) -> web.Response:
        store = StoreAddress(f"store-{self.name}", self.url, "127.0.0.1", 1)
        return _json(
            {
                "name": self.name,
                "instance": f"instance-{self.name}",
                "role": self.role,
                "site": self.place,
                "engine": "fake",
                "model": self.model,
                "max_model_len": self.max_model_len,
                "fingerprint": fingerprint_to_builtins(self.fingerprint()),
                "layout": layout_to_builtins(LAYOUT),
                "store": msgspec.to_builtins(store),
                "draining": False,
            }
        )

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await self._read(request, "tokenize")
        try:
            async with self._in("tokenize"):
                return _json({"count": 0, "tokens": list(_prompt_of(body)), "max_model_len": self.max_model_len})
        except FarfillError as error:
            return _error(error)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request, request.path)
        try:
            leg = from_kv_transfer_params(body.get("kv_transfer_params"))
            if leg is None:
                if self.role == "prefill":
                    raise ClientError("prefill_only", "prefills only")
                async with self._in("local"):
                    return await self._answer(request, body, 0)
            spec = leg[1]
            lease = self.site.leases.get(spec.transfer_id)
            if lease is None or lease.epoch != spec.epoch or lease.released:
                raise OperationError("lease_unknown", "no such lease")
            if leg[0] == "prefill":
                async with self._in("prefill"):
                    assert spec.producer == f"instance-{self.name}"
                    assert len(body["prompt"]) == spec.prefix_tokens + 1
                    self.site.of(spec.transfer_id).set()
                    return _json({"choices": [], "farfill": {"prefill_s": 0.25, "transfer_bytes": _bytes_of(spec)}})
            async with self._in("decode"):
                assert spec.consumer == f"instance-{self.name}"
                assert len(_prompt_of(body)) == spec.prefix_tokens + 1
                await self.site.of(spec.transfer_id).wait()
                return await self._answer(request, body, 0 if self.says_nothing_moved else _bytes_of(spec))
        except FarfillError as error:
            return _error(error)

    async def _answer(self, request: web.Request, body: dict[str, Any], kv_bytes: int) -> web.StreamResponse:
        prompt, count, choices = _prompt_of(body), body.get("max_tokens", 4), body.get("n", 1)
        if type(count) is not int or count < 1:
            raise ClientError("invalid_request", "max_tokens must be at least 1", field="max_tokens")
        headers = {"X-Engine": "fake"}
        if kv_bytes:
            headers |= {"X-Farfill-Kv-Bytes": str(kv_bytes), "X-Farfill-Transfer-Seconds": "0.125"}
        if not body.get("stream"):
            texts = [{"index": c, "text": "".join(words_of(prompt, c, count))} for c in range(choices)]
            return _json({"choices": texts, "usage": {"prompt_tokens": len(prompt)}}, headers=headers)
        headers["Content-Type"] = "text/event-stream; charset=utf-8"
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        for position in range(count):
            if self.cut_after is not None and position == self.cut_after:
                assert request.transport is not None
                request.transport.abort()
                return response
            if "token" in self.hold and position == 1:
                await self.hold["token"].wait()
            if "token" in self.fail and position == 1:
                await response.write(b"data: " + msgspec.json.encode(self.fail["token"].to_openai()) + b"\n\n")
                await response.write_eof()
                return response
            for choice in range(choices):
                piece = {"choices": [{"index": choice, "text": words_of(prompt, choice, count)[position]}]}
                await response.write(b"data: " + msgspec.json.encode(piece) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        if "eof" in self.hold:
            await self.hold["eof"].wait()
        await response.write_eof()
        return response

    async def _echo(self, request: web.Request) -> web.StreamResponse:
        """Says what it got: for what is passed through."""
        raw = await request.read()
        self.seen.append((request.path, request.headers.copy(), {}))
        if "echo" in self.fail:
            return _error(self.fail["echo"])
        if request.method == "DELETE":
            return web.Response(status=204)
        told = {"method": request.method, "query": request.query_string, "sha256": hashlib.sha256(raw).hexdigest()}
        return _json(told, headers={"X-Engine": "fake", "Connection": "X-Private", "X-Private": "1"})

    async def _endless(self, request: web.Request) -> web.StreamResponse:
        """Far more bytes than sockets hold. `stalled` is set once a write waits for the reader."""
        async with self._in("endless"):
            response = web.StreamResponse()
            await response.prepare(request)
            for _ in range(2048):
                write = asyncio.ensure_future(response.write(b"x" * 65536))
                done, _ = await asyncio.wait([write], timeout=0.5)
                if not done:
                    self.stalled.set()
                await write
            return response

    # --- the store --------------------------------------------------------------------------------------------------

    async def _reserve(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=Reserve)
        try:
            async with self._in("reserve"):
                lease = self.site.leases[asked.transfer_id] = Lease(asked, epoch=len(self.site.leases) + 1)
                address = StoreAddress(f"store-{self.name}", self.url, "127.0.0.1", 1)
                lease_s = asked.lease_s if self.lease_s is None else self.lease_s
                return _json(Granted(asked.transfer_id, lease.epoch, lease_s, address))
        except FarfillError as error:
            return _error(error)

    async def _store_status(self, request: web.Request) -> web.Response:
        ledger = LedgerSnapshot(self.store_bytes, self.store_bytes, 0, 0, 0, 0)
        return _json(StoreStatus(StoreAddress(f"store-{self.name}", self.url, "127.0.0.1", 1), ledger, self.draining))

    async def _renew(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=Renew)
        lease = self.site.leases[asked.transfer_id]
        lease.renewals += 1
        await self.site.tell()
        if "renew" in self.fail:
            return _error(self.fail["renew"])
        return _json(Renewed(asked.transfer_id, lease.epoch, self.lease_s or asked.lease_s))

    async def _release(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=Release)
        lease = self.site.leases[asked.transfer_id]
        assert lease.epoch == asked.epoch
        assert not lease.released, "released twice"
        lease.released = True
        await self.site.tell()
        return _json(Released(asked.transfer_id, asked.epoch))

    async def _read(self, request: web.Request, what: str) -> dict[str, Any]:
        body = msgspec.json.decode(await request.read())
        assert isinstance(body, dict)
        self.seen.append((what, request.headers.copy(), body))
        return body


def _prompt_of(body: dict[str, Any]) -> bytes:
    if "messages" in body:
        return "".join(f"{m['role']}:{m['content']}\n" for m in body["messages"]).encode()
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        prompt = prompt[0]
    if not prompt:
        raise ClientError("empty_prompt", "the prompt is empty", field="prompt")
    return prompt.encode() if isinstance(prompt, str) else bytes(prompt)


def _bytes_of(spec: TransferSpec) -> int:
    return spec.prefix_tokens * 32


def _json(value: Any, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json", headers=headers)


def _error(error: FarfillError) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(error.to_openai()), status=error.http_status, content_type="application/json"
    )


@dataclass
class Cluster:
    """A prefill worker in site east, a decode worker in site west, a gateway, and a relay (no more than its store)."""

    site: Site
    prefill: FakeWorker
    decode: FakeWorker
    relay: FakeWorker
    workers: list[FakeWorker]
    gateway: Gateway
    url: str


@contextlib.asynccontextmanager
async def cluster(
    *,
    threshold: int = 32,
    placement: Placement = Placement.PRODUCER,
    fallback: FallbackRules | None = None,
    clocks: GatewayClocks | None = None,
    limits: Limits | None = None,
    tenants: tuple[Tenant, ...] = (),
    prefill: bool = True,
    more: tuple[tuple[str, str, str], ...] = (),
    weights: str = "w1",
) -> AsyncIterator[Cluster]:
    """`more`: further workers (name, role, site). A block's end checks that nothing is left held or running."""
    site = Site()
    first = FakeWorker(site, "east-1", "prefill", "east", weights=weights)
    second = FakeWorker(site, "west-1", "decode", "west")
    workers = [second, *([first] if prefill else []), *(FakeWorker(site, *one) for one in more)]
    relay = FakeWorker(site, "relay", "both", "hub")
    for worker in (*workers, relay):
        await worker.start()
    settings = GatewaySettings(
        workers=tuple(worker.address for worker in workers),
        port=0,
        relay=RelayAddress("relay", relay.url),
        tenants=tenants,
        router=RouterSettings(threshold, placement),
        chunk_tokens=16,
        fallback=fallback or FallbackRules(),
        clocks=clocks or GatewayClocks(transfer=Clocks(setup_s=5.0), poll_s=60.0, drain_s=10.0),
        limits=limits or Limits(),
    )
    try:
        async with running_gateway(settings) as running:
            yield Cluster(site, first, second, relay, workers, running.gateway, running.url)
        assert running.gateway.admission.requests == 0
        assert all(worker.outstanding_tokens == 0 for worker in running.gateway.fleet.workers.values())
        assert site.held == 0, "a lease was left"
    finally:
        for worker in (*workers, relay):
            await worker.stop()
