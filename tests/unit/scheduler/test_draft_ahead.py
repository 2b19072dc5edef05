"""Drafting ahead: an idle draft prepares for outcomes of a verification, and a round begins with what it prepared."""

from __future__ import annotations

import pytest

from scheduler.messages import EmitTokens, Outcome, Role, Row, RowResult, SendStep
from scheduler.sampling import Grammar, SamplingParameters
from scheduler.state.digests import DigestedTokens
from tests.unit.scheduler.driver import Answer, Driver, check_to_the_end, of_type
from tests.unit.scheduler.model_worker import target_token


def seconds(step: SendStep) -> float:
    """What a draft's step takes, where a target's takes 0.05: time enough to prepare."""
    passes = max([max(row.draft_length + bool(row.outcomes), 1) for row in step.rows], default=0)
    tokens = sum(len(row.tokens) + len(row.draft_tokens) + row.draft_length * max(row.outcomes, 1) for row in step.rows)
    return 0.0005 + 0.001 * passes + 0.00001 * tokens


def drafting(max_length: int = 4000, config: dict[str, object] | None = None, **request: object) -> Driver:
    """A pair whose draft is always right, with one sequence that comes with 8 tokens."""
    driver = Driver(**{"draft_ahead": 4, "draft_length": 4, **(config or {})})
    driver.join("target")
    driver.join("draft", Role.DRAFT, max_length=max_length)
    driver.submit(1, prompt_length=8, **{"max_tokens": 40, **request})
    return driver


def draft(driver: Driver, instead: Answer | None = None) -> None:
    driver.answer("draft", instead, seconds(driver.steps["draft"][0]))


def verify(driver: Driver) -> tuple[Row, list[Row]]:
    """Goes on until draft tokens are verified; returns the target's row, and those of the draft meanwhile."""
    for _ in range(20):
        for step in driver.steps["target"]:
            for row in step.rows:
                if row.draft_tokens:
                    return row, [row for step in driver.steps["draft"] for row in step.rows]
        if driver.steps["draft"]:
            draft(driver)
        else:
            driver.answer("target")
    raise AssertionError("never verified")


def finds_three_tokens(driver: Driver) -> Answer:
    """The draft's answer to a row that prepares: the outcome that comes, and a proposal of three tokens for it."""

    def answer(row: Row) -> RowResult:
        result = driver.workers["draft"].run_row(row)
        held = driver.workers["draft"].held[row.sequence_id].tokens
        follows = DigestedTokens(held)
        for _ in range(4):
            follows.extend([target_token(follows.digest(len(follows)))])
        token, *proposal = follows.tokens[len(held) :]
        result.outcomes = (Outcome(len(row.draft_tokens), token, tuple(proposal)),)
        return result

    return answer


def counted(driver: Driver) -> tuple[int, int]:
    snapshot = driver.core.snapshot()
    return snapshot.outcomes_sought, snapshot.outcomes_found


@pytest.mark.parametrize(
    ("config", "request_fields"),
    [
        ({"draft_ahead": 0}, {}),
        ({"steps_in_flight": 1}, {}),
        ({"draft_length": 0}, {}),
        ({}, {"draft_length": 0}),
        ({}, {"sampling": SamplingParameters(grammar=Grammar("a", frozenset({1})))}),
    ],
)
def test_nothing_is_prepared(config: dict[str, object], request_fields: dict[str, object]) -> None:
    driver = drafting(config=config, **request_fields)
    while any(driver.steps.values()):
        if driver.steps["draft"]:
            draft(driver)
        if driver.steps["target"]:
            driver.answer("target")
    assert not any(row.outcomes for step in of_type(driver.log, SendStep) for row in step.rows)
    check_to_the_end(driver, 1)


@pytest.mark.parametrize(("spare", "length"), [(0, None), (1, 1), (2, 2), (9, 4)])
@pytest.mark.parametrize("bound", ["max_tokens", "max_sequence_length"])
def test_an_idle_draft_prepares_for_what_is_verified_up_to_the_end(bound: str, spare: int, length: int | None) -> None:
    """Of 9 tokens, 4 that are verified and the target's own: `spare` are left after these."""
    most = 14 + spare
    driver = drafting(max_length=most) if bound == "max_sequence_length" else drafting(max_tokens=most - 8)
    verified, rows = verify(driver)
    assert len(verified.draft_tokens) == 4
    assert [row.draft_length for row in rows] == ([] if length is None else [length])
    for row in rows:
        assert (row.draft_tokens, row.outcomes, row.sample) == (verified.draft_tokens, 4, False)
        assert row.kv_len + len(row.tokens) == verified.kv_len + len(verified.tokens) == 9
    check_to_the_end(driver, 1)


def test_after_a_hit_the_next_verification_needs_no_draft_step() -> None:
    driver = drafting()
    verify(driver)
    draft(driver, finds_three_tokens(driver))
    driver.answer("target")
    (row,) = driver.only_step("target").rows
    # It goes on with four accepted tokens and the target's own.
    assert (row.kv_len + len(row.tokens), len(row.draft_tokens), row.sample) == (14, 3, True)
    assert counted(driver) == (1, 1)
    # The draft has KV of the whole first proposal, and prepares for the next outcome.
    (ahead,) = driver.only_step("draft").rows
    assert (ahead.kv_len, len(ahead.tokens), ahead.draft_tokens, ahead.outcomes) == (13, 1, row.draft_tokens, 4)
    driver.answer("target")
    assert of_type(driver.log, EmitTokens)[-1].accepted == 3
    check_to_the_end(driver, 1)


def test_where_the_verdict_is_sooner_the_draft_row_follows_at_once() -> None:
    driver = drafting()
    _, rows = verify(driver)
    driver.answer("target")
    first, second = driver.steps["draft"]
    assert list(first.rows) == rows
    (proposes,) = second.rows
    assert (proposes.kv_len + len(proposes.tokens), proposes.draft_length, proposes.outcomes) == (14, 4, 0)
    # Too late, right as it is: the proposal under way is what counts.
    draft(driver, finds_three_tokens(driver))
    assert not driver.steps["target"]
    assert driver.core.snapshot().drafting == 1
    draft(driver)
    assert len(driver.only_step("target").rows[0].draft_tokens) == 4
    assert counted(driver) == (1, 0)
    check_to_the_end(driver, 1)
