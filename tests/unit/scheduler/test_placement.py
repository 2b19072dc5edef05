"""On which workers sequences are placed, and what becomes of them when pages or workers go."""

from __future__ import annotations

from scheduler.messages import EmitTokens, FinishSequence, Role, SendStep
from tests.unit.scheduler.driver import Driver, check_to_the_end, of_type


def test_the_youngest_makes_room_and_comes_back_with_its_tokens() -> None:
    driver = Driver(draft_length=0)
    driver.join("target", pages=12, page_size=4)
    driver.submit(1, prompt_length=8, max_tokens=30)
    driver.submit(2, prompt_length=8, max_tokens=30)
    check_to_the_end(driver, 1, 2)
    assert driver.core.snapshot().preemptions > 0
    finished = [command.sequence_id for command in of_type(driver.log, FinishSequence)]
    assert finished == [1, 2]
    first_release = next(step for step in of_type(driver.log, SendStep) if step.released)
    assert first_release.released == (2,)


def test_the_youngest_gives_up_its_draft_for_an_older_one() -> None:
    driver = Driver()
    driver.join("target", pages=1000)
    driver.join("draft", Role.DRAFT, pages=8, page_size=4)
    for sequence_id in (1, 2):
        driver.submit(sequence_id, prompt_length=8, max_tokens=20)
    driver.settle()
    rounds = {i: [e for e in of_type(driver.log, EmitTokens) if e.sequence_id == i] for i in (1, 2)}
    assert all(e.drafted for e in rounds[1][1:-1])
    assert any(e.drafted for e in rounds[2])
    assert not all(e.drafted for e in rounds[2][1:-1])


def test_a_sequence_longer_than_the_drafts_model_goes_on_without_it() -> None:
    driver = Driver()
    driver.join("target")
    driver.join("draft", Role.DRAFT, max_length=20)
    driver.submit(1, prompt_length=10, max_tokens=40)
    check_to_the_end(driver, 1)
    rows = [row for step in of_type(driver.log, SendStep) if step.worker_id == "draft" for row in step.rows]
    assert max(row.kv_len + len(row.tokens) + row.draft_length for row in rows) == 20
