"""Lookup and a draft take turns on a target: each is asked for as many tokens as pay of its own, as far as the target
tells who proposed."""

from __future__ import annotations

import pytest

from spool.scheduler.config import Policy
from spool.scheduler.messages import EmitTokens, ProposalSource, Role, Row, SendStep
from tests.unit.scheduler.driver import Driver, check_to_the_end, of_type

LONGEST = 12
BASE, TOKEN, PASS = 0.010, 0.0002, 0.001
"""Seconds of a step by itself, for each token that it computes, and for each pass of a draft."""


def run(
    found: float, lookup_guess: float, guess: float, proposer: str = "head", sequences: int = 2, tells: bool = True
) -> Driver:
    """Sequences of 1,000 tokens to their end, in virtual time, where lookup finds something in a share of rounds."""
    driver = Driver(policy=Policy.AUTO, draft_length=LONGEST, batch_size=16, wait_bound_steps=1.5)
    driver.join("target", pages=10_000, guess=guess, head="" if proposer == "draft" else proposer)
    if proposer == "draft":
        driver.join("draft", Role.DRAFT)
    worker = driver.workers["target"]
    worker.found, worker.lookup_guess, worker.tells = found, lookup_guess, tells
    decode(driver, *range(sequences))
    return driver


def decode(driver: Driver, *sequence_ids: int, max_tokens: int = 1000, proposer: str = "") -> None:
    worker = driver.workers["target"]
    for sequence_id in sequence_ids:
        driver.submit(sequence_id, max_tokens=max_tokens, proposer=proposer)
    while driver.steps["target"]:
        step = driver.steps["target"][0]
        results = {row.sequence_id: worker.run_row(row) for row in step.rows}
        fed = sum(max(1, row.end - row.kv_len) + results[row.sequence_id].verified for row in step.rows)
        drafted = (one.verified for one in results.values() if one.source is not ProposalSource.LOOKUP)
        drafting = PASS * max(drafted, default=0)
        seconds = BASE + TOKEN * fed + drafting
        driver.now += seconds
        driver.answer("target", lambda row: results[row.sequence_id], seconds, drafting_seconds=drafting)  # noqa: B023
    check_to_the_end(driver, *sequence_ids)


def rows_at_last(driver: Driver) -> list[Row]:
    rows = [row for step in of_type(driver.log, SendStep) for row in step.rows if row.sample]
    return rows[len(rows) // 2 : -LONGEST]


def mean(values: list[int]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("proposer", ["head", "draft"])
def test_what_lookup_finds_may_be_longer_than_what_a_draft_proposes(proposer: str) -> None:
    """A draft whose tokens are seldom right beyond the second, and repetitions of which nearly all are."""
    driver = run(0.4, 0.97, 0.4, proposer)
    verified = {source: list[int]() for source in ProposalSource}
    for one in of_type(driver.log, EmitTokens)[200:]:
        if one.source is not None:
            verified[one.source].append(one.drafted)
    assert mean(verified[ProposalSource.LOOKUP]) > 8
    assert 0.9 < mean(verified[ProposalSource.DRAFT]) < 3.5


@pytest.mark.parametrize("proposer", ["head", "ngram"])
def test_a_draft_that_is_never_right_is_not_asked_because_lookup_is_right(proposer: str) -> None:
    """Nor is it a reason not to look up. Lookup alone has no other to be asked."""
    rows = rows_at_last(run(0.3, 0.95, 0.0, proposer))
    assert mean([row.draft_length for row in rows]) < 0.3
    assert mean([row.lookup_length or 0 for row in rows]) > 8


def test_lookup_that_is_mostly_wrong_steps_back_behind_a_good_draft() -> None:
    rows = rows_at_last(run(0.5, 0.1, 0.9))
    assert mean([row.draft_length for row in rows]) > 3
    assert mean([row.lookup_length or 0 for row in rows]) < 0.5


def test_lookup_that_stepped_back_is_tried_again() -> None:
    driver = run(0.9, 0.1, 0.7, sequences=8)
    assert mean([row.lookup_length or 0 for row in rows_at_last(driver)]) < 0.5
    driver.workers["target"].lookup_guess = 1.0
    decode(driver, *range(10, 18), max_tokens=2000)
    assert mean([row.lookup_length or 0 for row in rows_at_last(driver)[-80:]]) > 8


def test_lookup_needs_no_draft_that_was_tried() -> None:
    """Where all requests want lookup alone."""
    driver = Driver(policy=Policy.AUTO, draft_length=LONGEST, batch_size=16)
    driver.join("target", pages=10_000, head="head")
    worker = driver.workers["target"]
    worker.found, worker.lookup_guess = 0.5, 0.95
    decode(driver, 1, 2, proposer="lookup")
    rows = rows_at_last(driver)
    assert {row.draft_length for row in rows} == {0}
    assert mean([row.lookup_length or 0 for row in rows]) > 8


def test_where_targets_do_not_tell_who_proposed_both_get_the_same_length() -> None:
    """As those of protocol version 21."""
    driver = run(0.4, 0.97, 0.8, tells=False)
    assert {row.lookup_length for step in of_type(driver.log, SendStep) for row in step.rows} == {None}
    assert mean([row.draft_length for row in rows_at_last(driver)]) > 2


def test_the_snapshot_tells_both_acceptances() -> None:
    driver = run(0.4, 0.95, 0.4, sequences=4)
    (now,) = driver.core.snapshot().drafting_now
    assert now.lookup_length > now.length
    assert 0.2 < now.lookup_share < 0.6
    assert now.lookup_chances[0] > 0.85 > 0.6 > now.chances[0]
