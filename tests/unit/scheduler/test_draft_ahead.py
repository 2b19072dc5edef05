"""Drafting ahead: an idle draft prepares for outcomes of a verification, and a round begins with what it prepared."""

from __future__ import annotations

import pytest

from scheduler.messages import Command, EmitTokens, Outcome, Role, Row, RowResult, SendStep
from scheduler.sampling import Grammar, SamplingParameters
from scheduler.state.digests import DigestedTokens
from tests.unit.scheduler.driver import Answer, Driver, check_to_the_end, of_type, pair
from tests.unit.scheduler.model_worker import VOCABULARY, target_token


def seconds(step: SendStep) -> float:
    """What a draft's step takes, where a target's takes 0.05: time enough to prepare."""
    passes = max([max(row.draft_length + bool(row.outcomes), 1) for row in step.rows], default=0)
    tokens = sum(len(row.tokens) + len(row.draft_tokens) + row.draft_length * max(row.outcomes, 1) for row in step.rows)
    return 0.0005 + 0.001 * passes + 0.00001 * tokens


def drafting(pages: int = 1000, **config: object) -> Driver:
    """A pair whose draft is always right, with one sequence that comes with 8 tokens."""
    driver = Driver(**{"draft_ahead": 4, "draft_length": 4, **config})
    driver.join("target")
    driver.join("draft", Role.DRAFT, pages)
    driver.submit(1, prompt_length=8, max_tokens=40)
    return driver


def draft(driver: Driver, instead: Answer | None = None) -> list[Command]:
    return driver.answer("draft", instead, seconds(driver.steps["draft"][0]))


def rows_of(driver: Driver, worker_id: str) -> list[Row]:
    """Of all its steps that are not answered."""
    return [row for step in driver.steps[worker_id] for row in step.rows]


def verify(driver: Driver, sequence_id: int = 1) -> Row:
    """Goes on until draft tokens of the sequence are verified; returns the target's row."""
    for _ in range(20):
        for row in rows_of(driver, "target"):
            if row.sequence_id == sequence_id and row.draft_tokens:
                return row
        if driver.steps["draft"]:
            draft(driver)
        else:
            driver.answer("target")
    raise AssertionError("never verified")


def preparing(driver: Driver) -> Row:
    """The one row of the draft, which prepares for the verification under way."""
    verify(driver)
    (row,) = driver.only_step("draft").rows
    assert row.outcomes
    return row


def prepares(driver: Driver, right: bool = True, length: int = 3) -> Answer:
    """The draft's answer with a single outcome, the one that comes or another one."""

    def answer(row: Row) -> RowResult:
        result = driver.workers["draft"].run_row(row)
        held = list(driver.workers["draft"].held[row.sequence_id].tokens)
        follows = DigestedTokens(held)
        for _ in range(length + 1):
            follows.extend([target_token(follows.digest(len(follows)))])
        token, *proposal = follows.tokens[len(held) :]
        if not right:
            token = (token + 1) % VOCABULARY
        result.outcomes = (Outcome(len(row.draft_tokens), token, tuple(proposal), bytes([200] * len(proposal))),)
        return result

    return answer


def counted(driver: Driver) -> tuple[int, int]:
    snapshot = driver.core.snapshot()
    return snapshot.outcomes_sought, snapshot.outcomes_found


def prepared_rows(driver: Driver) -> list[Row]:
    """All that were ever sent."""
    return [row for step in of_type(driver.log, SendStep) for row in step.rows if row.outcomes]


# --- what is asked of the draft ---


def test_an_idle_draft_prepares_for_what_is_verified() -> None:
    driver = drafting()
    verified, row = verify(driver), preparing(driver)
    assert (row.draft_tokens, row.outcomes, row.draft_length, row.sample) == (verified.draft_tokens, 4, 4, False)
    assert row.kv_len + len(row.tokens) == verified.kv_len + len(verified.tokens) == 9
    check_to_the_end(driver, 1)


@pytest.mark.parametrize("why", ["off", "one step at a time", "grammar", "plain", "request"])
def test_nothing_is_prepared(why: str) -> None:
    config = {"off": {"draft_ahead": 0}, "one step at a time": {"steps_in_flight": 1}, "plain": {"draft_length": 0}}
    driver = pair(**{"draft_ahead": 4, "draft_length": 4, **config.get(why, {})})
    sampling = SamplingParameters(grammar=Grammar("a", frozenset({1})) if why == "grammar" else None)
    draft_length = 0 if why == "request" else None
    driver.submit(1, prompt_length=8, max_tokens=40, sampling=sampling, draft_length=draft_length)
    while any(driver.steps.values()):
        if driver.steps["draft"]:
            driver.answer("draft", seconds=seconds(driver.steps["draft"][0]))
        if driver.steps["target"]:
            driver.answer("target")
    assert not prepared_rows(driver)
    assert counted(driver)[1] == 0
    check_to_the_end(driver, 1)


@pytest.mark.parametrize(("spare", "length"), [(0, None), (1, 1), (2, 2), (9, 4)])
@pytest.mark.parametrize("bound", ["max_tokens", "max_sequence_length"])
def test_proposals_end_where_the_sequence_does(bound: str, spare: int, length: int | None) -> None:
    """Of 9 tokens, 4 that are verified and the target's own: `spare` are left after these."""
    most = 14 + spare
    driver = Driver(draft_ahead=4, draft_length=4)
    driver.join("target")
    driver.join("draft", Role.DRAFT, max_length=most if bound == "max_sequence_length" else 4000)
    driver.submit(1, prompt_length=8, max_tokens=most - 8 if bound == "max_tokens" else 40)
    assert len(verify(driver).draft_tokens) == 4
    assert [row.draft_length for row in rows_of(driver, "draft")] == ([] if length is None else [length])
    check_to_the_end(driver, 1)


# --- the verdict ---


def test_after_a_hit_the_next_verification_needs_no_draft_step() -> None:
    driver = drafting()
    preparing(driver)
    draft(driver, prepares(driver))
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


def test_after_a_miss_the_draft_proposes() -> None:
    driver = drafting()
    preparing(driver)
    draft(driver, prepares(driver, right=False))
    driver.answer("target")
    (row,) = driver.only_step("draft").rows
    assert (row.kv_len, len(row.tokens), row.draft_length, row.outcomes) == (13, 1, 4, 0)
    assert not driver.steps["target"]
    assert counted(driver) == (1, 0)
    check_to_the_end(driver, 1)


def test_where_the_verdict_is_sooner_the_draft_row_follows_at_once() -> None:
    driver = drafting()
    row = preparing(driver)
    driver.answer("target")
    first, second = driver.steps["draft"]
    assert first.rows == (row,)
    (proposes,) = second.rows
    assert (proposes.kv_len + len(proposes.tokens), proposes.draft_length, proposes.outcomes) == (14, 4, 0)
    # Too late, right as it is: the proposal under way is what counts.
    assert not draft(driver, prepares(driver))
    assert not driver.steps["target"]
    assert driver.core.snapshot().drafting == 1
    draft(driver)
    assert len(driver.only_step("target").rows[0].draft_tokens) == 4
    assert counted(driver) == (1, 0)
    check_to_the_end(driver, 1)
