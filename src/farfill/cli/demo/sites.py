"""The demo's two sites as processes: certificates, a configuration file each, started in the order of who needs whom.

Not a deployment: everything stands on loopback, on ports that the system picks, in a folder that goes away.
"""

import os
import socket
import ssl
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from farfill import tls
from farfill.cli.demo.children import Child, Children
from farfill.cli.progress import Steps
from farfill.router.policy import Placement

PROCESSES: Final = 4
EAST, WEST, RELAY, GATEWAY = "prefill-east", "decode-west", "relay", "gateway"


@dataclass(frozen=True, slots=True)
class SiteSettings:
    """What the demo's options decide."""

    model: Path
    placement: Placement
    threshold_tokens: int
    gateway_port: int
    threads: int


@dataclass(frozen=True, slots=True)
class Sites:
    """Where everything listens. `context` shows the gateway's certificate: the workers admit nobody without one."""

    gateway_port: int
    prefill_url: str
    decode_url: str
    context: ssl.SSLContext


def threads_per_worker() -> int:
    """Half of the cores that this process may use: two workers share them."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def is_free(port: int) -> bool:
    """Whether the gateway could listen on `port` of 127.0.0.1 now."""
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def start_sites(children: Children, folder: Path, settings: SiteSettings, shown: Steps) -> Sites:
    """Starts all four processes and waits until each accepts requests.

    Raises:
        OperationError: one of them ended or was not ready in time; the message has its log's tail.
    """
    certificates = folder / "certs"
    tls.write_development_ca(certificates, days=1)
    files = {
        name: tls.write_certificate(certificates, name, days=1, role=role)
        for name, role in (
            (EAST, tls.PeerRole.WORKER),
            (WEST, tls.PeerRole.WORKER),
            (RELAY, tls.PeerRole.RELAY),
            (GATEWAY, tls.PeerRole.GATEWAY),
        )
    }

    def start(command: str, name: str, section: dict[str, Any]) -> Child:
        config = folder / f"{name}.yaml"
        own = files[name]
        paths = {"ca": str(own.ca), "certificate": str(own.certificate), "key": str(own.key)}
        config.write_text(yaml.safe_dump({command: {"name": name, **section}, "tls": paths}))
        # Libraries read their thread count from the environment before farfill can tell them.
        return children.start(name, [command, "--config", str(config)], {"OMP_NUM_THREADS": str(settings.threads)})

    def worker(name: str, role: str, site: str) -> Child:
        section = {"role": role, "site": site, "model": str(settings.model), "threads": settings.threads}
        return start("worker", name, {**section, "port": 0, "data_port": 0})

    relay = start("relay", RELAY, {"port": 0, "data_port": 0, "store_bytes": "1GiB"})
    east, west = worker(EAST, "prefill", "east"), worker(WEST, "decode", "west")

    def url_of(child: Child, what: str) -> str:
        shown.begin(f"waiting for the {what}")
        url = str(children.wait_ready(child)["url"])
        shown.done()
        return url

    relay_url = url_of(relay, "relay")
    east_url = url_of(east, "prefill worker in site east")
    west_url = url_of(west, "decode worker in site west")
    shown.begin("waiting for the gateway")
    gateway = start(
        "gateway",
        GATEWAY,
        {
            "port": settings.gateway_port,
            "threshold_tokens": settings.threshold_tokens,
            "placement": settings.placement.value,
            "relay": {"name": RELAY, "url": relay_url},
            "workers": [
                {"name": EAST, "url": east_url, "role": "prefill", "site": "east"},
                {"name": WEST, "url": west_url, "role": "decode", "site": "west"},
            ],
        },
    )
    facts = children.wait_ready(gateway)
    shown.done()
    port = int(str(facts["url"]).rsplit(":", 1)[1])
    return Sites(port, east_url, west_url, tls.client_context(files[GATEWAY]))
