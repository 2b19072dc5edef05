"""What is learnt of a draft's tokens, and which of them are verified where not all can be."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.batching.verify_steps import most_promising
from scheduler.config import Policy
from scheduler.messages import Role, Row, RowResult
from tests.unit.scheduler.driver import Driver, check_to_the_end

falling = st.lists(st.floats(0, 1), max_size=4).map(lambda chances: sorted(chances, reverse=True))


@given(st.lists(falling, max_size=4), st.integers(0, 9))
def test_no_other_choice_promises_more(chances: list[list[float]], room: int) -> None:
    lengths = most_promising(chances, room)

    def promise(chosen: tuple[int, ...] | list[int]) -> float:
        return sum(sum(found[:length]) for found, length in zip(chances, chosen, strict=True))

    every = product(*(range(len(found) + 1) for found in chances))
    assert sum(lengths) <= room
    assert promise(lengths) == pytest.approx(max(promise(other) for other in every if sum(other) <= room))


CONFIDENCES = {1: bytes([250, 10, 10]), 2: bytes([250, 250, 250]), 3: bytes([10, 10, 10]), 4: b""}


def test_where_room_is_short_the_least_promising_tokens_are_left_out_and_no_row() -> None:
    """Of four sequences, of which a draft has proposed three tokens each, as sure of them as CONFIDENCES."""
    driver = Driver(policy=Policy.EQSPEC, batch_size=4, max_running=4, draft_length=3, wait_bound_steps=100.0)
    driver.join("target", packed=10)
    driver.join("draft", Role.DRAFT)
    for sequence_id in CONFIDENCES:
        driver.submit(sequence_id, max_tokens=30)

    def propose(row: Row) -> RowResult:
        result = driver.workers["draft"].run_row(row)
        return replace(result, confidences=CONFIDENCES[row.sequence_id] if result.tokens else b"")

    while driver.steps["target"]:
        driver.answer("target")
    while driver.steps["draft"]:
        driver.answer("draft", instead=propose)
    step = driver.only_step("target")
    assert {row.sequence_id: len(row.draft_tokens) for row in step.rows} == {1: 1, 2: 3, 3: 0, 4: 2}
    assert step.group is not None
    assert not step.group.equal_length
    check_to_the_end(driver, *CONFIDENCES)
