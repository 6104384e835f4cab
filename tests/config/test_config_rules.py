"""Rules between fields: no unauthenticated listener off loopback, nothing that could not work."""

from pathlib import Path

import msgspec
import pytest

from farfill.config import (
    Config,
    GatewaySettings,
    RelayPeer,
    RelaySettings,
    Role,
    Tenant,
    TlsSettings,
    WorkerPeer,
    WorkerSettings,
    check_gateway,
    check_relay,
    check_worker,
    load,
)
from farfill.errors import ConfigurationError
from farfill.router.policy import Placement
from farfill.tls import is_loopback

WEST = WorkerPeer(name="west", url="http://127.0.0.1:1", role=Role.DECODE, site="west")
EAST = WorkerPeer(name="east", url="https://10.0.0.1:1", role=Role.PREFILL, site="east")
TLS = TlsSettings(ca="ca.pem", certificate="c.pem", key="k.pem")


def test_what_can_work_passes() -> None:
    check_gateway(Config(gateway=GatewaySettings(workers=(WEST,))))
    check_gateway(Config(gateway=GatewaySettings(workers=(EAST, WEST)), tls=TLS))
    check_worker(Config())
    check_relay(Config())
    check_worker(Config(worker=WorkerSettings(host="0.0.0.0", advertise_host="east.example"), tls=TLS))


@pytest.mark.parametrize(
    ("gateway", "code", "field"),
    [
        (GatewaySettings(), "config_invalid", "gateway.workers"),
        (GatewaySettings(workers=(EAST,)), "config_invalid", "gateway.workers"),
        (GatewaySettings(workers=(WEST,), host="0.0.0.0"), "insecure_listener", "gateway.host"),
        (GatewaySettings(workers=(WEST,), host="example.org"), "insecure_listener", "gateway.host"),
        (GatewaySettings(workers=(WEST, WEST)), "config_invalid", "gateway.workers[1].name"),
        (
            GatewaySettings(workers=(WEST, msgspec.structs.replace(WEST, name="other"))),
            "config_invalid",
            "gateway.workers[1].url",
        ),
        (GatewaySettings(workers=(WEST, EAST)), "config_invalid", "tls"),
        (GatewaySettings(workers=(WEST,), placement=Placement.RELAY), "config_invalid", "gateway.relay"),
        (
            GatewaySettings(workers=(msgspec.structs.replace(WEST, url="http://10.0.0.1:1"),)),
            "config_invalid",
            "gateway.workers[0].url",
        ),
        (
            GatewaySettings(workers=(WEST,), relay=RelayPeer(name="r", url="http://relay.example:1")),
            "config_invalid",
            "gateway.relay.url",
        ),
    ],
)
def test_gateway_refusals(gateway: GatewaySettings, code: str, field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_gateway(Config(gateway=gateway))
    assert (caught.value.code, caught.value.field) == (code, field)


@pytest.mark.parametrize(
    "url", ["https://", "http://127.0.0.1", "http://127.0.0.1:1/v1", "http://h:x", "http://[::1:1"]
)
def test_worker_urls_are_base_urls(url: str) -> None:
    gateway = GatewaySettings(workers=(msgspec.structs.replace(WEST, url=url),))
    with pytest.raises(ConfigurationError, match=r"must be http\(s\)://host:port"):
        check_gateway(Config(gateway=gateway))


def test_two_tenants_with_one_key_are_refused_without_showing_it() -> None:
    tenants = (Tenant(name="a", api_key="0123456789abcdef"), Tenant(name="b", api_key="0123456789abcdef"))
    with pytest.raises(ConfigurationError) as caught:
        check_gateway(Config(gateway=GatewaySettings(workers=(WEST,), tenants=tenants)))
    assert caught.value.field == "gateway.tenants[1].api_key"
    assert "0123456789abcdef" not in str(caught.value)


def test_stores_need_tls_off_loopback() -> None:
    for check, config in (
        (check_worker, Config(worker=WorkerSettings(host="10.0.0.1"))),
        (check_relay, Config(relay=RelaySettings(host="10.0.0.1"))),
    ):
        with pytest.raises(ConfigurationError) as caught:
            check(config)
        assert caught.value.code == "insecure_listener"


def test_every_address_needs_one_to_advertise() -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_worker(Config(worker=WorkerSettings(host="0.0.0.0"), tls=TLS))
    assert caught.value.field == "worker.advertise_host"


def test_two_listeners_need_two_ports() -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_relay(Config(relay=RelaySettings(port=5, data_port=5)))
    assert caught.value.field == "relay.data_port"
    check_relay(Config(relay=RelaySettings(port=0, data_port=0)))


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("localhost.example", False),
        ("10.0.0.1", False),
        ("", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_the_defaults_are_safe(tmp_path: Path) -> None:
    config = load(environ={}).config
    for host in (config.gateway.host, config.worker.host, config.relay.host):
        assert is_loopback(host)
