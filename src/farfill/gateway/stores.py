"""Staging for a transfer: how much, at which store, and the lease on it.

Not here: the store (`farfill.store`), or when a lease is renewed and released (the request machine).
"""

import asyncio
import os
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import aiohttp

from farfill.errors import FarfillError, OperationError, OverloadError, PeerError
from farfill.gateway.fleet import Fleet
from farfill.gateway.relay import RelayWatch
from farfill.gateway.settings import GatewaySettings
from farfill.kv.layout import layout_digest
from farfill.kv.plan import plan_chunks, transfer_bytes
from farfill.kv.spec import CacheLayout, TransferId
from farfill.router.policy import Choice, Placement
from farfill.store.control import StoreControl
from farfill.store.protocol import Release, Renew, Reserve
from farfill.transfer.spec import KEY_BYTES, TransferSpec

_SIZES_MAX: Final = 4096  # plans remembered: a small tuple each
# A plan takes about a microsecond for each chunk. Larger ones are made on a thread, off the event loop.
_PLAN_INLINE_CHUNKS: Final = 2000


@dataclass(frozen=True, slots=True)
class Reservation:
    """A granted transfer: what both legs are told, and the lease's length."""

    spec: TransferSpec
    control_url: str
    lease_s: float


class Stores:
    """Reserves, renews and releases for the gateway's requests."""

    def __init__(
        self, session: aiohttp.ClientSession, fleet: Fleet, relay: RelayWatch | None, settings: GatewaySettings
    ) -> None:
        self._session = session
        self._fleet = fleet
        self._relay = relay
        self._settings = settings
        self._sizes: OrderedDict[tuple[str, int], tuple[int, int]] = OrderedDict()

    async def can_hold(self, choice: Choice, prompt_tokens: int) -> bool:
        """Whether the store of the choice's placement could grant the transfer at all, as far as it is known."""
        try:
            size_bytes, _ = await self._size(self._fleet.info(choice.decode_workers[0]).layout, prompt_tokens - 1)
        except OverloadError:
            return False
        if choice.placement is not Placement.RELAY or self._relay is None or self._relay.total_bytes is None:
            return True
        return size_bytes <= self._relay.total_bytes

    async def reserve(self, transfer_id: TransferId, choice: Choice, prompt_tokens: int) -> Reservation:
        """Asks the store of the choice's placement for the whole transfer.

        Raises:
            FarfillError: the store's refusal, or why it can't be asked.
        """
        assert choice.prefill_worker is not None
        prefill, decode = self._fleet.info(choice.prefill_worker), self._fleet.info(choice.decode_workers[0])
        prefix_tokens = prompt_tokens - 1
        size_bytes, chunks = await self._size(decode.layout, prefix_tokens)
        control_url = self._control_url(choice)
        clocks = self._settings.clocks
        try:
            granted = await self._control(control_url).reserve(
                Reserve(transfer_id, prefill.name, decode.name, size_bytes, chunks, clocks.lease_s)
            )
        except OperationError as error:
            if choice.placement is Placement.RELAY and self._relay is not None and error.code == "peer_unreachable":
                self._relay.noticed(error)
            raise
        if granted.transfer_id != transfer_id:
            raise PeerError("protocol_violation", f"{control_url} granted {granted.transfer_id}, asked was another")
        spec = TransferSpec(
            transfer_id=transfer_id,
            epoch=granted.epoch,
            store=granted.store,
            producer=prefill.instance,
            consumer=decode.instance,
            prefix_tokens=prefix_tokens,
            chunk_tokens=self._settings.chunk_tokens,
            key=os.urandom(KEY_BYTES),
            clocks=clocks.transfer,
        )
        return Reservation(spec, control_url, granted.lease_s)

    async def renew(self, reservation: Reservation) -> float:
        """Seconds from now until it ends. Raises FarfillError."""
        spec = reservation.spec
        request = Renew(spec.transfer_id, spec.epoch, self._settings.clocks.lease_s)
        return (await self._control(reservation.control_url).renew(request)).lease_s

    async def release(self, reservation: Reservation) -> FarfillError | None:
        """Gives the staging back; what went wrong, if anything did. Then the lease runs out on its own."""
        spec = reservation.spec
        try:
            await self._control(reservation.control_url).release(Release(spec.transfer_id, spec.epoch))
        except FarfillError as error:
            return error
        return None

    def _control(self, control_url: str) -> StoreControl:
        return StoreControl(self._session, control_url, self._settings.clocks.transfer.setup_s)

    def _control_url(self, choice: Choice) -> str:
        if choice.placement is Placement.RELAY:
            assert self._settings.relay is not None, "checked with the settings"
            return self._settings.relay.url
        at_producer = choice.placement is Placement.PRODUCER
        name = choice.prefill_worker if at_producer else choice.decode_workers[0]
        assert name is not None
        store = self._fleet.info(name).store
        if store is None:
            raise OperationError(
                "peer_unreachable", f"worker {name} has no store: give it one, or change gateway.placement"
            )
        return store.control_url

    async def _size(self, layout: CacheLayout, prefix_tokens: int) -> tuple[int, int]:
        """(sealed bytes, chunks) of a transfer, manifest and closing record included."""
        chunk_tokens = self._settings.chunk_tokens
        key = (layout_digest(layout), prefix_tokens)
        known = self._sizes.get(key)
        if known is None:

            def measure() -> tuple[int, int]:
                plan = plan_chunks(layout, prefix_tokens, chunk_tokens)
                return transfer_bytes(plan), len(plan) + 2

            try:
                if len(layout.layers) * (prefix_tokens // chunk_tokens + 1) <= _PLAN_INLINE_CHUNKS:
                    known = measure()
                else:
                    known = await asyncio.to_thread(measure)
            except FarfillError as error:  # too large for any store: not the operator's fault at this moment
                raise OverloadError("store_full", f"this prompt's cache can't travel: {error.message}") from error
            self._sizes[key] = known
            while len(self._sizes) > _SIZES_MAX:
                self._sizes.popitem(last=False)
        return known
