"""Tests of the toy: two mutants pass them, one of which changes nothing."""

from tests.mutants.toy.counter import Counter


def test_counts() -> None:
    counter = Counter()
    assert counter.value == 0
    assert counter.add() is True
    assert counter.value == 1
    assert counter.add(2) is True
    assert counter.add(2) is False
    assert counter.value == 3


def test_describes() -> None:
    counter = Counter()
    assert counter.describe() == "0 of 3"
