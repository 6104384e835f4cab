"""Nodes and the connections between them, as TCP behaves: ordered inside one connection, delayed, cut.

It knows no protocol: a message is any object, with its size. What TCP cannot promise is here: messages of two
connections overtake each other; after a cut each end learns of it in its own time, and what one end thinks lost the
other may still receive; a node that is stalled says nothing and is not dead; a crashed node's peers learn later.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from farfill.sim.world import World

Accept = Callable[["End"], None]


@dataclass(frozen=True, slots=True)
class Timing:
    """How fast the network is. Latency is one way; a cut is noticed between `notice_min_s` and `notice_max_s` later."""

    latency_min_s: float = 0.002
    latency_max_s: float = 0.040
    jitter_s: float = 0.010
    bytes_per_s: float = 400_000.0
    notice_min_s: float = 0.0
    notice_max_s: float = 0.6


class Node:
    """A process: it accepts connections by service name while it is up. `life` counts its starts."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.up = True
        self.life = 1
        self.stalled_until = 0.0
        self.services: dict[str, Accept] = {}


class End:
    """One end of a connection. Its owner sets `on_message` and `on_lost` as soon as it gets it.

    `on_lost` is called at most once, and not after `close`. A closed or lost end takes `send` and forgets it, as a
    socket does whose peer has gone.
    """

    def __init__(self, connection: "Connection", node: Node) -> None:
        self.connection = connection
        self.node = node
        self.life = node.life
        self.peer: End
        self.on_message: Callable[[Any], None] | None = None
        self.on_lost: Callable[[], None] | None = None
        self.open = True  # as this end believes
        self._last_arrival = 0.0  # of what it is sent, so that order is kept

    @property
    def name(self) -> str:
        return f"{self.node.name}/{self.connection.service}#{self.connection.number}"

    @property
    def alive(self) -> bool:
        return self.open and self.node.up and self.node.life == self.life

    def send(self, message: Any, size_bytes: int = 200) -> None:
        """The message arrives at the peer later, unless the connection breaks first."""
        connection = self.connection
        if not self.alive or connection.broken:
            return
        network, world, peer = connection.network, connection.network.world, self.peer
        timing = network.timing
        delay_s = connection.latency_s + network.dice.between(0.0, timing.jitter_s) + size_bytes / timing.bytes_per_s
        arrival = max(world.now + delay_s, peer._last_arrival, self.node.stalled_until, peer.node.stalled_until)
        peer._last_arrival = arrival
        world.at(arrival, lambda: peer._deliver(message))

    def _deliver(self, message: Any) -> None:
        if self.connection.drops_in_flight:
            return
        if self.alive and self.on_message is not None:
            network = self.connection.network
            network.world.record(f"{self.name} gets {message}")
            self.on_message(network.on_the_wire(message) if network.on_the_wire is not None else message)

    def close(self) -> None:
        """The peer sees the end after what was sent before it (a FIN, in order)."""
        if not self.open:
            return
        self.open = False
        peer, connection = self.peer, self.connection
        if not connection.broken:
            connection.network.world.at(
                max(connection.network.world.now + connection.latency_s, peer._last_arrival, peer.node.stalled_until),
                peer._lose,
            )
        connection.retire()

    def _lose(self) -> None:
        if self.alive:
            self.open = False
            self.connection.retire()
            self.connection.network.world.record(f"{self.name} is lost")
            if self.on_lost is not None:
                self.on_lost()


class Connection:
    """Two ends. `broken`: cut, whatever the ends believe yet; `drops_in_flight`: and what was under way is lost."""

    def __init__(
        self, network: "Network", number: int, service: str, client: Node, server: Node, latency_s: float
    ) -> None:
        self.network = network
        self.number = number
        self.service = service
        self.latency_s = latency_s
        self.broken = False
        self.drops_in_flight = False
        self.client = End(self, client)
        self.server = End(self, server)
        self.client.peer, self.server.peer = self.server, self.client

    def retire(self) -> None:
        """Out of the list of what can be cut, once neither end uses it."""
        if not self.client.alive and not self.server.alive:
            self.network.connections.pop(self.number, None)


class Network:
    """All connections of the world. `on_the_wire` may replace a message as it arrives (how faults corrupt payloads)."""

    def __init__(self, world: World, timing: Timing) -> None:
        self.world = world
        self.timing = timing
        self.dice = world.dice("network")
        self.connections: dict[int, Connection] = {}
        self.on_the_wire: Callable[[Any], Any] | None = None
        self._count = 0

    def connect(self, client: Node, server: Node, service: str) -> End:
        """A connection being opened; the client may send at once. Refused (lost) later if nobody listens."""
        self._count += 1
        latency_s = self.dice.between(self.timing.latency_min_s, self.timing.latency_max_s)
        connection = Connection(self, self._count, service, client, server, latency_s)
        self.connections[connection.number] = connection
        arrival = max(self.world.now + 2 * latency_s, client.stalled_until, server.stalled_until)
        connection.server._last_arrival = arrival
        self.world.at(arrival, lambda: self._arrive(connection))
        return connection.client

    def _arrive(self, connection: Connection) -> None:
        server = connection.server
        accept = server.node.services.get(connection.service)
        if connection.broken:
            return
        if not server.node.up or accept is None:
            connection.broken = True
            server.open = False
            self.world.after(connection.latency_s, connection.client._lose)
            return
        server.life = server.node.life  # it may have restarted since the connection was asked for
        accept(server)

    def cut(self, connection: Connection, notice: tuple[float, float], drops_in_flight: bool) -> None:
        """Breaks it: nothing sent from now on arrives; client and server notice after so many seconds each."""
        connection.broken = True
        connection.drops_in_flight = drops_in_flight
        for end, notice_s in ((connection.client, notice[0]), (connection.server, notice[1])):
            self.world.after(notice_s, end._lose)

    def crash(self, node: Node) -> None:
        """The process is killed: its ends are gone, its peers learn by a reset in their own time."""
        node.up = False
        for connection in list(self.connections.values()):
            ends = (connection.client, connection.server)
            if node in (ends[0].node, ends[1].node):
                connection.broken = True
                for end in ends:
                    if end.node is node:
                        end.open = False
                    else:
                        self.world.after(
                            self.dice.between(self.timing.notice_min_s, self.timing.notice_max_s), end._lose
                        )
                connection.retire()

    def restart(self, node: Node) -> None:
        node.life += 1
        node.up = True
