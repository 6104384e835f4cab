"""Rule: a bad value in a body is one error with a stable code that names its field; good values come out as said."""

import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfill.engines.serving.fields import decode_object
from farfill.engines.serving.request import parse_chat, parse_completion, parse_detokenize, parse_tokenize
from farfill.errors import ClientError
from farfill.kv.spec import TransferId
from farfill.transfer.spec import StoreAddress, TransferSpec, to_kv_transfer_params

SPEC = TransferSpec(
    transfer_id=TransferId("0" * 32),
    epoch=1,
    store=StoreAddress(instance="s", control_url="http://127.0.0.1:1", host="127.0.0.1", data_port=1),
    producer="p",
    consumer="c",
    prefix_tokens=2,
    chunk_tokens=16,
    key=bytes(32),
)
PRODUCE = to_kv_transfer_params(SPEC, leg="prefill")
CONSUME = to_kv_transfer_params(SPEC, leg="decode")


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def refused(parse: Any, body: bytes) -> ClientError:
    with pytest.raises(ClientError) as caught:
        parse(body)
    return caught.value


BAD_BODIES = [
    (b"", "invalid_json"),
    (b"{", "invalid_json"),
    (b'{"prompt": "a"} x', "invalid_json"),
    (b'{"temperature": NaN, "prompt": "a"}', "invalid_json"),
    (b'{"prompt": "\\ud800"}', "invalid_json"),
    (b"[" * 100_000, "invalid_json"),
    (b'{"prompt": "\xff\xfe"}', "invalid_encoding"),
    ('{"prompt": "a"}'.encode("utf-16"), "invalid_encoding"),
    (b"[]", "invalid_request"),
    (b"null", "invalid_request"),
    (b'"prompt"', "invalid_request"),
]


@pytest.mark.parametrize(("body", "code"), BAD_BODIES, ids=[str(i) for i in range(len(BAD_BODIES))])
@pytest.mark.parametrize("parse", [parse_completion, parse_chat, parse_tokenize, parse_detokenize])
def test_a_body_that_is_no_json_object_is_refused(parse: Any, body: bytes, code: str) -> None:
    assert refused(parse, body).code == code


