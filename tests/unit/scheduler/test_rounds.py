"""What a round feeds, proposes, verifies and commits."""

from __future__ import annotations

import pytest

from scheduler.messages import (
    EmitTokens,
    FinishReason,
    FinishSequence,
    Role,
    SendStep,
)
from tests.unit.scheduler.driver import Driver, expected, of_type, outputs, pair


def test_the_last_prefill_chunk_yields_the_first_token() -> None:
    driver = Driver(prefill_chunk=4)
    driver.join("target")
    driver.submit(1, prompt_length=10, max_tokens=1)
    seen = []
    while driver.core.snapshot().live:
        (row,) = driver.only_step("target").rows
        seen.append((row.kv_len, len(row.tokens), row.sample, row.opening is not None))
        driver.answer("target")
    assert seen == [(0, 4, False, True), (4, 4, False, False), (8, 2, True, False)]
    assert outputs(driver, 1) == expected(driver, 1)


def test_after_full_acceptance_the_draft_lacks_two_tokens_else_one() -> None:
    driver = pair(draft_length=4)
    driver.submit(1, prompt_length=8, max_tokens=40)
    driver.answer("draft")
    driver.answer("target")
    driver.answer("draft")
    driver.answer("target")  # all four accepted: committed 8 + 1 + 5
    (row,) = driver.only_step("draft").rows
    assert (row.kv_len, len(row.tokens)) == (12, 2)
    driver.workers["draft"].guess = 0.0
    driver.answer("draft")
    (row,) = driver.only_step("target").rows
    assert (row.kv_len, len(row.tokens), len(row.draft_tokens)) == (13, 1, 4)
    driver.answer("target")  # none accepted: one more token
    (row,) = driver.only_step("draft").rows
    assert (row.kv_len, len(row.tokens)) == (14, 1)
    driver.workers["draft"].guess = 1.0
    driver.settle()
    assert outputs(driver, 1) == expected(driver, 1)


def test_drafts_never_reach_past_max_tokens() -> None:
    driver = pair(draft_length=4)
    driver.submit(1, prompt_length=8, max_tokens=5)
    lengths = []
    while any(driver.steps.values()):
        for worker_id in ("draft", "target"):
            for step in list(driver.steps[worker_id]):
                lengths += [row.draft_length for row in step.rows if worker_id == "draft" and row.draft_length]
                driver.answer(worker_id)
    assert lengths == [3]
    assert outputs(driver, 1) == expected(driver, 1)


@pytest.mark.parametrize("how", ["config", "request", "no draft worker"])
def test_plain_decoding_is_a_round_without_drafts(how: str) -> None:
    driver = Driver(draft_length=0 if how == "config" else 4)
    driver.join("target")
    if how != "no draft worker":
        driver.join("draft", Role.DRAFT)
    driver.submit(1, max_tokens=6, draft_length=0 if how == "request" else None)
    driver.settle()
    assert outputs(driver, 1) == expected(driver, 1)
    assert all(emitted.drafted == 0 for emitted in of_type(driver.log, EmitTokens))
    assert not any(step.worker_id == "draft" for step in of_type(driver.log, SendStep))


def test_output_stops_at_a_stop_token_inside_an_accepted_run() -> None:
    fresh = Driver()
    fresh.join("target")
    fresh.submit(1, prompt_length=8, max_tokens=10)
    fresh.settle()
    whole = outputs(fresh, 1)
    stop = whole[3]
    assert stop not in whole[:3]
    driver = pair(draft_length=4)
    driver.submit(1, prompt_length=8, max_tokens=10, stop_token_ids=frozenset({stop}), logits_digests=True)
    driver.settle()
    assert outputs(driver, 1) == whole[:4]
    last = of_type(driver.log, EmitTokens)[-1]
    assert (last.drafted, last.accepted, len(last.tokens), len(last.logits_digests)) == (4, 3, 3, 3)
    assert of_type(driver.log, FinishSequence) == [FinishSequence(1, FinishReason.STOP)]
