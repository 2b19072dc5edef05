"""A row that kills its worker or fails its step takes two workers at most, and nobody else's answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from spool.scheduler.config import Policy
from spool.scheduler.messages import FailSequence, Row, RowResult, RowStatus, SendStep, SuspectSequence, WorkerLost
from tests.unit.scheduler.driver import Driver, check_to_the_end, of_type

SEQUENCES = range(12)


def cell() -> Driver:
    driver = Driver(policy=Policy.EXSPEC, max_running=10, batch_size=4, draft_length=3)
    driver.join("target-0", head="head")
    return driver


def submit_all(driver: Driver) -> None:
    for sequence_id in SEQUENCES:
        driver.submit(sequence_id, prompt_length=2 + sequence_id % 5, max_tokens=15, draft_length=3)


def run(driver: Driver, deadly: Callable[[Row], bool]) -> int:
    """Answers all steps. A step with a deadly row is the last one of its target; another one joins in its place.
    Returns how many were lost."""
    names = (f"target-{number}" for number in itertools.count(10))
    lost = 0
    while ready := [worker_id for worker_id, steps in driver.steps.items() if steps]:
        for worker_id in ready:
            driver.now += 0.01
            if any(deadly(row) for row in driver.steps[worker_id][0].rows):
                lost += 1
                assert lost < 20, "one dies after the other"
                lose(driver, worker_id)
                driver.join(next(names), head="head")
            else:
                driver.answer(worker_id)
    return lost


def lose(driver: Driver, worker_id: str, blameless: bool = False) -> None:
    del driver.steps[worker_id], driver.workers[worker_id]
    driver.handle(WorkerLost(worker_id, "it is gone", blameless))


def check_answers(driver: Driver, wrong: int | None) -> None:
    """Those of all but the `wrong` sequence are as plain decoding has them."""
    check_to_the_end(driver, *(sequence_id for sequence_id in SEQUENCES if sequence_id != wrong))
    failed = [one.sequence_id for one in of_type(driver.log, FailSequence)]
    assert failed == ([] if wrong is None else [wrong])


def test_a_row_that_kills_targets_fails_after_two_and_the_others_share_steps_again() -> None:
    driver = cell()
    submit_all(driver)
    assert run(driver, lambda row: row.sequence_id == 0) == 2
    check_answers(driver, 0)
    beside = {one.sequence_id for one in of_type(driver.log, SuspectSequence)} - {0}
    last = of_type(driver.log[driver.log.index(of_type(driver.log, FailSequence)[0]) :], SendStep)
    together = {row.sequence_id for step in last for row in step.rows if step.grouped > 1}
    assert beside
    assert beside <= together


@pytest.mark.parametrize("blameless", [True, False])
def test_a_worker_that_leaves_blames_nobody(blameless: bool) -> None:
    driver = cell()
    submit_all(driver)
    assert driver.steps["target-0"]
    lose(driver, "target-0", blameless)
    assert bool(of_type(driver.log, SuspectSequence)) is not blameless


def test_a_row_that_fails_its_whole_step_fails_alone() -> None:
    driver = cell()
    submit_all(driver)
    failures = 0

    def broken(row: Row) -> RowResult:
        driver.workers["target-0"].forget(row.sequence_id)
        return RowResult(row.sequence_id, RowStatus.FAILED, 0, 0, error="the step broke")

    while driver.steps["target-0"]:
        poisoned = any(row.sequence_id == 4 for row in driver.steps["target-0"][0].rows)
        failures += poisoned
        driver.answer("target-0", instead=broken if poisoned else None)
    check_answers(driver, 4)
    assert failures == 2
