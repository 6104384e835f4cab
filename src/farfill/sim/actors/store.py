"""The store's simulated driver: connections, buffers with real bytes, and the real `StoreMachine`.

It decides nothing about chunks. As the real shell does, it reads a connection's frames in order, does not read on while
a put waits for its answer, and reads a chunk's buffer until the last byte is sent.
"""

import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any, assert_never

from farfill.sim.actors.driver import Driver
from farfill.sim.actors.wire import Attach, Attached, ChunkFrame, Payload, Refusal
from farfill.sim.checkers import Checkers
from farfill.sim.network import End, Network, Node
from farfill.store import events as e
from farfill.store.machine import StoreLimits, StoreMachine
from farfill.store.protocol import (
    Chunk,
    Get,
    Granted,
    Have,
    LedgerSnapshot,
    Present,
    Put,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
    Reserve,
    Stored,
    Verified,
    bitmap_of,
)
from farfill.transfer.spec import StoreAddress


@dataclass(slots=True)
class _Client:
    """One data connection.

    Attributes:
        put: whose payload comes next, until that is here. receiving: what to do with it, once known.
        skipping: it was refused; its payload is still on the wire.
        operations: not yet answered, or still being read, with what was asked.
    """

    end: End
    peer: str
    inbox: deque[Any] = field(default_factory=deque)
    put: e.OpId | None = None
    receiving: e.Receive | None = None
    skipping: bool = False
    busy_until: float = 0.0
    operations: dict[e.OpId, Any] = field(default_factory=dict)


