"""Prefill legs in vLLM's worker: each chunk is copied out in the step that completes it, and published at once.

Not here: which requests those are (`scheduler_side`), how a chunk travels (`farfill.transfer`).

A chunk is copied before the step ends, so vLLM may reuse its blocks right after: they are never held for a peer.

Where there are several ranks, each of them reads its heads of each chunk and rank 0 publishes: so all of them go
through the plan to its end, also where rank 0's transfer has failed meanwhile, which the others do not know.
"""

import logging
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from farfill.engines.vllm.identity import ServedModel
from farfill.engines.vllm.kv_views import CacheViews
from farfill.engines.vllm.ledger import Ledger
from farfill.engines.vllm.results import TransferResult
from farfill.engines.vllm.step import BeginSend, SaveRows
from farfill.errors import FarfillError, OperationError, PeerError
from farfill.kv.plan import plan_chunks
from farfill.kv.spec import WIRE_VERSION, ChunkSpec
from farfill.transfer.node import TransferNode
from farfill.transfer.outgoing import Outgoing, SendReport
from farfill.transfer.spec import TransferSpec

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Send:
    """`plan[:read]` has been read; the plan's order is that in which its chunks become complete.

    `outgoing` is None where there is nothing to publish to: on other ranks than the first, and after a failure.
    """

    spec: TransferSpec
    outgoing: Outgoing | None
    plan: tuple[ChunkSpec, ...]
    cached_tokens: int
    read: int = 0


class Sends:
    """Called on vLLM's worker thread only, but for the ends of transfers."""

    def __init__(
        self, node: TransferNode | None, model: ServedModel, views: CacheViews, instance: str, ledger: Ledger
    ) -> None:
        self._node = node
        self._model = model
        self._views = views
        self._instance = instance
        self._ledger = ledger
        self._sends: dict[str, _Send] = {}

    def begin(self, order: BeginSend) -> None:
        """Starts the transfer; its manifest goes out before anything is computed."""
        spec = order.spec
        try:
            plan = plan_chunks(self._model.layout, spec.prefix_tokens, spec.chunk_tokens)
        except FarfillError as error:
            self._ledger.failed(spec.transfer_id, "sent", error)
            return
        outgoing = self._open(order, plan)
        self._sends[order.request_id] = _Send(spec, outgoing, plan, order.cached_tokens)

    def save(self, order: SaveRows) -> None:
        """Publishes what this step has completed."""
        send = self._sends.get(order.request_id)
        if send is None:
            return
        while send.read < len(send.plan) and send.plan[send.read].token_stop <= order.computed_tokens:
            chunk = send.plan[send.read]
            send.read += 1
            try:
                self._publish(send, chunk, order)
            except FarfillError as error:  # it ends this transfer, not the engine
                self._give_up(send, error)
        if send.read == len(send.plan):
            del self._sends[order.request_id]
            self._finish(send)

    def end(self, request_id: str) -> None:
        """vLLM has ended the request before its prefix was computed."""
        send = self._sends.pop(request_id, None)
        if send is not None and send.outgoing is not None:
            send.outgoing.cancel("the prefill request was aborted")

    def _open(self, order: BeginSend, plan: tuple[ChunkSpec, ...]) -> Outgoing | None:
        if self._node is None:
            return None
        spec = order.spec
        self._ledger.began(spec.transfer_id, "sent")
        try:
            check_addressee(spec, spec.producer, self._instance, "producer")
            outgoing = self._node.send(spec, self._model.layout, self._model.fingerprint, order.token_ids)
        except FarfillError as error:
            self._ledger.failed(spec.transfer_id, "sent", error)
            return None
        kv_bytes = sum(chunk.payload_bytes for chunk in plan)
        outgoing.future.add_done_callback(partial(self._ended, spec.transfer_id, kv_bytes, order.cached_tokens))
        return outgoing

    def _publish(self, send: _Send, chunk: ChunkSpec, order: SaveRows) -> None:
        if chunk.is_state and order.computed_tokens != send.spec.prefix_tokens:
            raise PeerError(
                "prompt_mismatch",
                f"the state is that after {order.computed_tokens} tokens, not {send.spec.prefix_tokens}",
            )
        payload = self._views.read(chunk, order.blocks)
        if send.outgoing is not None and payload is not None:
            send.outgoing.publish(chunk, payload)

    def _finish(self, send: _Send) -> None:
        if send.outgoing is None:
            return
        try:
            send.outgoing.finish(send.cached_tokens)
        except FarfillError as error:
            self._give_up(send, error)
            return
        computed = send.spec.prefix_tokens - send.cached_tokens
        self._ledger.computed(computed_tokens=computed, cached_tokens=send.cached_tokens)

    def _give_up(self, send: _Send, error: FarfillError) -> None:
        if send.outgoing is not None:
            self._ledger.failed(send.spec.transfer_id, "sent", error)
            send.outgoing.cancel(error.message)
            send.outgoing = None

    def _ended(self, transfer_id: str, kv_bytes: int, cached_tokens: int, future: "Future[SendReport]") -> None:
        """In a thread of the data plane."""
        error = future.exception()
        if error is None:
            report = future.result()
            self._ledger.done(
                TransferResult(
                    transfer_id, "sent", "done", kv_bytes, report.sent_bytes, report.elapsed_s, cached_tokens
                )
            )
        elif isinstance(error, FarfillError):
            self._ledger.failed(transfer_id, "sent", error)
        else:
            _log.critical("sending transfer %s failed by a bug", transfer_id, exc_info=error)


def check_addressee(spec: TransferSpec, named: str, instance: str, part: str) -> None:
    """What can be seen to be wrong before a byte moves.

    Raises:
        PeerError: `wire_version_unsupported`. OperationError: `stale_epoch`, where the transfer is for another life
            of this worker.
    """
    if spec.wire_version != WIRE_VERSION:
        raise PeerError(
            "wire_version_unsupported", f"the transfer has wire version {spec.wire_version}, this side {WIRE_VERSION}"
        )
    if named != instance:
        raise OperationError(
            "stale_epoch",
            f"the transfer's {part} is instance {named[:100]}; this is {instance}: was it restarted?",
            field=f"kv_transfer_params.farfill.{part}",
        )
