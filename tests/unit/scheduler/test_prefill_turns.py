"""Whose prompt the next chunk is of."""

from __future__ import annotations

from scheduler.key_class import KeyClass
from scheduler.messages import SendStep
from tests.sim.driver import Driver, of_type

KEYS = (KeyClass("flood"), KeyClass("other"), KeyClass("third"))


def driver_of(keys: tuple[KeyClass, ...] = KEYS) -> Driver:
    driver = Driver(keys=keys, prefill_chunk=10, steps_in_flight=1)
    driver.join("target")
    return driver


def chunks(driver: Driver) -> list[int]:
    """The sequences of all rows that fed a prompt, in their order."""
    return [
        row.sequence_id
        for step in of_type(driver.log, SendStep)
        for row in step.rows
        if len(row.tokens) > 1 or row.opening is not None
    ]


def test_keys_take_turns_whatever_each_has() -> None:
    driver = driver_of()
    for number in range(4):
        driver.submit(number, prompt_length=40, max_tokens=1, key="flood")
    driver.submit(10, prompt_length=30, max_tokens=1, key="other")
    driver.submit(20, prompt_length=20, max_tokens=1, key="third")
    driver.settle()
    # The first chunk was sent before the others came.
    assert chunks(driver) == [0, 10, 20, 0, 10, 20, 0, 10, 0, *[1] * 4, *[2] * 4, *[3] * 4]


def test_of_one_key_the_older_prompt_is_computed_first() -> None:
    driver = driver_of(())
    for number in range(3):
        driver.submit(number, prompt_length=30, max_tokens=1)
    driver.settle()
    assert chunks(driver) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_what_is_left_of_a_chunk_goes_to_the_next_key() -> None:
    driver = driver_of()
    driver.submit(0, prompt_length=14, max_tokens=1, key="flood")
    driver.submit(1, prompt_length=14, max_tokens=1, key="flood")
    driver.submit(10, prompt_length=10, max_tokens=1, key="other")
    driver.answer("target")  # 10 of sequence 0
    driver.answer("target")  # 10 of sequence 10, whose turn it is
    (step,) = driver.steps["target"]
    assert [(row.sequence_id, len(row.tokens)) for row in step.rows] == [(0, 4), (1, 6)]
