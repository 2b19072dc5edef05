"""Digests of token prefixes: what scheduler and workers compare."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.state.digests import EMPTY_DIGEST, DigestedTokens, extend_digest

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(tokens)
def test_every_prefix_has_the_digest_of_a_list_built_one_by_one(values: list[int]) -> None:
    digested = DigestedTokens(values)
    digest = EMPTY_DIGEST
    assert digested.digest(0) == digest
    for index, value in enumerate(values):
        digest = extend_digest(digest, value)
        assert digested.digest(index + 1) == digest


@given(tokens, tokens, st.data())
def test_truncation_and_growth_leave_no_trace(first: list[int], second: list[int], data: st.DataObject) -> None:
    keep = data.draw(st.integers(0, len(first)))
    digested = DigestedTokens(first)
    digested.truncate(keep)
    digested.extend(second)
    expected = DigestedTokens(first[:keep] + second)
    assert digested.tokens == expected.tokens
    assert [digested.digest(i) for i in range(len(digested) + 1)] == [
        expected.digest(i) for i in range(len(expected) + 1)
    ]


@given(tokens, tokens)
def test_different_lists_differ_and_fit_the_wire(first: list[int], second: list[int]) -> None:
    one, other = DigestedTokens(first), DigestedTokens(second)
    assert (one.digest(len(first)) == other.digest(len(second))) == (first == second)
    assert 0 <= one.digest(len(first)) < 2**64


def test_zeros_count() -> None:
    digests = [DigestedTokens([0] * length).digest(length) for length in range(10)]
    assert len(set(digests)) == 10


def test_no_digest_past_the_end() -> None:
    with pytest.raises(IndexError):
        DigestedTokens([1, 2]).digest(3)
