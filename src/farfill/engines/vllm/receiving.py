"""Decode legs in vLLM's worker: a cache is received while the engine serves others, and installed once VERIFIED.

Not here: which requests those are and into which blocks (`scheduler_side`), how a chunk travels (`farfill.transfer`).

Nothing of a transfer touches a block before all of it is VERIFIED. Until then, and whatever happens, the blocks are
the request's own: vLLM keeps them until it is told that the load has ended, which it is exactly once.

Where there are several ranks, rank 0 receives. Its verdict goes to the scheduler side and from there, in one step, to
all ranks: each installs its heads, or none does.
"""

import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from farfill.engines.vllm.identity import ServedModel
from farfill.engines.vllm.kv_views import CacheViews
from farfill.engines.vllm.ledger import Ledger
from farfill.engines.vllm.ranks import Ranks
from farfill.engines.vllm.results import TransferResult
from farfill.engines.vllm.sending import check_addressee
from farfill.engines.vllm.step import BeginLoad, LoadNews, LoadVerdict, RefuseLoad
from farfill.errors import FarfillError, OperationError
from farfill.kv.plan import plan_chunks
from farfill.transfer.incoming import Incoming, ReceivedCache, held_chunks
from farfill.transfer.node import TransferNode

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadsEnded:
    """Request ids. `failed` are among `ended`."""

    ended: frozenset[str]
    failed: frozenset[str]


@dataclass(slots=True)
class _Load:
    """`incoming` is None on other ranks than the first, and on the first where the transfer could not begin."""

    order: BeginLoad
    incoming: Incoming | None
    is_cancelled: bool = False
    is_judged: bool = False

    @property
    def is_done(self) -> bool:
        return self.incoming is None or self.incoming.future.done()


@dataclass(slots=True)
class _Ended:
    """What vLLM has not been told yet."""

    ended: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

    def note(self, request_id: str, *, ok: bool) -> None:
        self.ended.add(request_id)
        if not ok:
            self.failed.add(request_id)


class Loads:
    """Called on vLLM's worker thread only, but for the ends of transfers, which wake `collect`.

    Args:
        node: None on other ranks than the first.
    """

    def __init__(
        self,
        node: TransferNode | None,
        model: ServedModel,
        views: CacheViews,
        instance: str,
        ledger: Ledger,
        ranks: Ranks,
    ) -> None:
        self._node = node
        self._model = model
        self._views = views
        self._instance = instance
        self._ledger = ledger
        self._ranks = ranks
        self._loads: dict[str, _Load] = {}
        self._ended = _Ended()
        self._arrived = threading.Event()

    def begin(self, order: BeginLoad) -> None:
        self._loads[order.request_id] = _Load(order, self._open(order))

    def refuse(self, order: RefuseLoad) -> None:
        refusal = order.refusal
        self._ledger.failed(refusal.transfer_id, "received", OperationError(refusal.code, refusal.message))
        self._ended.note(order.request_id, ok=False)

    def end(self, request_id: str) -> None:
        """vLLM has ended the request. If its load is still under way, it ends soon, and `collect` says so."""
        load = self._loads.get(request_id)
        if load is not None:
            load.is_cancelled = True
            if load.incoming is not None:
                load.incoming.cancel("the decode request was aborted")

    def collect(self, wait_s: float) -> LoadsEnded:
        """Which loads have ended since the last call. With one rank, VERIFIED ones are installed here.

        Args:
            wait_s: how long to wait for one of them to end, if none has.
        """
        if self._loads and not self._ended.ended:
            # Ranks that are not told of an end wait a little too: vLLM polls for its next step, and would take a core.
            self._arrived.wait(wait_s if self._ranks.is_first else wait_s / 4)
        self._arrived.clear()
        if self._ranks.size == 1:
            for request_id, load in list(self._loads.items()):
                if load.is_done:
                    self.conclude(LoadVerdict(request_id, self._is_verified(load)))
        told, self._ended = self._ended, _Ended()
        return LoadsEnded(frozenset(told.ended), frozenset(told.failed))

    def take_news(self) -> LoadNews | None:
        """Rank 0's verdicts since the last call, where there are several ranks."""
        if self._ranks.size == 1 or not self._ranks.is_first:
            return None
        verdicts = []
        for request_id, load in self._loads.items():
            if load.is_done and not load.is_judged:
                load.is_judged = True
                verdicts.append(LoadVerdict(request_id, self._is_verified(load)))
        return LoadNews(tuple(verdicts)) if verdicts else None

    def conclude(self, verdict: LoadVerdict) -> None:
        """Carries a verdict out; on all ranks in the same step, in the same order."""
        load = self._loads.pop(verdict.request_id)
        installed = False
        if verdict.is_verified:
            cache = None if load.incoming is None else load.incoming.future.result()
            installed = self._install(load.order, cache)
            if cache is not None:
                self._account(load.order, cache)
                cache.release()
        self._ended.note(verdict.request_id, ok=installed)

    def _open(self, order: BeginLoad) -> Incoming | None:
        if self._node is None:
            return None
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
            return None
        incoming.future.add_done_callback(self._wake)
        return incoming

    def _is_verified(self, load: _Load) -> bool:
        """Whether the request may decode from what has come. Rank 0 only."""
        if load.incoming is None or load.is_cancelled:
            return False
        error = load.incoming.future.exception()
        if isinstance(error, FarfillError):
            self._ledger.failed(load.order.spec.transfer_id, "received", error)
        return error is None

    def _install(self, order: BeginLoad, cache: ReceivedCache | None) -> bool:
        """Whether every chunk is in its blocks. `cache` is None on other ranks than the first: they are sent theirs."""
        spec, failure = order.spec, None
        plan = plan_chunks(self._model.layout, spec.prefix_tokens, spec.chunk_tokens)
        held = held_chunks(plan, order.local_tokens)
        for chunk in plan:
            if chunk.index in held:
                continue
            payload = memoryview(bytearray(chunk.payload_bytes)) if cache is None else cache.payload(chunk.index)
            self._ranks.broadcast(torch.frombuffer(payload, dtype=torch.uint8))
            try:
                if failure is None:
                    self._views.write(chunk, payload, order.blocks, order.local_tokens)
            except FarfillError as error:  # the other ranks still wait for their chunks
                failure = error
        if failure is not None:
            _log.critical("installing transfer %s failed by a bug", spec.transfer_id, exc_info=failure)
            self._ledger.failed(spec.transfer_id, "received", failure)
        return failure is None

    def _account(self, order: BeginLoad, cache: ReceivedCache) -> None:
        moved = sum(chunk.payload_bytes for chunk in cache.plan if chunk.index not in cache.held)
        self._ledger.done(
            TransferResult(
                order.spec.transfer_id,
                "received",
                "done",
                moved,
                cache.bytes_moved,
                cache.verified_at - cache.started_at,
                cache.cached_tokens,
            )
        )
        self._ledger.imported(cache.prefix_tokens - order.local_tokens)

    def _wake(self, _: "Future[ReceivedCache]") -> None:
        """In a thread of the data plane."""
        self._arrived.set()
