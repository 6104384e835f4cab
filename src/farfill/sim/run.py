"""One seed, from its scenario to its report: `simulate`.

Not a test by itself: what must hold is in `checkers`, which seeds are run is the tests' matter.
"""

import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from farfill.kv.fingerprint import Convertible, Fingerprint, Informational, MustEqual
from farfill.kv.layout import layout_digest
from farfill.router.budget import FallbackBudget
from farfill.sim.actors.decode import DecodeActor
from farfill.sim.actors.gateway import Arrival, GatewayActor
from farfill.sim.actors.prefill import PrefillActor
from farfill.sim.actors.store import StoreActor
from farfill.sim.checkers import Checkers, RequestRecord, Violation
from farfill.sim.engine import LAYOUT
from farfill.sim.faults import Saboteur
from farfill.sim.network import Network, Node
from farfill.sim.scenario import AFTER_HEALING_S, END_S, Scenario, draw_scenario
from farfill.sim.world import World
from farfill.store.machine import StoreLimits


@dataclass(frozen=True, slots=True)
class Report:
    """What came of one seed.

    Attributes:
        digest: of every line of the trace; the same for the same seed, in every process.
        violations: empty if every rule held. An exception that escapes from a machine or a driver is one too.
        statistics: how often what happened.
        trace: the last lines, for reading.
    """

    seed: int
    digest: str
    violations: tuple[Violation, ...]
    statistics: Counter[str]
    events: int
    trace: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {len(self.violations)} violations, {self.events} events, digest {self.digest}"]
        return "\n".join([*lines, *(f"  {violation}" for violation in self.violations[:10])])


def fingerprint(weights: int) -> Fingerprint:
    """Of the simulated model, with the right weights (0) or others."""
    return Fingerprint(
        MustEqual(
            f"weights-{weights}", "tokenizer", "template", "simulated", "{}", layout_digest(LAYOUT), "f32", "f16"
        ),
        Convertible(max_model_len=4096),
        Informational("simulated", "1"),
    )


class Cluster:
    """The scenario's processes, wired up."""

    def __init__(self, world: World, scenario: Scenario, checkers: Checkers) -> None:
        self.network = Network(world, scenario.timing)
        names = ("gateway", *scenario.prefill, *scenario.decode, "relay")
        self.nodes = {name: Node(name) for name in names}
        limits = StoreLimits(scenario.store_bytes, remember_s=10.0)
        self.stores = {
            name: StoreActor(self.network, node, limits, checkers)
            for name, node in self.nodes.items()
            if name != "gateway"
        }
        self.prefill = {
            name: PrefillActor(
                self.network,
                self.nodes[name],
                self.nodes,
                scenario.prefill_speed,
                scenario.sender,
                fingerprint(int(name in scenario.wrong_weights)),
                int(name in scenario.wrong_weights),
                checkers,
            )
            for name in scenario.prefill
        }
        self.decode = {
            name: DecodeActor(
                self.network,
                self.nodes[name],
                self.nodes,
                scenario.decode_speed,
                scenario.receiver,
                fingerprint(0),
                scenario.gateway.chunk_tokens,
                checkers,
            )
            for name in scenario.decode
        }
        self.gateway = GatewayActor(
            self.network,
            self.nodes["gateway"],
            self.nodes,
            scenario.decode,
            scenario.prefill,
            scenario.gateway,
            FallbackBudget(*scenario.budget),
            checkers,
        )

    def restart(self, node: Node) -> None:
        self.network.restart(node)
        for actors in (self.stores, self.prefill, self.decode):
            if node.name in actors:
                actors[node.name].restart()

    def crash_gateway(self) -> None:
        if self.gateway.node.up:
            self.gateway.crash()
            self.network.crash(self.gateway.node)


def simulate(seed: int, scenario: Scenario | None = None) -> Report:
    """Runs one seed to its end: faults, healing, and the clocks of all that was left. Deterministic.

    Args:
        scenario: what to run; None: what the seed draws.
    """
    world = World(seed)
    checkers = Checkers()
    scenario = scenario if scenario is not None else draw_scenario(world.dice("scenario"))
    cluster = Cluster(world, scenario, checkers)
    saboteur = Saboteur(
        cluster.network, cluster.nodes, cluster.stores, cluster.restart, cluster.crash_gateway, checkers
    )
    saboteur.schedule(scenario.faults)
    for arrival in scenario.arrivals:
        world.at(arrival.at_s, _taking(cluster.gateway, arrival))
    try:
        world.run(END_S, checkers)
    except Exception as error:  # noqa: BLE001  what escapes from a machine is exactly what a seed is run for
        where = traceback.extract_tb(error.__traceback__)[-1]
        checkers.require(False, "exception", f"{type(error).__name__} at {where.name}:{where.lineno}: {error}")
    else:
        _check_end(cluster, checkers)
    return Report(seed, world.digest, tuple(checkers.violations), checkers.statistics, world.events, tuple(world.trace))


def _taking(gateway: GatewayActor, arrival: Arrival) -> Callable[[], None]:
    return lambda: gateway.take(arrival)


def _check_end(cluster: Cluster, checkers: Checkers) -> None:
    """Liveness: long after healing nothing is open, held or parked."""
    for session in cluster.gateway.sessions:
        record: RequestRecord = session.record
        checkers.request_over(record, must_be_done=record.arrived_s >= AFTER_HEALING_S)
    for name, store in cluster.stores.items():
        checkers.store_empty(name, store.snapshot(), len(store.buffers), store.open_operations)
