"""The virtual-time world: a heap of things to happen, a clock that jumps from one to the next, and seeded dice.

It knows nothing of farfill: no messages, no nodes, no machines, no faults. It never reads the real clock and never
sleeps. The same seed gives the same run, in every process and on every CPython: ties in time are broken by the order of
scheduling, and of `random` only `Random.random()` is used, whose sequence is fixed by its documentation (the helpers'
are not).
"""

import hashlib
import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

T = TypeVar("T")

TRACE_LINES_KEPT: Final = 400  # what a failing seed's report shows; the digest covers every line
EVENTS_MAX: Final = 400_000  # a scenario takes a few thousand; more is two machines answering each other for ever


class Dice:
    """Seeded chance. Each purpose has its own, so that a new draw for one does not move the draws of another."""

    def __init__(self, seed: int, purpose: str) -> None:
        digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=16).digest()
        self._random = random.Random(int.from_bytes(digest, "big"))

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self._random.random()

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def below(self, limit: int) -> int:
        """A whole number in [0, limit)."""
        assert limit > 0
        return int(self._random.random() * limit)

    def choose(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def exponential(self, mean: float) -> float:
        return -mean * math.log(1.0 - self._random.random())


class Alarm:
    """Something that will happen; `cancel` keeps it from happening."""

    __slots__ = ("action", "cancelled", "when")

    def __init__(self, when: float, action: Callable[[], None]) -> None:
        self.when = when
        self.action = action
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Witness(Protocol):
    """Whoever notes when things happen."""

    now: float


class World:
    """Virtual time, in seconds from 0."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Alarm]] = []
        self._scheduled = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self._trace: deque[str] = deque(maxlen=TRACE_LINES_KEPT)

    def dice(self, purpose: str) -> Dice:
        return Dice(self.seed, purpose)

    def at(self, when: float, action: Callable[[], None]) -> Alarm:
        """`action` happens at `when`, or now if that is past."""
        alarm = Alarm(max(when, self.now), action)
        self._scheduled += 1
        heapq.heappush(self._heap, (alarm.when, self._scheduled, alarm))
        return alarm

    def after(self, delay_s: float, action: Callable[[], None]) -> Alarm:
        return self.at(self.now + delay_s, action)

    def run(self, until: float, witness: Witness) -> None:
        """Lets everything happen that is due up to `until`; the clock then stands there. `witness` is told the time."""
        while self._heap and self._heap[0][0] <= until:
            when, _, alarm = heapq.heappop(self._heap)
            if alarm.cancelled:
                continue
            self.now = witness.now = when
            self.events += 1
            assert self.events < EVENTS_MAX, f"seed {self.seed}: still busy after {EVENTS_MAX} events, at {when:.3f} s"
            alarm.action()
        self.now = witness.now = until

    def record(self, line: str) -> None:
        """Adds one line to the trace, with the time to the nanosecond."""
        text = f"{self.now:.9f} {line}"
        self._digest.update(text.encode())
        self._digest.update(b"\n")
        self._trace.append(text)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    @property
    def trace(self) -> list[str]:
        """The last lines."""
        return list(self._trace)
