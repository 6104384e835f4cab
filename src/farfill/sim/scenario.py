"""What a seed draws before anything happens: the cluster, its settings, the requests and the faults. Pure data.

Not here: carrying it out (`run`, `faults`). The figures are chosen so that a request takes seconds, faults fall into
its middle, and every clock can run out; none of them describes real hardware.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from farfill.errors import FailureClass
from farfill.kv.limits import MANIFEST_HEAD_BYTES_MAX
from farfill.router.budget import Answer, FallbackPolicy
from farfill.router.policy import Placement, RouterSettings
from farfill.router.request import RequestClocks, RequestRules
from farfill.sim.actors.decode import DecodeSpeed
from farfill.sim.actors.gateway import Arrival, GatewaySettings
from farfill.sim.actors.prefill import PrefillSpeed
from farfill.sim.engine import OUTPUT_TOKENS_MAX
from farfill.sim.network import Timing
from farfill.sim.world import Dice
from farfill.transfer.events import LinkSettings
from farfill.transfer.spec import Clocks

CHUNK_TOKENS: Final = 16
THRESHOLD_TOKENS: Final = 24
PROMPT_TOKENS_MAX: Final = 110
LEASE_S: Final = 6.0
FAULTS_UNTIL_S: Final = 9.0  # the last fault; stalls and restarts end up to 6 s later
HEALED_S: Final = 16.0
AFTER_HEALING_S: Final = 30.0  # leases of what went wrong have run out: a request that comes now must succeed
REQUEST_S: Final = 40.0
END_S: Final = 160.0  # request clock, lease and the store's memory of it, one after the other


class FaultKind(StrEnum):
    CUT = "cut"  # one connection breaks; both ends notice soon, or much later
    STALL = "stall"  # a node says nothing for a while
    CRASH = "crash"  # a worker or the relay is killed, and started again
    GATEWAY_CRASH = "gateway crash"  # for good: its requests are lost, what they held is not
    DAMAGE = "damage"  # a payload is altered on the wire: its checksum does not hold
    TAMPER = "tamper"  # a store alters a chunk and its checksum: only the seal can tell
    ROT = "rot"  # a store's memory alters a chunk, its checksum stays


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        pick: in [0, 1), chooses the victim among what is there at that moment.
        last_s: of a stall, or until a restart.
        notice_s: after a cut, until the client and until the server of the connection know.
        drops_in_flight: after a cut, whether what was under way is lost too.
    """

    at_s: float
    kind: FaultKind
    pick: float
    last_s: float
    notice_s: tuple[float, float] = (0.0, 0.0)
    drops_in_flight: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything about one run but its chance.

    Attributes:
        prefill, decode: worker name -> site.
        wrong_weights: names of prefill workers whose fingerprint, and whose bytes, are another model's.
        arrivals: those before healing may end in any right way; the last comes after it and must be done.
    """

    prefill: dict[str, str]
    decode: dict[str, str]
    wrong_weights: tuple[str, ...]
    store_bytes: int
    timing: Timing
    gateway: GatewaySettings
    budget: tuple[float, float]
    sender: LinkSettings
    receiver: LinkSettings
    prefill_speed: PrefillSpeed
    decode_speed: DecodeSpeed
    arrivals: tuple[Arrival, ...]
    faults: tuple[Fault, ...] = field(default=())


def draw_scenario(dice: Dice) -> Scenario:
    """A seed's scenario. About one in twelve has no fault at all."""
    placement = dice.choose(tuple(Placement))
    answers: dict[FailureClass, Answer] = {cls: "fail" if dice.chance(0.06) else "local" for cls in FailureClass}
    link = LinkSettings(
        slots=1 + dice.below(3),
        window_chunks=1 + dice.below(4),
        window_bytes=2048,
        retries_max=2 + dice.below(3),
        backoff_s=0.1,
        jitter=dice.between(0.0, 1.0),
        corrupt_max=2,
    )
    small = dice.chance(0.15)
    gateway = GatewaySettings(
        router=RouterSettings(THRESHOLD_TOKENS, placement),
        rules=RequestRules(
            policy=FallbackPolicy(answers),
            clocks=RequestClocks(setup_s=2.0, transfer_s=14.0, request_s=REQUEST_S),
        ),
        clocks=Clocks(queue_s=10.0, setup_s=2.0, stall_s=3.0, produce_s=6.0, transfer_s=12.0, verify_s=2.0),
        lease_s=LEASE_S,
        chunk_tokens=CHUNK_TOKENS,
        duplicate_chance=dice.choose((0.0, 0.05, 0.3)),
        duplicates_until_s=HEALED_S,
        polls_until_s=AFTER_HEALING_S,
    )
    return Scenario(
        prefill={"prefill-1": "far", "prefill-2": dice.choose(("far", "edge"))},
        decode={"decode-1": "edge", "decode-2": "edge"},
        wrong_weights=("prefill-2",) if dice.chance(0.06) else (),
        # Two leases of the store, or more than it can need.
        store_bytes=2 * MANIFEST_HEAD_BYTES_MAX + 40_000 if small else 40 * MANIFEST_HEAD_BYTES_MAX,
        timing=Timing(latency_max_s=dice.choose((0.005, 0.04, 0.15)), bytes_per_s=dice.choose((5e3, 20e3, 200e3))),
        gateway=gateway,
        budget=(float(dice.choose((1, 3, 10))), 0.5),
        sender=link,
        receiver=link,
        prefill_speed=PrefillSpeed(dice.between(0.0, 0.3), dice.choose((30.0, 100.0, 400.0))),
        decode_speed=DecodeSpeed(dice.choose((0.0, 0.02)), dice.choose((40.0, 150.0)), dice.choose((0.02, 0.1))),
        arrivals=_draw_arrivals(dice),
        faults=_draw_faults(dice),
    )


