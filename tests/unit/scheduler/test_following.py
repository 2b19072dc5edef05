"""Plain rounds whose row is sent before the answer to the one before has come."""

from __future__ import annotations

from scheduler.messages import FinishReason, FinishSequence, Role, Row, RowResult, RowStatus, SendStep
from scheduler.state.digests import EMPTY_DIGEST
from tests.unit.scheduler.driver import Driver, check_to_the_end, expected, of_type, outputs


def following(driver: Driver) -> Driver:
    driver.join("target")
    driver.submit(1, max_tokens=12)
    driver.submit(2, max_tokens=12)
    return driver


def rows(driver: Driver) -> list[list[tuple[int, bool]]]:
    """Of each step in flight: its sequences, and whether their rows follow others."""
    return [[(row.sequence_id, row.follows) for row in step.rows] for step in driver.outstanding("target")]


def test_the_next_step_is_there_before_the_answer() -> None:
    driver = following(Driver(draft_length=0, batch_size=2))
    for _ in range(3):
        driver.answer("target")
    for _ in range(5):
        assert [sorted(step) for step in rows(driver)] == [[(1, True), (2, True)]] * 2
        driver.answer("target")
    check_to_the_end(driver, 1, 2)


def test_nothing_follows_the_last_token() -> None:
    driver = Driver(draft_length=0)
    driver.join("target")
    driver.submit(1, max_tokens=3)
    driver.settle()
    assert [row.follows for step in of_type(driver.log, SendStep) for row in step.rows] == [False, True, True]


def test_a_stop_token_makes_the_row_under_way_void() -> None:
    driver = Driver(draft_length=0)
    driver.join("target")
    driver.submit(1, max_tokens=50)
    text = expected(driver, 1)
    driver.cancel(1)
    driver.settle()
    stop = next(token for place, token in enumerate(text) if place > 3 and token not in text[:place])
    driver.log.clear()
    driver.submit(1, max_tokens=50, stop_token_ids=frozenset({stop}))
    driver.settle()
    (finished,) = of_type(driver.log, FinishSequence)
    assert finished.reason is FinishReason.STOP
    assert outputs(driver, 1) == text[: text.index(stop) + 1]
    assert not driver.workers["target"].held, "what was computed in vain is released"


def test_after_a_row_that_failed_the_next_one_is_sent_again() -> None:
    driver = following(Driver(draft_length=0))
    for _ in range(4):
        driver.answer("target")

    def lost(row: Row) -> RowResult | None:
        if row.sequence_id == 1:
            driver.workers["target"].forget(1)
            return RowResult(1, RowStatus.UNKNOWN_SEQUENCE, 0, 0)
        return None

    driver.answer("target", instead=lost)
    check_to_the_end(driver, 1, 2)


def test_kv_that_is_lost_between_two_rows_is_computed_again() -> None:
    """The row that follows is the first to find nothing; the next one learns that the sequence is unknown."""
    driver = following(Driver(draft_length=0))
    for _ in range(4):
        driver.answer("target")

    def void(row: Row) -> RowResult | None:
        if row.sequence_id == 1 and row.follows:
            driver.workers["target"].forget(1)
            return RowResult(1, RowStatus.VOID, 0, EMPTY_DIGEST)
        return None

    driver.answer("target", instead=void)
    driver.answer("target", instead=void)  # it was under way
    check_to_the_end(driver, 1, 2)


def test_sequences_that_draft_are_waited_for() -> None:
    driver = following(Driver(draft_length=2))
    driver.join("draft", Role.DRAFT)
    driver.settle()
    drafting = [step for step in of_type(driver.log, SendStep) if step.worker_id == "draft"]
    assert drafting
    after = of_type(driver.log, SendStep).index(drafting[0])
    assert not any(row.follows for step in of_type(driver.log, SendStep)[after + 1 :] for row in step.rows)
    check_to_the_end(driver, 1, 2)


def test_where_pages_are_short_the_first_in_rank_gets_them() -> None:
    driver = Driver(draft_length=0)
    driver.join("target", pages=9)
    driver.submit(1, prompt_length=3, max_tokens=25)
    driver.submit(2, prompt_length=3, max_tokens=25)
    driver.settle()
    assert [one.sequence_id for one in of_type(driver.log, FinishSequence)] == [1, 2]
    check_to_the_end(driver, 1, 2)
    assert driver.core.snapshot().preemptions
