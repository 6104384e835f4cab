"""Decode legs in vLLM's worker: a cache is received while the engine serves others, and installed once VERIFIED.

Not here: which requests those are and into which blocks (`scheduler_side`), how a chunk travels (`farfill.transfer`).

Nothing of a transfer touches a block before all of it is VERIFIED. Until then, and whatever happens, the blocks are
the request's own: vLLM keeps them until it is told that the load has ended, which it is exactly once.
"""

import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass

from farfill.engines.vllm.identity import ServedModel
from farfill.engines.vllm.kv_views import CacheViews
from farfill.engines.vllm.ledger import Ledger
from farfill.engines.vllm.results import TransferResult
from farfill.engines.vllm.sending import check_addressee
from farfill.engines.vllm.step import BeginLoad, RefuseLoad
from farfill.errors import FarfillError, LocalProtocolError, OperationError
from farfill.transfer.incoming import Incoming, ReceivedCache
from farfill.transfer.node import TransferNode

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadsEnded:
    """Request ids. `failed` are among `ended`."""

    ended: frozenset[str]
    failed: frozenset[str]


@dataclass(slots=True)
class _Load:
    order: BeginLoad
    incoming: Incoming
    is_cancelled: bool = False


class Loads:
    """Called on vLLM's worker thread only, but for the ends of transfers, which wake `collect`."""

    def __init__(
        self, node: TransferNode, model: ServedModel, views: CacheViews, instance: str, ledger: Ledger
    ) -> None:
        self._node = node
        self._model = model
        self._views = views
        self._instance = instance
        self._ledger = ledger
        self._loads: dict[str, _Load] = {}
        self._refused: set[str] = set()
        self._arrived = threading.Event()

    def begin(self, order: BeginLoad) -> None:
        spec = order.spec
        self._ledger.began(spec.transfer_id, "received")
        try:
            check_addressee(spec, spec.consumer, self._instance, "consumer")
            incoming = self._node.receive(
                spec,
                self._model.layout,
                self._model.fingerprint,
                order.token_ids,
                held_tokens=order.local_tokens,
            )
        except FarfillError as error:
            self._ledger.failed(spec.transfer_id, "received", error)
            self._refused.add(order.request_id)
            return
        self._loads[order.request_id] = _Load(order, incoming)
        incoming.future.add_done_callback(self._wake)

    def refuse(self, order: RefuseLoad) -> None:
        refusal = order.refusal
        self._ledger.failed(refusal.transfer_id, "received", OperationError(refusal.code, refusal.message))
        self._refused.add(order.request_id)

    def end(self, request_id: str) -> None:
        """vLLM has ended the request. If its load is still under way, it ends soon, and `collect` says so."""
        load = self._loads.get(request_id)
        if load is not None:
            load.is_cancelled = True
            load.incoming.cancel("the decode request was aborted")

    def collect(self, wait_s: float) -> LoadsEnded:
        """Installs what has been VERIFIED, and says which loads have ended since the last call.

        Args:
            wait_s: how long to wait for one of them to end, if none has.
        """
        if self._loads and not self._refused:
            self._arrived.wait(wait_s)
        self._arrived.clear()
        ended, failed = set(self._refused), set(self._refused)
        self._refused.clear()
        for request_id, load in list(self._loads.items()):
            if load.incoming.future.done():
                del self._loads[request_id]
                ended.add(request_id)
                if not self._take(load):
                    failed.add(request_id)
        return LoadsEnded(frozenset(ended), frozenset(failed))

    def _take(self, load: _Load) -> bool:
        """Whether the request may decode from its blocks."""
        transfer_id = load.order.spec.transfer_id
        try:
            cache = load.incoming.future.result()
            if not load.is_cancelled:
                self._install(load.order, cache)
        except FarfillError as error:
            if isinstance(error, LocalProtocolError):
                _log.critical("installing transfer %s failed by a bug", transfer_id, exc_info=error)
            self._ledger.failed(transfer_id, "received", error)
            return False
        self._ledger.done(
            TransferResult(
                transfer_id,
                "received",
                "done",
                sum(chunk.payload_bytes for chunk in cache.plan if chunk.index not in cache.held),
                cache.bytes_moved,
                cache.verified_at - cache.started_at,
                cache.cached_tokens,
            )
        )
        self._ledger.imported(cache.prefix_tokens - load.order.local_tokens)
        cache.release()
        return True

    def _install(self, order: BeginLoad, cache: ReceivedCache) -> None:
        for chunk in cache.plan:
            if chunk.index in cache.held:
                continue
            self._views.write(chunk, cache.payload(chunk.index), order.blocks, order.local_tokens)

    def _wake(self, _: "Future[ReceivedCache]") -> None:
        """In a thread of the data plane."""
        self._arrived.set()