class StoreActor:
    """One store on one node; lives through the node's crashes with nothing kept but the epochs it has granted."""

    def __init__(self, network: Network, node: Node, limits: StoreLimits, checkers: Checkers) -> None:
        self.node = node
        self._network = network
        self._limits = limits
        self._checkers = checkers
        self._dice = network.world.dice(f"store {node.name}")
        self._operation_count = 0
        self._first_epoch = 1
        self.restart()

    def restart(self) -> None:
        """A new process: nothing in memory."""
        self.buffers: dict[e.ChunkHandle, bytearray] = {}
        self.checksums: dict[e.ChunkHandle, int] = {}  # what is sent beside a chunk, if it is not the machine's own
        self._readers: dict[e.OpId, e.ChunkHandle] = {}
        self._writers: dict[e.OpId, e.ChunkHandle] = {}
        self._clients: dict[e.OpId, _Client] = {}
        self._controls: dict[e.OpId, tuple[End, Any]] = {}
        self._granted: dict[str, int] = {}  # the newest epoch of each transfer id
        machine = StoreMachine(self._limits, self._first_epoch)
        self._driver = Driver[e.StoreEvent, e.StoreEffect](
            self._network.world, self.node, self._dice, machine, e.Tick(), self._perform
        )
        self._machine = machine
        self.node.services["data"] = self._accept_data
        self.node.services["store"] = self._accept_control

    def snapshot(self) -> LedgerSnapshot:
        return self._machine.snapshot()

    @property
    def open_operations(self) -> int:
        return len(self._clients) + len(self._controls)

    def check(self) -> None:
        self._checkers.ledger(self.node.name, self.snapshot(), sum(map(len, self.buffers.values())))

    def _feed(self, event: e.StoreEvent) -> None:
        self._driver.feed(event)
        self.check()

    def _operation(self) -> e.OpId:
        self._operation_count += 1
        return e.OpId(self._operation_count)

    # --- control calls ----------------------------------------------------------------------------------------------

    def _accept_control(self, end: End) -> None:
        def asked(request: Reserve | Renew | Release) -> None:
            op, peer = self._operation(), end.peer.node.name
            self._controls[op] = (end, request)
            match request:
                case Reserve():
                    self._feed(e.ReserveAsked(op, peer, request))
                case Renew():
                    self._feed(e.RenewAsked(op, peer, request))
                case Release():
                    self._feed(e.ReleaseAsked(op, peer, request))
                case _:
                    assert_never(request)

        end.on_message = asked

    # --- data connections -------------------------------------------------------------------------------------------

    def _accept_data(self, end: End) -> None:
        client = _Client(end, "")

        def attached(message: Attach) -> None:
            client.peer = message.peer
            end.send(Attached())
            end.on_message = received
            end.on_lost = lambda: self._lose(client)

        def received(message: Any) -> None:
            client.inbox.append(message)
            self._read(client)

        end.on_message = attached

    def _read(self, client: _Client) -> None:
        """Frames in order; none behind a put whose answer is not known."""
        while client.inbox:
            if isinstance(client.inbox[0], Payload):
                if client.skipping:
                    client.inbox.popleft()
                    client.skipping = False
                elif client.receiving is not None:
                    self._receive(client, client.receiving, client.inbox.popleft())
                else:
                    return  # its put waits
            elif client.put is not None:
                return
            else:
                self._ask(client, client.inbox.popleft())

    def _ask(self, client: _Client, message: Put | Get | Have | Verified) -> None:
        op = self._operation()
        self._clients[op] = client
        client.operations[op] = message
        match message:
            case Put():
                client.put = op
                self._checkers.count("puts")
                self._feed(e.PutBegan(op, client.peer, message))
            case Get():
                self._feed(e.GetAsked(op, client.peer, message))
            case Have():
                self._feed(e.HaveAsked(op, client.peer, message))
            case Verified():
                self._feed(e.VerifiedReported(op, client.peer, message))
            case _:
                assert_never(message)

    def _receive(self, client: _Client, receive: e.Receive, payload: Payload) -> None:
        op, client.receiving, client.put = receive.op, None, None
        if receive.handle is not None:
            self._writers.pop(op)
            self.buffers[receive.handle][:] = payload.data
        self._feed(e.PutReceived(op, zlib.crc32(payload.data)))

    def _lose(self, client: _Client) -> None:
        client.inbox.clear()
        for op, message in list(client.operations.items()):
            if op not in client.operations:
                continue  # ended by the loss of another
            self._writers.pop(op, None)
            self._readers.pop(op, None)
            self._forget(op)
            if isinstance(message, Put):
                self._feed(e.PutAborted(op))
            elif isinstance(message, Get):
                self._feed(e.GetEnded(op))

    def _forget(self, op: e.OpId) -> tuple[_Client, Any]:
        """Whose operation it was, and what was asked."""
        client = self._clients.pop(op)
        return client, client.operations.pop(op)

    # --- effects ----------------------------------------------------------------------------------------------------

    def _perform(self, effect: e.StoreEffect) -> None:
        match effect:
            case e.Grant():
                self._first_epoch = max(self._first_epoch, effect.epoch + 1)
                self._granted[effect.transfer_id] = effect.epoch
                address = StoreAddress(f"{self.node.name}/{self.node.life}", "", self.node.name, 0)
                self._answer(effect.op, Granted(effect.transfer_id, effect.epoch, effect.lease_s, address))
            case e.ConfirmRenewed():
                self._answer(effect.op, Renewed(effect.transfer_id, effect.epoch, effect.lease_s))
            case e.ConfirmReleased():
                self._answer(effect.op, Released(effect.transfer_id, effect.epoch))
            case e.Receive():
                self._begin(effect)
            case e.StopWriter():
                self._checkers.count("writers stopped")
                client = self._clients[effect.op]
                client.end.close()
                self._driver.later(0.0, lambda: self._lose(client))
            case e.AnswerStored():
                client, asked = self._forget(effect.op)
                self._same_epoch(asked, effect.epoch)
                client.end.send(Stored(effect.transfer_id, effect.epoch, effect.index))
            case e.SendChunk():
                self._send_chunk(effect)
            case e.AnswerPresent():
                client, asked = self._forget(effect.op)
                self._same_epoch(asked, self._granted[effect.transfer_id])
                bitmap = bitmap_of(effect.indices)
                client.end.send(Present(effect.transfer_id, effect.epoch, bitmap, effect.verified))
            case e.AcceptVerified():
                _, asked = self._forget(effect.op)
                self._same_epoch(asked, self._granted[asked.transfer_id])
            case e.Refuse():
                self._refuse(effect)
            case e.Drop():
                self._drop(effect.handle)
            case e.DrainCompleted():
                pass
            case _:
                assert_never(effect)

    def _answer(self, op: e.OpId, answer: Granted | Renewed | Released | Refusal) -> None:
        end, asked = self._controls.pop(op)
        if isinstance(answer, Renewed | Released):
            self._same_epoch(asked, self._granted[asked.transfer_id])
        end.send(answer)

    def _same_epoch(self, asked: Any, epoch: int) -> None:
        self._checkers.require(
            asked.epoch == epoch, "epoch", f"{self.node.name}: {asked} was served, the lease's epoch is {epoch}"
        )

    def _begin(self, effect: e.Receive) -> None:
        client = self._clients[effect.op]
        client.receiving = effect
        if effect.handle is not None:
            self._same_epoch(client.operations[effect.op], self._granted[effect.handle.transfer_id])
            in_use = effect.handle in self.buffers
            self._checkers.require(not in_use, "buffers", f"{effect.handle} is filled while it is in use")
            self.buffers[effect.handle] = bytearray(effect.payload_bytes)
            self._writers[effect.op] = effect.handle
        self._driver.later(0.0, lambda: self._read(client))

    def _send_chunk(self, effect: e.SendChunk) -> None:
        client = self._clients[effect.op]
        self._same_epoch(client.operations[effect.op], effect.handle.epoch)
        self._readers[effect.op] = effect.handle
        world = self._network.world
        client.busy_until = max(world.now, client.busy_until) + effect.payload_bytes / self._network.timing.bytes_per_s

        def sent() -> None:
            if effect.op not in self._readers:
                return  # the connection went first
            del self._readers[effect.op]
            _, asked = self._forget(effect.op)
            data = bytes(self.buffers[effect.handle])
            checksum = self.checksums.get(effect.handle, effect.checksum)
            message = Chunk(asked.transfer_id, asked.epoch, asked.index, len(data), checksum)
            client.end.send(ChunkFrame(message, data), len(data))
            self._feed(e.GetEnded(effect.op))

        self._driver.later(client.busy_until - world.now, sent)

    def _refuse(self, effect: e.Refuse) -> None:
        self._checkers.count(f"refused {effect.code}")
        if effect.op in self._controls:
            self._answer(effect.op, Refusal(effect.code, effect.detail))
            return
        client, asked = self._forget(effect.op)
        if client.put == effect.op:  # its payload is still to come, or waits in the inbox
            client.put, client.skipping = None, True
            self._driver.later(0.0, lambda: self._read(client))
        index = None if isinstance(asked, Have | Verified) else asked.index
        tag = type(asked).__name__.lower()
        client.end.send(Refused(asked.transfer_id, asked.epoch, tag, index, effect.code, effect.detail))

    def _drop(self, handle: e.ChunkHandle) -> None:
        used = handle in self._readers.values() or handle in self._writers.values()
        self._checkers.require(not used, "buffers", f"{handle} is dropped while somebody uses it")
        self._checkers.require(handle in self.buffers, "buffers", f"{handle} is dropped, and is not there")
        self.buffers.pop(handle, None)
        self.checksums.pop(handle, None)
