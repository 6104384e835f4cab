"""Rule: greedy is argmax; a seed fixes the draws; each filter keeps what its definition says and nothing else."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farfill.engines.api import SamplingParams
from farfill.engines.hf.sampling import Sampler
from farfill.errors import ClientError, OperationError

LOGITS = torch.log(torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]))


def sampler(*, prompt=(), seed=1, forbidden=(), **params):
    return Sampler(SamplingParams(**params), prompt, len(LOGITS), seed, forbidden)


def drawn(count=300, **params):
    chooser = sampler(**params)
    return [chooser.sample(LOGITS)[0] for _ in range(count)]


@given(st.lists(st.floats(-5, 5, width=32), min_size=5, max_size=5))
def test_greedy_is_argmax_and_the_lowest_id_at_a_tie(values):
    token_id, _ = sampler(temperature=0.0).sample(torch.tensor(values))
    assert token_id == values.index(max(values))


def test_a_seed_fixes_the_draws_and_another_seed_changes_them():
    assert drawn(seed=3) == drawn(seed=3)
    assert drawn(seed=3) != drawn(seed=4)


def test_frequencies_follow_the_distribution():
    tokens = drawn(4000)
    for token_id, probability in enumerate(LOGITS.exp().tolist()):
        spread = 5 * math.sqrt(probability * (1 - probability) / len(tokens))
        assert abs(tokens.count(token_id) / len(tokens) - probability) < spread


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 1}, {1}),
        ({"top_k": -1}, {0, 1, 2, 3, 4}),
        ({"top_k": 50}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.35}, {1}),
        ({"top_p": 0.65}, {1, 3}),
        ({"top_p": 0.8}, {1, 3, 4}),
        ({"top_p": 1e-6}, {1}),
        ({"min_p": 0.5}, {1, 3}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 3, "top_p": 0.8}, {1, 3}),  # top_p counts within what top_k left: 0.47, 0.82
        ({"logit_bias": {1: -100.0}}, {0, 2, 3, 4}),
        ({"logit_bias": {2: 100.0}}, {2}),
        ({"logit_bias": {99: 100.0}}, {0, 1, 2, 3, 4}),
    ],
)
def test_filters(params, kept):
    assert set(drawn(**params)) == kept


def test_low_temperature_sharpens_and_the_lowest_is_greedy():
    assert drawn(temperature=0.1).count(1) > drawn(temperature=1.0).count(1)
    assert set(drawn(temperature=1e-6)) == {1}


def test_penalties():
    chooser = sampler(temperature=0.0, frequency_penalty=2.0)
    assert [chooser.sample(LOGITS)[0] for _ in range(4)][:3] == [1, 3, 4]
    chooser = sampler(temperature=0.0, presence_penalty=0.5)
    assert [chooser.sample(LOGITS)[0] for _ in range(3)] == [1, 3, 1]
    assert sampler(temperature=0.0, repetition_penalty=2.0, prompt=[1]).sample(LOGITS)[0] == 3


def test_forbidden_ids_until_min_tokens():
    chooser = sampler(temperature=0.0, min_tokens=2, forbidden=[1, 4000])
    assert [chooser.sample(LOGITS)[0] for _ in range(3)] == [3, 3, 1]


def test_logprobs_are_the_models_own_before_all_shaping():
    _, entry = sampler(temperature=0.0, logprobs=2, logit_bias={1: -100.0}).sample(LOGITS)
    assert entry.token_id == 3
    assert entry.logprob == pytest.approx(math.log(0.3), abs=1e-6)
    assert [token_id for token_id, _ in entry.top] == [1, 3]
    assert [value for _, value in entry.top] == pytest.approx([math.log(0.4), math.log(0.3)], abs=1e-6)
    assert sampler(temperature=0.0, logprobs=0).sample(LOGITS)[1].top == ()
    assert sampler(temperature=0.0).sample(LOGITS)[1] is None


def test_numbers_that_are_none_end_the_request():
    with pytest.raises(OperationError) as caught:
        sampler(temperature=0.0).sample(torch.tensor([0.0, math.nan, 0.0, 0.0, 0.0]))
    assert caught.value.code == "engine_failed"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -5), ("min_tokens", -1), ("temperature", -0.1), ("temperature", math.nan),
        ("top_p", 0.0), ("top_p", 1.1), ("top_k", -2), ("min_p", 1.5), ("seed", 2**63), ("stop", ("",)),
        ("stop", ("x" * 2000,)), ("stop", ("a",) * 17), ("logprobs", 21), ("logprobs", -1), ("n", 0), ("n", 129),
        ("presence_penalty", 3.0), ("frequency_penalty", math.inf), ("repetition_penalty", 0.0),
        ("logit_bias", {1: 101.0}),
    ],
)  # fmt: skip
def test_bad_parameters_name_the_field(field, value):
    with pytest.raises(ClientError) as caught:
        SamplingParams(**{field: value})
    assert (caught.value.code, caught.value.field) == ("invalid_request", field)


def test_min_tokens_over_max_tokens_is_refused():
    with pytest.raises(ClientError) as caught:
        SamplingParams(max_tokens=1, min_tokens=2)
    assert caught.value.field == "min_tokens"
