"""How keys share a cell, what their limits refuse and let pass, and when trying again helps."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from spool.scheduler.config import Policy
from spool.scheduler.key_class import KeyClass
from spool.scheduler.messages import (
    MAX_PRIORITY,
    MIN_PRIORITY,
    FinishReason,
    FinishSequence,
    RefusalCause,
    RefuseSequence,
    SendStep,
    SequenceCancelled,
    SequenceRequest,
    SequenceSubmitted,
)
from tests.unit.scheduler.driver import Driver, expected, of_type, outputs, prompt_of

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


def test_figures_name_only_keys_that_are_configured() -> None:
    driver = driver_of(KeyClass("a"))
    for sequence_id, key in enumerate(("a", "", "#1", "made up")):
        driver.submit(sequence_id, prompt_length=5, max_tokens=2, key=key)
    driver.settle()
    assert {key.name: key.prompt_tokens for key in driver.core.snapshot().keys} == {"": 15, "a": 5}


def test_figures_of_many_names_are_not_lost() -> None:
    """However many names come, in whatever order their sequences end."""
    driver = driver_of()
    for number in range(3000):
        driver.core.apply(SequenceSubmitted(SequenceRequest(number, (1, 2), 1, key=f"#{number}")), 0.0)
        if number % 100 == 99:
            driver.plan()
            driver.settle()
    (nobody,) = driver.core.snapshot().keys
    assert (nobody.prompt_tokens, nobody.output_tokens, nobody.running, nobody.waiting) == (6000, 3000, 0, 0)


def test_no_key_finds_the_queue_filled_by_others() -> None:
    """Alone, a key has all of it. Where it is full, each key gets an equal part."""
    driver = driver_of(max_running=1, max_queued_sequences=6)
    refused(driver, 0, key="#0")  # runs
    waiting = {
        key: sum(refused(driver, next(NUMBERS), key=key) is None for _ in range(9)) for key in ("#1", "#2", "#3")
    }
    assert waiting == {"#1": 6, "#2": 3, "#3": 2}
    refusal = refused(driver, next(NUMBERS), key="#1")
    assert refusal is not None
    assert refusal.cause is RefusalCause.QUEUE_FULL
    assert refusal.message == "11 sequences wait, the limit is 6"


def test_no_key_finds_the_tokens_of_the_queue_taken_by_others() -> None:
    driver = driver_of(max_running=1, max_queued_tokens=60)
    refused(driver, 0, key="#0")  # runs
    waiting = {
        key: sum(refused(driver, next(NUMBERS), key=key, prompt_length=10) is None for _ in range(9))
        for key in ("#1", "#2")
    }
    assert waiting == {"#1": 6, "#2": 3}
    assert refused(driver, next(NUMBERS), key="#3", prompt_length=50) is None  # none of this key waits


def steps_to_first_token(driver: Driver, sequence_id: int) -> int:
    for step in range(1, 100):
        driver.answer("target")
        if outputs(driver, sequence_id):
            return step
    raise AssertionError("no token came")


@pytest.mark.parametrize("keys", [("greedy", "modest"), ("#greedy", "#modest")], ids=["named", "without names"])
@pytest.mark.parametrize(
    ("prompt_length", "pages"), [(8, 100_000), (900, 100_000), (40, 1200)], ids=["places", "long prompts", "pages"]
)
def test_beside_a_key_that_asks_for_everything_a_second_one_is_served_at_once(
    keys: tuple[str, str], prompt_length: int, pages: int
) -> None:
    """60 requests of 32 choices that go on for long, whatever runs short: the first token of each of the other key's
    requests comes within five steps. Nobody's output changes."""
    greedy, modest = keys
    classes = [KeyClass(key) for key in keys if not key.startswith("#")]
    driver = Driver(policy=Policy.AUTO, keys=tuple(classes))
    driver.join("target", pages=pages)
    for sequence_id in range(60 * 32):
        request = SequenceRequest(sequence_id, prompt_of(sequence_id, prompt_length), 80, key=greedy)
        driver.core.apply(SequenceSubmitted(request), driver.now)
    driver.plan()
    for _ in range(30):
        driver.answer("target")
    ids = range(10_000, 10_004)
    for sequence_id in ids:
        assert refused(driver, sequence_id, key=modest, prompt_length=20, max_tokens=60) is None
        assert steps_to_first_token(driver, sequence_id) <= 5
    for sequence_id in range(40, 60 * 32):
        driver.core.apply(SequenceCancelled(sequence_id), driver.now)
    driver.settle()
    begun = {one.sequence_id for one in of_type(driver.log, FinishSequence) if one.reason is FinishReason.LENGTH}
    assert begun == {*range(40), *ids}
    for sequence_id in begun:
        assert outputs(driver, sequence_id) == expected(driver, sequence_id)


def test_of_few_places_a_second_key_gets_one_at_once() -> None:
    """Although the next row of each sequence is sent before the one under way is answered."""
    driver = driver_of(max_running=4, draft_length=0, policy=Policy.AUTO)
    for sequence_id in range(20):
        driver.submit(sequence_id, max_tokens=300, key="#greedy")
    for _ in range(10):
        driver.answer("target")
    driver.submit(100, max_tokens=50, key="#modest")
    assert steps_to_first_token(driver, 100) <= 5
    driver.settle(max_steps=5000)
    for sequence_id in (*range(20), 100):
        assert outputs(driver, sequence_id) == expected(driver, sequence_id)


@pytest.mark.parametrize("batch_size", [4, 16])
def test_of_few_pages_a_second_key_gets_many_at_once(batch_size: int) -> None:
    """Although many sequences must leave for that, and rows of some are always in flight: those get no others."""
    driver = Driver(max_running=16, batch_size=batch_size, draft_length=0, policy=Policy.AUTO, steps_in_flight=3)
    driver.join("target", pages=100)
    for sequence_id in range(40):
        driver.submit(sequence_id, max_tokens=100, key="#greedy")
    for _ in range(40):
        driver.answer("target")
    driver.submit(100, prompt_length=250, max_tokens=20, key="#modest")
    assert steps_to_first_token(driver, 100) <= 5
    assert driver.core.snapshot().preemptions > 5
    driver.settle(max_steps=5000)
    for sequence_id in (*range(40), 100):
        assert outputs(driver, sequence_id) == expected(driver, sequence_id)


def test_a_key_that_asks_for_little_keeps_its_pages() -> None:
    """However urgent another key's requests are said to be: no other sequence takes those of the only one."""
    driver = Driver(draft_length=0)
    driver.join("target", pages=200)
    driver.submit(0, max_tokens=200, key="#modest")
    for sequence_id in range(10, 40):
        driver.submit(sequence_id, max_tokens=200, key="#greedy", priority=MIN_PRIORITY)
    driver.settle(max_steps=20_000)
    begun = Counter(
        row.sequence_id for step in of_type(driver.log, SendStep) for row in step.rows if row.opening is not None
    )
    assert begun[0] == 1
    assert begun.total() > len(begun), "pages were never short"
