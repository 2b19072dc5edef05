"""Which proposed tokens are verified where not all can be."""

from __future__ import annotations

from spool.scheduler.config import Policy
from tests.unit.scheduler.driver import Driver, check_to_the_end


def test_where_room_is_short_the_last_tokens_of_proposals_are_left_out_and_no_row() -> None:
    """Of four sequences, for each of which three tokens are proposed."""
    driver = Driver(policy=Policy.EQSPEC, batch_size=4, max_running=4, draft_length=3, wait_bound_steps=100.0)
    driver.join("target", packed=10, head="head")
    for sequence_id in range(4):
        driver.submit(sequence_id, max_tokens=30)
    while sum(row.verify > 0 for row in driver.steps["target"][0].rows) < 4:
        driver.answer("target")
    assert [row.verify for row in driver.only_step("target").rows] == [2, 2, 1, 1]
    ragged = driver.core.snapshot().ragged_rows
    driver.answer("target")
    assert driver.core.snapshot().ragged_rows == ragged + 4
    check_to_the_end(driver, *range(4))
