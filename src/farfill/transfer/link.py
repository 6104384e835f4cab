"""What transfers and their connections are to each other: protocols, and the few rules both kinds of link share.

A *link* leads to one store, over TCP (`connections`) or within the process (`lanes`), and is shared by all transfers
with that store.
"""

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from farfill.store.protocol import Chunk, ClientMessage, Present, Refused, Stored
from farfill.transfer.events import ConnectionId

_log = logging.getLogger(__name__)
_ids: Final = itertools.count(1)

# Makes a request when its turn has come, in the connection's writing thread (and seals its payload then). None: not any
# more.
Prepare = Callable[[], tuple[ClientMessage, memoryview | None] | None]


class Connection(Protocol):
    """One life of one slot."""

    @property
    def id(self) -> ConnectionId:
        """Unique in the process."""

    def ask(self, end: "TransferEnd", prepare: Prepare) -> None:
        """Queues a request. Never blocks; on a connection that has ended it does nothing."""

    def close(self, code: str, detail: str) -> None:
        """Ends it; every attached transfer is told that it is lost."""


class TransferEnd(Protocol):
    """A sender or a receiver, as its link sees it. None of these blocks; `take_chunk` computes."""

    @property
    def key(self) -> tuple[str, int, bool]:
        """(transfer id, epoch, whether it sends)."""

    def connection_opened(self, slot: int, connection: Connection) -> None: ...

    def connection_refused(self, slot: int, code: str, detail: str) -> None: ...

    def connection_lost(self, connection: Connection, code: str, detail: str) -> None: ...

    def answered(self, connection: Connection, message: Stored | Present | Refused) -> None: ...

    def is_expected(self, connection: Connection, message: Chunk) -> bool:
        """Whether this chunk was asked for on this connection, or the transfer is over and it does not matter."""

    def take_chunk(self, connection: Connection, message: Chunk, sealed: memoryview) -> None:
        """Opens a chunk. `sealed` is valid during the call only."""

    def failed(self, bug: Exception) -> None:
        """An exception that nobody expected: the transfer ends with `internal_error`."""


class Link(Protocol):
    """See the module. Slots are numbered from 0; how many there are is the transfer's LinkSettings' matter."""

    def attach(self, end: TransferEnd) -> None: ...

    def detach(self, end: TransferEnd) -> None: ...

    def open(self, slot: int, end: TransferEnd) -> None:
        """Answered by `connection_opened` or `connection_refused`, at once where the slot is open already."""

    def close(self) -> None:
        """Ends every connection and thread; transfers must have ended."""


def next_connection_id() -> ConnectionId:
    return ConnectionId(next(_ids))


@contextlib.contextmanager
def guarding(end: TransferEnd) -> Iterator[None]:
    """A bug in one transfer's step ends that transfer, loudly, and not the thread that other transfers use too."""
    try:
        yield
    except Exception as bug:  # noqa: BLE001 - see the docstring
        _log.critical("a transfer failed by a bug", exc_info=bug)
        end.failed(bug)


def key_of_refused(message: Refused) -> tuple[str, int, bool]:
    """Which end a refusal is for."""
    return message.transfer_id, message.epoch, message.request in ("put", "have")
