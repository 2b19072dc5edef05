"""Targets with a drafting head: their answers bring the proposals of the next round, and no draft worker is asked."""

from __future__ import annotations

import pytest

from scheduler.config import Policy
from scheduler.messages import EmitTokens, MoveKv, Outcome, Role, Row, RowResult
from scheduler.sampling import Grammar, SamplingParameters
from tests.unit.scheduler.driver import Driver, expected, of_type, outputs


def head_cell(guess: float = 1.0, **config: object) -> Driver:
    driver = Driver(**config)
    driver.join("target", guess=guess, head="head")
    return driver


def drafted(driver: Driver) -> int:
    return sum(emitted.drafted for emitted in of_type(driver.log, EmitTokens))


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("guess", [0.0, 0.6, 1.0])
def test_output_is_that_of_plain_decoding(policy: Policy, guess: float) -> None:
    driver = head_cell(guess, policy=policy, batch_size=3)
    for number in range(1, 8):
        driver.submit(number, 3 + 5 * number, 4 + 6 * number)
    driver.settle()
    for number in range(1, 8):
        assert outputs(driver, number) == expected(driver, number)
    accepted = sum(emitted.accepted for emitted in of_type(driver.log, EmitTokens))
    assert drafted(driver) > 0
    assert (accepted == drafted(driver)) if guess == 1.0 else (accepted < drafted(driver))


def test_the_proposal_of_an_answer_is_verified_in_the_next_row() -> None:
    driver = head_cell(draft_length=3)
    driver.submit(1, max_tokens=10)
    lengths = []
    while driver.outstanding("target"):
        lengths += [(len(row.draft_tokens), row.draft_length) for row in driver.only_step("target").rows]
        driver.answer("target")
    # 1, 5 and 9 tokens; the last row may bring no more than one.
    assert lengths == [(0, 3), (3, 3), (3, 3), (0, 0)]


def test_draft_workers_have_nothing_to_do_where_the_target_has_a_head() -> None:
    driver = head_cell()
    driver.join("draft", Role.DRAFT)
    driver.submit(1, 40)
    driver.settle("target")
    assert outputs(driver, 1) == expected(driver, 1)
    assert not driver.outstanding("draft")


def test_a_row_with_a_grammar_or_without_drafts_asks_for_no_proposal() -> None:
    driver = head_cell()
    grammar = SamplingParameters(grammar=Grammar("anything", (49,)))
    driver.submit(1, sampling=grammar)
    driver.submit(2, draft_length=0)
    driver.settle()
    assert drafted(driver) == 0
    assert outputs(driver, 2) == expected(driver, 2)


@pytest.mark.parametrize("outcomes", [(), (Outcome(1, 3, (4,)),), (Outcome(0, 999, (4, 5)),)])
def test_an_answer_without_a_proposal_for_its_result_is_followed_by_a_plain_row(outcomes: tuple[Outcome, ...]) -> None:
    driver = head_cell()
    driver.submit(1)

    def instead(row: Row) -> RowResult:
        result = driver.workers["target"].run_row(row)
        result.outcomes = outcomes
        return result

    driver.answer("target", instead)
    (row,) = driver.only_step("target").rows
    assert row.draft_tokens == ()
    driver.settle()
    assert outputs(driver, 1) == expected(driver, 1)


def test_a_moved_sequence_goes_on_without_the_proposal_of_the_old_target() -> None:
    driver = head_cell(steps_in_flight=1)
    driver.submit(1, max_tokens=30)
    driver.answer("target")
    driver.join("new", head="head")
    driver.drain("target")
    assert of_type(driver.answer("target"), MoveKv) or driver.outstanding("new")
    driver.settle()
    assert outputs(driver, 1) == expected(driver, 1)
    assert driver.workers["new"].held == {}
    assert of_type(driver.log, EmitTokens)[-1].drafted > 0


def run_with_costs(guess: float, pass_seconds: float, rounds: int = 400) -> int:
    """Draft tokens asked for in the last 50 of the target's steps, of up to 4 for each of two sequences: AUTO, where a
    step takes 10 ms and a pass of the head so many seconds more."""
    driver = head_cell(guess, policy=Policy.AUTO)
    for number in (1, 2):
        driver.submit(number, max_tokens=3900)
    asked = []
    for _ in range(rounds):
        step = driver.outstanding("target")[0]
        asked.append(sum(row.draft_length for row in step.rows))
        driver.now += (seconds := 0.010 + pass_seconds * max((row.draft_length for row in step.rows), default=0))
        driver.answer("target", seconds=seconds)
    return sum(asked[-50:])


def test_auto_asks_for_proposals_only_where_they_pay() -> None:
    assert run_with_costs(0.9, 0.002) > 250
    # Wrong guesses, and passes of the head that cost more than the steps that they save. Probes go on.
    assert run_with_costs(0.0, 0.002) <= 5
    assert run_with_costs(0.9, 0.02) <= 5
