"""How keys share a cell, what their limits refuse and let pass, and when trying again helps."""

from __future__ import annotations

import itertools

import pytest

from scheduler.key_class import KeyClass
from scheduler.messages import MAX_PRIORITY, MIN_PRIORITY, RefusalCause, RefuseSequence
from tests.unit.scheduler.driver import Driver, of_type

NUMBERS = itertools.count(1000)


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


@pytest.mark.parametrize("priority", [MIN_PRIORITY - 1, MAX_PRIORITY + 1])
def test_priorities_have_limits(priority: int) -> None:
    driver = driver_of()
    refusal = refused(driver, 1, priority=priority)
    assert refusal is not None
    assert refusal.message == f"priority is {priority}, must be between {MIN_PRIORITY} and {MAX_PRIORITY}"
    assert refused(driver, 2, priority=MIN_PRIORITY) is None
    assert refused(driver, 3, priority=MAX_PRIORITY) is None


def served_under_load(driver: Driver, shapes: dict[str, tuple[int, int]], turns: int) -> dict[str, int]:
    """The tokens that each key gets in so many steps, while 20 more of its sequences wait: of so long prompts and
    outputs."""
    before = {key.name: key.prompt_tokens + key.output_tokens for key in driver.core.snapshot().keys}
    for _ in range(turns):
        for key in driver.core.snapshot().keys:
            for _ in range(key.waiting, 20 if key.name in shapes else 0):
                prompt, output = shapes[key.name]
                driver.submit(next(NUMBERS), prompt, output, key=key.name)
        driver.answer("target")
    return {key.name: key.prompt_tokens + key.output_tokens - before[key.name] for key in driver.core.snapshot().keys}


def test_tokens_are_shared_by_weight_whatever_the_length_of_requests() -> None:
    """Within twice what the slots can hold: the kind of bound that the paper proves for keys with a backlog."""
    driver = driver_of(KeyClass("one"), KeyClass("three", weight=3.0), max_running=12, batch_size=12, draft_length=0)
    tokens = served_under_load(driver, {"one": (3, 60), "three": (40, 5)}, 500)
    assert abs(tokens["three"] / 3.0 - tokens["one"]) <= 2 * 12 * 60
    assert tokens["one"] > 4000


def test_idleness_saves_nothing_up() -> None:
    """A key that comes after a long time is served as one that has just begun: not alone until it has caught up."""
    driver = driver_of(KeyClass("busy"), KeyClass("late"), max_running=4, draft_length=0)
    served_under_load(driver, {"busy": (5, 5)}, 200)
    gained = served_under_load(driver, {"busy": (5, 5), "late": (5, 5)}, 200)
    assert abs(gained["busy"] - gained["late"]) <= 2 * 4 * 10
    assert gained["late"] > 300


def test_names_that_are_not_configured_share_one_account() -> None:
    driver = driver_of(KeyClass("a"))
    for sequence_id, key in enumerate(("a", "", "made up", "made up, too")):
        driver.submit(sequence_id, prompt_length=5, max_tokens=2, key=key)
    driver.settle()
    assert {key.name: key.prompt_tokens for key in driver.core.snapshot().keys} == {"": 15, "a": 5}
