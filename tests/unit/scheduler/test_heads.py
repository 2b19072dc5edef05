"""Targets with a drafting head: their answers bring the proposals of the next round, and no draft worker is asked."""

from __future__ import annotations

import pytest

from scheduler.config import Policy
from scheduler.messages import EmitTokens, Outcome, Role, Row, RowResult
from tests.unit.scheduler.driver import Driver, of_type, outputs
from tests.unit.scheduler.driver import expected as expected_output


def head_cell(guess: float = 1.0, **config: object) -> Driver:
    driver = Driver(**config)
    driver.join("target", guess=guess, head="head")
    return driver


@pytest.mark.parametrize(
    ("policy", "ahead", "expected"),
    [
        # 1, 5 and 9 tokens; the last row may bring no more than one.
        (Policy.EXSPEC, 1, [(0, 3), (3, 3), (3, 3), (0, 0)]),
        # The last row was sent when 5 tokens were known.
        (Policy.AUTO, 2, [(0, 3), (3, 3), (3, 3), (3, 3)]),
    ],
)
def test_what_the_head_proposes_is_verified_in_the_next_row(
    policy: Policy, ahead: int, expected: list[tuple[int, int]]
) -> None:
    driver = head_cell(draft_length=3, policy=policy)
    driver.join("draft", Role.DRAFT)
    driver.submit(1, max_tokens=10, draft_length=3)
    lengths, sent = [], []
    while driver.steps["target"]:
        if driver.steps["target"][0].rows:
            sent.append(len(driver.steps["target"]))
        lengths += [(len(row.draft_tokens), row.draft_length) for row in driver.steps["target"][0].rows]
        driver.answer("target")
    assert not driver.steps["draft"]
    assert lengths == expected
    # All but the last rows are sent before the answer that tells what they verify.
    assert sent == [ahead] * 3 + [1]
    assert outputs(driver, 1) == expected_output(driver, 1)


def test_a_row_without_drafts_asks_for_no_proposal() -> None:
    driver = head_cell()
    driver.submit(1, draft_length=0)
    driver.settle()
    assert not any(emitted.drafted for emitted in of_type(driver.log, EmitTokens))
    assert outputs(driver, 1) == expected_output(driver, 1)


@pytest.mark.parametrize("outcomes", [(), (Outcome(1, 3, (4,)),), (Outcome(0, 999, (4, 5)),)])
def test_an_answer_without_a_proposal_for_its_result_is_followed_by_a_plain_row(outcomes: tuple[Outcome, ...]) -> None:
    driver = head_cell(policy=Policy.EXSPEC)
    driver.submit(1)

    def instead(row: Row) -> RowResult:
        result = driver.workers["target"].run_row(row)
        result.outcomes = outcomes
        return result

    driver.answer("target", instead)
    (row,) = driver.only_step("target").rows
    assert row.draft_tokens == ()
    driver.settle()
    assert outputs(driver, 1) == expected_output(driver, 1)
