"""Which of a draft's tokens are verified where not all can be."""

from __future__ import annotations

from scheduler.config import Policy
from scheduler.messages import Role
from tests.unit.scheduler.driver import Driver, check_to_the_end


def test_where_room_is_short_the_last_tokens_of_proposals_are_left_out_and_no_row() -> None:
    """Of four sequences, of which a draft has proposed three tokens each."""
    driver = Driver(policy=Policy.EQSPEC, batch_size=4, max_running=4, draft_length=3, wait_bound_steps=100.0)
    driver.join("target", packed=10)
    driver.join("draft", Role.DRAFT)
    for sequence_id in range(4):
        driver.submit(sequence_id, max_tokens=30)
    while driver.steps["target"]:
        driver.answer("target")
    while driver.steps["draft"]:
        driver.answer("draft")
    step = driver.only_step("target")
    assert [len(row.draft_tokens) for row in step.rows] == [2, 2, 1, 1]
    assert step.group is not None
    assert not step.group.equal_length
    check_to_the_end(driver, *range(4))
