"""The gateway over real workers: real sockets, real transfers, an engine whose cache decides its tokens.

Rules: what is decoded remotely is what one worker alone says; whatever way a request ends, no worker keeps anything.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_engine import TinyEngine
from worker_kit import WAIT_S, Site, worker_site

from farfill import tls
from farfill.config.tree import Role
from farfill.engines.serving.serve import running_worker
from farfill.engines.serving.settings import WorkerSettings
from farfill.gateway.gateway import Gateway
from farfill.gateway.serve import running_gateway
from farfill.gateway.settings import (
    FallbackRules,
    GatewayClocks,
    GatewaySettings,
    RelayAddress,
    Tenant,
    WorkerAddress,
)
from farfill.router.policy import Placement, RouterSettings
from farfill.transfer.spec import Clocks

TEXT = "The cache of a prompt is computed in one place and read in another. " * 4
GREEDY: dict[str, Any] = {"model": "tiny", "prompt": TEXT, "temperature": 0, "max_tokens": 24, "ignore_eos": True}


class Hold:
    """Holds an engine before a phase until the test lets go; says when it is there."""

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.reached = threading.Event()
        self.go = threading.Event()

    def __call__(self, request_id: str, phase: str) -> None:
        if phase == self.phase:
            self.reached.set()
            assert self.go.wait(WAIT_S)

    async def until_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, WAIT_S)


@dataclass
class Sites:
    gateway: Gateway
    client: httpx.AsyncClient
    east: Site
    west: Site

    async def post(self, body: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
        return await self.client.post(path, json=body)


def settings_for(workers: list[WorkerAddress], **changes: Any) -> GatewaySettings:
    whole: dict[str, Any] = {
        "workers": tuple(workers),
        "port": 0,
        "router": RouterSettings(64, changes.pop("placement", Placement.PRODUCER)),
        "chunk_tokens": 16,
        "clocks": GatewayClocks(poll_s=30.0, drain_s=20.0),
        **changes,
    }
    return GatewaySettings(**whole)


@contextlib.asynccontextmanager
async def sites(
    *,
    placement: Placement = Placement.PRODUCER,
    files: dict[str, tls.TlsFiles] | None = None,
    east_engine: TinyEngine | None = None,
    west_engine: TinyEngine | None = None,
    **changes: Any,
) -> AsyncIterator[Sites]:
    """A prefill worker, a decode worker, a relay and a gateway. Every site checks at its end that it keeps nothing."""
    files = files or {}
    async with contextlib.AsyncExitStack() as stack:
        east = await stack.enter_async_context(
            worker_site(name="east-1", role=Role.PREFILL, engine=east_engine, site="east", tls=files.get("east-1"))
        )
        west = await stack.enter_async_context(
            worker_site(name="west-1", role=Role.DECODE, engine=west_engine, site="west", tls=files.get("west-1"))
        )
        relay = await stack.enter_async_context(worker_site(name="relay", tls=files.get("relay")))
        addresses = [
            WorkerAddress("east-1", east.url, "prefill", "east"),
            WorkerAddress("west-1", west.url, "decode", "west"),
        ]
        settings = settings_for(
            addresses, placement=placement, relay=RelayAddress("relay", relay.url), tls=files.get("gateway"), **changes
        )
        running = await stack.enter_async_context(running_gateway(settings))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=running.url, timeout=WAIT_S))
        yield Sites(running.gateway, client, east, west)


def texts_of(stream: str) -> dict[int, str]:
    """What a stream of completions or chat chunks says, by choice."""
    events = [event.removeprefix("data: ") for event in stream.strip().split("\n\n")]
    assert events.pop() == "[DONE]"
    said: dict[int, str] = {}
    for event in events:
        for choice in json.loads(event)["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            said[choice["index"]] = said.get(choice["index"], "") + piece
    return said


BODIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "several choices": {"n": 3, "temperature": 0.8, "seed": 11},
    "stop": {"stop": ["e", "q"]},
    "logprobs": {"logprobs": 2},
    "seed": {"temperature": 1.0, "seed": 5},
    "min_tokens": {"min_tokens": 8},
}


@pytest.mark.parametrize("more", list(BODIES.values()), ids=list(BODIES))
async def test_remote_says_what_local_says(more: dict[str, Any]) -> None:
    answers = []
    for threshold in (0, 100_000):
        async with sites(router=RouterSettings(threshold)) as made:
            whole = await made.post({**GREEDY, **more})
            assert whole.status_code == 200, whole.text
            assert whole.headers["x-farfill-path"] == ("remote" if threshold == 0 else "local")
            stream = await made.post({**GREEDY, **more, "stream": True, "stream_options": {"include_usage": True}})
            assert stream.headers["x-farfill-path"] == whole.headers["x-farfill-path"]
            spoken = {choice["index"]: choice["text"] for choice in whole.json()["choices"]}
            assert texts_of(stream.text) == spoken
            answers.append((whole.json()["choices"], whole.json()["usage"], spoken))
    assert answers[0] == answers[1]
    assert any(answers[0][2].values())


async def test_a_chat_says_the_same_remotely() -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": TEXT}], "temperature": 0, "max_tokens": 16}
    answers = []
    for threshold in (0, 100_000):
        async with sites(router=RouterSettings(threshold)) as made:
            whole = await made.post(chat, "/v1/chat/completions")
            assert whole.headers["x-farfill-path"] == ("remote" if threshold == 0 else "local"), whole.text
            stream = await made.post({**chat, "stream": True}, "/v1/chat/completions")
            content = whole.json()["choices"][0]["message"]["content"]
            assert texts_of(stream.text) == {0: content}
            answers.append(content)
    assert answers[0] == answers[1]
    assert answers[0]


@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize("secure", [False, True], ids=["loopback", "mutual-tls"])
async def test_every_placement_with_and_without_tls(placement: Placement, secure: bool, tmp_path: Path) -> None:
    files: dict[str, tls.TlsFiles] = {}
    if secure:
        tls.write_development_ca(tmp_path)
        for name, role in (
            ("east-1", tls.PeerRole.WORKER), ("west-1", tls.PeerRole.WORKER), ("relay", tls.PeerRole.RELAY),
            ("gateway", tls.PeerRole.GATEWAY),
        ):  # fmt: skip
            files[name] = tls.write_certificate(tmp_path, name, role=role)
    async with sites(placement=placement, files=files) as made:
        answer = await made.post(GREEDY)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-farfill-path"] == "remote"
        assert int(answer.headers["x-farfill-kv-bytes"]) > 0
        assert int(answer.headers["x-farfill-transfer-bytes"]) > int(answer.headers["x-farfill-kv-bytes"])
        assert float(answer.headers["x-farfill-transfer-seconds"]) > 0
        assert made.west.metric("farfill_transfers_total", direction="received", outcome="ok") == 1.0
        local = await made.post({**GREEDY, "kv_transfer_params": None, "echo": False, "prompt": TEXT[:20]})
        assert local.headers["x-farfill-reason"] == "below_threshold"


async def test_eight_at_once() -> None:
    async with sites() as made:
        bodies = [{**GREEDY, "prompt": f"{number}: {TEXT}", "stream": bool(number % 2)} for number in range(8)]
        answers = await asyncio.gather(*(made.post(body) for body in bodies))
        assert [answer.headers.get("x-farfill-path") for answer in answers] == ["remote"] * 8
        said = [
            texts_of(answer.text)[0] if body["stream"] else answer.json()["choices"][0]["text"]
            for body, answer in zip(bodies, answers, strict=True)
        ]
    async with sites(router=RouterSettings(100_000)) as made:
        for body, text in zip(bodies, said, strict=True):
            alone = await made.post({**body, "stream": False})
            assert alone.json()["choices"][0]["text"] == text


async def test_a_client_that_leaves_in_the_middle_of_the_prefill_frees_both_sides() -> None:
    hold = Hold("prefill")
    async with sites(east_engine=TinyEngine(before_step=hold)) as made:
        pending = asyncio.create_task(made.post({**GREEDY, "stream": True}))
        await hold.until_reached()
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
        await made.gateway.admission.idle()
        hold.go.set()
        # that nothing is kept is checked by every site at its end


async def test_a_store_without_room_is_an_overload_that_falls_back() -> None:
    east = await asyncio.to_thread(TinyEngine)
    async with contextlib.AsyncExitStack() as stack:
        small = await stack.enter_async_context(
            worker_site(name="east-1", role=Role.PREFILL, engine=east, store_bytes=4096)
        )
        west = await stack.enter_async_context(worker_site(name="west-1", role=Role.DECODE))
        addresses = [
            WorkerAddress("east-1", small.url, "prefill", "east"), WorkerAddress("west-1", west.url, "decode", "west"),
        ]  # fmt: skip
        running = await stack.enter_async_context(running_gateway(settings_for(addresses)))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=running.url, timeout=WAIT_S))
        answer = await client.post("/v1/completions", json=GREEDY)
        assert answer.status_code == 200
        assert answer.headers["x-farfill-reason"] == "fallback:overload"


@pytest.mark.parametrize("allowed", [True, False], ids=["fallback", "no-fallback"])
async def test_the_prefill_worker_and_its_store_die_in_the_middle(allowed: bool) -> None:
    hold = Hold("prefill")
    engine = TinyEngine(before_step=hold)
    rules = FallbackRules() if allowed else FallbackRules(burst=0, per_s=0)
    try:
        async with contextlib.AsyncExitStack() as stack:
            west = await stack.enter_async_context(worker_site(name="west-1", role=Role.DECODE, site="west"))
            dying = contextlib.AsyncExitStack()
            east = await dying.enter_async_context(
                running_worker(WorkerSettings(name="east-1", role=Role.PREFILL, site="east"), engine)
            )
            addresses = [
                WorkerAddress("east-1", east.url, "prefill", "east"),
                WorkerAddress("west-1", west.url, "decode", "west"),
            ]
            running = await stack.enter_async_context(running_gateway(settings_for(addresses, fallback=rules)))
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=running.url, timeout=WAIT_S))
            local = await client.post("/v1/completions", json={**GREEDY, "best_of": 2, "n": 2, "prompt": TEXT[:30]})
            assert local.status_code == 200
            pending = asyncio.create_task(client.post("/v1/completions", json=GREEDY))
            await hold.until_reached()
            await dying.aclose()
            answer = await pending
            if allowed:
                assert answer.status_code == 200
                assert answer.headers["x-farfill-path"] == "local"
                assert answer.headers["x-farfill-reason"] == "fallback:transport"
                alone = await client.post(f"{west.url}/v1/completions", json=GREEDY)
                assert answer.json()["choices"] == alone.json()["choices"]
            else:
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "fallback_exhausted"
    finally:
        hold.go.set()
        await asyncio.to_thread(engine.stop)


async def test_the_decode_workers_stall_clock_ends_a_prefill_that_hangs() -> None:
    hold = Hold("prefill")
    clocks = GatewayClocks(transfer=Clocks(stall_s=0.3, produce_s=0.5, setup_s=5.0, transfer_s=0.6), poll_s=30.0)
    async with sites(east_engine=TinyEngine(before_step=hold), clocks=clocks) as made:
        answer = await made.post(GREEDY)
        hold.go.set()
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-farfill-reason"] == "fallback:timeout"


async def test_workers_of_other_weights_stay_apart() -> None:
    async with sites(east_engine=TinyEngine(model_seed="weights-2")) as made:
        answer = await made.post(GREEDY)
        assert answer.headers["x-farfill-reason"] == "incompatible:weights_digest"


async def test_ready_goes_through_the_real_path() -> None:
    async with sites() as made:
        answer = await made.client.get("/ready")
        assert answer.status_code == 200, answer.text
        report = answer.json()["models"]["tiny"]
        assert report["path"] == "remote"
        assert report["kv_bytes"] > 0
        assert made.west.metric("farfill_transfers_total", direction="received", outcome="ok") == 1.0


async def test_pass_through_and_the_workers_own_errors() -> None:
    async with sites() as made:
        tokens = await made.client.post("/tokenize", json={"model": "tiny", "prompt": "abc"})
        assert tokens.json()["count"] == 4
        back = await made.client.post("/detokenize", json={"model": "tiny", "tokens": tokens.json()["tokens"][1:]})
        assert back.json()["prompt"] == "abc"
        absent = await made.client.post("/v1/embeddings", json={"model": "tiny", "input": "x"})
        assert (absent.status_code, absent.json()["error"]["code"]) == (404, "unknown_endpoint")
        assert absent.headers["x-farfill-reason"] == "endpoint_not_splittable"
        long = await made.post({**GREEDY, "prompt": TEXT * 40})
        assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
        for more in ({"temperature": -1}, {"max_tokens": 0}, {"bad_words": ["x"]}):
            bad = await made.post({**GREEDY, **more})
            assert bad.status_code == 400, bad.text


def cached_tokens(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("remote", [True, False], ids=["remote", "local"])
async def test_a_tenant_sees_only_its_own_cached_prompts(remote: bool) -> None:
    keys = {"a": "key-of-tenant-a", "b": "key-of-tenant-b"}
    engines = {"east_engine": TinyEngine(prefix_cache=True), "west_engine": TinyEngine(prefix_cache=True)}
    router = RouterSettings(0 if remote else 100_000)
    tenants = tuple(Tenant(name, key) for name, key in keys.items())
    async with sites(**engines, tenants=tenants, router=router) as made:

        async def ask(tenant: str, **more: Any) -> int:
            headers = {"Authorization": f"Bearer {keys[tenant]}"}
            answer = await made.client.post("/v1/completions", json={**GREEDY, **more}, headers=headers)
            return cached_tokens(answer)

        whole = len(TEXT)  # with the token that begins a text, less the last one
        assert await ask("a") == 0
        assert await ask("b") == 0
        assert (await ask("a"), await ask("b")) == (whole, whole)
        assert await ask("a", cache_salt="x") == 0
        assert await ask("b", cache_salt="x") == 0
        assert await ask("a", cache_salt="x") == whole


@pytest.mark.parametrize("remote", [True, False], ids=["remote", "local"])
async def test_without_tenants_the_clients_own_cache_salt_counts(remote: bool) -> None:
    engines = {"east_engine": TinyEngine(prefix_cache=True), "west_engine": TinyEngine(prefix_cache=True)}
    async with sites(**engines, router=RouterSettings(0 if remote else 100_000)) as made:
        salts = ("x", "y", "", "x")
        seen = [cached_tokens(await made.post({**GREEDY, "cache_salt": salt or None})) for salt in salts]
        assert seen == [0, 0, 0, len(TEXT)]
        # An imported cache has the salt of its request too.
        local = {**GREEDY, "cache_salt": "x", "n": 2}
        alone = await made.client.post(f"{made.west.url}/v1/completions", json=local)
        assert cached_tokens(alone) == len(TEXT)
        alone = await made.client.post(f"{made.west.url}/v1/completions", json={**local, "cache_salt": "z"})
        assert cached_tokens(alone) == 0
        refused = await made.post({**GREEDY, "cache_salt": 5})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")
