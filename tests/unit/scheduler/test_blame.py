"""A row that kills its worker or fails its step takes two workers at most, and nobody else's answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from scheduler.messages import FailSequence, Role, Row, RowResult, RowStatus, SendStep, SuspectSequence, WorkerLost
from tests.unit.scheduler.driver import Driver, check_to_the_end, expected, of_type, outputs

SEQUENCES = range(12)


def cell(drafts: int = 1) -> Driver:
    driver = Driver(max_running=10, batch_size=4, draft_length=3)
    driver.join("target-0")
    for number in range(drafts):
        driver.join(f"draft-{number}", Role.DRAFT)
    return driver


def submit_all(driver: Driver) -> None:
    for sequence_id in SEQUENCES:
        driver.submit(sequence_id, prompt_length=2 + sequence_id % 5, max_tokens=15, draft_length=3)


def run(driver: Driver, role: Role, deadly: Callable[[Row], bool]) -> int:
    """Answers all steps. A step with a deadly row is the last one of a worker of that role; another one joins in its
    place. Returns how many were lost."""
    names = (f"{role.value}-{number}" for number in itertools.count(10))
    lost = 0
    while ready := [worker_id for worker_id, steps in driver.steps.items() if steps]:
        for worker_id in ready:
            driver.now += 0.01
            if worker_id.startswith(role.value) and any(deadly(row) for row in driver.steps[worker_id][0].rows):
                lost += 1
                assert lost < 20, "one dies after the other"
                lose(driver, worker_id)
                driver.join(next(names), role)
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
    assert run(driver, Role.TARGET, lambda row: row.sequence_id == 0) == 2
    check_answers(driver, 0)
    beside = {one.sequence_id for one in of_type(driver.log, SuspectSequence)} - {0}
    last = of_type(driver.log[driver.log.index(of_type(driver.log, FailSequence)[0]) :], SendStep)
    together = {row.sequence_id for step in last for row in step.rows if step.group and step.group.rows > 1}
    assert beside
    assert beside <= together


@pytest.mark.parametrize("blameless", [True, False])
def test_a_worker_that_leaves_blames_nobody(blameless: bool) -> None:
    driver = cell()
    submit_all(driver)
    assert driver.steps["target-0"]
    lose(driver, "target-0", blameless)
    assert bool(of_type(driver.log, SuspectSequence)) is not blameless


def test_a_row_that_kills_drafts_now_and_then_kills_ever_seldomer() -> None:
    driver = cell(drafts=2)
    driver.submit(7, prompt_length=3, max_tokens=200, draft_length=3)
    seen = itertools.count(1)
    lost = run(driver, Role.DRAFT, lambda row: next(seen) % 3 == 0)
    # At most 200 proposals: the losses ask for 1, 2, 4 ... of them, and the last comes too soon.
    assert 2 <= lost <= 2 + (200).bit_length()
    assert next(seen) - 1 == 3 * lost  # no draft has seen it since
    assert outputs(driver, 7) == expected(driver, 7)


@pytest.mark.parametrize("role", list(Role))
def test_a_row_that_fails_its_whole_step_fails_alone(role: Role) -> None:
    driver = cell()
    submit_all(driver)
    worker_id, failures = f"{role.value}-0", 0

    def broken(row: Row) -> RowResult:
        driver.workers[worker_id].forget(row.sequence_id)
        return RowResult(row.sequence_id, RowStatus.FAILED, 0, 0, error="the step broke")

    while any(driver.steps.values()):
        for name, steps in driver.steps.items():
            if steps:
                poisoned = name == worker_id and any(row.sequence_id == 4 for row in steps[0].rows)
                failures += poisoned
                driver.answer(name, instead=broken if poisoned else None)
    check_answers(driver, 4 if role is Role.TARGET else None)
    assert failures <= (2 if role is Role.TARGET else 3)
