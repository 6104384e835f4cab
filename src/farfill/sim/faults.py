"""Carrying out a scenario's faults in the world, up to the moment of healing.

Not here: which faults there are and when (`scenario`), what they must not do (`checkers`).
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, assert_never

from farfill.sim.actors.store import StoreActor
from farfill.sim.actors.wire import ChunkFrame, Payload
from farfill.sim.checkers import Checkers
from farfill.sim.network import Network, Node
from farfill.sim.scenario import HEALED_S, Fault, FaultKind


class Saboteur:
    """Does what the scenario says, to whom its picks point.

    Args:
        stores: by node name. restart: starts a node's process again. crash_gateway: kills the gateway for good.
    """

    def __init__(
        self,
        network: Network,
        nodes: Mapping[str, Node],
        stores: Mapping[str, StoreActor],
        restart: Callable[[Node], None],
        crash_gateway: Callable[[], None],
        checkers: Checkers,
    ) -> None:
        self._network = network
        self._nodes = nodes
        self._stores = stores
        self._restart = restart
        self._crash_gateway = crash_gateway
        self._checkers = checkers
        self._to_damage = 0
        network.on_the_wire = self._on_the_wire

    def schedule(self, faults: tuple[Fault, ...]) -> None:
        for fault in faults:
            self._network.world.at(fault.at_s, lambda fault=fault: self._do(fault))  # type: ignore[misc]
        self._network.world.at(HEALED_S, self._heal)

    def _do(self, fault: Fault) -> None:
        world = self._network.world
        world.record(f"fault {fault}")
        match fault.kind:
            case FaultKind.CUT:
                self._cut(fault)
            case FaultKind.STALL:
                node = _picked(list(self._nodes.values()), fault.pick)
                node.stalled_until = max(node.stalled_until, min(world.now + fault.last_s, HEALED_S))
                self._checkers.count("stalls")
            case FaultKind.CRASH:
                node = _picked([n for n in self._nodes.values() if n.name != "gateway"], fault.pick)
                if node.up:
                    self._checkers.count("crashes")
                    self._network.crash(node)
                    world.at(min(world.now + fault.last_s, HEALED_S), lambda: self._restart(node))
            case FaultKind.GATEWAY_CRASH:
                self._checkers.count("gateway crashes")
                self._crash_gateway()
            case FaultKind.DAMAGE:
                self._to_damage += 1
            case FaultKind.TAMPER | FaultKind.ROT:
                self._alter(fault)
            case _:
                assert_never(fault.kind)

    def _heal(self) -> None:
        self._to_damage = 0
        self._network.world.record("healed")

    def _cut(self, fault: Fault) -> None:
        """Mostly a data connection, for that is where it hurts."""
        candidates = [c for c in self._network.connections.values() if not c.broken]
        data = [c for c in candidates if c.service == "data"]
        if fault.pick < 0.75 and data:
            connection = _picked(data, fault.pick / 0.75)
        elif candidates:
            connection = _picked(candidates, fault.pick)
        else:
            return
        self._checkers.count(f"cuts {connection.service}")
        self._network.cut(connection, fault.notice_s, fault.drops_in_flight)

    def _alter(self, fault: Fault) -> None:
        held = [(store, handle) for store in self._stores.values() for handle in store.buffers]
        if not held:
            return
        store, handle = _picked(held, fault.pick)
        data = store.buffers[handle]
        data[int(fault.pick * 7919) % len(data)] ^= 1 << int(fault.last_s * 1000) % 8
        if fault.kind is FaultKind.TAMPER:
            store.checksums[handle] = zlib.crc32(data)
        self._checkers.count(f"{fault.kind.value}s")

    def _on_the_wire(self, message: Any) -> Any:
        if self._to_damage == 0 or not isinstance(message, Payload | ChunkFrame):
            return message
        self._to_damage -= 1
        self._checkers.count("payloads damaged")
        data = bytearray(message.data)
        data[len(data) // 2] ^= 0x40
        return replace(message, data=bytes(data))


def _picked(options: list[Any], pick: float) -> Any:
    return options[int(pick * len(options))]
