"""The relay as a process: authenticated, drained by SIGTERM, stopped by SIGINT, clear about a taken port."""

import http.client
import json
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from farfill import tls
from farfill.cli import run
from farfill.cli.demo.children import Children


def get(url: str, path: str, context: ssl.SSLContext | None = None) -> tuple[int, str]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection: http.client.HTTPConnection
    if context is None:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    else:
        connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=30, context=context)
    with closing(connection):
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()


@contextmanager
def relay(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    with Children(folder) as children:
        child = children.start("relay", ["relay", "--port", "0", "--data-port", "0", *arguments], {})
        yield child.process, children.wait_ready(child)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    tls.write_development_ca(folder)
    return folder


def config(folder: Path, files: tls.TlsFiles, name: str) -> Path:
    path = folder / "relay.json.yaml"
    paths = {"ca": str(files.ca), "certificate": str(files.certificate), "key": str(files.key)}
    path.write_text(json.dumps({"relay": {"name": name}, "tls": paths}))
    return path


def test_peers_with_a_certificate_are_served_others_are_not(tmp_path: Path, certificates: Path) -> None:
    file = config(tmp_path, tls.write_certificate(certificates, "middle", role=tls.PeerRole.RELAY), "middle")
    peer = tls.client_context(tls.write_certificate(certificates, "front", role=tls.PeerRole.GATEWAY))
    with relay(tmp_path, "--config", str(file)) as (_, facts):
        assert facts["name"] == "middle"
        status, body = get(facts["url"], "/farfill/v1/store/status", peer)
        assert status == 200
        assert json.loads(body)["store"]["instance"] == facts["instance"]
        assert json.loads(body)["store"]["data_port"] == facts["data_port"]
        stranger = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
            get(facts["url"], "/farfill/v1/store/status", stranger)
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            get(facts["url"].replace("https", "http"), "/health")


def test_a_certificate_of_another_name_is_refused_at_start(
    tmp_path: Path, certificates: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rule: peers go by the certificate, so a name that differs would never be reached."""
    file = config(tmp_path, tls.write_certificate(certificates, "one"), "another")
    assert run(["relay", "--config", str(file)]) == 2
    assert "proves 'one'" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_clean_stop(tmp_path: Path, number: signal.Signals) -> None:
    with relay(tmp_path) as (process, facts):
        assert get(facts["url"], "/health")[0] == 200
        assert 'farfill_store_bytes{state="held"} 0.0' in get(facts["url"], "/metrics")[1]
        process.send_signal(number)
        assert process.wait(timeout=60) == 0
    assert not (tmp_path / "relay.ready.json").exists()
    assert "Traceback" not in (tmp_path / "relay.log").read_text()


def test_drain_lets_a_lease_end_and_grants_no_other(tmp_path: Path) -> None:
    """Rule: drain: no admission, wait for leases, then leave."""
    lease = {"transfer_id": "a" * 32, "producer": "p", "consumer": "c", "bytes": 4096, "chunks": 3, "lease_s": 60}
    with relay(tmp_path) as (process, facts):
        parts = urlsplit(facts["url"])
        with closing(http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=30)) as connection:

            def post(name: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
                connection.request("POST", f"/farfill/v1/store/{name}", json.dumps(body))
                response = connection.getresponse()
                return response.status, json.loads(response.read())

            status, granted = post("reserve", lease)
            assert status == 200, granted
            process.terminate()
            while get(facts["url"], "/health")[0] == 200:
                pass
            status, refused = post("reserve", {**lease, "transfer_id": "b" * 32})
            assert (status, refused["error"]["code"]) == (503, "draining")
            assert process.poll() is None
            assert post("release", {"transfer_id": "a" * 32, "epoch": granted["epoch"]})[0] == 200
        assert process.wait(timeout=60) == 0


def test_a_taken_port_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert run(["relay", "--port", port, "--data-port", "0"]) == 2
        assert "farfill: [port_in_use]" in capsys.readouterr().err


def test_python_m_farfill_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "farfill", "--version"], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("farfill 0.")
