"""Which rows share a step, and who waits for whom."""

from __future__ import annotations

import pytest

from scheduler.config import Policy
from scheduler.messages import FinishSequence, Role, Row, RowResult, RowStatus, SendStep
from tests.unit.scheduler.driver import Driver, of_type, pair


def unknown(row: Row) -> RowResult:
    return RowResult(row.sequence_id, RowStatus.UNKNOWN_SEQUENCE, 0, 0)


def test_prefill_rides_in_the_step_of_a_verify_group_and_shares_its_chunk() -> None:
    driver = Driver(prefill_chunk=8, draft_length=0, steps_in_flight=1)
    driver.join("target")
    driver.submit(1, prompt_length=3)
    driver.submit(2, prompt_length=5)
    driver.submit(3, prompt_length=20)
    driver.answer("target")
    step = driver.only_step("target")
    assert step.group is not None
    assert step.group.rows == 1
    assert [(row.sequence_id, len(row.tokens), row.sample) for row in step.rows] == [
        (1, 1, True),
        (2, 5, True),
        (3, 3, False),
    ]


def test_a_second_step_waits_for_what_may_still_join_it() -> None:
    driver = pair(batch_size=2, steps_in_flight=2)
    for sequence_id in range(3):
        driver.submit(sequence_id, prompt_length=1)
    while driver.core.snapshot().prefilling:
        driver.answer("target")
    assert driver.core.snapshot().drafting == 3
    driver.answer("draft")
    assert [step.group.rows for step in driver.steps["target"]] == [1]
    driver.answer("draft")
    assert driver.core.snapshot().drafted == 1
    assert len(driver.steps["target"]) == 1  # the target is busy, and a third may still join the second
    driver.answer("draft")
    assert [step.group.rows for step in driver.steps["target"]] == [1, 2]


def test_a_drafts_second_step_waits_for_what_is_being_verified() -> None:
    driver = Driver()
    driver.join("one")
    driver.join("two")
    driver.join("draft", Role.DRAFT)
    driver.submit(0, prompt_length=1)
    driver.answer("one")
    driver.answer("draft")
    assert driver.core.snapshot().verifying == 1
    for sequence_id in (1, 2, 3):
        driver.submit(sequence_id, prompt_length=1, max_tokens=9)
    for drafting in (1, 2):
        driver.answer("two")
        assert driver.core.snapshot().drafting == drafting
        assert len(driver.steps["draft"]) == 1
    driver.answer("one")
    assert [len(step.rows) for step in driver.steps["draft"]] == [1, 2]


def test_no_more_steps_than_allowed_are_in_flight() -> None:
    driver = Driver(batch_size=1, draft_length=0, steps_in_flight=2)
    driver.join("target")
    for sequence_id in range(6):
        driver.submit(sequence_id)
    for _ in range(20):
        assert len(driver.steps["target"]) <= 2
        driver.answer("target")
    assert len(driver.steps["target"]) == 2


def test_packed_rows_are_bounded_and_prefill_is_not_shut_out() -> None:
    driver = Driver(batch_size=8, draft_length=0, prefill_chunk=64)
    driver.join("target", packed=8)
    for sequence_id in range(20):
        driver.submit(sequence_id, prompt_length=4, max_tokens=100)
    driver.submit(99, prompt_length=100, max_tokens=3)
    driver.settle(max_steps=5000)
    steps = of_type(driver.log, SendStep)
    assert all(sum(len(row.tokens) + len(row.draft_tokens) for row in step.rows) <= 8 for step in steps)
    assert of_type(driver.log, FinishSequence)[0].sequence_id == 99


@pytest.mark.parametrize("seconds", [0.00005, 5.0])
def test_the_wait_bound_is_that_of_usual_steps(seconds: float) -> None:
    """A step may end at once, where nothing was left to compute, or stall."""
    driver = Driver(wait_bound_steps=2.0)
    driver.join("target")
    driver.submit(1, prompt_length=2, max_tokens=100)
    for _ in range(60):
        driver.answer("target", seconds=0.05)
    assert driver.core.wait_bound("target") == pytest.approx(0.1, rel=0.1)
    driver.answer("target", seconds=seconds)
    assert driver.core.wait_bound("target") == pytest.approx(0.1, rel=0.25)


def eqspec_waiting() -> Driver:
    """A target idle with a drafted sequence, while another is being drafted."""
    driver = Driver(policy=Policy.EQSPEC, wait_bound_steps=1.5, initial_step_seconds=0.1)
    driver.join("target")
    driver.join("draft", Role.DRAFT)
    driver.submit(1, prompt_length=2)
    driver.submit(2, prompt_length=2)
    while driver.core.snapshot().drafted == 0:
        if driver.steps["target"]:
            driver.answer("target", seconds=0.1)
        elif driver.steps["draft"]:
            step = driver.steps["draft"][0]
            if len(step.rows) == 2 and all(row.draft_length for row in step.rows):
                driver.answer("draft", instead=lambda row: unknown(row) if row.sequence_id == 2 else None)
            else:
                driver.answer("draft")
    return driver


def test_a_waiting_sequence_goes_when_its_bound_is_reached() -> None:
    driver = eqspec_waiting()
    assert not driver.steps["target"]
    deadline = driver.core.next_deadline()
    assert deadline == pytest.approx(driver.now + driver.core.wait_bound("target"))
    assert driver.core.wait_bound("target") == pytest.approx(1.5 * 0.1, rel=0.1)
    driver.now = deadline - 1e-6
    assert driver.plan() == []
    driver.now = deadline
    (step,) = driver.plan()
    assert [row.sequence_id for row in step.rows] == [1]
    assert step.group.forced_by_bound
    assert step.group.seconds_waited == pytest.approx(0.15, rel=0.1)
    assert driver.core.next_deadline() is None


def test_eqspec_keeps_a_batch_of_sequences_per_target() -> None:
    driver = Driver(policy=Policy.EQSPEC, batch_size=3, max_running=48)
    driver.join("a")
    driver.join("b")
    for sequence_id in range(20):
        driver.submit(sequence_id)
    assert driver.core.snapshot().running == 6


def test_releases_ride_on_the_next_step() -> None:
    driver = Driver(draft_length=0)
    driver.join("target")
    driver.submit(1, max_tokens=2)
    driver.submit(2, max_tokens=30)
    driver.settle()
    (release,) = [step for step in of_type(driver.log, SendStep) if 1 in step.released]
    assert release.rows, "another sequence was running: no step of its own is needed"
