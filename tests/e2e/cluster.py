"""Whole farfill processes for tests: certificates, workers, a relay, gateways, over mutual TLS on loopback.

Real processes started through the command line, nothing in this test's process. They are ended by their handles.
"""

import http.client
import json
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from prometheus_client.parser import text_string_to_metric_families

from farfill import tls
from farfill.cli.demo.children import Child, Children

WAIT_S = 120.0
_POLL_S = 0.02


@dataclass(frozen=True)
class Node:
    """A process that listens."""

    name: str
    child: Child
    url: str

    @property
    def port(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None
        return port

    def kill(self) -> None:
        self.child.process.kill()
        self.child.process.wait()


@dataclass
class Cluster:
    """`threads`: of each worker; the same everywhere, so that numbers do not depend on who computes them."""

    folder: Path
    children: Children
    model: Path
    threads: int = 1
    nodes: dict[str, Node] = field(default_factory=dict)
    _certificates: dict[str, tls.TlsFiles] = field(default_factory=dict)

    def files(self, name: str, role: tls.PeerRole) -> tls.TlsFiles:
        folder = self.folder / "certs"
        if not self._certificates:
            tls.write_development_ca(folder, days=1)
        if name not in self._certificates:
            self._certificates[name] = tls.write_certificate(folder, name, days=1, role=role)
        return self._certificates[name]

    def start(self, command: str, name: str, role: tls.PeerRole, section: Mapping[str, Any]) -> Child:
        files = self.files(name, role)
        config = self.folder / f"{name}.yaml"
        paths = {"ca": str(files.ca), "certificate": str(files.certificate), "key": str(files.key)}
        config.write_text(yaml.safe_dump({command: {"name": name, **section}, "tls": paths}))
        (self.folder / f"{name}.ready.json").unlink(missing_ok=True)
        return self.children.start(name, [command, "--config", str(config)], {"OMP_NUM_THREADS": str(self.threads)})

    def begin_worker(self, name: str, role: str, site: str, **more: Any) -> Child:
        section = {"role": role, "site": site, "model": str(self.model), "threads": self.threads, "port": 0}
        return self.start("worker", name, tls.PeerRole.WORKER, {**section, "data_port": 0, **more})

    def begin_relay(self, name: str = "relay", **more: Any) -> Child:
        return self.start("relay", name, tls.PeerRole.RELAY, {"port": 0, "data_port": 0, **more})

    def ready(self, child: Child) -> Node:
        """Waits for this child alone: others may be dead on purpose."""
        wait_until(lambda: child.ready_file.exists() or child.process.poll() is not None)
        assert child.process.poll() is None, child.log_tail()
        node = Node(child.name, child, str(json.loads(child.ready_file.read_text())["url"]))
        self.nodes[child.name] = node
        return node

    def gateway(
        self, name: str, prefill: list[tuple[Node, str]], decode: list[tuple[Node, str]], **more: Any
    ) -> "Gateway":
        """`prefill`, `decode`: nodes with their sites."""
        workers = [
            {"name": node.name, "url": node.url, "role": role, "site": site}
            for role, pairs in (("prefill", prefill), ("decode", decode))
            for node, site in pairs
        ]
        relay = self.nodes.get("relay")
        section: dict[str, Any] = {"port": 0, "workers": workers, **more}
        if relay is not None:
            section["relay"] = {"name": relay.name, "url": relay.url}
        node = self.ready(self.start("gateway", name, tls.PeerRole.GATEWAY, section))
        gateway = Gateway(node, node.port)
        wait_until(lambda: gateway.sees([node.name for node, _ in (*prefill, *decode)]))
        return gateway

    def peer_context(self) -> ssl.SSLContext:
        return tls.client_context(self.files("observer", tls.PeerRole.GATEWAY))

    def metrics(self, node: Node) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        return read_metrics(node.url, self.peer_context())

    def ask(self, node: Node, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """A GET, or a POST of `body`, as a peer with a gateway's certificate: status and JSON answer."""
        parts = urlsplit(node.url)
        assert parts.hostname is not None
        connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=10, context=self.peer_context())
        try:
            if body is None:
                connection.request("GET", path)
            else:
                connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
            assert isinstance(answer, dict)
            return response.status, answer
        finally:
            connection.close()

    def is_store_free(self, node: Node) -> bool:
        _, status = self.ask(node, "/farfill/v1/store/status")
        ledger = status["ledger"]
        assert isinstance(ledger, dict)
        return bool(ledger["free_bytes"] == ledger["total_bytes"]) and ledger["gets_parked"] == 0


def read_metrics(url: str, context: ssl.SSLContext | None) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection: http.client.HTTPConnection
    if context is None:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
    else:
        connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=10, context=context)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(samples: Mapping[tuple[str, tuple[tuple[str, str], ...]], float], name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    wanted = set(labels.items())
    return sum(value for (one, found), value in samples.items() if one == name and wanted <= set(found))


@dataclass(frozen=True)
class Reply:
    """A chat answer. `events`: of a stream, all but [DONE]; `done`: whether [DONE] came."""

    status: int
    headers: Mapping[str, str]
    events: list[dict[str, Any]]
    done: bool

    @property
    def text(self) -> str:
        pieces = []
        for event in self.events:
            for choice in event.get("choices", ()):
                pieces.append((choice.get("delta") or choice.get("message") or {}).get("content") or "")
        return "".join(pieces)

    @property
    def error(self) -> dict[str, Any]:
        return next((event["error"] for event in self.events if "error" in event), {})

    @property
    def usage(self) -> dict[str, Any]:
        return next((event["usage"] for event in self.events if event.get("usage")), {})

    @property
    def path(self) -> str:
        return self.headers.get("x-farfill-path", "")

    @property
    def reason(self) -> str:
        return self.headers.get("x-farfill-reason", "")


@dataclass(frozen=True)
class Gateway:
    node: Node
    port: int

    def open(self, path: str, body: Mapping[str, Any]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return connection, connection.getresponse()

    def chat(
        self,
        messages: list[dict[str, str]],
        max_tokens: int,
        *,
        at_text: Callable[[], None] | None = None,
        **more: Any,
    ) -> Reply:
        """A greedy streaming chat. `at_text` is called once, when the first text has come."""
        body = {
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
        }
        connection, response = self.open("/v1/chat/completions", body)
        try:
            headers = {name.lower(): value for name, value in response.getheaders()}
            if response.status != 200 or not headers["content-type"].startswith("text/event-stream"):
                return Reply(response.status, headers, [json.loads(response.read())], done=False)
            events: list[dict[str, Any]] = []
            try:
                for line in response:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return Reply(200, headers, events, done=True)
                    events.append(json.loads(data))
                    if at_text is not None and any(
                        (choice.get("delta") or {}).get("content") for choice in events[-1].get("choices", ())
                    ):
                        at_text()
                        at_text = None
            except http.client.IncompleteRead:
                pass  # broken off: `done` says so
            return Reply(200, headers, events, done=False)
        finally:
            connection.close()

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        return read_metrics(f"http://127.0.0.1:{self.port}", None)

    def sees(self, names: list[str]) -> bool:
        samples = self.metrics()
        return all(total(samples, "farfill_gateway_worker_up", worker=name) == 1.0 for name in names)


def wait_until(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    """Waits for a state of other processes; fails, saying which condition, when it does not come."""
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, f"not so after {timeout_s} s: {condition}"
        time.sleep(_POLL_S)
