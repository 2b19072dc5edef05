"""Rows fail singly: what the core does about each status, and that the rest of the step does not notice."""

from __future__ import annotations

import pytest

from spool.scheduler.messages import (
    EmitTokens,
    FailSequence,
    Row,
    RowResult,
    RowStatus,
    TokenLogprobs,
)
from spool.scheduler.transitions.results import MAX_TARGET_FAILURES
from tests.unit.scheduler.driver import Answer, Driver, check_to_the_end, of_type, pair


def until_verifying(driver: Driver) -> Row:
    return driver.until_asked("target", lambda row: row.sequence_id == 1 and row.verify)


def answer_all(driver: Driver, worker_id: str, instead: Answer) -> None:
    """All steps, those of this worker in its place."""
    for _ in range(500):
        ready = next((name for name, steps in driver.steps.items() if steps), None)
        if ready is None:
            return
        driver.answer(ready, instead=instead if ready == worker_id else None)
    raise AssertionError("it is asked for ever")


def for_row(sequence_id: int, make: Answer) -> Answer:
    return lambda row: make(row) if row.sequence_id == sequence_id else None


def status(kind: RowStatus, error: str = "") -> Answer:
    return lambda row: RowResult(row.sequence_id, kind, 0, 0, error=error)


def test_endless_mismatches_end_in_an_error_for_that_sequence_alone() -> None:
    driver = pair()
    driver.submit(1, prompt_length=9)
    driver.submit(2, prompt_length=9)
    answer_all(driver, "target", for_row(1, status(RowStatus.KV_MISMATCH, "odd")))
    (failed,) = of_type(driver.log, FailSequence)
    assert failed.sequence_id == 1
    assert failed.error.startswith("target worker target answered kv_mismatch: odd, ")
    assert str(MAX_TARGET_FAILURES + 1) in failed.error
    check_to_the_end(driver, 2)


def test_a_target_that_says_ok_without_progress_is_not_asked_for_ever() -> None:
    driver = pair(prefill_chunk=4)
    driver.submit(1, prompt_length=9)
    answer_all(driver, "target", lambda row: RowResult(1, RowStatus.OK, 0, 1))
    assert [failed.sequence_id for failed in of_type(driver.log, FailSequence)] == [1]


@pytest.mark.parametrize("kind", [RowStatus.INVALID, RowStatus.FAILED])
def test_a_row_that_the_target_cannot_run_fails_its_sequence_with_the_reason(kind: RowStatus) -> None:
    driver = pair()
    driver.submit(1, prompt_length=9)
    driver.submit(2, prompt_length=9)
    until_verifying(driver)
    commands = driver.answer("target", instead=for_row(1, status(kind, "no such kernel")))
    (failed,) = of_type(commands, FailSequence)
    assert (failed.sequence_id, failed.error) == (1, f"target worker target answered {kind.value}: no such kernel")
    check_to_the_end(driver, 2)


@pytest.mark.parametrize(
    ("tokens", "accepted", "verified"),
    [((), 0, 2), ((1, 2), 0, 2), ((9, 9, 9), 2, 1), ((1,), -1, 2), ((1,) * 5, 4, 4), ((1,) * 4, 3, 2), ((1,), 0, -1)],
)
def test_an_answer_that_cannot_be_is_not_committed(tokens: tuple[int, ...], accepted: int, verified: int) -> None:
    """To a row that verifies three tokens at most."""
    driver = pair(draft_length=3)
    driver.submit(1, prompt_length=9)
    assert until_verifying(driver).verify == 3
    before = len(of_type(driver.log, EmitTokens))

    def wrong(row: Row) -> RowResult:
        return RowResult(1, RowStatus.OK, row.kv_len + 1, 0, tokens, accepted, verified=verified)

    driver.answer("target", instead=wrong)
    assert len(of_type(driver.log, EmitTokens)) == before
    (failed,) = of_type(driver.log, FailSequence)
    assert "do not match" in failed.error


@pytest.mark.parametrize("wrong", [range(0), range(2, 10), range(1, 8)])
def test_other_scores_of_the_prompt_than_those_asked_for_fail_the_sequence(wrong: range) -> None:
    """Of places 1 to 8: none, others and too few."""
    driver = Driver(prefill_chunk=8, draft_length=0)
    driver.join("target")
    driver.submit(1, prompt_length=30, prompt_logprobs=0)
    (row,) = driver.only_step("target").rows
    result = driver.workers["target"].run_row(row)
    result.prompt_logprobs = tuple(TokenLogprobs((7 + place) % 50, -1.0) for place in wrong)
    driver.answer("target", lambda _: result)
    (failure,) = of_type(driver.log, FailSequence)
    assert "8 log probabilities of prompt tokens were asked for, others came" in failure.error


def test_a_target_out_of_pages_sends_the_youngest_away() -> None:
    driver = pair(draft_length=0)
    driver.submit(1, prompt_length=9)
    driver.submit(2, prompt_length=9)
    while driver.core.snapshot().verifying < 1:
        driver.answer("target")
    preempted = driver.core.snapshot().preemptions
    while not any(row.sequence_id == 1 for row in driver.steps["target"][0].rows):
        driver.answer("target")
    driver.answer("target", instead=for_row(1, status(RowStatus.OUT_OF_PAGES)))
    assert driver.core.snapshot().preemptions == preempted + 1
    check_to_the_end(driver, 1, 2)
