"""How sequences end, and what the core makes of answers and clocks that come late."""

from __future__ import annotations

import pytest

from scheduler.messages import (
    FinishReason,
    FinishSequence,
    SendStep,
    StepCompleted,
)
from tests.unit.scheduler.driver import Driver, expected, of_type, outputs, pair


@pytest.mark.parametrize("answers", range(8))
def test_cancelling_frees_every_worker_at_once(answers: int) -> None:
    """At any moment of its life; idle workers get a step just to release."""
    driver = pair()
    driver.submit(1, prompt_length=6, max_tokens=50)
    for _ in range(answers):
        worker_id = max(
            driver.steps, key=lambda name: -driver.steps[name][0].step_id if driver.steps[name] else -(10**9)
        )
        driver.answer(worker_id)
    count = len(outputs(driver, 1))
    assert of_type(driver.cancel(1), FinishSequence) == [FinishSequence(1, FinishReason.CANCELLED)]
    assert driver.core.snapshot().live == 0
    driver.settle(max_steps=4)
    assert not driver.workers["target"].held
    assert not driver.workers["draft"].held
    assert len(outputs(driver, 1)) == count
    assert driver.cancel(1) == []
    pages = {worker.worker_id: worker.free_pages for worker in driver.core.snapshot().workers}
    assert pages == {"target": 1000, "draft": 1000}


def test_stale_and_unknown_answers_do_nothing() -> None:
    driver = pair()
    driver.submit(1, max_tokens=20)
    step = driver.steps["target"][0]
    driver.answer("target")
    results = driver.workers["target"].run(step)
    assert driver.handle(StepCompleted("target", step.step_id, results, 0.1)) == []
    assert driver.handle(StepCompleted("target", 999, (), 0.1)) == []
    assert driver.handle(StepCompleted("nobody", 1, (), 0.1)) == []
    driver.lose("nobody")
    driver.settle()
    assert outputs(driver, 1) == expected(driver, 1)


def test_releases_ride_on_the_next_step() -> None:
    driver = Driver(draft_length=0)
    driver.join("target")
    driver.submit(1, max_tokens=2)
    driver.submit(2, max_tokens=30)
    driver.settle()
    (release,) = [step for step in of_type(driver.log, SendStep) if 1 in step.released]
    assert release.rows, "another sequence was running: no step of its own is needed"
