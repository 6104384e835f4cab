"""Configuration: one typed tree from a file, the environment and flags.

Not a registry that parts ask for values: the command line loads it once and gives each constructor its own slice.
"""

from farfill.config.load import Loaded, Origin, load
from farfill.config.rules import check_gateway, check_relay, check_worker
from farfill.config.show import effective_yaml, example_yaml
from farfill.config.tree import (
    ClockSettings,
    Config,
    FallbackSettings,
    GatewaySettings,
    LimitSettings,
    RelayPeer,
    RelaySettings,
    Role,
    Tenant,
    TlsSettings,
    WorkerPeer,
    WorkerSettings,
)

__all__ = [
    "ClockSettings",
    "Config",
    "FallbackSettings",
    "GatewaySettings",
    "LimitSettings",
    "Loaded",
    "Origin",
    "RelayPeer",
    "RelaySettings",
    "Role",
    "Tenant",
    "TlsSettings",
    "WorkerPeer",
    "WorkerSettings",
    "check_gateway",
    "check_relay",
    "check_worker",
    "effective_yaml",
    "example_yaml",
    "load",
]
