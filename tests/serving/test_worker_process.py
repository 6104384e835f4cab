"""Rules: a worker says where it listens once it does; SIGTERM lets requests end, SIGINT does not; a port that is taken
or a listener that anybody could reach is refused, by name.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tiny_engine import TinyEngine
from worker_kit import WAIT_S, http_session, worker_site

from farfill import tls
from farfill.cli.relay import serve_relay
from farfill.config import RelaySettings
from farfill.engines.serving.listen import bind, url_of, write_ready_file
from farfill.engines.serving.serve import running_worker
from farfill.engines.serving.settings import WorkerSettings
from farfill.errors import ConfigurationError

SUPPORT = Path(__file__).parents[1] / "support"
ROOT = SUPPORT.parents[1]
GREEDY = {"model": "tiny", "prompt": "abc", "temperature": 0, "max_tokens": 30, "ignore_eos": True}


@contextlib.asynccontextmanager
async def process(ready: Path, **settings: Any) -> AsyncIterator[Process]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{SUPPORT}"}
    arguments = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SUPPORT / "tiny_worker.py"),
        str(ready),
        *arguments,
        env=environment,
        stdin=PIPE,
        stdout=PIPE,
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def ready_content(started: Process, ready: Path) -> dict[str, Any]:
    async with asyncio.timeout(WAIT_S):
        while not ready.exists():
            assert started.returncode is None
            await asyncio.sleep(0.01)
    content: dict[str, Any] = json.loads(ready.read_text())
    return content


async def line(started: Process) -> str:
    assert started.stdout is not None
    return (await asyncio.wait_for(started.stdout.readline(), WAIT_S)).decode().strip()


async def test_sigterm_lets_a_stream_end(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    async with process(ready, hold="line") as started, http_session() as session:
        content = await ready_content(started, ready)
        assert content.keys() == {"name", "url", "data_port", "instance", "pid"}
        assert content["pid"] == started.pid
        body = {**GREEDY, "stream": True}
        async with session.post(f"{content['url']}/v1/completions", json=body) as response:
            assert response.status == 200
            assert await line(started) == "held"
            started.send_signal(signal.SIGTERM)
            await until_draining(session, content["url"])
            assert started.stdin is not None
            started.stdin.write(b"go\n")
            text = (await response.read()).decode()
        assert text.endswith("data: [DONE]\n\n")
        assert await line(started) == "stopped"
        assert await asyncio.wait_for(started.wait(), WAIT_S) == 0
        assert not ready.exists()


async def until_draining(session: Any, url: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            async with session.get(f"{url}/health") as response:
                if response.status == 503:
                    return


async def test_sigint_stops_at_once_and_says_so(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    async with process(ready, hold="stop") as started, http_session() as session:
        content = await ready_content(started, ready)
        async with session.post(f"{content['url']}/v1/completions", json={**GREEDY, "stream": True}) as response:
            assert await line(started) == "held"
            started.send_signal(signal.SIGINT)
            last = (await response.text()).strip().rsplit("\n\n", 1)[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "draining"
        assert await line(started) == "stopped"
        assert await asyncio.wait_for(started.wait(), WAIT_S) == 0


async def test_who_does_not_end_within_the_drain_is_told(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    async with process(ready, hold="stop", drain_s=0.1) as started, http_session() as session:
        content = await ready_content(started, ready)
        asking = asyncio.create_task(session.post(f"{content['url']}/v1/completions", json=GREEDY))
        assert await line(started) == "held"
        started.send_signal(signal.SIGTERM)
        async with await asking as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == "draining"
        assert await asyncio.wait_for(started.wait(), WAIT_S) == 0


async def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with process(tmp_path / "ready.json", port=port) as started:
            said = await line(started)
            assert said.startswith("port_in_use worker.port")
            assert str(port) in said
            assert await asyncio.wait_for(started.wait(), WAIT_S) == 2
        assert not (tmp_path / "ready.json").exists()


async def test_a_taken_data_port_is_named_and_frees_the_api_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        data_port = taken.getsockname()[1]
        engine = TinyEngine()
        with bind("127.0.0.1", 0, field="x") as free:
            port = free.getsockname()[1]
        with pytest.raises(ConfigurationError, match=str(data_port)) as refused:
            async with running_worker(WorkerSettings(port=port, data_port=data_port), engine):
                raise AssertionError("it serves")
        assert refused.value.code == "port_in_use"
        bind("127.0.0.1", port, field="x").close()
        engine.stop()


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        (WorkerSettings(host="0.0.0.0", advertise_host="10.0.0.1"), "insecure_listener"),
        (WorkerSettings(host="10.1.2.3"), "insecure_listener"),
        (WorkerSettings(host="example.invalid"), "insecure_listener"),
    ],
)
async def test_a_listener_off_loopback_needs_tls(settings: WorkerSettings, code: str) -> None:
    engine = TinyEngine()
    with pytest.raises(ConfigurationError) as refused:
        async with running_worker(settings, engine):
            raise AssertionError("it serves")
    assert (refused.value.code, refused.value.field) == (code, "worker.host")
    engine.stop()


async def test_every_address_needs_one_to_tell_peers(tmp_path: Path) -> None:
    tls.write_development_ca(tmp_path)
    files = tls.write_certificate(tmp_path, "worker")
    with pytest.raises(ConfigurationError) as refused:
        WorkerSettings(host="0.0.0.0", tls=files).check()
    assert refused.value.field == "worker.advertise_host"
    async with worker_site(tls=files, host="0.0.0.0", advertise_host="127.0.0.1") as site:
        assert site.url.startswith("https://127.0.0.1:")
        assert site.store.host == "127.0.0.1"
        async with (
            http_session(tls.client_context(files)) as session,
            session.get(f"{site.url}/farfill/v1/info") as response,
        ):
            assert response.status == 200


def test_an_address_that_is_not_ours_is_refused() -> None:
    for host in ("203.0.113.7", "no-such-host.invalid"):
        with pytest.raises(ConfigurationError) as refused:
            bind(host, 0, field="worker.host")
        assert (refused.value.code, refused.value.field) == ("config_invalid", "worker.host")


async def test_a_ready_file_without_a_folder_is_named_before_anything_is_served(tmp_path: Path) -> None:
    missing = tmp_path / "none" / "ready.json"
    async with process(missing) as started:
        assert (await line(started)).startswith(f"config_invalid ready_file {missing}")
        assert await asyncio.wait_for(started.wait(), WAIT_S) == 2
    engine = TinyEngine()
    for path in (missing, tmp_path):
        with pytest.raises(ConfigurationError, match=str(path)) as refused:
            async with running_worker(WorkerSettings(ready_file=path), engine):
                raise AssertionError("it serves")
        assert (refused.value.code, refused.value.field) == ("config_invalid", "ready_file")
        with pytest.raises(ConfigurationError, match=str(path)) as refused:
            await serve_relay(RelaySettings(port=0, data_port=0), None, path)
        assert (refused.value.code, refused.value.field) == ("config_invalid", "ready_file")
        with pytest.raises(ConfigurationError, match=str(path)) as refused:
            write_ready_file(path, {})
        assert (refused.value.code, refused.value.field) == ("config_invalid", "ready_file")
    engine.stop()


def test_urls_and_ready_files(tmp_path: Path) -> None:
    assert url_of("http", "::1", 80) == "http://[::1]:80"
    target = tmp_path / "ready"
    target.write_text("old")
    write_ready_file(target, {"url": "u"})
    assert json.loads(target.read_text()) == {"url": "u"}
    assert stat.S_ISREG(target.stat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["ready"]
