"""Scenarios by hand: what must succeed, succeeds; the seeds alone would also pass if everything fell back."""

from dataclasses import replace

import pytest

from farfill.errors import FailureClass
from farfill.router.budget import FallbackPolicy
from farfill.router.policy import Placement, RouterSettings
from farfill.sim.actors.decode import DecodeSpeed
from farfill.sim.actors.gateway import Arrival
from farfill.sim.actors.prefill import PrefillSpeed
from farfill.sim.network import Timing
from farfill.sim.run import Report, simulate
from farfill.sim.scenario import AFTER_HEALING_S, THRESHOLD_TOKENS, Fault, FaultKind, Scenario, draw_scenario
from farfill.sim.world import Dice
from farfill.transfer.events import LinkSettings

LINK = LinkSettings(slots=2, window_chunks=2, window_bytes=2048, retries_max=4)


def calm(placement: Placement, *, requests: int = 1) -> Scenario:
    """A healthy cluster, and prompts of 100 tokens for it; prefill takes a second for the first request."""
    drawn = draw_scenario(Dice(0, "scenario"))
    arrivals = tuple(
        Arrival(f"request-{number}", 0.1 * number, tuple(range(number, number + 100)), 6, None)
        for number in range(requests)
    )
    gateway = replace(
        drawn.gateway,
        router=RouterSettings(THRESHOLD_TOKENS, placement),
        rules=replace(drawn.gateway.rules, policy=FallbackPolicy()),
        duplicate_chance=0.0,
    )
    return replace(
        drawn,
        prefill={"prefill-1": "far"},
        wrong_weights=(),
        store_bytes=4_000_000,
        gateway=gateway,
        budget=(10.0, 1.0),
        sender=LINK,
        receiver=LINK,
        timing=Timing(bytes_per_s=100e3),
        prefill_speed=PrefillSpeed(queue_s=0.1, tokens_per_s=100.0 * requests),
        decode_speed=DecodeSpeed(open_s=0.01, prefill_tokens_per_s=100.0, token_s=0.02),
        arrivals=arrivals,
        faults=(),
    )


def passed(report: Report) -> Report:
    assert not report.violations, str(report)
    return report


@pytest.mark.parametrize("placement", list(Placement))
def test_eight_requests_at_once_all_go_remote(placement: Placement) -> None:
    report = passed(simulate(1, calm(placement, requests=8)))
    assert report.statistics["done remote"] == 8
    assert report.statistics["fallbacks"] == 0
    assert report.statistics["verified"] == 8
    # A release may overtake the word that its transfer is verified, which is then refused to nobody's harm.
    refused = {
        what for what in report.statistics if what.startswith(("refused", "error", "receive failed", "send failed"))
    }
    assert refused <= {"refused transfer_cancelled"}


@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize("seed", range(8))
def test_a_transfer_that_is_cut_three_times_is_still_remote_and_resends_nothing_acknowledged(
    placement: Placement, seed: int
) -> None:
    """Re-putting an acknowledged chunk is a violation of its own (checker `re-put`)."""
    cuts = tuple(
        Fault(at_s, FaultKind.CUT, pick, 0.0, (0.05, 0.1), drops_in_flight=pick > 0.3)
        for at_s, pick in ((0.5, 0.1), (0.8, 0.4), (1.1, 0.7))
    )
    report = passed(simulate(seed, replace(calm(placement), faults=cuts)))
    assert report.statistics["cuts data"] == 3
    assert report.statistics["done remote"] == 1
    assert report.statistics["fallbacks"] == 0


@pytest.mark.parametrize("placement", list(Placement))
def test_killing_the_prefill_worker_or_the_store_ends_in_the_right_tokens_by_fallback(placement: Placement) -> None:
    """One node after the other is killed in mid-transfer; `pick` walks over all of them."""
    fell_back = 0
    for step in range(20):
        kill = Fault(0.8, FaultKind.CRASH, step / 20, 3.0)
        report = passed(simulate(step, replace(calm(placement), faults=(kill,))))
        assert report.statistics["crashes"] == 1
        assert report.statistics["outcome done"] == 1
        fell_back += report.statistics["done local by fallback"]
    assert fell_back >= 4