def _draw_arrivals(dice: Dice) -> tuple[Arrival, ...]:
    arrivals = []
    count = 2 + dice.below(4)
    for number in range(count + 1):
        last = number == count
        short = not last and dice.chance(0.12)
        length = 1 + dice.below(THRESHOLD_TOKENS) if short else THRESHOLD_TOKENS + 1 + dice.below(PROMPT_TOKENS_MAX)
        arrivals.append(
            Arrival(
                name=f"request-{number}",
                at_s=AFTER_HEALING_S if last else dice.between(0.0, 5.0),
                prompt=tuple(dice.below(50_000) for _ in range(length)),
                output_tokens=1 + dice.below(OUTPUT_TOKENS_MAX),
                patience_s=dice.between(0.0, 5.0) if not last and dice.chance(0.12) else None,
                streaming=not dice.chance(0.25),
            )
        )
    return tuple(arrivals)


_WEIGHTS: Final = (
    (FaultKind.CUT, 44),
    (FaultKind.STALL, 14),
    (FaultKind.CRASH, 14),
    (FaultKind.DAMAGE, 12),
    (FaultKind.ROT, 8),
    (FaultKind.TAMPER, 6),
    (FaultKind.GATEWAY_CRASH, 2),
)
_KINDS: Final = tuple(kind for kind, weight in _WEIGHTS for _ in range(weight))


def _draw_faults(dice: Dice) -> tuple[Fault, ...]:
    def notice_s() -> float:
        return dice.between(1.0, 5.0) if dice.chance(0.25) else dice.between(0.0, 0.4)

    return tuple(
        Fault(
            at_s=dice.between(0.05, FAULTS_UNTIL_S),
            kind=dice.choose(_KINDS),
            pick=dice.between(0.0, 1.0),
            last_s=dice.exponential(1.2) if dice.chance(0.8) else dice.between(3.0, 6.0),
            notice_s=(notice_s(), notice_s()),
            drops_in_flight=dice.chance(0.5),
        )
        for _ in range(dice.below(12))
    )
