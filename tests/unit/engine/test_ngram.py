from __future__ import annotations

import pytest

from engine.drafting.ngram_engine import NgramEngine, continuation
from engine.kv.pages import PageTable
from engine.steps import ProposeRow
from scheduler.sampling import SamplingParameters


@pytest.mark.parametrize(
    ("history", "count", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 2, [9, 1]),
        ([9, 5, 6, 1, 9, 5, 7, 2, 9, 5], 2, [7, 2]),  # the latest match
        ([5, 6, 1, 5], 2, []),  # one token alone is none
        ([1, 2, 8, 3, 2, 9, 4, 1, 2], 1, [8]),  # the longer match, although a shorter one is later
        ([4, 4, 4], 3, [4, 4, 4]),
        ([1, 2, 1, 2, 1], 5, [2, 1, 2, 1, 2]),
        ([1, 2, 3], 4, []),
        ([7], 4, []),
        ([], 4, []),
        ([1, 1], 0, []),
    ],
)
def test_continuation(history: list[int], count: int, expected: list[int]) -> None:
    assert continuation(history, count) == expected


def test_proposal_is_state_but_for_its_last_token() -> None:
    engine = NgramEngine()
    table = PageTable()
    history = [1, 2, 3, 1, 2]
    row = ProposeRow(table, history, 3, history, 5, SamplingParameters())
    assert engine.step([row]).rows[0].tokens == [3, 1, 2]
    assert table.length == len(history) + 2
