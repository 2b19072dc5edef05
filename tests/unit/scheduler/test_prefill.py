"""Which prompt the next chunk is of, and which step it is part of."""

from __future__ import annotations

from scheduler.messages import SendStep
from tests.unit.scheduler.driver import Driver, expected, of_type, outputs


def chunks(driver: Driver) -> list[tuple[int, int]]:
    """The sequence and the tokens of all rows that fed a prompt, in their order."""
    return [
        (row.sequence_id, len(row.tokens))
        for step in of_type(driver.log, SendStep)
        for row in step.rows
        if len(row.tokens) > 1 or row.opening is not None
    ]


def test_the_prompt_that_was_admitted_first_is_computed_first() -> None:
    driver = Driver(prefill_chunk=10, steps_in_flight=1)
    driver.join("target", pages=10_000)
    for number in range(3):
        driver.submit(number, prompt_length=15, max_tokens=1)
    driver.settle()
    # What is left of a chunk goes to the next prompt.
    assert chunks(driver) == [(0, 10), (0, 5), (1, 5), (1, 10), (2, 10), (2, 5)]


def busy() -> Driver:
    """Two sequences decode, each in every other step, of which two are always in flight."""
    driver = Driver(batch_size=1, draft_length=0, prefill_chunk=10, steps_in_flight=2)
    driver.join("target")
    for number in range(2):
        driver.submit(number, max_tokens=200)
    for _ in range(6):
        driver.answer("target")
    assert [[row.sequence_id for row in step.rows] for step in driver.outstanding("target")] in ([[0], [1]], [[1], [0]])
    return driver


def steps_with(driver: Driver, sequence_id: int) -> list[bool]:
    return [any(row.sequence_id == sequence_id for row in step.rows) for step in of_type(driver.log, SendStep)]


def test_chunks_of_a_prompt_ride_in_consecutive_steps_beside_others() -> None:
    """Where they waited for each other's answers, they would ride in every other step."""
    driver = busy()
    before = len(steps_with(driver, 10))
    driver.submit(10, prompt_length=35, max_tokens=1)
    while not outputs(driver, 10):
        driver.answer("target")
    assert steps_with(driver, 10)[before:][:5] == [True, True, True, True, False]
    assert outputs(driver, 10) == expected(driver, 10)
