"""A store in this process's memory: the machine, the buffers under its handles, and its timer.

Not here: connections. Whoever has an operation (a data connection, a local transfer, a control call) is told of its
effects by callback; callbacks must not block.
"""

import itertools
import logging
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from farfill.errors import LocalProtocolError
from farfill.store.events import (
    AcceptVerified,
    AnswerPresent,
    AnswerStored,
    ChunkHandle,
    ConfirmReleased,
    ConfirmRenewed,
    DrainBegan,
    DrainCompleted,
    Drop,
    GetEnded,
    Grant,
    OpId,
    PutAborted,
    PutReceived,
    Receive,
    Refuse,
    SendChunk,
    StopWriter,
    StoreEffect,
    StoreEvent,
    Tick,
)
from farfill.store.machine import StoreLimits, StoreMachine
from farfill.store.protocol import LedgerSnapshot
from farfill.store.shelf import BufferShelf, ChunkBuffers
from farfill.transfer.mailbox import Mailbox
from farfill.transfer.timer import DeadlineTimer

_log = logging.getLogger(__name__)

OpEffect = (
    Grant
    | ConfirmRenewed
    | ConfirmReleased
    | Receive
    | StopWriter
    | AnswerStored
    | SendChunk
    | AnswerPresent
    | AcceptVerified
    | Refuse
)
# Told each effect of an operation; with SendChunk comes the buffer to send, valid until GetEnded is posted.
OnEffect = Callable[[OpEffect, memoryview | None], None]
_STILL_GOING: Final = (Receive, StopWriter, SendChunk)


def new_first_epoch() -> int:
    """Above every epoch of an earlier life: milliseconds since 1970, with room for 2,048 grants in each of them.

    Under 2**53, so that JSON carries it everywhere.
    """
    return time.time_ns() // 1_000_000 << 11


@dataclass(frozen=True, slots=True)
class _Filled:
    """A PutReceived with the buffer that it filled."""

    event: PutReceived
    handle: ChunkHandle | None
    buffer: memoryview | None
    is_from_shelf: bool


@dataclass(frozen=True, slots=True)
class _Watch:
    """Asks for the ledger as soon as `holds` is true of it."""

    holds: Callable[[LedgerSnapshot], bool]
    answer: "Future[LedgerSnapshot]"


class MemoryStore:
    """See the module. Every method may be called from any thread.

    Args:
        limits: the machine's bounds.
        first_epoch: see `StoreMachine`; by default from the clock.
    """

    def __init__(self, limits: StoreLimits, first_epoch: int | None = None) -> None:
        self.instance = uuid.uuid4().hex
        self.limits = limits
        self._machine = StoreMachine(limits, new_first_epoch() if first_epoch is None else first_epoch)
        self._mailbox: Mailbox[StoreEvent | _Filled | _Watch] = Mailbox(self._handle, self._on_bug)
        self._timer = DeadlineTimer("farfill-store-timer")
        self._ids = itertools.count(1)
        self._owners: dict[OpId, OnEffect] = {}
        self._buffers = ChunkBuffers()
        self._watches: list[_Watch] = []
        self._drained: Future[None] = Future()
        self._bug: Exception | None = None

    @property
    def shelf(self) -> BufferShelf:
        """Where to take a buffer to receive into."""
        return self._buffers.shelf

    def begin(self, on_effect: OnEffect) -> OpId:
        """Numbers an operation; post the event that opens it next."""
        if self._bug is not None:
            raise LocalProtocolError(f"the store has stopped after a bug: {self._bug!r}")
        op = OpId(next(self._ids))
        self._owners[op] = on_effect
        return op

    def post(self, event: StoreEvent) -> None:
        self._mailbox.post(event)

    def post_received(
        self,
        op: OpId,
        checksum: int,
        handle: ChunkHandle | None,
        buffer: memoryview | None,
        *,
        is_from_shelf: bool = False,
    ) -> None:
        """PutReceived, with the buffer that now belongs to the store (None with a handle of None).

        `is_from_shelf`: nobody else keeps it, so that it may be used again.
        """
        self._mailbox.post(_Filled(PutReceived(op, checksum), handle, buffer, is_from_shelf))

    def ledger(self) -> LedgerSnapshot:
        """The ledger now. Not to be called from a callback."""
        return self.when(lambda _: True).result()

    def when(self, holds: Callable[[LedgerSnapshot], bool]) -> "Future[LedgerSnapshot]":
        """The first ledger, from now on, of which `holds` is true."""
        answer: Future[LedgerSnapshot] = Future()
        self._mailbox.post(_Watch(holds, answer))
        if self._bug is not None and not answer.done():
            answer.set_exception(LocalProtocolError(f"the store has stopped after a bug: {self._bug!r}"))
        return answer

    @property
    def is_draining(self) -> bool:
        return self._machine.is_draining

    def drain(self) -> "Future[None]":
        """Grants nothing more; done when no lease is live."""
        self.post(DrainBegan())
        return self._drained

    def close(self) -> None:
        """Stops the timer. Connections have been closed before."""
        self._timer.stop()

    # ---- in the mailbox

    def _handle(self, posted: StoreEvent | _Filled | _Watch) -> None:
        if isinstance(posted, _Watch):
            self._watches.append(posted)
        else:
            event = posted.event if isinstance(posted, _Filled) else posted
            if isinstance(posted, _Filled) and posted.handle is not None:
                assert posted.buffer is not None
                self._buffers.keep(posted.handle, posted.buffer, is_from_shelf=posted.is_from_shelf)
            for effect in self._machine.handle(event, time.monotonic()):
                self._carry_out(effect)
            if isinstance(event, PutAborted | GetEnded):
                self._owners.pop(event.op, None)
            self._timer.set(self, self._machine.deadline, self._tick)
        self._look()

    def _tick(self) -> None:
        self.post(Tick())

    def _look(self) -> None:
        if not self._watches:
            return
        snapshot = self._machine.snapshot()
        pending, self._watches = self._watches, []
        for watch in pending:
            if watch.holds(snapshot):
                watch.answer.set_result(snapshot)
            else:
                self._watches.append(watch)

    def _carry_out(self, effect: StoreEffect) -> None:
        if isinstance(effect, Drop):
            self._buffers.drop(effect.handle, self._machine.free_bytes)
            return
        if isinstance(effect, DrainCompleted):
            self._drained.set_result(None)
            return
        if isinstance(effect, Grant):
            self.shelf.trim(self._machine.free_bytes)
        on_effect = self._owners[effect.op] if isinstance(effect, _STILL_GOING) else self._owners.pop(effect.op)
        on_effect(effect, self._buffers[effect.handle] if isinstance(effect, SendChunk) else None)

    def _on_bug(self, bug: Exception) -> None:
        """What the machine knows can no longer be trusted: everybody who waits is told, and nothing is served."""
        self._bug = bug
        _log.critical("the store has stopped after a bug", exc_info=bug)
        owners, self._owners = self._owners, {}
        for op, on_effect in owners.items():
            on_effect(Refuse(op, "internal_error", f"the store has stopped after a bug: {bug!r}"), None)
        for watch in self._watches:
            watch.answer.set_exception(bug)
        if not self._drained.done():
            self._drained.set_exception(bug)
