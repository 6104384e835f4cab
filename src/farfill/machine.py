"""What every decision-maker in farfill is: a machine that is told what happened and returns what to do.

Not a framework: there is no registry, no event bus and no driver here. The drivers are the asyncio and
thread shells in production and the virtual-time world in `farfill.sim`.
"""

from typing import Protocol, TypeVar

EventT = TypeVar("EventT", contravariant=True)
EffectT = TypeVar("EffectT")


class Machine(Protocol[EventT, EffectT]):
    """No I/O, no clock, no randomness, no `async` inside; time comes in as an argument.

    `now` is seconds on a monotonic clock that belongs to the driver. It never goes back.
    """

    @property
    def deadline(self) -> float | None:
        """When the driver must send the machine its `Tick` event; None: never."""

    def handle(self, event: EventT, now: float) -> list[EffectT]:
        """Takes one event, changes state, returns the effects in the order in which to carry them out."""
