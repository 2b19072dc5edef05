"""Which rows share a step, and who waits for whom."""

from __future__ import annotations

from itertools import pairwise

import pytest

from spool.engine.settings import EngineSettings
from spool.scheduler.config import Policy
from spool.scheduler.messages import MAX_SCORED_TOKENS, FinishSequence, SendStep
from tests.unit.scheduler.driver import Driver, check_to_the_end, expected, of_type, outputs, pair


def test_prefill_rides_in_the_step_of_a_verify_group_and_shares_its_chunk() -> None:
    driver = Driver(prefill_chunk=8, draft_length=0, steps_in_flight=1)
    driver.join("target")
    driver.submit(1, prompt_length=3)
    driver.submit(2, prompt_length=5)
    driver.submit(3, prompt_length=20)
    driver.answer("target")
    step = driver.only_step("target")
    assert step.grouped == 1
    assert [(row.sequence_id, len(row.tokens), row.sample) for row in step.rows] == [
        (1, 1, True),
        (2, 5, True),
        (3, 3, False),
    ]


def test_the_prompt_that_was_admitted_first_is_computed_first() -> None:
    driver = Driver(prefill_chunk=10, steps_in_flight=1)
    driver.join("target", pages=10_000)
    for number in range(3):
        driver.submit(number, prompt_length=15, max_tokens=1)
    driver.settle()
    rows = [row for step in of_type(driver.log, SendStep) for row in step.rows]
    # What is left of a chunk goes to the next prompt.
    assert [(row.sequence_id, len(row.tokens)) for row in rows] == [(0, 10), (0, 5), (1, 5), (1, 10), (2, 10), (2, 5)]


@pytest.mark.parametrize(("device", "running", "chunk"), [("cpu", 48, 96), ("cuda:1", 256, 1024)])
def test_what_runs_and_what_a_step_feeds_follow_from_what_a_pass_takes(device: str, running: int, chunk: int) -> None:
    driver = Driver(draft_length=0, steps_in_flight=1)
    driver.join("target", pages=9000, packed=EngineSettings("any", device=device).batched_tokens)
    for number in range(300):
        driver.submit(number, prompt_length=80, max_tokens=1)
    snapshot = driver.core.snapshot()
    assert (snapshot.running, snapshot.max_running) == (running, running)
    driver.answer("target")
    fed = [sum(len(row.tokens) for row in step.rows) for step in of_type(driver.log, SendStep)]
    assert fed == [80, chunk]


def test_a_row_asks_for_few_log_probabilities_of_a_prompt() -> None:
    driver = Driver(draft_length=0, steps_in_flight=1)
    driver.join("target", pages=9000, packed=2048)
    driver.submit(0, prompt_length=600, max_tokens=1, prompt_logprobs=0)
    ((row,),) = [step.rows for step in of_type(driver.log, SendStep)]
    assert row.scoring is not None
    assert len(row.tokens) == len(row.scoring.tokens) == MAX_SCORED_TOKENS


def test_chunks_of_a_prompt_ride_in_consecutive_steps_beside_others() -> None:
    """Two sequences decode, each in every other step, of which two are always in flight. Where chunks waited for each
    other's answers, they would ride in every other step."""
    driver = Driver(batch_size=1, draft_length=0, prefill_chunk=10, steps_in_flight=2)
    driver.join("target")
    for number in range(2):
        driver.submit(number, max_tokens=200)
    for _ in range(6):
        driver.answer("target")
    assert sorted(row.sequence_id for step in driver.steps["target"] for row in step.rows) == [0, 1]
    driver.log.clear()
    driver.submit(10, prompt_length=35, max_tokens=1)
    while not outputs(driver, 10):
        driver.answer("target")
    steps = [[row.sequence_id for row in step.rows] for step in of_type(driver.log, SendStep)]
    assert [10 in step for step in steps[:5]] == [True, True, True, True, False]
    assert outputs(driver, 10) == expected(driver, 10)


def test_a_prompt_is_not_shut_out_by_those_who_decode() -> None:
    driver = Driver(batch_size=8, draft_length=0, max_running=48, prefill_chunk=64)
    driver.join("target", packed=8)
    for sequence_id in range(20):
        driver.submit(sequence_id, prompt_length=4, max_tokens=100)
    driver.submit(99, prompt_length=100, max_tokens=3)
    driver.settle(max_steps=5000)
    assert of_type(driver.log, FinishSequence)[0].sequence_id == 99


