"""What a gateway is told at its start: one frozen slice of the configuration, checked as a whole.

Not here: files, environment and flags (`farfill.config`).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from farfill.errors import ConfigurationError
from farfill.router.budget import FallbackPolicy
from farfill.router.policy import Placement, RouterSettings
from farfill.router.request import RequestClocks
from farfill.tls import TlsFiles, is_loopback
from farfill.transfer.spec import Clocks

ROLES: Final = ("prefill", "decode", "both")


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """`name` is what its certificate and its info say; `role`: "prefill", "decode" or "both"; `url` without a path.

    `control_url` is where farfill's own API is, if it is not where the engine's OpenAI API is (beside vLLM).
    """

    name: str
    url: str
    role: str
    site: str
    control_url: str = ""

    @property
    def control(self) -> str:
        return self.control_url or self.url


@dataclass(frozen=True, slots=True)
class RelayAddress:
    name: str
    url: str


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str
    api_key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Limits:
    """`body_bytes`: largest request body. `requests`: in flight, all tenants together."""

    body_bytes: int = 16 * 1024**2
    requests: int = 1024


@dataclass(frozen=True, slots=True)
class FallbackRules:
    """The answer for each class of failure, and the budget: `burst` at once, `per_s` regained each second."""

    policy: FallbackPolicy = field(default_factory=FallbackPolicy)
    burst: float = 20.0
    per_s: float = 1.0


@dataclass(frozen=True, slots=True)
class GatewayClocks:
    """Seconds.

    Attributes:
        transfer: what both legs of a transfer are told; its `setup_s` and `transfer_s` hold at the gateway too.
        request_s: the whole request.
        lease_s: asked from the store, renewed while the transfer runs.
        poll_s: between two looks at a worker.
        ready_s: how long one answer of `/ready` holds.
        drain_s: on SIGTERM, for requests in flight to end.
    """

    transfer: Clocks = field(default_factory=Clocks)
    request_s: float = 600.0
    lease_s: float = 30.0
    poll_s: float = 2.0
    ready_s: float = 3.0
    drain_s: float = 30.0

    def of_request(self) -> RequestClocks:
        return RequestClocks(self.transfer.setup_s, self.transfer.transfer_s, self.request_s)


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """See the fields' own types. `ready_file`: written once it serves, with its URL and process id."""

    workers: tuple[WorkerAddress, ...]
    name: str = "gateway"
    host: str = "127.0.0.1"
    port: int = 8000
    relay: RelayAddress | None = None
    tenants: tuple[Tenant, ...] = ()
    router: RouterSettings = field(default_factory=RouterSettings)
    chunk_tokens: int = 256
    fallback: FallbackRules = field(default_factory=FallbackRules)
    clocks: GatewayClocks = field(default_factory=GatewayClocks)
    limits: Limits = Limits()
    tls: TlsFiles | None = None
    ready_file: Path | None = None

    def check(self) -> None:
        """Raises ConfigurationError: `insecure_listener` or `config_invalid`, naming the field."""
        if not self.tenants and not is_loopback(self.host):
            raise ConfigurationError(
                "insecure_listener",
                f"the gateway would serve anybody on {self.host}: name tenants with API keys, or listen on 127.0.0.1",
                field="gateway.host",
            )
        names = [worker.name for worker in self.workers]
        if not any(worker.role in ("decode", "both") for worker in self.workers):
            raise _invalid("gateway.workers", "must name at least one worker with the role decode or both")
        for name in names:
            if names.count(name) > 1:
                raise _invalid("gateway.workers", f"names {name!r} twice")
        for worker in self.workers:
            if worker.role not in ROLES:
                raise _invalid("gateway.workers", f"{worker.name}: the role is {worker.role!r}, not one of {ROLES}")
            self._check_url(worker.name, worker.url, "gateway.workers")
            self._check_url(worker.name, worker.control, "gateway.workers")
        if self.relay is not None:
            self._check_url(self.relay.name, self.relay.url, "gateway.relay")
        if self.router.placement is Placement.RELAY and self.relay is None:
            raise _invalid("gateway.relay", "must be given with placement: relay")
        if len({tenant.name for tenant in self.tenants}) < len(self.tenants):
            raise _invalid("gateway.tenants", "names a tenant twice")
        if len({tenant.api_key for tenant in self.tenants}) < len(self.tenants):
            raise _invalid("gateway.tenants", "gives two tenants the same key")

    def _check_url(self, name: str, url: str, field_name: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
            raise _invalid(field_name, f"{name}: {url!r} is not of the form https://host:port")
        if parts.scheme == "http" and not is_loopback(parts.hostname):
            raise _invalid(field_name, f"{name}: {url} is plain http off loopback: use https, and set tls")
        if parts.scheme == "https" and self.tls is None:
            raise _invalid("tls", f"must be set to reach {name} at {url}: workers ask for a client certificate")


def _invalid(field_name: str, message: str) -> ConfigurationError:
    return ConfigurationError("config_invalid", f"{field_name} {message}", field=field_name)