BAD_VALUES: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": -1}, "invalid_request", "max_tokens"),
    ({"max_tokens": 0}, "invalid_request", "max_tokens"),
    ({"max_tokens": 1.5}, "invalid_request", "max_tokens"),
    ({"max_tokens": "5"}, "invalid_request", "max_tokens"),
    ({"max_tokens": True}, "invalid_request", "max_tokens"),
    ({"max_tokens": 10**30}, "invalid_request", "max_tokens"),
    ({"max_completion_tokens": -1}, "invalid_request", "max_completion_tokens"),
    ({"min_tokens": -1}, "invalid_request", "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "invalid_request", "min_tokens"),
    ({"temperature": -0.1}, "invalid_request", "temperature"),
    ({"temperature": "hot"}, "invalid_request", "temperature"),
    ({"temperature": True}, "invalid_request", "temperature"),
    ({"top_p": 0}, "invalid_request", "top_p"),
    ({"top_p": 1.1}, "invalid_request", "top_p"),
    ({"top_k": -2}, "invalid_request", "top_k"),
    ({"min_p": 2}, "invalid_request", "min_p"),
    ({"seed": 2**63}, "invalid_request", "seed"),
    ({"seed": "x"}, "invalid_request", "seed"),
    ({"n": 0}, "invalid_request", "n"),
    ({"n": 100_000}, "invalid_request", "n"),
    ({"stop": [1]}, "invalid_request", "stop"),
    ({"stop": [""]}, "invalid_request", "stop"),
    ({"stop": ["a"] * 1000}, "invalid_request", "stop"),
    ({"stop": "a" * 2000}, "invalid_request", "stop"),
    ({"stop_token_ids": ["a"]}, "invalid_request", "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "invalid_request", "stop_token_ids"),
    ({"stop_token_ids": 5}, "invalid_request", "stop_token_ids"),
    ({"ignore_eos": "yes"}, "invalid_request", "ignore_eos"),
    ({"frequency_penalty": 2.5}, "invalid_request", "frequency_penalty"),
    ({"presence_penalty": -2.5}, "invalid_request", "presence_penalty"),
    ({"repetition_penalty": 0}, "invalid_request", "repetition_penalty"),
    ({"logit_bias": {"a": 1}}, "invalid_request", "logit_bias"),
    ({"logit_bias": {"1": 101}}, "invalid_request", "logit_bias.1"),
    ({"logit_bias": [1]}, "invalid_request", "logit_bias"),
    ({"stream": "true"}, "invalid_request", "stream"),
    ({"stream_options": {"include_usage": True}}, "invalid_request", "stream_options"),
    ({"stream": True, "stream_options": []}, "invalid_request", "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "invalid_request", "stream_options.include_usage"),
    ({"model": 5}, "invalid_request", "model"),
    ({"echo": True}, "unsupported_parameter", "echo"),
    ({"prompt_logprobs": 1}, "unsupported_parameter", "prompt_logprobs"),
    ({"use_beam_search": True}, "unsupported_parameter", "use_beam_search"),
    ({"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
    ({"structured_outputs": {"regex": "a"}}, "unsupported_parameter", "structured_outputs"),
    ({"kv_transfer_params": 5}, "invalid_request", "kv_transfer_params"),
    ({"kv_transfer_params": {**PRODUCE, "do_remote_prefill": True}}, "invalid_request", "kv_transfer_params"),
    ({"kv_transfer_params": {**PRODUCE, "farfill": {}}}, "invalid_request", "kv_transfer_params.farfill"),
    ({"kv_transfer_params": PRODUCE, "n": 2}, "invalid_request", "n"),
    ({"kv_transfer_params": PRODUCE, "stream": True}, "invalid_request", "stream"),
]
COMPLETION_ONLY: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "invalid_request", "prompt"),
    ({"prompt": ""}, "empty_prompt", "prompt"),
    ({"prompt": []}, "empty_prompt", "prompt"),
    ({"prompt": [""]}, "empty_prompt", "prompt"),
    ({"prompt": [[]]}, "empty_prompt", "prompt"),
    ({"prompt": ["a", ""]}, "empty_prompt", "prompt"),
    ({"prompt": 5}, "invalid_request", "prompt"),
    ({"prompt": {"a": 1}}, "invalid_request", "prompt"),
    ({"prompt": [1, "a"]}, "invalid_request", "prompt"),
    ({"prompt": ["a", 1]}, "invalid_request", "prompt"),
    ({"prompt": [-1]}, "invalid_request", "prompt"),
    ({"prompt": [1.5]}, "invalid_request", "prompt"),
    ({"prompt": [True]}, "invalid_request", "prompt"),
    ({"prompt": ["a"] * 2000}, "invalid_request", "prompt"),
    ({"logprobs": 21}, "invalid_request", "logprobs"),
    ({"logprobs": -1}, "invalid_request", "logprobs"),
    ({"suffix": "x"}, "unsupported_parameter", "suffix"),
    ({"best_of": 3}, "unsupported_parameter", "best_of"),
    ({"kv_transfer_params": CONSUME, "prompt": ["a", "b"]}, "invalid_request", "kv_transfer_params"),
]
CHAT_ONLY: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "invalid_request", "messages"),
    ({"messages": []}, "empty_prompt", "messages"),
    ({"messages": "hello"}, "invalid_request", "messages"),
    ({"messages": ["hello"]}, "invalid_request", "messages[0]"),
    ({"messages": [{"content": "a"}]}, "invalid_request", "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "invalid_request", "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "unsupported_parameter",
        "messages[0].content",
    ),
    ({"tools": "x"}, "invalid_request", "tools"),
    ({"tools": ["x"]}, "invalid_request", "tools"),
    ({"tool_choice": "required"}, "unsupported_parameter", "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "unsupported_parameter", "tool_choice"),
    ({"logprobs": 5}, "invalid_request", "logprobs"),
    ({"top_logprobs": 5}, "invalid_request", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "invalid_request", "top_logprobs"),
    ({"chat_template": "{{ x }}"}, "unsupported_parameter", "chat_template"),
    ({"chat_template_kwargs": 5}, "invalid_request", "chat_template_kwargs"),
    ({"functions": [{"name": "f"}]}, "unsupported_parameter", "functions"),
    ({"modalities": ["audio"]}, "unsupported_parameter", "modalities"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "invalid_request",
        "continue_final_message",
    ),
]


@pytest.mark.parametrize(("change", "code", "field"), BAD_VALUES + COMPLETION_ONLY, ids=repr)
def test_bad_completion_values_name_their_field(change: dict[str, Any], code: str, field: str) -> None:
    error = refused(parse_completion, encoded({"model": "m", "prompt": "a", **change}))
    assert (error.code, error.field) == (code, field)
    assert error.http_status == 400


@pytest.mark.parametrize(("change", "code", "field"), BAD_VALUES + CHAT_ONLY, ids=repr)
def test_bad_chat_values_name_their_field(change: dict[str, Any], code: str, field: str) -> None:
    messages = [{"role": "user", "content": "a"}]
    error = refused(parse_chat, encoded({"model": "m", "messages": messages, **change}))
    assert (error.code, error.field) == (code, field)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ({"prompt": [1]}, "prompt"),
    ],
)
def test_tokenize_takes_a_prompt_or_messages(body: dict[str, Any], field: str) -> None:
    assert refused(parse_tokenize, encoded(body)).field == field


@pytest.mark.parametrize("tokens", [None, "abc", [1, -1], [1.5], {"a": 1}])
def test_detokenize_takes_token_ids(tokens: Any) -> None:
    assert refused(parse_detokenize, encoded({"tokens": tokens})).field == "tokens"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", ("ab",)),
        (["ab"], ("ab",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2]], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        (["a", [1]], ("a", (1,))),
    ],
)
def test_prompt_forms(prompt: Any, prompts: Any) -> None:
    assert parse_completion(encoded({"prompt": prompt})).prompts == prompts


