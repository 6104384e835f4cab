"""Prefill legs in vLLM's worker: each chunk is copied out in the step that completes it, and published at once.

Not here: which requests those are (`scheduler_side`), how a chunk travels (`farfill.transfer`).

A chunk is copied before the step ends, so vLLM may reuse its blocks right after: they are never held for a peer.
"""

import logging
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from farfill.engines.vllm.identity import ServedModel
from farfill.engines.vllm.kv_views import CacheViews
from farfill.engines.vllm.ledger import Ledger
from farfill.engines.vllm.results import TransferResult
from farfill.engines.vllm.step import BeginSend, BlockTable, SaveRows
from farfill.errors import FarfillError, OperationError, PeerError
from farfill.kv.plan import plan_chunks
from farfill.kv.spec import WIRE_VERSION, ChunkSpec
from farfill.transfer.node import TransferNode
from farfill.transfer.outgoing import Outgoing, SendReport
from farfill.transfer.spec import TransferSpec

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Send:
    """`plan[:published]` has been published; the plan's order is that in which its chunks become complete."""

    spec: TransferSpec
    outgoing: Outgoing
    plan: tuple[ChunkSpec, ...]
    cached_tokens: int
    published: int = 0
    is_finished: bool = False


class Sends:
    """Called on vLLM's worker thread only, but for the ends of transfers."""

    def __init__(
        self, node: TransferNode, model: ServedModel, views: CacheViews, instance: str, ledger: Ledger
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
        self._ledger.began(spec.transfer_id, "sent")
        try:
            check_addressee(spec, spec.producer, self._instance, "producer")
            plan = plan_chunks(self._model.layout, spec.prefix_tokens, spec.chunk_tokens)
            outgoing = self._node.send(spec, self._model.layout, self._model.fingerprint, order.token_ids)
        except FarfillError as error:
            self._ledger.failed(spec.transfer_id, "sent", error)
            return
        self._sends[order.request_id] = _Send(spec, outgoing, plan, order.cached_tokens)
        kv_bytes = sum(chunk.payload_bytes for chunk in plan)
        outgoing.future.add_done_callback(partial(self._ended, spec.transfer_id, kv_bytes, order.cached_tokens))

    def save(self, order: SaveRows) -> None:
        """Publishes what this step has completed."""
        send = self._sends.get(order.request_id)
        if send is None:
            return
        try:
            self._publish(send, order.computed_tokens, order.blocks)
        except FarfillError as error:  # it ends this transfer, not the engine
            self._ledger.failed(send.spec.transfer_id, "sent", error)
            send.outgoing.cancel(error.message)
            send.is_finished = True
        if send.is_finished:
            del self._sends[order.request_id]

    def end(self, request_id: str) -> None:
        """vLLM has ended the request before its prefix was computed."""
        send = self._sends.pop(request_id, None)
        if send is not None:
            send.outgoing.cancel("the prefill request was aborted")

    def _publish(self, send: _Send, computed_tokens: int, blocks: BlockTable) -> None:
        prefix_tokens = send.spec.prefix_tokens
        while send.published < len(send.plan):
            chunk = send.plan[send.published]
            if chunk.token_stop > computed_tokens:
                return
            if chunk.is_state and computed_tokens != prefix_tokens:
                raise PeerError(
                    "prompt_mismatch", f"the state is that after {computed_tokens} tokens, not {prefix_tokens}"
                )
            send.outgoing.publish(chunk, self._views.read(chunk, blocks))
            send.published += 1
        send.outgoing.finish(send.cached_tokens)
        send.is_finished = True
        self._ledger.computed(computed_tokens=prefix_tokens - send.cached_tokens, cached_tokens=send.cached_tokens)

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
