"""The budget of fallbacks never gives more than its rate; the prefix index is bounded and never over-estimates."""

from hypothesis import given
from hypothesis import strategies as st

from farfill.errors import FailureClass
from farfill.router.budget import FallbackBudget, FallbackPolicy
from farfill.router.prefix_index import PrefixIndex


@given(st.integers(0, 5), st.floats(0, 2), st.lists(st.floats(0, 3), max_size=60))
def test_the_budget_keeps_to_its_rate(burst: int, per_s: float, pauses: list[float]) -> None:
    budget, now, taken = FallbackBudget(burst, per_s), 0.0, 0
    for pause in pauses:
        now += pause
        taken += budget.take(now)
        assert taken <= burst + now * per_s + 1e-6


@given(st.integers(1, 3), st.floats(0.01, 2))
def test_after_the_time_it_names_there_is_one_again(burst: int, per_s: float) -> None:
    budget = FallbackBudget(burst, per_s)
    while budget.take(0.0):
        pass
    wait = budget.retry_after_s(0.0)
    assert wait is not None
    assert budget.take(wait + 1e-6)


def test_an_empty_budget_never_fills_and_says_so() -> None:
    for budget in (FallbackBudget(0, 5), FallbackBudget(2, 0)):
        while budget.take(0.0):
            pass
        assert budget.retry_after_s(1e9) is None
        assert not budget.take(1e9)


def test_a_clock_that_stands_still_or_steps_back_gives_nothing() -> None:
    budget = FallbackBudget(1, 1)
    assert budget.take(100.0)
    assert not budget.take(50.0)
    assert not budget.take(100.0)


def test_every_class_has_an_answer_and_an_unnamed_one_fails() -> None:
    assert all(FallbackPolicy().answer(one) == "local" for one in FailureClass)
    assert FallbackPolicy({FailureClass.MISS: "local"}).answer(FailureClass.TIMEOUT) == "fail"


NAMES = [bytes([number]) * 32 for number in range(20)]


def test_only_an_unbroken_prefix_counts() -> None:
    index = PrefixIndex(block_tokens=16)
    index.remember("d", NAMES[:3])
    assert index.cached_tokens("d", NAMES[:6]) == 48
    assert index.cached_tokens("d", [NAMES[9], *NAMES[:3]]) == 0
    assert index.cached_tokens("other", NAMES[:3]) == 0
    index.forget_worker("d")
    assert index.cached_tokens("d", NAMES[:3]) == 0


def test_what_was_used_last_stays_and_a_prefix_outlives_what_follows_it() -> None:
    index = PrefixIndex(block_tokens=1, blocks_max=4)
    index.remember("d", NAMES[:3])
    index.remember("d", NAMES[10:12])
    assert len(index) == 4
    assert index.cached_tokens("d", NAMES[:3]) == 2, "the last block of the first prompt went, its beginning stays"
    index.remember("d", NAMES[12:14])
    assert index.cached_tokens("d", NAMES[10:12]) == 0
    assert index.cached_tokens("d", NAMES[:3]) == 2, "it was looked up just before"


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 19), st.integers(1, 8)), max_size=40))
def test_it_never_holds_more_than_its_bound_nor_names_what_it_was_not_told(
    told: list[tuple[str, int, int]],
) -> None:
    index, known = PrefixIndex(block_tokens=1, blocks_max=7), set()
    for worker, start, count in told:
        names = NAMES[start : start + count]
        index.remember(worker, names)
        known |= {(worker, name) for name in names}
        assert len(index) <= 7
        for other in "ab":
            found = index.cached_tokens(other, names)
            assert all((other, name) in known for name in names[:found])
