"""A store's own process using it: the same machine, the same checks and the same answers, without a wire.

Not here: threads and connections; `transfer.connections` makes a connection of it.
"""

from collections.abc import Callable
from functools import partial
from typing import assert_never

from farfill.store.answers import answer_to
from farfill.store.events import (
    GetAsked,
    GetEnded,
    HaveAsked,
    PutBegan,
    Receive,
    SendChunk,
    StopWriter,
    VerifiedReported,
)
from farfill.store.memory import MemoryStore, OpEffect
from farfill.store.protocol import Chunk, ClientMessage, Get, Have, Put, ServerMessage, Verified

# Told each answer; with a Chunk come its sealed bytes and what to call when they are no longer read. Must not block.
OnAnswer = Callable[[ServerMessage, memoryview | None, Callable[[], None] | None], None]


class LocalStore:
    """Access as `identity`.

    A sealed chunk that is put is kept, not copied; a chunk that is got is lent, not copied.
    """

    def __init__(self, memory: MemoryStore, identity: str) -> None:
        self._memory = memory
        self._identity = identity

    @property
    def instance(self) -> str:
        return self._memory.instance

    def ask(self, message: ClientMessage, sealed: memoryview | None, on_answer: OnAnswer) -> None:
        """One request; answers come through `on_answer`, in whichever thread.

        Args:
            sealed: a Put's payload; it must not change afterwards.
        """
        memory, identity = self._memory, self._identity
        op = memory.begin(partial(self._answer, message, sealed, on_answer))
        match message:
            case Put():
                memory.post(PutBegan(op, identity, message))
            case Get():
                memory.post(GetAsked(op, identity, message))
            case Have():
                memory.post(HaveAsked(op, identity, message))
            case Verified():
                memory.post(VerifiedReported(op, identity, message))
            case _:
                assert_never(message)

    def _answer(
        self,
        message: ClientMessage,
        sealed: memoryview | None,
        on_answer: OnAnswer,
        effect: OpEffect,
        buffer: memoryview | None,
    ) -> None:
        if isinstance(effect, Receive):
            assert isinstance(message, Put)
            assert sealed is not None
            kept = sealed if effect.handle is not None else None
            # No wire, no damage on the way: the checksum that the sender computed is the one of what is here.
            self._memory.post_received(effect.op, message.checksum, effect.handle, kept)
            return
        if isinstance(effect, StopWriter):
            return  # the whole payload is here already: PutReceived is on its way
        answer = answer_to(message, effect)  # type: ignore[arg-type]
        if isinstance(effect, SendChunk):
            assert isinstance(answer, Chunk)
            on_answer(answer, buffer, partial(self._memory.post, GetEnded(effect.op)))
        elif answer is not None:
            on_answer(answer, None, None)
