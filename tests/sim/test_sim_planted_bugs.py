"""The simulation finds bugs: each test removes one check from a real machine and expects some early seed to complain.

A bug that no seed finds is a hole in the simulation. The same seed without the bug is clean.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import pytest

import farfill.kv.sealing as sealing
import farfill.router.request as request_module
import farfill.sim.actors.decode as decode_actor
from farfill.errors import PeerError
from farfill.router.lease import LeaseStatus, RequestLease
from farfill.router.request import RequestMachine
from farfill.router.states import TRANSITIONS, RequestState
from farfill.sim.run import Report, simulate
from farfill.sim.scenario import Scenario, draw_scenario
from farfill.sim.world import Dice
from farfill.store.lease import Ledger
from farfill.store.machine import StoreMachine
from farfill.transfer.receiver import ReceiverMachine, Verify
from farfill.transfer.sender import SenderMachine

SEEDS_MAX = 400

Shape = Callable[[Scenario], Scenario]


class Hunt(Protocol):
    def __call__(self, checker: str, shape: Shape = ...) -> str: ...


def as_drawn(scenario: Scenario) -> Scenario:
    return scenario


def all_repeated(scenario: Scenario) -> Scenario:
    return replace(scenario, gateway=replace(scenario.gateway, duplicate_chance=1.0))


def all_impatient(scenario: Scenario) -> Scenario:
    *early, last = scenario.arrivals
    impatient = (replace(arrival, patience_s=0.5 + 0.1 * number) for number, arrival in enumerate(early))
    return replace(scenario, arrivals=(*impatient, last))


def run(seed: int, shape: Shape) -> Report:
    return simulate(seed, shape(draw_scenario(Dice(seed, "scenario"))))


ANYTHING_GOES: Mapping[Any, Any] = {
    state: {event: frozenset(RequestState) for row in TRANSITIONS.values() for event in row} for state in RequestState
}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hunt]:
    """Runs seeds until a checker complains: what it says. Fails where none does, and where the seed is never clean."""
    hit: list[tuple[int, Shape]] = []

    def hunt(checker: str, shape: Shape = as_drawn) -> str:
        for seed in range(SEEDS_MAX):
            complaints = [str(v) for v in run(seed, shape).violations if v.checker == checker]
            if complaints:
                hit.append((seed, shape))
                return complaints[0]
        pytest.fail(f"no violation of {checker!r} in {SEEDS_MAX} seeds: the simulation does not see this bug")

    yield hunt
    monkeypatch.undo()
    for seed, shape in hit:
        report = run(seed, shape)
        assert not report.violations, f"it is not the planted bug alone: {report}"


# --- transfer


def verify_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def conclude(self: Any) -> list[Any]:
        self._is_over = True
        return [Verify()]

    monkeypatch.setattr(ReceiverMachine, "_is_complete", lambda self: len(self._tags) >= 3)
    monkeypatch.setattr(ReceiverMachine, "_conclude", conclude)


def test_verified_before_everything_is_here(monkeypatch: pytest.MonkeyPatch, found: Hunt) -> None:
    verify_early(monkeypatch)
    assert "VERIFIED with" in found("verified")


def test_the_wrong_tokens_of_an_early_decode_reach_the_checker_of_outputs(
    monkeypatch: pytest.MonkeyPatch, found: Hunt
) -> None:
    verify_early(monkeypatch)
    assert "is not the beginning of" in found("output")


def test_the_closing_record_is_not_compared(monkeypatch: pytest.MonkeyPatch, found: Hunt) -> None:
    """Needs a second bug to show: a store that takes any chunk for a repeat, so that two legs' chunks mix."""
    monkeypatch.setattr(StoreMachine, "_is_same", lambda self, stored, payload_bytes, checksum: True)
    refused = 0
    for seed in range(40):  # the second bug alone is caught by the receiver, and harms nobody
        report = run(seed, all_repeated)
        refused += report.statistics["receive failed manifest_invalid"]
        assert not [v for v in report.violations if v.checker in ("verified", "output")]
    assert refused > 0
    monkeypatch.setattr(ReceiverMachine, "_closing_agrees", lambda self, closing: True)
    assert "names other chunks" in found("verified", all_repeated)


def test_data_is_asked_for_before_the_manifest_is_checked(monkeypatch: pytest.MonkeyPatch, found: Hunt) -> None:
    monkeypatch.setattr(decode_actor, "check_manifest", lambda manifest, **expected: ())
    assert "foreign bytes" in found("verified")


def test_a_bad_chunk_is_accepted(monkeypatch: pytest.MonkeyPatch, found: Hunt) -> None:
    real = sealing.Sealer.open_into

    def lenient(self: Any, identity: Any, sealed: Any, out: Any) -> bytes:
        try:
            return real(self, identity, sealed, out)
        except PeerError:
            return bytes(sealed[-sealing.TAG_BYTES :])

    monkeypatch.setattr(sealing.Sealer, "open_into", lenient)
    assert "foreign bytes" in found("verified")


def test_a_chunk_is_sent_again_though_the_store_has_it(monkeypatch: pytest.MonkeyPatch, found: Hunt) -> None:
    monkeypatch.setattr(SenderMachine, "_may_resend", lambda self, index, present: True)
    assert "is put again, the store has it" in found("re-put")


def test_a_chunk_is_sent_again_without_asking(monkeypatch: pytest.MonkeyPatch, found: Hunt) -> None:
    real = SenderMachine._lose

    def lose(self: Any, connection: Any, code: str, detail: str, now: float) -> None:
        real(self, connection, code, detail, now)
        self._queue = sorted([*self._queue, *self._uncertain])
        self._uncertain = set()

    monkeypatch.setattr(SenderMachine, "_lose", lose)
    assert "the store was not asked" in found("re-put")


