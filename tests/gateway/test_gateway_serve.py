"""A gateway as a process: what it refuses to start with, its ready-file, and how it leaves."""

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import pytest
from fake_site import MODEL, FakeWorker, Site

from farfill.errors import ConfigurationError
from farfill.gateway.serve import running_gateway, serve_gateway
from farfill.gateway.settings import GatewaySettings, RelayAddress, Tenant, WorkerAddress
from farfill.router.policy import Placement, RouterSettings

DECODE = WorkerAddress("west-1", "http://127.0.0.1:9", "decode", "west")
TENANT = Tenant("first", "sk-a-key-of-some-length")


@pytest.mark.parametrize(
    ("settings", "code", "field"),
    [
        (GatewaySettings((DECODE,), host="0.0.0.0"), "insecure_listener", "gateway.host"),
        (GatewaySettings((), port=0), "config_invalid", "gateway.workers"),
        (GatewaySettings((WorkerAddress("p", "http://127.0.0.1:9", "prefill", "x"),)), "config_invalid",
         "gateway.workers"),
        (GatewaySettings((DECODE, DECODE)), "config_invalid", "gateway.workers"),
        (GatewaySettings((WorkerAddress("d", "http://192.0.2.1:9", "decode", "x"),)), "config_invalid",
         "gateway.workers"),
        (GatewaySettings((WorkerAddress("d", "https://192.0.2.1:9", "decode", "x"),)), "config_invalid", "tls"),
        (GatewaySettings((WorkerAddress("d", "http://127.0.0.1:9/v1", "decode", "x"),)), "config_invalid",
         "gateway.workers"),
        (GatewaySettings((DECODE,), router=RouterSettings(1, Placement.RELAY)), "config_invalid", "gateway.relay"),
        (GatewaySettings((DECODE,), relay=RelayAddress("r", "http://192.0.2.1:9")), "config_invalid", "gateway.relay"),
        (GatewaySettings((DECODE,), tenants=(TENANT, TENANT)), "config_invalid", "gateway.tenants"),
    ],
)  # fmt: skip
async def test_what_it_refuses_to_start_with(settings: GatewaySettings, code: str, field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        async with running_gateway(settings):
            pass
    assert (caught.value.code, caught.value.field) == (code, field)
    assert TENANT.api_key not in str(caught.value)


def test_keys_are_not_shown() -> None:
    assert TENANT.api_key not in repr(GatewaySettings((DECODE,), tenants=(TENANT,)))


async def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigurationError) as caught:
        async with running_gateway(GatewaySettings((DECODE,), port=taken.getsockname()[1])):
            pass
    assert caught.value.code == "port_in_use"


async def test_workers_that_are_down_do_not_keep_it_from_starting() -> None:
    worker = FakeWorker(Site(), "west-1", "decode", "west")
    await worker.start()
    address, port = worker.address, int(worker.url.rsplit(":", 1)[1])
    await worker.stop()
    async with running_gateway(GatewaySettings((address,), port=0)) as running, aiohttp.ClientSession() as session:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 1}
        async with session.post(running.url + "/v1/completions", json=body) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (503, "no_worker")
        await worker.start(port)
        await running.gateway.fleet.look("west-1")
        async with session.post(running.url + "/v1/completions", json=body) as answer:
            assert answer.status == 200
    await worker.stop()


async def test_a_worker_with_another_name_is_not_taken() -> None:
    worker = FakeWorker(Site(), "somebody", "decode", "west")
    await worker.start()
    address = WorkerAddress("west-1", worker.url, "decode", "west")
    async with running_gateway(GatewaySettings((address,), port=0)) as running:
        failure = running.gateway.fleet.workers["west-1"].failure
        assert failure is not None
        assert failure.code == "peer_unauthenticated"
        assert "'somebody'" in failure.message
    await worker.stop()


async def test_a_worker_with_another_role_is_not_taken() -> None:
    worker = FakeWorker(Site(), "west-1", "prefill", "west")
    await worker.start()
    address = WorkerAddress("west-1", worker.url, "decode", "west")
    async with running_gateway(GatewaySettings((address,), port=0)) as running:
        failure = running.gateway.fleet.workers["west-1"].failure
        assert failure is not None
        assert (failure.code, failure.field) == ("config_invalid", "gateway.workers")
    await worker.stop()


SCRIPT = """
import asyncio, sys
from pathlib import Path
from farfill.gateway.serve import serve_gateway
from farfill.gateway.settings import GatewaySettings, WorkerAddress
settings = GatewaySettings(
    (WorkerAddress("west-1", sys.argv[1], "decode", "west"),), port=0, ready_file=Path(sys.argv[2])
)
asyncio.run(serve_gateway(settings, lambda url: print(url, flush=True)))
"""


async def test_a_ready_file_in_a_missing_folder_is_refused_before_it_serves(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "ready.json"
    served: list[str] = []
    with pytest.raises(ConfigurationError) as caught:
        await serve_gateway(GatewaySettings((DECODE,), port=0, ready_file=path), served.append)
    assert (caught.value.code, caught.value.field, served) == ("config_invalid", "ready_file", [])
    assert str(path) in caught.value.message


async def test_ctrl_c_cuts_requests_in_flight_and_frees_the_worker(tmp_path: Path) -> None:
    site = Site()
    worker = FakeWorker(site, "west-1", "decode", "west")
    worker.hold["token"] = asyncio.Event()  # never set: a drain would wait for it
    await worker.start()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        SCRIPT,
        worker.url,
        str(tmp_path / "ready.json"),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            url = (await process.stdout.readline()).decode().strip()
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 3, "stream": True}
        async with aiohttp.ClientSession() as session, session.post(url + "/v1/completions", json=body) as answer:
            await answer.content.readuntil(b"\n\n")
            process.send_signal(signal.SIGINT)
            with pytest.raises(aiohttp.ClientError):
                await answer.content.read()
            _, said = await process.communicate()
        assert process.returncode == 0
        assert b"did not end within the drain" not in said
        assert not (tmp_path / "ready.json").exists()
        await site.until(lambda: worker.active.total() == 0)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await worker.stop()


async def test_sigterm_drains_requests_in_flight_end_new_ones_are_refused(tmp_path: Path) -> None:
    worker = FakeWorker(Site(), "west-1", "decode", "west")
    hold = worker.hold["token"] = asyncio.Event()
    await worker.start()
    ready_file = tmp_path / "ready.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        SCRIPT,
        worker.url,
        str(ready_file),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            url = (await process.stdout.readline()).decode().strip()
        ready = json.loads(ready_file.read_text())
        assert ready == {"url": url, "pid": process.pid}
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 3, "stream": True}
        async with (
            aiohttp.ClientSession() as session,
            session.post(ready["url"] + "/v1/completions", json=body) as answer,
        ):
            await answer.content.readuntil(b"\n\n")
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                while True:
                    async with session.get(ready["url"] + "/health") as health:
                        if (await health.json())["status"] == "draining":
                            break
            async with session.post(ready["url"] + "/v1/completions", json=body) as refused:
                assert (refused.status, (await refused.json())["error"]["code"]) == (503, "draining")
            async with session.get(ready["url"] + "/ready") as unready:
                assert unready.status == 503
            hold.set()
            assert (await answer.content.read()).endswith(b"data: [DONE]\n\n")
        async with asyncio.timeout(60):
            assert await process.wait() == 0
        assert not ready_file.exists()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await worker.stop()
