"""The store's control API over real HTTP: every call, and every kind of request that is not one."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from farfill import tls
from farfill.errors import ClientError, ConfigurationError, FarfillError, OperationError, OverloadError, PeerError
from farfill.store.control import PREFIX, StoreControl, add_store_routes, fetch_session
from farfill.store.machine import StoreLimits
from farfill.store.protocol import Release, Renew, Reserve
from farfill.store.server import Security, StoreServer, StoreSettings
from farfill.transfer.spec import StoreAddress

REQUEST = Reserve("t", "p", "c", 600, 5, 60.0)


@asynccontextmanager
async def serving(files: tls.TlsFiles | None = None) -> AsyncIterator[StoreServer]:
    app = web.Application()
    runner = web.AppRunner(app)
    store = StoreServer(
        StoreSettings(
            "127.0.0.1",
            0,
            Security.MUTUAL_TLS if files else Security.LOOPBACK,
            "",
            StoreLimits(1000),
        )
    )
    add_store_routes(app, store)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls.server_context(files) if files else None)
    await site.start()
    port = runner.addresses[0][1]
    scheme = "https" if files else "http"
    store.address = StoreAddress(
        store.address.instance, f"{scheme}://127.0.0.1:{port}", "127.0.0.1", store.address.data_port
    )
    try:
        yield store
    finally:
        await runner.cleanup()
        await asyncio.to_thread(store.stop)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def test_reserve_renew_status_release(session: aiohttp.ClientSession) -> None:
    async with serving() as store:
        control = StoreControl(session, store.address.control_url)
        granted = await control.reserve(REQUEST)
        assert granted.store == store.address
        assert granted.lease_s == 60.0
        assert (await control.renew(Renew("t", granted.epoch, 90.0))).lease_s == 90.0
        status = await control.status()
        assert (status.ledger.held_bytes, status.ledger.free_bytes) == (600, 400)
        with pytest.raises(OverloadError, match="store_full"):
            await control.reserve(Reserve("u", "p", "c", 500, 5, 60.0))
        with pytest.raises(OperationError, match="stale_epoch"):
            await control.release(Release("t", granted.epoch + 1))
        await control.release(Release("t", granted.epoch))
        assert (await control.status()).ledger.free_bytes == 1000
        with pytest.raises(ClientError, match="invalid_request"):
            await control.reserve(Reserve("", "p", "c", 500, 5, 60.0))


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b"\xff\xfe", 400, "invalid_json"),
        (b"[]", 400, "invalid_request"),
        (b"{}", 400, "invalid_request"),
        (json.dumps({"transfer_id": "t", "epoch": "one"}).encode(), 400, "invalid_request"),
        (json.dumps({"transfer_id": "t", "epoch": 1, "extra": 1}).encode(), 400, "invalid_request"),
        (b" " * 20_000, 413, "body_too_large"),
    ],
)
async def test_a_body_that_is_no_request_gets_one_clear_error(
    session: aiohttp.ClientSession, body: bytes, status: int, code: str
) -> None:
    async with serving() as store:
        for name in ("release", "renew", "reserve", "session"):
            async with session.post(f"{store.address.control_url}{PREFIX}/{name}", data=body) as response:
                assert response.status == status
                assert (await response.json())["error"]["code"] == code


async def test_a_body_of_unstated_length_is_refused(session: aiohttp.ClientSession) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"{"

    async with (
        serving() as store,
        session.post(f"{store.address.control_url}{PREFIX}/release", data=pieces()) as response,
    ):
        assert response.status == 413


async def test_a_store_that_is_full_says_when_to_come_back(session: aiohttp.ClientSession) -> None:
    async with serving() as store:
        control = StoreControl(session, store.address.control_url)
        await control.reserve(REQUEST)
        body = json.dumps(
            {"transfer_id": "u", "producer": "p", "consumer": "c", "bytes": 999, "chunks": 2, "lease_s": 9}
        )
        async with session.post(f"{store.address.control_url}{PREFIX}/reserve", data=body) as response:
            assert response.status == 503
            assert 55 <= int(response.headers["Retry-After"]) <= 60


async def test_without_a_store_there_the_caller_is_told(session: aiohttp.ClientSession) -> None:
    async with serving() as store:
        address = store.address
    with pytest.raises(OperationError, match="peer_unreachable"):
        await StoreControl(session, address.control_url).status()
    with pytest.raises(OperationError, match="peer_unreachable"):
        await asyncio.to_thread(fetch_session, address, None, 5.0)


async def test_an_answer_that_is_not_a_stores_is_a_violation(session: aiohttp.ClientSession) -> None:
    async def page(request: web.Request) -> web.Response:
        return web.Response(text="<html>hello</html>")

    async def flood(request: web.Request) -> web.Response:
        return web.Response(body=b" " * 100_000)

    app = web.Application()
    app.router.add_post(f"{PREFIX}/session", page)
    app.router.add_get(f"{PREFIX}/status", flood)
    app.router.add_post(f"{PREFIX}/release", page)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    control = StoreControl(session, url)
    with pytest.raises(PeerError, match="protocol_violation"):
        await control.release(Release("t", 1))
    with pytest.raises(PeerError, match="frame_too_large"):
        await control.status()
    with pytest.raises(PeerError, match="protocol_violation"):
        await asyncio.to_thread(fetch_session, StoreAddress("i", url, "127.0.0.1", 1), None, 5.0)
    await runner.cleanup()


async def test_a_store_that_does_not_answer_is_given_up(session: aiohttp.ClientSession) -> None:
    release = asyncio.Event()

    async def never(request: web.Request) -> web.Response:
        await release.wait()
        return web.Response()

    app = web.Application()
    app.router.add_post(f"{PREFIX}/session", never)
    app.router.add_get(f"{PREFIX}/status", never)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    with pytest.raises(OperationError, match="setup_timeout"):
        await StoreControl(session, url, timeout_s=0.1).status()
    with pytest.raises(OperationError, match="setup_timeout"):
        await asyncio.to_thread(fetch_session, StoreAddress("i", url, "127.0.0.1", 1), None, 0.1)
    release.set()
    await runner.cleanup()


@pytest.mark.parametrize("host", ["192.0.2.1", "store.example", "0.0.0.0"])
def test_no_session_key_is_asked_for_in_the_clear_off_this_machine(host: str) -> None:
    with pytest.raises(ConfigurationError, match="configure tls"):
        fetch_session(StoreAddress("i", f"http://{host}:1", host, 1), None, 5.0)


# ---- with mutual TLS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    tls.write_development_ca(folder)
    return folder


async def test_peers_are_who_their_certificate_says(folder: Path) -> None:
    files = {
        name: tls.write_certificate(folder, name, role=role)
        for name, role in (
            ("relay-c", tls.PeerRole.RELAY),
            ("gateway-a", tls.PeerRole.GATEWAY),
            ("gateway-b", tls.PeerRole.GATEWAY),
        )
    }
    async with serving(files["relay-c"]) as store:

        def client(name: str) -> aiohttp.ClientSession:
            connector = aiohttp.TCPConnector(ssl=tls.client_context(files[name]))
            return aiohttp.ClientSession(connector=connector)

        async with client("gateway-a") as one, client("gateway-b") as other:
            granted = await StoreControl(one, store.address.control_url).reserve(REQUEST)
            with pytest.raises(FarfillError, match="only who reserved") as error:
                await StoreControl(other, store.address.control_url).release(Release("t", granted.epoch))
            assert error.value.code == "forbidden"
            await StoreControl(one, store.address.control_url).release(Release("t", granted.epoch))
        opened = await asyncio.to_thread(fetch_session, store.address, tls.client_context(files["gateway-a"]), 5.0)
        assert len(opened.key) == 32


async def test_only_gateways_hold_staging(folder: Path) -> None:
    """A worker's or a relay's certificate, lost or misused, does not fill a store or end another's transfer."""
    async with serving(tls.write_certificate(folder, "relay-e", role=tls.PeerRole.RELAY)) as store:
        for name, role in (("worker-a", tls.PeerRole.WORKER), ("relay-f", tls.PeerRole.RELAY)):
            files = tls.write_certificate(folder, name, role=role)
            connector = aiohttp.TCPConnector(ssl=tls.client_context(files))
            async with aiohttp.ClientSession(connector=connector) as session:
                control = StoreControl(session, store.address.control_url)
                for call in (
                    control.reserve(REQUEST),
                    control.renew(Renew("t", 1, 5.0)),
                    control.release(Release("t", 1)),
                ):
                    with pytest.raises(FarfillError, match="gateways reserve") as error:
                        await call
                    assert error.value.code == "forbidden"
        files = tls.write_certificate(folder, "gateway-c", role=tls.PeerRole.GATEWAY)
        connector = aiohttp.TCPConnector(ssl=tls.client_context(files))
        async with aiohttp.ClientSession(connector=connector) as session:
            granted = await StoreControl(session, store.address.control_url).reserve(REQUEST)
            await StoreControl(session, store.address.control_url).release(Release("t", granted.epoch))


async def test_without_our_certificate_there_is_no_control(folder: Path, tmp_path: Path) -> None:
    tls.write_development_ca(tmp_path)
    foreign = tls.write_certificate(tmp_path, "gateway-a")
    async with serving(tls.write_certificate(folder, "relay-d")) as store:
        strangers = tls.client_context(foreign)
        with pytest.raises(PeerError, match="peer_unauthenticated"):  # we do not trust the store
            await asyncio.to_thread(fetch_session, store.address, strangers, 5.0)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=strangers)) as session:
            with pytest.raises(PeerError, match="peer_unauthenticated"):
                await StoreControl(session, store.address.control_url).status()
        strangers.load_verify_locations(folder / "ca.pem")
        with pytest.raises(PeerError, match="peer_unauthenticated"):  # the store does not trust us
            await asyncio.to_thread(fetch_session, store.address, strangers, 5.0)
        with pytest.raises(FarfillError, match="does not fit"):
            await asyncio.to_thread(fetch_session, store.address, None, 5.0)
        assert store.memory.ledger().leases == 0
