"""What a round feeds, proposes, verifies and commits."""

from __future__ import annotations

from scheduler.messages import (
    EmitTokens,
    FinishReason,
    FinishSequence,
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