@pytest.mark.parametrize("seconds", [0.00005, 5.0])
def test_the_wait_bound_is_that_of_usual_steps(seconds: float) -> None:
    """Of a wait for proposals. A step may end at once, where nothing was left to compute, or stall."""
    driver = pair(wait_bound_steps=2.0, steps_in_flight=1, draft_length=1)
    driver.submit(1, prompt_length=2, max_tokens=200)
    for _ in range(60):
        driver.answer("target", seconds=0.05)
    assert driver.only_step("target").wait_seconds == pytest.approx(0.1, rel=0.1)
    driver.answer("target", seconds=seconds)
    assert driver.only_step("target").wait_seconds == pytest.approx(0.1, rel=0.25)


def test_exspec_lets_no_sequence_be_passed_over_for_more_than_its_bound() -> None:
    """One sequence differs from all others, which always make equal groups."""
    driver = Driver(policy=Policy.EXSPEC, batch_size=4, draft_length=1, wait_bound_steps=3.0, max_running=48)
    driver.join("target", head="head")
    for sequence_id in range(9):
        driver.submit(sequence_id, prompt_length=5 if sequence_id == 4 else 3, max_tokens=200)
    driver.log.clear()
    for _ in range(60):
        driver.answer("target")
    groups = [[row.sequence_id for row in step.rows] for step in of_type(driver.log, SendStep)]
    places = [place for place, group in enumerate(groups) if 4 in group]
    # At most two groups are before it when it gets idle, three may pass it over, and one is sent with it in the next.
    assert max(later - before for before, later in pairwise(places)) <= 7
    assert sum(step.forced for step in of_type(driver.log, SendStep)) >= 2


def test_the_next_plain_step_is_there_before_the_answer_and_none_after_the_last_token() -> None:
    driver = Driver(draft_length=0, batch_size=2)
    driver.join("target")
    for sequence_id in (1, 2):
        driver.submit(sequence_id, max_tokens=12)
    for _ in range(3):
        driver.answer("target")
    for _ in range(5):
        rows = [sorted((row.sequence_id, row.follows) for row in step.rows) for step in driver.steps["target"]]
        assert rows == [[(1, True), (2, True)]] * 2
        driver.answer("target")
    check_to_the_end(driver, 1, 2)
    rows = [row for step in of_type(driver.log, SendStep) for row in step.rows if row.sequence_id == 1]
    assert [row.follows for row in rows] == [False] + [True] * 11


@pytest.mark.parametrize(("policy", "follow"), [(policy, policy in (Policy.AUTO, Policy.RAGGED)) for policy in Policy])
def test_rows_that_verify_are_sent_ahead_where_the_policy_does_not_ask_for_lengths(
    policy: Policy, follow: bool
) -> None:
    driver = pair(policy=policy, draft_length=2)
    for sequence_id in (1, 2):
        driver.submit(sequence_id, max_tokens=12)
    check_to_the_end(driver, 1, 2)
    assert any(row.follows for step in of_type(driver.log, SendStep) for row in step.rows) is follow


@pytest.mark.parametrize("policy", list(Policy))
def test_chunks_of_a_prompt_say_what_will_be_proposed_after_it(policy: Policy) -> None:
    driver = pair(policy=policy, draft_length=3, prefill_chunk=4)
    driver.submit(1, prompt_length=10, draft_length=2)
    driver.submit(2, prompt_length=10, draft_length=0)
    check_to_the_end(driver, 1, 2)
    rows = [row for step in of_type(driver.log, SendStep) for row in step.rows if not row.sample]
    assert {(row.sequence_id, row.draft_length) for row in rows} == {(1, 2), (2, 0)}


def test_eqspec_keeps_a_batch_of_sequences_per_target() -> None:
    driver = Driver(policy=Policy.EQSPEC, batch_size=3, max_running=48)
    driver.join("a")
    driver.join("b")
    for sequence_id in range(20):
        driver.submit(sequence_id)
    assert driver.core.snapshot().running == 6
