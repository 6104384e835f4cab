"""What every simulated driver does: feed one machine, arm its deadline, carry its effects out; and hold connections.

Not here: which effects there are (each actor), what a machine decides.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from farfill.machine import Machine
from farfill.sim.actors.wire import Attach, Attached
from farfill.sim.network import End, Network, Node
from farfill.sim.world import Alarm, Dice, World
from farfill.transfer.events import (
    CloseConnection,
    ConnectionId,
    ConnectionLost,
    ConnectionOpened,
    ConnectionRefused,
    OpenConnection,
)

EventT = TypeVar("EventT")
EffectT = TypeVar("EffectT")

TICK_LATE_CHANCE: Final = 0.2
MAILBOX_WAIT_CHANCE: Final = 0.15
MAILBOX_WAIT_MAX_S: Final = 0.06  # another thread has the mailbox
TICK_LATE_MAX_S: Final = 0.03  # an event loop wakes late, never early


class Driver(Generic[EventT, EffectT]):
    """One machine in one life of one node. After `stop`, or when the node has crashed, it does nothing any more."""

    def __init__(
        self,
        world: World,
        node: Node,
        dice: Dice,
        machine: Machine[EventT, EffectT],
        tick: EventT,
        perform: Callable[[EffectT], None],
    ) -> None:
        self.machine = machine
        self._world = world
        self._node = node
        self._life = node.life
        self._dice = dice
        self._tick = tick
        self._perform = perform
        self._alarm: Alarm | None = None
        self._armed_for: float | None = None
        self._stopped = False

    @property
    def alive(self) -> bool:
        return not self._stopped and self._node.up and self._node.life == self._life

    def feed(self, event: EventT) -> None:
        if not self.alive:
            return
        effects = self.machine.handle(event, self._world.now)
        self._arm()
        for effect in effects:
            self._perform(effect)

    def later(self, delay_s: float, action: Callable[[], None]) -> Alarm:
        """`action`, unless the driver has stopped by then."""
        return self._world.after(delay_s, lambda: action() if self.alive else None)

    def stop(self) -> None:
        self._stopped = True
        if self._alarm is not None:
            self._alarm.cancel()

    def _arm(self) -> None:
        deadline = self.machine.deadline
        if deadline == self._armed_for:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._armed_for, self._alarm = deadline, None
        if deadline is not None:
            late_s = self._dice.between(0.0, TICK_LATE_MAX_S) if self._dice.chance(TICK_LATE_CHANCE) else 0.0
            self._alarm = self._world.at(deadline + late_s, self._wake)

    def _wake(self) -> None:
        self._alarm, self._armed_for = None, None
        self.feed(self._tick)


class StoreLink:
    """The data connections of one sender or receiver to its store.

    As in the real shell, what happens on them goes through one mailbox, in order, and now and then waits there: so a
    machine may still be told what came over a connection that it has closed since, and may use one that is broken.
    """

    def __init__(
        self,
        network: Network,
        node: Node,
        store: Node,
        dice: Dice,
        feed: Callable[[Any], None],
        on_message: Callable[[ConnectionId, Any], None],
    ) -> None:
        self._network = network
        self._node = node
        self._store = store
        self._dice = dice
        self._feed = feed
        self._on_message = on_message
        self._count = 0
        self._opening: list[End] = []
        self._ends: dict[ConnectionId, End] = {}
        self._mailbox: deque[Callable[[], None]] = deque()

    def open(self, effect: OpenConnection) -> None:
        end = self._network.connect(self._node, self._store, "data")
        self._opening.append(end)

        def answered(message: Any) -> None:
            assert isinstance(message, Attached), message
            self._opening.remove(end)
            self._count += 1
            connection = ConnectionId(self._count)
            self._ends[connection] = end
            lost = ConnectionLost(connection, "connection_lost", f"the connection to {self._store.name} broke")
            end.on_message = lambda later: self._post(lambda: self._on_message(connection, later))
            end.on_lost = lambda: self._post(lambda: self._feed(lost))
            self._post(lambda: self._feed(ConnectionOpened(effect.slot, connection)))

        def refused() -> None:
            self._opening.remove(end)
            failed = ConnectionRefused(effect.slot, "peer_unreachable", f"{self._store.name} does not answer")
            self._post(lambda: self._feed(failed))

        end.on_message, end.on_lost = answered, refused
        end.send(Attach(self._node.name))

    def close(self, effect: CloseConnection) -> None:
        """The machine has forgotten it; whoever reads it notices the end like any other."""
        end = self._ends[effect.connection]
        assert end.open or self._mailbox, f"{effect} of a connection whose end was told"
        end.close()
        gone = ConnectionLost(effect.connection, effect.code, "closed on this side")
        self._post(lambda: self._feed(gone))

    def send(self, connection: ConnectionId, message: Any, size_bytes: int = 200) -> None:
        self._ends[connection].send(message, size_bytes)

    def close_all(self) -> None:
        for end in (*self._opening, *self._ends.values()):
            end.close()

    def _post(self, action: Callable[[], None]) -> None:
        if not self._mailbox and not self._dice.chance(MAILBOX_WAIT_CHANCE):
            action()
            return
        self._mailbox.append(action)
        if len(self._mailbox) == 1:
            self._network.world.after(self._dice.between(0.0, MAILBOX_WAIT_MAX_S), self._empty)

    def _empty(self) -> None:
        waiting = list(self._mailbox)
        for action in waiting:
            action()
            self._mailbox.popleft()
        if self._mailbox:  # posted meanwhile, by the actions themselves
            self._network.world.after(0.0, self._empty)
