"""Which path and which workers: each rule gives its own reason, in a fixed order, and the same answer every time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfill.errors import OverloadError
from farfill.router.policy import (
    Path,
    Placement,
    RequestFacts,
    RouterSettings,
    WorkerFacts,
    choose_path,
    splitting_blocker,
)

RULES = RouterSettings(threshold_tokens=100, placement=Placement.CONSUMER)
WEST = WorkerFacts("west-1", "west", "m")
EAST = WorkerFacts("east-1", "east", "m")


def facts(tokens: int = 500, **more: object) -> RequestFacts:
    return RequestFacts("m", tokens, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_facts", "prefill", "incompatible", "path", "reason"),
    [
        (facts(blocker="endpoint_not_splittable"), [EAST], {}, Path.LOCAL, "endpoint_not_splittable"),
        (facts(0), [EAST], {}, Path.LOCAL, "prompt_too_short"),
        (facts(1), [EAST], {}, Path.LOCAL, "prompt_too_short"),
        (facts(100), [EAST], {}, Path.LOCAL, "below_threshold"),
        (facts(101), [EAST], {}, Path.REMOTE, "above_threshold"),
        (facts(500, cached_tokens={"west-1": 400}), [EAST], {}, Path.LOCAL, "below_threshold"),
        (facts(500, cached_tokens={"west-2": 400}), [EAST], {}, Path.REMOTE, "above_threshold"),
        (facts(), [], {}, Path.LOCAL, "no_prefill_worker"),
        (facts(), [WorkerFacts("east-1", "east", "other")], {}, Path.LOCAL, "no_prefill_worker"),
        (facts(), [WEST], {}, Path.LOCAL, "no_prefill_worker"),
        (facts(), [WorkerFacts("east-1", "east", "m", up=False)], {}, Path.LOCAL, "prefill_unavailable"),
        (facts(), [EAST], {("east-1", "west-1"): "rope"}, Path.LOCAL, "incompatible:rope"),
        (facts(), [WorkerFacts("west-9", "west", "m")], {}, Path.NEAR, "above_threshold"),
    ],
)
def test_each_rule_has_its_own_reason(
    request_facts: RequestFacts,
    prefill: list[WorkerFacts],
    incompatible: dict[tuple[str, str], str],
    path: Path,
    reason: str,
) -> None:
    choice = choose_path(request_facts, [WEST], prefill, incompatible, RULES)
    assert (choice.path, choice.reason) == (path, reason)
    assert choice.decode_workers == ("west-1",)
    assert (choice.prefill_worker is not None) == (path is not Path.LOCAL)
    assert choice.placement == (None if path is Path.LOCAL else Placement.CONSUMER)


def test_an_incompatible_worker_is_passed_over_for_a_compatible_one() -> None:
    other = WorkerFacts("east-2", "east", "m", outstanding_tokens=10_000)
    choice = choose_path(facts(), [WEST], [EAST, other], {("east-1", "west-1"): "dtype"}, RULES)
    assert choice.prefill_worker == "east-2"


@pytest.mark.parametrize("placement", list(Placement))
def test_without_its_relay_a_request_stays_local_and_only_the_relays_placement_needs_it(placement: Placement) -> None:
    choice = choose_path(facts(), [WEST], [EAST], {}, RouterSettings(100, placement), relay_up=False)
    if placement is Placement.RELAY:
        assert (choice.path, choice.reason, choice.prefill_worker) == (Path.LOCAL, "relay_unavailable", None)
    else:
        assert (choice.path, choice.reason) == (Path.REMOTE, "above_threshold")


def test_no_decode_worker_is_an_overload_that_says_when_to_come_back() -> None:
    for decode in ([], [WorkerFacts("west-1", "west", "m", up=False)], [WorkerFacts("west-1", "west", "other")]):
        with pytest.raises(OverloadError) as caught:
            choose_path(facts(), decode, [EAST], {}, RULES)
        assert caught.value.code == "no_worker"
        assert caught.value.retry_after_s is not None


def test_a_cached_prefix_counts_against_the_work_that_waits() -> None:
    busy, idle = WorkerFacts("west-1", "west", "m", outstanding_tokens=300), WorkerFacts("west-2", "west", "m")
    assert choose_path(facts(), [busy, idle], [], {}, RULES).decode_workers == ("west-2", "west-1")
    cached = facts(cached_tokens={"west-1": 400})
    assert choose_path(cached, [busy, idle], [], {}, RULES).decode_workers == ("west-1", "west-2")


@given(st.permutations(range(6)), st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_the_least_loaded_come_first_ties_by_name_whatever_the_order(order: list[int], loads: list[int]) -> None:
    decode = [WorkerFacts(f"d{i}", "west", "m", outstanding_tokens=loads[i]) for i in order]
    prefill = [WorkerFacts(f"p{i}", "east", "m", outstanding_tokens=loads[i]) for i in order]
    choice = choose_path(facts(), decode, prefill, {}, RULES)
    expected = sorted(range(6), key=lambda i: (loads[i], i))
    assert choice.decode_workers == tuple(f"d{i}" for i in expected)
    assert choice.prefill_worker == f"p{expected[0]}"


@pytest.mark.parametrize(
    ("body", "blocker"),
    [
        ({"prompt": "x"}, None),
        ({"prompt": [1, 2, 3]}, None),
        ({"prompt": ["x"]}, None),
        ({"prompt": ["x", "y"]}, "several_prompts"),
        ({"prompt": [[1, 2], [3]]}, "several_prompts"),
        ({"echo": False, "prompt_logprobs": None}, None),
        ({"echo": True}, "not_splittable:echo"),
        ({"prompt_logprobs": 0}, "not_splittable:prompt_logprobs"),
        ({"prompt_embeds": "..."}, "not_splittable:prompt_embeds"),
        ({"best_of": 2}, "not_splittable:best_of"),
        ({"best_of": 2, "n": 2}, None),
        ({"use_beam_search": True}, "not_splittable:use_beam_search"),
    ],
)
def test_what_cannot_be_split(body: dict[str, object], blocker: str | None) -> None:
    assert splitting_blocker(True, body) == blocker
    assert splitting_blocker(False, body) == "endpoint_not_splittable"
