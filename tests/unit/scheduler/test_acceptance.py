"""What is learnt of a draft's tokens, and which of them are verified where not all can be."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.batching.trimming import most_promising
from scheduler.config import Policy
from scheduler.messages import EmitTokens, Role, Row, RowResult, SendStep
from tests.unit.scheduler.driver import Driver, expected, of_type, outputs

falling = st.lists(st.floats(0, 1), max_size=4).map(lambda chances: sorted(chances, reverse=True))


@given(st.lists(falling, max_size=4), st.integers(0, 9))
def test_no_other_choice_promises_more(chances: list[list[float]], room: int) -> None:
    lengths = most_promising(chances, room)

    def promise(chosen: tuple[int, ...] | list[int]) -> float:
        return sum(sum(found[:length]) for found, length in zip(chances, chosen, strict=True))

    every = product(*(range(len(found) + 1) for found in chances))
    assert sum(lengths) <= room
    assert promise(lengths) == pytest.approx(max(promise(other) for other in every if sum(other) <= room))


PROMPT_LENGTH = 3
CONFIDENCES = {1: bytes([250, 10, 10]), 2: bytes([250, 250, 250]), 3: bytes([10, 10, 10]), 4: b""}


def proposing(packed: int) -> Driver:
    """Four sequences, of which a draft has proposed three tokens each, as sure of them as CONFIDENCES."""
    driver = Driver(policy=Policy.EQSPEC, batch_size=4, draft_length=3, wait_bound_steps=100.0)
    driver.join("target", packed=packed)
    driver.join("draft", Role.DRAFT)
    for sequence_id in CONFIDENCES:
        driver.submit(sequence_id, max_tokens=30)

    def propose(row: Row) -> RowResult:
        result = driver.workers["draft"].run_row(row)
        return replace(result, confidences=CONFIDENCES[row.sequence_id] if result.tokens else b"")

    while not any(row.draft_tokens for step in driver.steps["target"] for row in step.rows):
        if driver.steps["target"]:
            driver.answer("target")
        else:
            driver.answer("draft", instead=propose)
    return driver


def test_where_room_is_short_the_least_promising_tokens_are_left_out_and_no_row() -> None:
    driver = proposing(packed=10)
    (step,) = (step for step in driver.steps["target"] if step.group is not None)
    assert {row.sequence_id: len(row.draft_tokens) for row in step.rows} == {1: 1, 2: 3, 3: 0, 4: 2}
    assert step.group is not None
    assert not step.group.equal_length
    driver.settle()
    for sequence_id in CONFIDENCES:
        assert outputs(driver, sequence_id) == expected(driver, sequence_id)
    steps = of_type(driver.log, SendStep)
    assert max(sum(len(row.tokens) + len(row.draft_tokens) for row in step.rows) for step in steps) == 10


def test_by_cost_what_is_not_worth_its_row_is_left_out_but_looked_at_now_and_then() -> None:
    driver = Driver(policy=Policy.AUTO, batch_size=4, draft_length=4, wait_bound_steps=4.0)
    driver.join("target")
    driver.join("draft", Role.DRAFT, guess=0.5)
    driver.submit(1, prompt_length=PROMPT_LENGTH, max_tokens=1500)
    worker = driver.workers["draft"]

    def propose(row: Row) -> RowResult:
        result = worker.run_row(row)
        wrong = [place for place, token in enumerate(result.tokens) if token != upcoming(row, place)]
        right = wrong[0] if wrong else len(result.tokens)
        return replace(result, confidences=bytes([230] * right + [5] * (len(result.tokens) - right)))

    def upcoming(row: Row, place: int) -> int:
        return oracle[row.kv_len + len(row.tokens) + place - PROMPT_LENGTH]

    oracle = expected(driver, 1)
    for _ in range(20000):
        if driver.steps["draft"]:
            step = driver.steps["draft"][0]
            passes = max((row.draft_length for row in step.rows), default=0)
            driver.answer("draft", propose, seconds=0.0001 * passes)
        elif driver.steps["target"]:
            step = driver.steps["target"][0]
            # A row costs a quarter of what a step does.
            rows = sum(len(row.tokens) + len(row.draft_tokens) for row in step.rows)
            driver.answer("target", seconds=0.02 + 0.005 * rows)
        else:
            break
    assert outputs(driver, 1) == oracle
    late = of_type(driver.log, EmitTokens)[100:]
    drafted, accepted = sum(emitted.drafted for emitted in late), sum(emitted.accepted for emitted in late)
    assert accepted > 0
    # Half of the tokens are right, so that of proposals verified whole less than a third would be.
    assert accepted / drafted > 0.7
    assert any(emitted.drafted > emitted.accepted for emitted in late)
