"""Rules: text never contains half a character, and nothing of a stop string is shown; whatever the token borders."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import build_tokenizer

from farfill.engines.api import Tokenizer
from farfill.engines.hf.detokenize import StopStrings
from farfill.engines.hf.tokenizer import HfTokenizer
from farfill.errors import ClientError

TOKENIZER = HfTokenizer(build_tokenizer())
BYTE_OF = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size)}
TEXTS = st.text(st.sampled_from("ab é日🙂🚀\n\u200d\ufffdß"), max_size=30)


def test_it_is_a_tokenizer():
    tokenizer: Tokenizer = TOKENIZER
    assert tokenizer.vocab_size == len(BYTE_OF)


def pieces_of(ids, **options):
    detokenizer = TOKENIZER.detokenizer(**options)
    return [detokenizer.push(token_id) for token_id in ids] + [detokenizer.flush()]


@given(TEXTS)
def test_pieces_joined_are_the_text(text):
    """Byte by byte, the worst that a tokenizer can do, and in the tokenizer's own pieces."""
    for ids in ([BYTE_OF[bytes([byte])] for byte in text.encode()], TOKENIZER.encode(text)):
        pieces = pieces_of(ids)
        assert "".join(pieces) == text
        if "\ufffd" not in text:
            assert "\ufffd" not in "".join(pieces)


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=60), st.booleans())
@settings(max_examples=300)
def test_any_tokens_give_what_decoding_the_whole_gives(ids, skip):
    assert "".join(pieces_of(ids, skip_special_tokens=skip)) == TOKENIZER.decode(ids, skip_special_tokens=skip)


def test_a_character_is_held_back_until_it_is_whole():
    pieces = pieces_of([BYTE_OF[bytes([byte])] for byte in "é🙂".encode()])
    assert pieces == ["", "é", "", "", "", "🙂", ""]


def test_a_broken_character_becomes_visible_at_the_end_and_in_the_middle_of_garbage():
    half = [BYTE_OF[bytes([byte])] for byte in "🙂".encode()[:3]]
    assert "".join(pieces_of(half)) == "\ufffd"
    garbage = pieces_of([BYTE_OF[b"\xff"]] * 50)
    assert "".join(garbage) == "\ufffd" * 50
    assert "".join(garbage[:-1]).count("\ufffd") >= 40  # not all held back to the end


def test_special_tokens_show_only_when_asked():
    ids = TOKENIZER.encode("<|im_start|>a<|im_end|>")
    assert len(ids) == 3
    assert "".join(pieces_of(ids)) == "a"
    assert "".join(pieces_of(ids, skip_special_tokens=False)) == "<|im_start|>a<|im_end|>"


@given(TEXTS)
def test_token_bytes_joined_are_the_text(text):
    assert b"".join(TOKENIZER.token_bytes(i) for i in TOKENIZER.encode(text)) == text.encode()


def test_token_bytes_of_ids_beyond_the_vocabulary():
    assert TOKENIZER.token_bytes(TOKENIZER.vocab_size + 5) == b""


def shown(stops, parts, *, include_stop=False):
    finder, text = StopStrings(stops, include_stop=include_stop), ""
    for part in parts:
        piece, stop = finder.push(part)
        text += piece
        assert not (set(stops) & {s for s in stops if s in text and not include_stop})
        if stop is not None:
            return text, stop
    return text + finder.flush(), None


@given(
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.booleans(),
)
@settings(max_examples=500)
def test_stop_strings_against_a_search_after_each_piece(stops, parts, include_stop):
    text, expected = "", None
    for part in parts:
        text += part
        found = [(text.find(stop), order) for order, stop in enumerate(stops) if stop in text]
        if found:
            position, order = min(found)
            end = position + (len(stops[order]) if include_stop else 0)
            expected = (text[:end], stops[order])
            break
    assert shown(stops, parts, include_stop=include_stop) == (expected or (text, None))


def test_only_what_may_begin_a_stop_string_is_held_back():
    finder = StopStrings(["\n\nUser:"], include_stop=False)
    assert finder.push("Hello\n") == ("Hello", None)
    assert finder.push("World") == ("\nWorld", None)
    assert finder.push("\n\nUs") == ("", None)
    assert finder.push("er: x") == ("", "\n\nUser:")


def test_chat_template():
    messages = [{"role": "user", "content": "a"}]
    whole = TOKENIZER.apply_chat_template(messages)
    assert (
        TOKENIZER.decode(whole, skip_special_tokens=False) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    )
    bare = TOKENIZER.apply_chat_template(messages, add_generation_prompt=False)
    assert whole[: len(bare)] == bare
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert '"name": "f"' in TOKENIZER.decode(TOKENIZER.apply_chat_template(messages, tools=tools))
    extra = TOKENIZER.apply_chat_template(messages, template_kwargs={"prefill": "Sure"})
    assert TOKENIZER.decode(extra).endswith("assistant\nSure")


def test_messages_that_the_template_cannot_take_are_the_clients_fault():
    with pytest.raises(ClientError) as caught:
        TOKENIZER.apply_chat_template([{"role": "user", "content": "a"}], continue_final_message=True)
    assert caught.value.code == "invalid_request"
