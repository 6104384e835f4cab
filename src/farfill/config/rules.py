"""Rules between fields: what each kind of process needs, and what would be unsafe.

Not here: a single field's type and range (`tree`), whether certificate files are good (`farfill.tls`).
"""

from collections.abc import Iterable
from urllib.parse import urlsplit

from farfill.config.tree import Config, RelaySettings, Role, WorkerSettings
from farfill.errors import ConfigurationError
from farfill.router.policy import Placement
from farfill.tls import is_loopback


def check_gateway(config: Config) -> None:
    """Raises ConfigurationError where `config` cannot run a gateway."""
    gateway = config.gateway
    if not is_loopback(gateway.host) and not gateway.tenants:
        raise ConfigurationError(
            "insecure_listener",
            f"gateway.host {gateway.host!r} is not loopback, so gateway.tenants must name who may call",
            field="gateway.host",
        )
    if not any(worker.role in (Role.DECODE, Role.BOTH) for worker in gateway.workers):
        raise ConfigurationError(
            "config_invalid",
            "gateway.workers must have at least one worker of role decode or both; without one nothing can answer",
            field="gateway.workers",
        )
    _require_unique("gateway.workers", "name", (worker.name for worker in gateway.workers))
    _require_unique("gateway.workers", "url", (worker.url.rstrip("/") for worker in gateway.workers))
    _require_unique("gateway.tenants", "name", (tenant.name for tenant in gateway.tenants))
    _require_unique("gateway.tenants", "api_key", (tenant.api_key for tenant in gateway.tenants), secret=True)
    if gateway.placement is Placement.RELAY and gateway.relay is None:
        raise ConfigurationError(
            "config_invalid",
            "gateway.placement is relay, so gateway.relay.name and gateway.relay.url must say which",
            field="gateway.relay",
        )
    for index, worker in enumerate(gateway.workers):
        _check_url(f"gateway.workers[{index}].url", worker.url, config)
    if gateway.relay is not None:
        _check_url("gateway.relay.url", gateway.relay.url, config)


def check_worker(config: Config) -> None:
    """Raises ConfigurationError where `config` cannot run a worker."""
    _check_listener("worker", config.worker, config)


def check_relay(config: Config) -> None:
    """Raises ConfigurationError where `config` cannot run a relay."""
    _check_listener("relay", config.relay, config)


def _check_listener(section: str, settings: WorkerSettings | RelaySettings, config: Config) -> None:
    if not is_loopback(settings.host) and config.tls is None:
        raise ConfigurationError(
            "insecure_listener",
            f"{section}.host {settings.host!r} is not loopback, so tls.ca, tls.certificate and tls.key are required "
            f"(`farfill certs` makes development certificates)",
            field=f"{section}.host",
        )
    if settings.port == settings.data_port != 0:
        raise ConfigurationError(
            "config_invalid",
            f"{section}.port and {section}.data_port must differ, both are {settings.port}",
            field=f"{section}.data_port",
        )
    if settings.host in ("0.0.0.0", "::") and not settings.advertise_host:
        raise ConfigurationError(
            "config_invalid",
            f"{section}.host {settings.host!r} is every address and none that peers could connect to, "
            f"so {section}.advertise_host must be set",
            field=f"{section}.advertise_host",
        )


def _check_url(path: str, url: str, config: Config) -> None:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port is None or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ConfigurationError("config_invalid", f"{path} must be http(s)://host:port, not {url!r}", field=path)
    if parts.scheme == "http" and not is_loopback(host):
        raise ConfigurationError(
            "config_invalid", f"{path} {url!r} leaves this machine, so it must be https", field=path
        )
    if parts.scheme == "https" and config.tls is None:
        raise ConfigurationError(
            "config_invalid", f"{path} is https, so tls.ca, tls.certificate and tls.key are required", field="tls"
        )


def _require_unique(path: str, field: str, values: Iterable[str], *, secret: bool = False) -> None:
    seen: set[str] = set()
    for index, value in enumerate(values):
        if value in seen:
            shown = "..." if secret else value
            raise ConfigurationError(
                "config_invalid", f"{path}[{index}].{field} {shown} is there twice", field=f"{path}[{index}].{field}"
            )
        seen.add(value)
