"""From the configuration tree to what each constructor takes: its own slice, and nothing else of the tree."""

from pathlib import Path

from farfill.config import Config
from farfill.engines.serving.settings import WorkerSettings
from farfill.errors import FailureClass
from farfill.gateway.settings import (
    FallbackRules,
    GatewayClocks,
    GatewaySettings,
    Limits,
    RelayAddress,
    Tenant,
    WorkerAddress,
)
from farfill.router.budget import FallbackPolicy
from farfill.router.policy import RouterSettings
from farfill.transfer.spec import Clocks


def gateway_settings(config: Config, ready_file: Path | None) -> GatewaySettings:
    gateway, clocks, fallback = config.gateway, config.gateway.clocks, config.gateway.fallback
    return GatewaySettings(
        name=gateway.name,
        host=gateway.host,
        port=gateway.port,
        workers=tuple(
            WorkerAddress(one.name, one.url, one.role.value, one.site, one.control_url) for one in gateway.workers
        ),
        relay=RelayAddress(gateway.relay.name, gateway.relay.url) if gateway.relay is not None else None,
        tenants=tuple(Tenant(one.name, one.api_key) for one in gateway.tenants),
        router=RouterSettings(gateway.threshold_tokens, gateway.placement),
        chunk_tokens=gateway.chunk_tokens,
        fallback=FallbackRules(
            FallbackPolicy({one: getattr(fallback, one.value) for one in FailureClass}), fallback.burst, fallback.per_s
        ),
        clocks=GatewayClocks(
            transfer=Clocks(
                queue_s=clocks.queue_s,
                setup_s=clocks.setup_s,
                stall_s=clocks.stall_s,
                produce_s=clocks.produce_s,
                transfer_s=clocks.transfer_s,
                verify_s=clocks.verify_s,
            ),
            request_s=clocks.request_s,
            lease_s=clocks.lease_s,
            poll_s=clocks.poll_s,
            ready_s=clocks.ready_s,
            drain_s=clocks.drain_s,
        ),
        limits=Limits(gateway.limits.body_bytes, gateway.limits.requests),
        tls=config.tls.files() if config.tls is not None else None,
        ready_file=ready_file,
    )


def worker_settings(config: Config, ready_file: Path | None) -> WorkerSettings:
    worker = config.worker
    return WorkerSettings(
        name=worker.name,
        role=worker.role,
        site=worker.site,
        host=worker.host,
        port=worker.port,
        data_port=worker.data_port,
        advertise_host=worker.advertise_host,
        store_bytes=worker.store_bytes,
        connections=worker.connections,
        requests=worker.requests,
        drain_s=worker.drain_s,
        tls=config.tls.files() if config.tls is not None else None,
        ready_file=ready_file,
    )
