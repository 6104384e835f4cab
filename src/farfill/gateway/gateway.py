"""One gateway: its parts, put together; who is let in; and how one request is driven.

Not here: HTTP routes (`app`), sockets and signals (`serve`).
"""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator
from importlib.metadata import version
from typing import Any, Final

from farfill.errors import OverloadError
from farfill.gateway.choose import Chooser
from farfill.gateway.client_side import ClientSide
from farfill.gateway.drive import RequestDriver, Upstreams
from farfill.gateway.fleet import Fleet
from farfill.gateway.legs import tracing
from farfill.gateway.mailbox import Background
from farfill.gateway.relay import RelayWatch
from farfill.gateway.settings import GatewaySettings
from farfill.gateway.stores import Stores
from farfill.gateway.tenants import Tenants
from farfill.gateway.upstream import open_session
from farfill.gateway.work import Chosen, Work
from farfill.kv.spec import TransferId
from farfill.observe.gateway_metrics import FleetReading, GatewayMetrics, WorkerReading
from farfill.router.budget import FallbackBudget, FallbackPolicy
from farfill.router.messages import RecordOutcome
from farfill.router.policy import Placement
from farfill.router.prefix_index import PrefixIndex
from farfill.router.request import RequestMachine, RequestRules
from farfill.tls import client_context

VERSION: Final = version("farfill")
_FULL_RETRY_S: Final = 1.0


class Admission:
    """Requests in flight, their bound, and the drain."""

    def __init__(self, requests_max: int) -> None:
        self._requests_max = requests_max
        self.requests = 0
        self.is_closed = False
        self._inside: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """One request's stay. Raises OverloadError: `draining`, `queue_full`."""
        if self.is_closed:
            raise OverloadError("draining", "this gateway is stopping", retry_after_s=_FULL_RETRY_S)
        if self.requests >= self._requests_max:
            raise OverloadError(
                "queue_full",
                f"this gateway already has {self.requests} requests, its limit",
                retry_after_s=_FULL_RETRY_S,
            )
        task = asyncio.current_task()
        assert task is not None, "a request is let in by its handler"
        self.requests += 1
        self._inside.add(task)
        self._idle.clear()
        try:
            yield
        finally:
            self.requests -= 1
            self._inside.discard(task)
            if self.requests == 0:
                self._idle.set()

    def cut(self) -> None:
        """Cancels every request in flight, as if its client had left: each frees what it holds."""
        for task in self._inside:
            task.cancel()

    async def idle(self) -> None:
        await self._idle.wait()


class Gateway:
    """Must be made, started and stopped on one event loop.

    Raises:
        ConfigurationError: see `GatewaySettings.check`; `certificate_invalid`.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        settings.check()
        self.settings = settings
        self.admission = Admission(settings.limits.requests)
        self.tenants = Tenants(settings.tenants)
        self._budget = FallbackBudget(settings.fallback.burst, settings.fallback.per_s)
        self._background = Background()
        tls = None if settings.tls is None else client_context(settings.tls)
        setup_s = settings.clocks.transfer.setup_s
        self._session = open_session(tls, setup_s, tracing())
        index = PrefixIndex()
        self.fleet = Fleet(self._session, settings.workers, settings.clocks.poll_s, index.forget_worker)
        self.relay: RelayWatch | None = None
        if settings.relay is not None and settings.router.placement is Placement.RELAY:
            self.relay = RelayWatch(self._session, settings.relay, settings.clocks.poll_s)
        stores = Stores(self._session, self.fleet, self.relay, settings)
        self.choose = Chooser(self._session, self.fleet, self.relay, stores, index, settings.router, setup_s)
        self.metrics = GatewayMetrics(VERSION, self._read_fleet, lambda: self.admission.requests)
        self._upstreams = Upstreams(
            self._session,
            self.fleet,
            stores,
            self._background,
            self.metrics,
            self.choose.remember,
            tenants_apart=bool(settings.tenants),
        )

    async def start(self) -> None:
        """Looks at every worker, and the relay, once. One that is down does not keep the gateway from starting."""
        await asyncio.gather(self.fleet.start(), *(() if self.relay is None else (self.relay.start(),)))

    async def stop(self) -> None:
        """After the last request: gives leases back, then closes all connections."""
        await self.fleet.stop()
        if self.relay is not None:
            await self.relay.stop()
        await self._background.finish()
        await self._session.close()

    async def drive(
        self,
        work: Work,
        client: ClientSide,
        choose: Callable[[], Awaitable[Chosen]],
        *,
        policy: FallbackPolicy | None = None,
    ) -> RecordOutcome:
        """Carries one request out. `policy`: another one than the gateway's own."""
        rules = RequestRules(
            policy=policy or self.settings.fallback.policy,
            clocks=self.settings.clocks.of_request(),
            streaming=work.streaming,
        )
        transfer_id = TransferId(os.urandom(16).hex())
        machine = RequestMachine(transfer_id, rules, self._budget, asyncio.get_running_loop().time())
        return await RequestDriver(machine, work, client, self._upstreams).run(choose)

    def _read_fleet(self) -> FleetReading:
        workers = tuple(
            WorkerReading(name, worker.address.role, worker.address.site, worker.up, worker.outstanding_tokens)
            for name, worker in self.fleet.workers.items()
        )
        pairs = tuple(
            (prefill.name, decode.name, (prefill.name, decode.name) not in self.fleet.incompatible)
            for prefill in self.fleet.facts("prefill", "both")
            for decode in self.fleet.facts("decode", "both")
            if prefill.name != decode.name and prefill.model == decode.model
        )
        return FleetReading(workers, pairs, None if self.relay is None else self.relay.up)
