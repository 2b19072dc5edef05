"""Slots are shared by weight: whose sequence makes room for whom, and where nobody's does."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from scheduler.config import Policy
from scheduler.key_class import KeyClass
from scheduler.messages import FailSequence, RefuseSequence
from tests.unit.scheduler.driver import Driver, expected, of_type, outputs

KEYS = (KeyClass("flood"), KeyClass("other"), KeyClass("heavy", weight=2.0))


def driver_of(keys: tuple[KeyClass, ...] = KEYS, **config: object) -> Driver:
    driver = Driver(keys=keys, max_queued_sequences=10_000, **config)
    driver.join("target", pages=10_000)
    return driver


def running(driver: Driver) -> Counter[str]:
    return Counter(sequence.account.key.name for sequence in driver.core._live.running.values())


def preemptions(driver: Driver) -> int:
    return driver.core.snapshot().preemptions


def answer_until(driver: Driver, done: object, most: int = 200) -> None:
    for _ in range(most):
        if done():  # type: ignore[operator]
            return
        driver.answer("target")
    raise AssertionError("it never came to that")


def test_a_key_that_comes_late_gets_its_share_of_slots_at_once() -> None:
    driver = driver_of(max_running=8)
    for number in range(40):
        driver.submit(number, max_tokens=200, key="flood")
    for number in range(40, 80):
        driver.submit(number, max_tokens=200, key="other")
    answer_until(driver, lambda: running(driver)["other"] == 4)
    assert running(driver) == {"flood": 4, "other": 4}
    assert preemptions(driver) == 4
    # The youngest made room, and nobody does so any more while both have their share.
    ran = sorted(number for number in driver.core._live.running if number < 40)
    assert ran == [0, 1, 2, 3]
    for _ in range(60):
        driver.answer("target")
    assert preemptions(driver) == 4


def test_shares_go_by_weight_among_the_keys_that_are_there() -> None:
    driver = driver_of(max_running=12)
    for number in range(120):
        driver.submit(number, max_tokens=400, key=("flood", "heavy", "other")[number // 40])
    answer_until(driver, lambda: running(driver) == {"flood": 3, "heavy": 6, "other": 3})
    done = preemptions(driver)
    assert done == 8 + 3  # heavy took its share of two keys from flood, and other its own of three from both
    for _ in range(40):
        driver.answer("target")
    assert preemptions(driver) == done


def test_one_waiting_sequence_takes_one_slot_and_no_more() -> None:
    driver = driver_of(max_running=6)
    for number in range(30):
        driver.submit(number, max_tokens=200, key="flood")
    driver.submit(100, max_tokens=5, key="other")
    answer_until(driver, lambda: running(driver)["other"] == 1)
    assert (running(driver), preemptions(driver)) == ({"flood": 5, "other": 1}, 1)


def test_of_a_key_beyond_its_share_the_least_urgent_gives_way_first() -> None:
    driver = driver_of(max_running=4, steps_in_flight=1)
    for number, priority in enumerate((3, 9, 9, -2)):
        driver.submit(number, max_tokens=200, key="flood", priority=priority)
    driver.submit(100, max_tokens=200, key="other")
    driver.submit(101, max_tokens=200, key="other")
    answer_until(driver, lambda: running(driver)["other"] == 2)
    assert set(driver.core._live.running) == {0, 3, 100, 101}


def test_a_single_key_never_gives_a_slot_up() -> None:
    driver = driver_of(max_running=2)
    for number in range(10):
        driver.submit(number, max_tokens=6, key="flood", priority=-number)
    driver.settle()
    assert preemptions(driver) == 0


def test_a_share_below_one_slot_is_one_slot() -> None:
    """More keys than slots: a key keeps the only one that it has."""
    keys = tuple(KeyClass(f"key{number}") for number in range(6))
    driver = driver_of(keys, max_running=2)
    for number in range(6):
        driver.submit(number, max_tokens=30, key=f"key{number}")
    driver.settle()
    assert preemptions(driver) == 0
    assert all(outputs(driver, number) == expected(driver, number) for number in range(6))


def test_without_pages_for_the_newcomer_nobody_gives_a_slot_up() -> None:
    driver = Driver(keys=KEYS, max_running=3)
    driver.join("target", pages=24, page_size=4, max_length=90)
    for number in range(3):
        driver.submit(number, prompt_length=20, max_tokens=4, key="flood")
    driver.submit(10, prompt_length=70, max_tokens=4, key="other")
    driver.answer("target")
    assert preemptions(driver) == 0
    driver.settle()
    assert len(outputs(driver, 10)) == 4


def test_slots_of_a_target_in_lockstep_are_shared_as_well() -> None:
    """EQSPEC places no more than a batch on a target: these are the slots then, however many may run."""
    driver = driver_of(max_running=100, batch_size=4, policy=Policy.EQSPEC)
    for number in range(20):
        driver.submit(number, max_tokens=60, key="flood")
    driver.submit(100, max_tokens=5, key="other")
    driver.submit(101, max_tokens=5, key="other")
    answer_until(driver, lambda: running(driver)["other"] == 2)
    assert running(driver) == {"flood": 2, "other": 2}
    driver.settle()
    assert outputs(driver, 100) == expected(driver, 100)


@pytest.mark.parametrize("policy", list(Policy))
def test_everybody_ends_with_the_right_text(policy: Policy) -> None:
    """Keys, weights, limits and priorities at random, pages for a few sequences: no starvation, no lost token."""
    rng = random.Random(policy.value)
    keys = tuple(KeyClass(f"key{number}", rng.choice((0.5, 1.0, 3.0)), rng.choice((None, 1, 3))) for number in range(3))
    driver = Driver(keys=keys, max_running=rng.choice((3, 6)), batch_size=3, policy=policy)
    for name in ("one", "two"):
        driver.join(name, pages=30, page_size=2, max_length=60)
    for number in range(60):
        driver.submit(
            number,
            prompt_length=rng.randint(1, 20),
            max_tokens=rng.randint(1, 12),
            key=rng.choice(("key0", "key1", "key2", "")),
            priority=rng.randint(-2, 2),
        )
        if rng.random() < 0.5:
            driver.plan()
    for _ in range(5000):
        driver.answer_moves()
        busy = [name for name, steps in driver.steps.items() if steps]
        if not busy and driver.core.next_deadline() is None:
            break
        if not busy:
            driver.now = driver.core.next_deadline() or driver.now
            driver.plan()
        else:
            driver.answer(rng.choice(busy))
            driver.now += 0.01
    assert not of_type(driver.log, FailSequence)
    assert not of_type(driver.log, RefuseSequence)
    assert driver.core.snapshot().live == 0
    assert all(outputs(driver, number) == expected(driver, number) for number in range(60))


def test_pages_go_to_the_most_urgent_first_and_it_always_gets_through() -> None:
    driver = Driver(max_running=4)
    driver.join("target", pages=16, page_size=4, max_length=64)
    for number, priority in enumerate((5, 0, -5)):
        driver.submit(number, prompt_length=8, max_tokens=40, priority=priority)
    ends: list[int] = []
    for _ in range(500):
        if not driver.steps["target"]:
            break
        driver.answer("target")
        live = driver.core._live.sequences
        ends += [number for number in (0, 1, 2) if number not in live and number not in ends]
    assert ends == [2, 1, 0]
    assert preemptions(driver) > 0
    assert all(outputs(driver, number) == expected(driver, number) for number in range(3))
