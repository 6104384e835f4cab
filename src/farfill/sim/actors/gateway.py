"""The gateway's simulated driver: requests arrive, the real policy chooses, a real `RequestMachine` runs each.

No HTTP and no tokeniser. What is duplicated (a retried reservation or release, a prefill leg sent twice by something on
the way) is duplicated here, on a connection of its own, with its answer thrown away.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, assert_never

from farfill.errors import CODES, FailureClass, FarfillError, OperationError, OverloadError
from farfill.kv.plan import plan_chunks, transfer_bytes
from farfill.kv.spec import TransferId
from farfill.router import messages as m
from farfill.router.budget import FallbackBudget
from farfill.router.policy import Choice, Placement, RequestFacts, RouterSettings, WorkerFacts, choose_path
from farfill.router.request import RequestMachine, RequestRules
from farfill.sim.actors.driver import Driver
from farfill.sim.actors.wire import (
    DecodeLeg,
    LegAccepted,
    LegDone,
    LegFailed,
    LegOutput,
    LegStarted,
    PrefillLeg,
    Refusal,
)
from farfill.sim.checkers import Checkers, RequestRecord
from farfill.sim.engine import LAYOUT, reference_output
from farfill.sim.network import End, Network, Node
from farfill.store.protocol import Granted, Release, Renew, Renewed, Reserve
from farfill.transfer.spec import Clocks, StoreAddress, TransferSpec

POLL_S: Final = 0.5  # how old the gateway's knowledge of its workers may be
DUPLICATE_SOON_S: Final = 0.3
DUPLICATE_AFTER_MAX_S: Final = 6.0


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """What an operator sets; how often, and until when, something on the way repeats a call; the end of polling."""

    router: RouterSettings
    rules: RequestRules
    clocks: Clocks
    lease_s: float
    chunk_tokens: int
    duplicate_chance: float
    duplicates_until_s: float
    polls_until_s: float


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a client, who may leave `patience_s` after it."""

    name: str
    at_s: float
    prompt: tuple[int, ...]
    output_tokens: int
    patience_s: float | None
    streaming: bool = True


class GatewayActor:
    """One gateway on one node, in front of named workers.

    Args:
        decode, prefill: worker name -> site; each is the name of a node too.
    """

    def __init__(
        self,
        network: Network,
        node: Node,
        nodes: Mapping[str, Node],
        decode: Mapping[str, str],
        prefill: Mapping[str, str],
        settings: GatewaySettings,
        budget: FallbackBudget,
        checkers: Checkers,
    ) -> None:
        self.node = node
        self.network = network
        self.nodes = nodes
        self.settings = settings
        self.budget = budget
        self.checkers = checkers
        self.dice = network.world.dice("gateway")
        self._decode = dict(decode)
        self._prefill = dict(prefill)
        self._up = dict.fromkeys((*decode, *prefill), True)
        self.sessions: list[RequestSession] = []
        self._poll()

    def _poll(self) -> None:
        for name in self._up:
            self._up[name] = self.nodes[name].up
        if self.network.world.now < self.settings.polls_until_s:
            self.network.world.after(POLL_S, self._poll)

    def take(self, arrival: Arrival) -> None:
        if self.node.up:
            self.sessions.append(RequestSession(self, arrival))

    def crash(self) -> None:
        """Its requests are gone with it, and nobody releases what they held."""
        for session in self.sessions:
            if session.record.outcome is None:
                session.record.lost = True
                session.abandon()

    def choose(self, prompt_tokens: int) -> Choice:
        def facts(workers: Mapping[str, str]) -> Sequence[WorkerFacts]:
            loads = {name: sum(s.load_on(name) for s in self.sessions) for name in workers}
            return [WorkerFacts(name, site, "model", self._up[name], loads[name]) for name, site in workers.items()]

        request = RequestFacts("model", prompt_tokens)
        return choose_path(request, facts(self._decode), facts(self._prefill), {}, self.settings.router)

    def call(self, store: str, request: Any, answered: Callable[[Any], None], failed: Callable[[], None]) -> None:
        """A control call; now and then it arrives twice."""
        end = self.network.connect(self.node, self.nodes[store], "store")

        def answer(message: Any) -> None:
            end.close()
            answered(message)

        end.on_message, end.on_lost = answer, failed
        end.send(request)
        self.repeat(lambda: self.network.connect(self.node, self.nodes[store], "store").send(request))

    def repeat(self, action: Callable[[], None]) -> None:
        settings = self.settings
        if self.network.world.now < settings.duplicates_until_s and self.dice.chance(settings.duplicate_chance):
            self.checkers.count("duplicates")
            latest_s = DUPLICATE_AFTER_MAX_S if self.dice.chance(0.5) else DUPLICATE_SOON_S
            self.network.world.after(self.dice.between(0.0, latest_s), action)


