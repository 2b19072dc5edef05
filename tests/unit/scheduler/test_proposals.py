"""Targets verify what was proposed, whoever proposes: a head, a draft inside, or the draft worker that serves them."""

from __future__ import annotations

import pytest

from spool.scheduler.config import Policy
from spool.scheduler.messages import (
    DraftingReport,
    EmitTokens,
    ProposalSource,
    Role,
    Row,
    RowResult,
    SendStep,
    SequenceRequest,
    SequenceSubmitted,
)
from tests.unit.scheduler.driver import Driver, check_to_the_end, of_type, prompt_of

PROPOSERS = ["head", "draft"]


def cell(proposer: str, **config: object) -> Driver:
    driver = Driver(**config)
    driver.join("target", head="head" if proposer == "head" else "")
    if proposer == "draft":
        driver.join("draft", Role.DRAFT)
    return driver


def rounds(driver: Driver, sequence_id: int) -> list[tuple[int, int]]:
    return [(one.drafted, one.accepted) for one in of_type(driver.log, EmitTokens) if one.sequence_id == sequence_id]


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize(
    ("policy", "ahead", "expected"),
    [
        # 1, 5 and 9 tokens; the last row may bring no more than one.
        (Policy.EXSPEC, 1, [(0, 3), (3, 3), (3, 3), (0, 0)]),
        # The last row was sent when 5 tokens were known.
        (Policy.AUTO, 2, [(0, 3), (3, 3), (3, 3), (3, 3)]),
    ],
)
def test_what_was_proposed_is_verified_in_the_next_row(
    policy: Policy, ahead: int, expected: list[tuple[int, int]], proposer: str
) -> None:
    driver = cell(proposer, draft_length=3, policy=policy)
    driver.submit(1, max_tokens=10, draft_length=3)
    lengths, sent = [], []
    while driver.steps["target"]:
        if driver.steps["target"][0].rows:
            sent.append(len(driver.steps["target"]))
        lengths += [(row.verify, row.draft_length) for row in driver.steps["target"][0].rows]
        driver.answer("target")
    assert lengths == expected
    # All but the last rows are sent before the answer that tells what they follow.
    assert sent == [ahead] * 3 + [1]
    check_to_the_end(driver, 1)


@pytest.mark.parametrize("policy", list(Policy))
def test_a_request_may_ask_for_fewer_tokens_than_the_server_drafts_but_not_for_more(policy: Policy) -> None:
    """Rows with many tokens would delay those of others."""
    driver = cell("draft", draft_length=3, policy=policy)
    for sequence_id, asked in ((1, 2), (2, 64)):
        driver.submit(sequence_id, max_tokens=30, draft_length=asked)
    check_to_the_end(driver, 1, 2)
    assert [max(drafted for drafted, _ in rounds(driver, one)) for one in (1, 2)] == [2, 3]


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("drafts", [False, True])
def test_nothing_is_asked_for_where_nobody_proposes_or_no_draft_is_wanted(policy: Policy, drafts: bool) -> None:
    driver = cell("draft" if drafts else "none", policy=policy)
    driver.submit(1, draft_length=0 if drafts else 4)
    check_to_the_end(driver, 1)
    assert not any(row.verify or row.draft_length for step in of_type(driver.log, SendStep) for row in step.rows)


@pytest.mark.parametrize("policy", list(Policy))
def test_only_whom_a_request_names_is_asked(policy: Policy) -> None:
    driver = cell("head", draft_length=3, policy=policy)
    for sequence_id, proposer in enumerate(("", "draft", "lookup", "none")):
        driver.submit(sequence_id, max_tokens=60, proposer=proposer)
    driver.workers["target"].found = 1.0
    check_to_the_end(driver, 0, 1, 2, 3)
    sources = [
        {one.source for one in of_type(driver.log, EmitTokens) if one.sequence_id == number and one.drafted}
        for number in range(4)
    ]
    if policy is not Policy.AUTO:
        assert sources == [{ProposalSource.LOOKUP}, {ProposalSource.DRAFT}, {ProposalSource.LOOKUP}, set()]
    assert sources[1] <= {ProposalSource.DRAFT}
    assert sources[2] <= {ProposalSource.LOOKUP}
    assert not sources[3]


@pytest.mark.parametrize("policy", list(Policy))
def test_a_sequence_goes_on_plainly_while_its_proposals_are_late(policy: Policy) -> None:
    driver = cell("draft", policy=policy)
    driver.workers["target"].served = False
    driver.submit(1, max_tokens=12, draft_length=2)
    for _ in range(6):
        driver.answer("target", report=DraftingReport(True, 1, 0))
    driver.workers["target"].served = True
    check_to_the_end(driver, 1)
    assert rounds(driver, 1)[:4] == [(0, 0)] * 4
    assert (2, 2) in rounds(driver, 1)


def test_a_draft_is_not_asked_any_more_for_what_it_refuses() -> None:
    driver = cell("draft", draft_length=2, policy=Policy.EXSPEC)
    for sequence_id in (1, 2):
        driver.submit(sequence_id, max_tokens=30)
    driver.until_asked("target", lambda row: row.verify)
    driver.log.clear()
    driver.answer("target", report=DraftingReport(True, 2, 2, refused=(1, 77)))
    driver.settle()
    asked = {row.sequence_id for step in of_type(driver.log, SendStep) for row in step.rows if row.draft_length}
    assert asked == {2}


def test_groups_are_equal_where_their_rows_verify_equally_many_tokens_from_one_position() -> None:
    """Two sequences of one length go on together, until a proposal of one of them is not there."""
    driver = cell("draft", policy=Policy.EQSPEC, batch_size=2, draft_length=2)
    requests = [SequenceRequest(number, prompt_of(number, 3), 60) for number in (1, 2)]
    driver.handle(*map(SequenceSubmitted, requests))
    driver.answer("target")

    def counted() -> tuple[int, int]:
        snapshot = driver.core.snapshot()
        return snapshot.equal_length_groups, snapshot.ragged_groups

    def unserved(row: Row) -> RowResult | None:
        worker = driver.workers["target"]
        worker.served = row.sequence_id != 1
        return worker.run_row(row)

    for groups in (1, 2):
        driver.answer("target")
        assert counted() == (groups, 0)
    driver.answer("target", unserved)
    assert counted() == (2, 1)
    driver.answer("target")
    assert counted() == (2, 2)
    assert driver.core.snapshot().ragged_rows == 4
    check_to_the_end(driver, 1, 2)
