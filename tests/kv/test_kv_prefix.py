"""Names of prefix blocks: equal for equal prefixes under equal salts, and for nothing else."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfill.errors import LocalProtocolError
from farfill.kv.prefix import prefix_block_hashes, prefix_salt, token_digest

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=60)
SALT = prefix_salt("f" * 64, tenant="a", adapter="")
# Computed with hashlib alone, outside of this project's code.
PINNED = "d3cc6d23c05aac4ed4bace36dab86708cb28321054d5593e408cf9427dc2e764"


@given(TOKENS, TOKENS, st.integers(1, 9))
def test_two_prompts_share_exactly_the_names_of_their_common_blocks(
    first: list[int], second: list[int], block_tokens: int
) -> None:
    one, other = (prefix_block_hashes(tokens, block_tokens, salt=SALT) for tokens in (first, second))
    assert (len(one), len(other)) == (len(first) // block_tokens, len(second) // block_tokens)
    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1
    shared = common // block_tokens
    assert one[:shared] == other[:shared]
    assert set(one[shared:]).isdisjoint(other[shared:])


@given(TOKENS, st.integers(1, 9))
def test_the_names_are_the_documented_chain(tokens: list[int], block_tokens: int) -> None:
    names = prefix_block_hashes(tokens, block_tokens, salt=SALT)
    assert len(set(names)) == len(names)
    before = hashlib.sha256(b"farfill-prefix-block-1" + block_tokens.to_bytes(4, "little") + SALT).digest()
    for number, name in enumerate(names):
        block = tokens[number * block_tokens : (number + 1) * block_tokens]
        before = hashlib.sha256(before + b"".join(token.to_bytes(4, "little") for token in block)).digest()
        assert name == before


def test_names_are_the_same_in_every_process_and_version() -> None:
    """Stores and routers of different ages compare these; a change needs a new hash scheme in the fingerprint."""
    assert prefix_block_hashes([1, 2, 3, 4, 5], 2, salt=bytes(32))[1].hex() == PINNED


def test_salts_differ_in_fingerprint_tenant_and_adapter_and_in_their_borders() -> None:
    parts = [
        ("f", "a", ""),
        ("g", "a", ""),
        ("f", "b", ""),
        ("f", "a", "x"),
        ("fa", "", ""),
        ("f", "", "a"),
        ("", "fa", ""),
    ]
    salts = [prefix_salt(fingerprint, tenant=tenant, adapter=adapter) for fingerprint, tenant, adapter in parts]
    assert len(set(salts)) == len(parts)
    names = [tuple(prefix_block_hashes([1, 2], 1, salt=salt)) for salt in salts]
    assert len(set(names)) == len(parts)


def test_blocks_of_another_size_have_other_names() -> None:
    assert set(prefix_block_hashes([1] * 8, 4, salt=SALT)).isdisjoint(prefix_block_hashes([1] * 8, 8, salt=SALT))


@pytest.mark.parametrize("token", [-1, 2**32, 1.5, "1"])
def test_what_is_no_token_id_is_our_own_mistake(token: int) -> None:
    with pytest.raises(LocalProtocolError):
        token_digest([token])
    with pytest.raises(LocalProtocolError):
        prefix_block_hashes([token], 1, salt=SALT)


def test_a_block_has_at_least_one_token() -> None:
    with pytest.raises(LocalProtocolError):
        prefix_block_hashes([1], 0, salt=SALT)


def test_the_token_digest_is_over_the_whole_prefix() -> None:
    assert token_digest([1, 2]) == hashlib.sha256(b"\1\0\0\0\2\0\0\0").digest()
    assert len({token_digest(ids) for ids in ([], [1], [1, 2], [2, 1], [1, 2, 0])}) == 5
