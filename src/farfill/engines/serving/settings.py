"""What a worker's server is told at its start: one frozen slice of the configuration, checked as a whole.

Not here: files, environment and flags (`farfill.config`), or the engine, which comes ready-made.
"""

from dataclasses import dataclass
from pathlib import Path

from farfill.config.tree import Role
from farfill.engines.serving.listen import check_ready_file
from farfill.errors import ConfigurationError
from farfill.tls import TlsFiles, is_loopback


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """One worker's server, store and transfers.

    Attributes:
        name: what its certificate's common name says.
        host, port: of the API; port 0 takes a free one. Off loopback `tls` is required.
        data_port: of the store's data plane, on the same host; 0 takes a free one.
        advertise_host: where peers reach this worker; empty: `host`.
        store_bytes: staging memory for chunks in transit.
        connections: data connections for each transfer.
        requests: in flight at once; more get `queue_full`.
        drain_s: on SIGTERM, seconds for requests and leases to end.
        ready_file: written once it serves: {"url", "data_port", "instance", "pid"}; removed when it stops.
    """

    name: str = "worker"
    role: Role = Role.BOTH
    site: str = "local"
    host: str = "127.0.0.1"
    port: int = 0
    data_port: int = 0
    advertise_host: str = ""
    store_bytes: int = 1024**3
    connections: int = 4
    requests: int = 64
    drain_s: float = 30.0
    tls: TlsFiles | None = None
    ready_file: Path | None = None

    def check(self) -> None:
        """Raises ConfigurationError: `insecure_listener` or `config_invalid`, naming the field."""
        if self.ready_file is not None:
            check_ready_file(self.ready_file)
        if not is_loopback(self.host) and self.tls is None:
            raise ConfigurationError(
                "insecure_listener",
                f"the worker would listen on {self.host} without knowing its peers: configure tls, or listen on "
                "127.0.0.1",
                field="worker.host",
            )
        if self.host in ("0.0.0.0", "::") and not self.advertise_host:
            raise ConfigurationError(
                "config_invalid",
                f"worker.host {self.host} is every address and none that peers could connect to, so "
                "worker.advertise_host must be set",
                field="worker.advertise_host",
            )
