"""Targets with a drafting head: their answers bring the proposals of the next round, and no draft worker is asked."""

from __future__ import annotations

import pytest

from scheduler.messages import EmitTokens, Outcome, Role, Row, RowResult
from scheduler.sampling import Grammar, SamplingParameters
from tests.unit.scheduler.driver import Driver, expected, of_type, outputs


def head_cell(guess: float = 1.0, **config: object) -> Driver:
    driver = Driver(**config)
    driver.join("target", guess=guess, head="head")
    return driver


def test_the_proposal_of_an_answer_is_verified_in_the_next_row() -> None:
    driver = head_cell(draft_length=3)
    driver.join("draft", Role.DRAFT)
    driver.submit(1, max_tokens=10)
    lengths = []
    while driver.steps["target"]:
        lengths += [(len(row.draft_tokens), row.draft_length) for row in driver.only_step("target").rows]
        driver.answer("target")
    assert not driver.steps["draft"]
    # 1, 5 and 9 tokens; the last row may bring no more than one.
    assert lengths == [(0, 3), (3, 3), (3, 3), (0, 0)]


def test_a_row_with_a_grammar_or_without_drafts_asks_for_no_proposal() -> None:
    driver = head_cell()
    grammar = SamplingParameters(grammar=Grammar("anything", (49,)))
    driver.submit(1, sampling=grammar)
    driver.submit(2, draft_length=0)
    driver.settle()
    assert not any(emitted.drafted for emitted in of_type(driver.log, EmitTokens))
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