def test_null_means_absent() -> None:
    names = ("max_tokens", "temperature", "stop", "seed", "n", "logprobs", "echo", "stream", "stream_options", "user")
    parsed = parse_completion(encoded({"prompt": "a", **dict.fromkeys(names)}))
    assert parsed == parse_completion(encoded({"prompt": "a"}))


def test_all_sampling_parameters_arrive() -> None:
    sampling = parse_completion(
        encoded(
            {
                "prompt": "a",
                "max_tokens": 5.0,
                "min_tokens": 2,
                "temperature": 0,
                "top_p": 0.5,
                "top_k": 7,
                "min_p": 0.1,
                "seed": -3,
                "stop": "x",
                "stop_token_ids": [4],
                "ignore_eos": True,
                "logprobs": 3,
                "n": 2,
                "presence_penalty": 1,
                "frequency_penalty": -1,
                "repetition_penalty": 1.5,
                "logit_bias": {"7": -100},
                "include_stop_str_in_output": True,
                "skip_special_tokens": False,
            }
        )
    ).sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature, sampling.top_p) == (5, 2, 0.0, 0.5)
    assert (sampling.top_k, sampling.min_p, sampling.seed, sampling.stop) == (7, 0.1, -3, ("x",))
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.logprobs, sampling.n) == ((4,), True, 3, 2)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.5)
    assert (sampling.logit_bias, sampling.include_stop, sampling.skip_special_tokens) == ({7: -100.0}, True, False)


def test_the_newer_name_of_max_tokens_wins() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "max_completion_tokens": 6}
    assert parse_chat(encoded(body)).sampling.max_tokens == 6


def test_text_parts_of_a_message_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = parse_chat(encoded({"messages": [{"role": "user", "content": parts}]})).chat
    assert chat.messages[0]["content"] == "a\nb"


def test_tool_choice_none_hides_the_tools() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}
    assert len(parse_chat(encoded(body)).chat.tools) == 1
    assert parse_chat(encoded({**body, "tool_choice": "none"})).chat.tools == ()


def test_legs_are_told_apart() -> None:
    assert parse_completion(encoded({"prompt": [1, 2, 3]})).leg is None
    for params, producing in ((PRODUCE, True), (CONSUME, False)):
        leg = parse_completion(encoded({"prompt": [1, 2, 3], "kv_transfer_params": params})).leg
        assert leg is not None
        assert (leg.producing, leg.spec) == (producing, SPEC)


def test_unknown_fields_are_accepted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            parse_completion(encoded({"prompt": "a", "quux_of_test_request": 1, "user": "u"}))
    assert [record.getMessage() for record in caplog.records if "quux_of_test_request" in record.getMessage()] == [
        "ignoring unknown request field 'quux_of_test_request' (logged once)"
    ]
    assert "'user'" not in caplog.text


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_names = st.sampled_from(
    sorted({name for change, _, _ in BAD_VALUES + COMPLETION_ONLY + CHAT_ONLY for name in change} | {"prompt"})
)


@given(st.dictionaries(_names, _json, max_size=5))
def test_any_json_is_parsed_or_refused_with_a_client_error(body: dict[str, Any]) -> None:
    for parse in (parse_completion, parse_chat, parse_tokenize, parse_detokenize):
        try:
            parse(encoded(body))
        except ClientError as error:
            assert error.code in ("invalid_request", "unsupported_parameter", "empty_prompt", "invalid_json")


@given(st.binary(max_size=40))
def test_any_bytes_are_decoded_or_refused(body: bytes) -> None:
    try:
        assert isinstance(decode_object(body), dict)
    except ClientError as error:
        assert error.code in ("invalid_request", "invalid_json", "invalid_encoding")


@pytest.mark.parametrize("value", [0, 10**30])
def test_a_number_out_of_range_is_told_both_bounds(value: int) -> None:
    error = refused(parse_completion, encoded({"prompt": "a", "max_tokens": value}))
    assert (error.code, error.field) == ("invalid_request", "max_tokens")
    assert f"from 1 to {2**63 - 1}, not {value}" in error.message


@pytest.mark.parametrize(
    ("parse", "body"),
    [(parse_completion, {"prompt": "a"}), (parse_chat, {"messages": [{"role": "user", "content": "a"}]})],
)
def test_a_cache_salt_is_a_bounded_string(parse: Any, body: dict[str, Any]) -> None:
    assert parse(encoded(body)).cache_salt == parse(encoded({**body, "cache_salt": None})).cache_salt == ""
    assert parse(encoded({**body, "cache_salt": "x" * 256})).cache_salt == "x" * 256
    for bad in ("", "x" * 257, 5, ["x"]):
        error = refused(parse, encoded({**body, "cache_salt": bad}))
        assert (error.code, error.field) == ("invalid_request", "cache_salt")