def test_a_leg_is_done_before_the_store_has_everything(monkeypatch: pytest.MonkeyPatch, found: Hunt) -> None:
    monkeypatch.setattr(SenderMachine, "_is_complete", lambda self: len(self._done) >= self._chunks - 1)
    assert "the leg is done" in found("complete")


# --- store


def test_a_stale_epoch_is_served(monkeypatch: pytest.MonkeyPatch, found: Hunt) -> None:
    monkeypatch.setattr(StoreMachine, "_is_current", lambda self, lease, epoch: True)
    assert "the lease's epoch is" in found("epoch")


def test_nobody_reaps(monkeypatch: pytest.MonkeyPatch, found: Hunt) -> None:
    monkeypatch.setattr(StoreMachine, "_reap", lambda self, now: [])
    monkeypatch.setattr(StoreMachine, "deadline", None)
    assert "keeps bytes" in found("liveness")


def test_a_buffer_is_dropped_while_it_is_read(monkeypatch: pytest.MonkeyPatch, found: Hunt) -> None:
    class Blind(Counter[Any]):
        def __contains__(self, handle: object) -> bool:
            return False

    real = StoreMachine.__init__

    def init(self: Any, *arguments: Any) -> None:
        real(self, *arguments)
        self._readers = Blind()

    monkeypatch.setattr(StoreMachine, "__init__", init)
    assert "is dropped while somebody uses it" in found("buffers", all_impatient)


def test_the_ledger_forgets_what_it_holds(monkeypatch: pytest.MonkeyPatch, found: Hunt) -> None:
    def let_go(self: Any, amount_bytes: int) -> None:
        self.held_bytes -= amount_bytes // 2

    monkeypatch.setattr(Ledger, "let_go", let_go)
    assert "keeps bytes" in found("liveness")


def test_bytes_are_taken_from_the_ledger_twice(monkeypatch: pytest.MonkeyPatch, found: Hunt) -> None:
    def quarantine(self: Any, handle: Any, amount_bytes: int) -> None:
        self.quarantined[handle] = amount_bytes  # and not counted

    monkeypatch.setattr(Ledger, "quarantine", quarantine)
    assert found("ledger", all_impatient)


# --- request


def test_a_lease_is_never_released(monkeypatch: pytest.MonkeyPatch, found: Hunt) -> None:
    monkeypatch.setattr(RequestMachine, "_release", lambda self: [])
    assert "did not release" in found("lease")


def test_a_lease_is_released_twice(monkeypatch: pytest.MonkeyPatch, found: Hunt) -> None:
    def let_go(self: Any) -> bool:
        held = self.status in (LeaseStatus.HELD, LeaseStatus.GONE) and self.epoch > 0
        if held:
            self.status = LeaseStatus.GONE
        return held

    monkeypatch.setattr(RequestLease, "let_go", let_go)
    assert "releases a lease that is released" in found("lease")


def test_a_grant_that_comes_late_is_kept(monkeypatch: pytest.MonkeyPatch, found: Hunt) -> None:
    monkeypatch.setattr(RequestMachine, "_late", lambda self, event, now: [])
    assert "never released" in found("lease")


def test_a_request_falls_back_after_its_head(monkeypatch: pytest.MonkeyPatch, found: Hunt) -> None:
    real = RequestMachine._may_fall_back

    def may_fall_back(self: Any, error: Any) -> bool:
        state, self.state = self.state, RequestState.PREFILLING
        allowed = real(self, error)
        self.state = state
        return allowed

    monkeypatch.setattr(RequestMachine, "_may_fall_back", may_fall_back)
    assert "LocalProtocolError" in found("exception")  # the machine's own table sees it first
    monkeypatch.setattr(request_module, "TRANSITIONS", ANYTHING_GOES)
    assert "after the head was sent" in found("fallback")


def test_a_fallback_is_not_told(monkeypatch: pytest.MonkeyPatch, found: Hunt) -> None:
    def shown(self: Any) -> tuple[Any, str]:
        return self._choice.path, self._choice.reason

    monkeypatch.setattr(RequestMachine, "_shown", shown)
    assert "fallbacks" in found("fallback")
    assert "the head says" in found("remote")


def test_the_first_failure_is_the_last_word(monkeypatch: pytest.MonkeyPatch, found: Hunt) -> None:
    monkeypatch.setattr(RequestMachine, "_may_fall_back", lambda self, error: False)
    assert "need not have" in found("excuse")


def test_a_request_that_waits_for_ever(monkeypatch: pytest.MonkeyPatch, found: Hunt) -> None:
    monkeypatch.setattr(RequestMachine, "deadline", None)
    monkeypatch.setattr(ReceiverMachine, "deadline", None)
    complaint = found("liveness")
    assert "has never ended" in complaint or "took" in complaint


def test_an_output_is_cut_short_in_silence(monkeypatch: pytest.MonkeyPatch, found: Hunt) -> None:
    """A decode worker that dies after the head must give an error event, not an end."""
    real = RequestMachine._leg_failed

    def leg_failed(self: Any, event: Any, now: float) -> list[Any]:
        if self.state is RequestState.DECODING:
            return [*self._give_up(), request_module.EndResponse(), self._end(RequestState.DONE, None, now)]
        return real(self, event, now)

    monkeypatch.setattr(RequestMachine, "_leg_failed", leg_failed)
    monkeypatch.setattr(request_module, "TRANSITIONS", ANYTHING_GOES)
    assert "complete with" in found("output")
