"""The relay as the gateway sees it: polled like a worker, so that no request is tried through one that is down.

Not here: reserving at it (`stores`), or what a request does without it (`farfill.router.policy`).
"""

import asyncio
import logging

import aiohttp

from farfill.errors import FarfillError, OverloadError
from farfill.gateway.settings import RelayAddress
from farfill.store.control import StoreControl

_log = logging.getLogger(__name__)


class RelayWatch:
    """`failure` is why it is not up, None while it is. `total_bytes` of staging, as it last said; None: it never did.

    Args:
        poll_s: between two looks; also how long a look may take.
    """

    def __init__(self, session: aiohttp.ClientSession, address: RelayAddress, poll_s: float) -> None:
        self.address = address
        self.failure: FarfillError | None = None
        self.total_bytes: int | None = None
        self._control = StoreControl(session, address.url, poll_s)
        self._poll_s = poll_s
        self._task: asyncio.Task[None] | None = None

    @property
    def up(self) -> bool:
        return self.failure is None

    async def start(self) -> None:
        """Looks once, then keeps looking. A relay that is down now may come later."""
        await self.look()
        self._task = asyncio.create_task(self._keep_looking(), name=f"poll {self.address.name}")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def noticed(self, error: FarfillError) -> None:
        """A request found it out of reach: no further one is sent there until it answers a look again."""
        if self.failure is None:
            _log.warning("relay %s is out of reach: %s", self.address.name, error)
            self.failure = error

    async def look(self) -> None:
        """One poll; its result, good or bad, is kept."""
        try:
            status = await self._control.status()
            if status.draining:
                raise OverloadError("draining", "it grants nothing new")
        except FarfillError as error:
            if self.failure is None or self.failure.code != error.code:
                _log.warning("relay %s at %s is down: %s", self.address.name, self.address.url, error)
            self.failure = error
            return
        if self.failure is not None or self.total_bytes is None:
            _log.info("relay %s at %s is up", self.address.name, self.address.url)
        self.failure, self.total_bytes = None, status.ledger.total_bytes

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            await self.look()
