"""What a key's limits refuse, what they let pass, and when trying again helps."""

from __future__ import annotations

import pytest

from scheduler.config import SchedulerConfig
from scheduler.key_class import KeyClass
from scheduler.messages import MAX_PRIORITY, MIN_PRIORITY, RefusalCause, RefuseSequence
from tests.unit.scheduler.driver import Driver, of_type


def refused(driver: Driver, sequence_id: int, **request: object) -> RefuseSequence | None:
    refusals = of_type(driver.submit(sequence_id, **request), RefuseSequence)  # type: ignore[arg-type]
    return refusals[0] if refusals else None


def driver_of(*keys: KeyClass, **config: object) -> Driver:
    driver = Driver(keys=keys, **config)
    driver.join("target")
    return driver


def test_too_many_waiting_sequences_of_one_key_are_refused_and_others_are_not() -> None:
    driver = driver_of(KeyClass("a", max_waiting=2), KeyClass("b"), max_running=1)
    for number in range(3):
        assert refused(driver, number, key="a") is None
    refusal = refused(driver, 3, key="a")
    assert refusal is not None
    assert refusal.cause is RefusalCause.KEY_LIMIT
    assert refusal.message == "2 sequences wait, max_waiting of key a is 2"
    assert refused(driver, 4, key="b") is None
    assert refused(driver, 5) is None
    # What was admitted before comes in whatever waits.
    assert refused(driver, 6, key="a", admitted_before=True) is None
    assert refused(driver, 7, key="a", committed_output=(1,)) is None
    keys = {key.name: key for key in driver.core.snapshot().keys}
    assert (keys["a"].waiting, keys["a"].refusals) == (4, {"max_waiting": 1})


def test_a_key_without_a_slot_of_its_own_may_still_have_as_many_waiting_as_it_may() -> None:
    driver = driver_of(KeyClass("a", max_running=2, max_waiting=3), max_running=10)
    assert [refused(driver, number, key="a") is None for number in range(7)] == [True] * 5 + [False] * 2
    (snapshot,) = [key for key in driver.core.snapshot().keys if key.name == "a"]
    assert (snapshot.running, snapshot.waiting) == (2, 3)
    driver.settle()
    assert driver.core.snapshot().live == 0


def test_a_full_queue_is_counted_for_the_key_that_was_refused() -> None:
    driver = driver_of(KeyClass("a"), max_running=1, max_queued_sequences=1)
    for number in range(4):
        refused(driver, number)
    assert (refusal := refused(driver, 9, key="a")) is not None
    assert refusal.cause is RefusalCause.QUEUE_FULL
    counted = {key.name: dict(key.refusals) for key in driver.core.snapshot().keys}
    assert counted == {"": {"max_queued_sequences": 2}, "a": {"max_queued_sequences": 1}}


def test_tokens_of_a_minute_are_those_that_were_served() -> None:
    driver = driver_of(KeyClass("a", tokens_per_minute=60))
    assert refused(driver, 1, key="a", prompt_length=10, max_tokens=30) is None
    driver.settle()  # at time 0: 10 tokens of prompt and 30 of output are gone, 20 are left
    assert refused(driver, 2, key="a", prompt_length=19, max_tokens=30) is None  # the last one lets it in
    driver.settle()
    refusal = refused(driver, 3, key="a", prompt_length=1)
    assert refusal is not None
    assert refusal.cause is RefusalCause.KEY_LIMIT
    assert "tokens_per_minute of key a is 60" in refusal.message
    assert refusal.retry_after_seconds == pytest.approx(30.0)  # 29 below zero, and one is needed: a token a second
    driver.now = 29.9
    assert refused(driver, 4, key="a", prompt_length=1) is not None
    driver.now = 30.1
    assert refused(driver, 5, key="a", prompt_length=1) is None
    # Prompts count at once, so of many that come together not all find the same tokens.
    assert refused(driver, 6, key="a", prompt_length=1) is not None
    # What was let in goes on, and what was admitted before is neither refused nor charged again.
    assert refused(driver, 7, key="a", admitted_before=True, prompt_length=500) is None
    driver.cancel(7)
    driver.cancel(5)
    driver.now = 32.2
    assert refused(driver, 8, key="a", prompt_length=1) is None


def test_what_was_served_is_told_by_key() -> None:
    driver = driver_of(KeyClass("a"), KeyClass("b"), KeyClass("idle"))
    driver.submit(1, prompt_length=5, max_tokens=7, key="a")
    driver.submit(2, prompt_length=3, max_tokens=2, key="b")
    driver.submit(3, prompt_length=4, max_tokens=1, key="made up")
    driver.settle()
    served = {key.name: (key.prompt_tokens, key.output_tokens) for key in driver.core.snapshot().keys}
    assert served == {"": (4, 1), "a": (5, 7), "b": (3, 2), "idle": (0, 0)}


@pytest.mark.parametrize("priority", [MIN_PRIORITY - 1, MAX_PRIORITY + 1])
def test_priorities_have_limits(priority: int) -> None:
    driver = driver_of()
    refusal = refused(driver, 1, priority=priority)
    assert refusal is not None
    assert refusal.message == f"priority is {priority}, must be between {MIN_PRIORITY} and {MAX_PRIORITY}"
    assert refused(driver, 2, priority=MIN_PRIORITY) is None
    assert refused(driver, 3, priority=MAX_PRIORITY) is None


def test_names_of_classes_are_there_and_differ() -> None:
    with pytest.raises(ValueError, match=r"keys\[1\] has the name 'a', must differ from keys\[0\]"):
        SchedulerConfig(keys=(KeyClass("a"), KeyClass("a", weight=2)))
    with pytest.raises(ValueError, match=r"keys\[0\] has the name '', must have at least 1 character"):
        SchedulerConfig(keys=(KeyClass(""),))