class RequestSession:
    """One request: its machine, its legs, its client."""

    def __init__(self, gateway: GatewayActor, arrival: Arrival) -> None:
        self._gateway = gateway
        self._arrival = arrival
        self._checkers = gateway.checkers
        world = gateway.network.world
        settings = gateway.settings
        reference = reference_output(arrival.prompt, settings.chunk_tokens, arrival.output_tokens)
        self.record = RequestRecord(arrival.name, world.now, reference)
        self._checkers.requests[arrival.name] = self.record
        self._transfer_id = TransferId(hashlib.sha256(f"{world.seed}/{arrival.name}".encode()).hexdigest()[:32])
        self._key = hashlib.sha256(f"key {self._transfer_id}".encode()).digest()
        self._choice: Choice | None = None
        self._prefill_end: End | None = None
        self._decode_end: End | None = None
        self._workers_lost = 0  # decode workers that could not be reached, or broke off
        rules = replace(settings.rules, streaming=arrival.streaming)
        machine = RequestMachine(self._transfer_id, rules, gateway.budget, world.now)
        self._driver = Driver[m.Event, m.Effect](world, gateway.node, gateway.dice, machine, m.Tick(), self._perform)
        if arrival.patience_s is not None:
            self._driver.later(arrival.patience_s, self._leave)
        self._choose()

    @property
    def limit_s(self) -> float:
        """The sum of its clocks, with an event loop's lateness."""
        return self._gateway.settings.rules.clocks.request_s + 0.1

    def load_on(self, worker: str) -> int:
        if self.record.outcome is not None or self.record.lost or self._choice is None:
            return 0
        return (
            len(self._arrival.prompt) if worker in (self._choice.prefill_worker, self._choice.decode_workers[0]) else 0
        )

    def abandon(self) -> None:
        self._driver.stop()

    def _feed(self, event: m.Event) -> None:
        self._driver.feed(event)

    def _choose(self) -> None:
        try:
            self._choice = self._gateway.choose(len(self._arrival.prompt))
        except OverloadError as error:
            self._feed(m.ChoosingFailed(error))
            return
        self._feed(m.PathChosen(self._choice))

    def _leave(self) -> None:
        if self.record.outcome is None:
            self._checkers.count("clients left")
            self.record.client_left = True
            self._feed(m.ClientGone())

    @property
    def _store(self) -> str:
        assert self._choice is not None
        match self._choice.placement:
            case Placement.PRODUCER:
                assert self._choice.prefill_worker is not None
                return self._choice.prefill_worker
            case Placement.CONSUMER:
                return self._choice.decode_workers[0]
            case Placement.RELAY:
                return "relay"
            case None:
                raise AssertionError("a local path has no store")
            case _:
                assert_never(self._choice.placement)

    def _spec(self, epoch: int) -> TransferSpec:
        assert self._choice is not None
        assert self._choice.prefill_worker is not None
        return TransferSpec(
            transfer_id=self._transfer_id,
            epoch=epoch,
            store=StoreAddress(self._store, "", self._store, 0),
            producer=self._choice.prefill_worker,
            consumer=self._choice.decode_workers[0],
            prefix_tokens=len(self._arrival.prompt) - 1,
            chunk_tokens=self._gateway.settings.chunk_tokens,
            key=self._key,
            clocks=self._gateway.settings.clocks,
        )

    # --- effects ----------------------------------------------------------------------------------------------------

    def _perform(self, effect: m.Effect) -> None:
        record, checkers = self.record, self._checkers
        match effect:
            case m.Reserve():
                self._reserve()
            case m.RenewLease():
                self._renew(effect.epoch)
            case m.ReleaseLease():
                checkers.count("releases")
                checkers.released(record, effect.transfer_id, effect.epoch)
                request = Release(effect.transfer_id, effect.epoch)
                self._gateway.call(self._store, request, lambda _: None, lambda: None)
            case m.StartPrefillLeg():
                self._start_prefill(effect)
            case m.StartDecodeLeg():
                checkers.leg_started(record, effect.attempt)
                self._start_decode(effect)
            case m.AbortPrefillLeg():
                if self._prefill_end is not None:
                    self._prefill_end.close()
            case m.AbortDecodeLeg():
                if self._decode_end is not None:
                    self._decode_end.close()
            case m.FellBack():
                checkers.count(f"fell back {effect.error.code}")
            case m.SendHead():
                checkers.head_sent(record, effect.path, effect.reason, effect.transfer_id, effect.kv_bytes)
            case m.Forward():
                checkers.forwarded(record, int.from_bytes(effect.data, "big"))
            case m.EndResponse():
                checkers.response_ended(record, "complete")
            case m.SendErrorBeforeHead():
                checkers.count(f"error {effect.error.code}")
                checkers.response_ended(record, "error")
            case m.SendErrorEvent():
                checkers.count(f"error event {effect.error.code}")
                checkers.response_ended(record, "error event")
            case m.RecordOutcome():
                checkers.outcome(record, effect, self._is_excused(effect.code))
                checkers.ended_in_time(record, self.limit_s)
                self._gateway.network.world.record(f"{record.name} {effect}")
            case _:
                assert_never(effect)

    def _is_excused(self, code: str | None) -> bool:
        """Whether no other worker could have served it, or the operator did not want one to."""
        if code in ("fallback_exhausted", "no_worker", "request_timeout") or self._choice is None:
            return True
        failure_class = CODES[code].failure_class if code is not None else None
        policy = self._gateway.settings.rules.policy
        unwanted = failure_class is not None and policy.answer(failure_class) == "fail"
        return unwanted or self._workers_lost >= len(self._choice.decode_workers)

    def _reserve(self) -> None:
        assert self._choice is not None
        assert self._choice.prefill_worker is not None
        settings = self._gateway.settings
        plan = plan_chunks(LAYOUT, len(self._arrival.prompt) - 1, settings.chunk_tokens)
        producer, consumer = self._choice.prefill_worker, self._choice.decode_workers[0]
        self._checkers.count(f"placement {self._choice.placement}")
        request = Reserve(self._transfer_id, producer, consumer, transfer_bytes(plan), len(plan) + 2, settings.lease_s)

        def answered(answer: Granted | Refusal) -> None:
            if isinstance(answer, Refusal):
                self._feed(m.ReserveFailed(_error(answer)))
                return
            if self._driver.alive:
                self._checkers.granted(self.record, answer.transfer_id, answer.epoch, answer.lease_s)
            self._feed(m.ReserveGranted(answer.epoch, answer.lease_s))

        def failed() -> None:
            self._feed(m.ReserveFailed(OperationError("peer_unreachable", "the store does not answer")))

        self._gateway.call(self._store, request, answered, failed)

    def _renew(self, epoch: int) -> None:
        self._checkers.count("renewals")

        def answered(answer: Renewed | Refusal) -> None:
            if isinstance(answer, Renewed):
                self._checkers.renewed(self.record, answer.lease_s)
                self._feed(m.LeaseRenewed(answer.lease_s))
                return
            error = _error(answer)
            if error.failure_class is FailureClass.MISS:
                self._checkers.lease_lost(self.record)
            self._feed(m.LeaseNotRenewed(error))

        def failed() -> None:
            self._feed(m.LeaseNotRenewed(OperationError("peer_unreachable", "the store does not answer")))

        request = Renew(self._transfer_id, epoch, self._gateway.settings.lease_s)
        self._gateway.call(self._store, request, answered, failed)

    def _start_prefill(self, effect: m.StartPrefillLeg) -> None:
        gateway = self._gateway
        leg = PrefillLeg(self._spec(effect.epoch), self._store, self._arrival.prompt)
        end = gateway.network.connect(gateway.node, gateway.nodes[effect.worker], "prefill")
        self._prefill_end = end

        def said(message: LegAccepted | LegDone | LegFailed) -> None:
            match message:
                case LegAccepted():
                    self._feed(m.PrefillLegAccepted())
                case LegDone():
                    end.close()
                    self._feed(m.PrefillLegDone())
                case LegFailed():
                    end.close()
                    self._feed(m.PrefillLegFailed(OperationError(message.code, message.detail)))
                case _:
                    assert_never(message)

        end.on_message = said
        end.on_lost = lambda: self._feed(
            m.PrefillLegFailed(OperationError("connection_lost", f"{effect.worker} broke off"))
        )
        end.send(leg)
        gateway.repeat(lambda: gateway.network.connect(gateway.node, gateway.nodes[effect.worker], "prefill").send(leg))

    def _start_decode(self, effect: m.StartDecodeLeg) -> None:
        gateway, attempt = self._gateway, effect.attempt
        spec, store = (None, None) if effect.epoch is None else (self._spec(effect.epoch), self._store)
        arrival = self._arrival
        leg = DecodeLeg(attempt, arrival.prompt, arrival.output_tokens, arrival.streaming, spec, store)
        end = gateway.network.connect(gateway.node, gateway.nodes[effect.worker], "decode")
        self._decode_end = end

        def said(message: LegStarted | LegOutput | LegDone | LegFailed) -> None:
            match message:
                case LegStarted():
                    self._feed(m.DecodeLegStarted(attempt, message.kv_bytes))
                case LegOutput():
                    self._feed(m.DecodeLegOutput(attempt, message.token.to_bytes(2, "big")))
                case LegDone():
                    end.close()
                    self._feed(m.DecodeLegDone(attempt))
                case LegFailed():
                    end.close()
                    error = OperationError(message.code, message.detail)
                    self._feed(m.DecodeLegFailed(attempt, error, reached=True))
                case _:
                    assert_never(message)

        def broke_off() -> None:
            self._workers_lost += 1
            error = OperationError("connection_lost", f"{effect.worker} broke off")
            self._feed(m.DecodeLegFailed(attempt, error, reached=False))

        end.on_message, end.on_lost = said, broke_off
        end.send(leg)


def _error(refusal: Refusal) -> FarfillError:
    return OperationError(refusal.code, refusal.detail)