def test_without_fallback_the_same_kill_is_a_clear_error() -> None:
    scenario = calm(Placement.PRODUCER)
    policy = FallbackPolicy(dict.fromkeys(FailureClass, "fail"))
    rules = replace(scenario.gateway.rules, policy=policy)
    scenario = replace(scenario, gateway=replace(scenario.gateway, rules=rules))
    report = passed(simulate(0, replace(scenario, faults=(Fault(0.8, FaultKind.CRASH, 0.0, 3.0),))))
    assert report.statistics["outcome failed"] == 1
    assert report.statistics["error connection_lost"] == 1
    assert report.statistics["fallbacks"] == 0


@pytest.mark.parametrize("kind", [FaultKind.DAMAGE, FaultKind.ROT, FaultKind.TAMPER])
def test_an_altered_chunk_never_becomes_a_token(kind: FaultKind) -> None:
    total_bad = 0
    for step in range(20):
        faults = tuple(Fault(0.3 + 0.04 * step + 0.01 * extra, kind, step / 20, 0.003) for extra in range(3))
        report = passed(simulate(step, replace(calm(Placement.RELAY), faults=faults)))
        assert report.statistics["outcome done"] == 1
        bad = ("chunks damaged on the wire", "chunks that did not open", "refused chunk_corrupt")
        total_bad += sum(report.statistics[what] for what in bad)
    assert total_bad > 0


def test_a_worker_with_other_weights_is_refused_by_name_and_the_answer_is_right() -> None:
    report = passed(simulate(0, replace(calm(Placement.CONSUMER), wrong_weights=("prefill-1",))))
    assert report.statistics["manifests refused fingerprint_mismatch"] == 1
    assert report.statistics["done local by fallback"] == 1


def test_a_killed_gateway_leaves_nothing_behind() -> None:
    kill = Fault(0.4, FaultKind.GATEWAY_CRASH, 0.0, 0.0)
    report = passed(simulate(0, replace(calm(Placement.RELAY, requests=4), faults=(kill,))))
    assert report.statistics["gateway crashes"] == 1
    assert report.statistics["outcome done"] == 0  # and the stores are empty: `store_empty` has looked


def test_a_client_that_leaves_frees_everything() -> None:
    scenario = calm(Placement.PRODUCER, requests=3)
    arrivals = tuple(replace(arrival, patience_s=0.7) for arrival in scenario.arrivals)
    report = passed(simulate(0, replace(scenario, arrivals=arrivals)))
    assert report.statistics["outcome cancelled"] == 3
    assert report.statistics["releases"] == 3


def test_a_request_after_healing_is_remote_again() -> None:
    scenario = calm(Placement.RELAY)
    late = replace(scenario.arrivals[0], name="late", at_s=AFTER_HEALING_S)
    faults = tuple(Fault(0.5 + 0.5 * n, FaultKind.CRASH, 0.17 * n, 2.0) for n in range(6))
    report = passed(simulate(0, replace(scenario, arrivals=(*scenario.arrivals, late), faults=faults)))
    assert report.statistics["done remote"] >= 1
    assert report.statistics["crashes"] >= 4


@pytest.mark.parametrize("placement", list(Placement))
def test_an_answer_in_one_piece_that_outlasts_its_lease_is_not_thrown_away(placement: Placement) -> None:
    """The store knows VERIFIED long before the gateway does; renewing meanwhile must not look like a loss."""
    scenario = calm(placement)
    slow = replace(scenario.decode_speed, token_s=2.0)
    arrivals = tuple(replace(arrival, streaming=False) for arrival in scenario.arrivals)
    report = passed(simulate(0, replace(scenario, decode_speed=slow, arrivals=arrivals)))
    assert report.statistics["renewals"] >= 4
    assert report.statistics["done remote"] == 1
    assert report.statistics["fallbacks"] == 0
