"""The whole cluster under seeds and faults: every rule of `farfill.sim.checkers` holds, and the seeds are not tame."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from sim_reports import report

import farfill
from farfill.sim.run import simulate

SEEDS = 1000
BATCH = 50
REGRESSIONS = json.loads((Path(__file__).parent / "regressions.json").read_text())["seeds"]


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_no_rule_is_broken_under_any_seed(first: int) -> None:
    failed = [str(report(seed)) for seed in range(first, first + BATCH) if report(seed).violations]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("entry", REGRESSIONS, ids=lambda entry: str(entry["seed"]))
def test_a_seed_that_has_failed_never_fails_again(entry: dict[str, object]) -> None:
    seed = entry["seed"]
    assert isinstance(seed, int)
    assert not report(seed).violations, f"{entry['found']}\n{report(seed)}"


def test_the_seeds_do_what_they_are_for() -> None:
    """A simulation in which nothing goes wrong proves nothing. The floors are about half of what is usual."""
    total: Counter[str] = Counter()
    for seed in range(0, SEEDS, 4):
        total.update(report(seed).statistics)
    floors = {
        "done remote": 300,
        "done near": 40,
        "done local": 40,
        "done local by fallback": 50,
        "outcome cancelled": 10,
        "outcome failed": 20,
        "placement producer": 150,
        "placement consumer": 150,
        "placement relay": 150,
        "cuts data": 100,
        "cuts decode": 20,
        "cuts prefill": 5,
        "cuts store": 20,
        "crashes": 80,
        "gateway crashes": 8,
        "stalls": 80,
        "duplicates": 150,
        "payloads damaged": 40,
        "rots": 15,
        "tampers": 10,
        "clients left": 10,
        "resumes": 25,
        "chunks not resent": 10,
        "chunks damaged on the wire": 10,
        "chunks that did not open": 3,
        "manifests refused fingerprint_mismatch": 4,
        "refused stale_epoch": 10,
        "refused lease_expired": 3,
        "refused transfer_cancelled": 20,
        "refused chunk_corrupt": 20,
        "refused chunk_conflict": 5,
        "refused store_full": 2,
        "error fallback_exhausted": 5,
        "receive failed transfer_stalled": 5,
        "stores asked by a receiver": 4,
        "send failed transfer_stalled": 2,
        "renewals": 100,
        "error event connection_lost": 3,
    }
    too_few = {what: (total[what], floor) for what, floor in floors.items() if total[what] < floor}
    assert not too_few, f"(found, floor): {too_few}"
    ended = total["outcome done"] + total["outcome failed"] + total["outcome cancelled"]
    assert 0.5 < (total["done remote"] + total["done near"]) / ended < 0.9
    assert 0.03 < total["fallbacks"] / ended < 0.4
    assert total["outcome failed"] / ended < 0.15


def test_the_same_seed_gives_the_same_run() -> None:
    seeds = range(40, 60)
    assert [simulate(seed).digest for seed in seeds] == [report(seed).digest for seed in seeds]
    assert len({report(seed).digest for seed in seeds}) == len(seeds)


def test_the_same_seed_gives_the_same_run_in_every_process() -> None:
    """`hash()` of strings differs from process to process; nothing may depend on it."""
    seeds = (3, 17, 42, 202)
    code = f"from farfill.sim.run import simulate\nfor seed in {seeds}: print(simulate(seed).digest)"
    source = str(Path(farfill.__file__).parent.parent)
    for hash_seed in ("0", "1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": source}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [report(seed).digest for seed in seeds]
