"""The scheduler core, event by event: admission, rounds, groups, pages, homes, ends."""

from __future__ import annotations

import pytest

from scheduler.config import Policy
from scheduler.messages import (
    EmitTokens,
    FailSequence,
    FinishReason,
    FinishSequence,
    RefusalCause,
    RefuseSequence,
    Role,
    Row,
    RowResult,
    RowStatus,
    SendStep,
    StepCompleted,
)
from tests.sim.driver import Driver, of_type
from tests.sim.model import plain_decoding


def outputs(driver: Driver, sequence_id: int) -> list[int]:
    return [
        token
        for emitted in of_type(driver.log, EmitTokens)
        if emitted.sequence_id == sequence_id
        for token in emitted.tokens
    ]


def expected(driver: Driver, sequence_id: int) -> list[int]:
    request = next(
        row.opening
        for step in of_type(driver.log, SendStep)
        for row in step.rows
        if row.sequence_id == sequence_id and row.opening is not None
    )
    return plain_decoding(request)[0]


def refusal(commands: list[object]) -> RefuseSequence:
    (command,) = commands
    assert isinstance(command, RefuseSequence)
    return command


def pair(**config: object) -> Driver:
    """One target and one draft whose guesses are always right."""
    driver = Driver(**config)
    driver.join("target")
    driver.join("draft", Role.DRAFT)
    return driver


def unknown(row: Row) -> RowResult:
    return RowResult(row.sequence_id, RowStatus.UNKNOWN_SEQUENCE, 0, 0)


# --- admission ---


def test_faulty_requests_are_refused() -> None:
    driver = pair()
    assert refusal(driver.submit(1, prompt_length=0)).cause is RefusalCause.INVALID
    assert refusal(driver.submit(1, max_tokens=0)).cause is RefusalCause.INVALID
    assert refusal(driver.submit(1, draft_length=-1)).cause is RefusalCause.INVALID
    driver.submit(1)
    twice = refusal(driver.submit(1))
    assert (twice.cause, twice.sequence_id) == (RefusalCause.INVALID, 1)
    driver.settle()
    assert outputs(driver, 1) == expected(driver, 1)


def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    driver = Driver()
    driver.join("small", pages=5, page_size=4, max_length=1000)
    refused = refusal(driver.submit(1, prompt_length=11, max_tokens=10))
    assert refused.cause is RefusalCause.TOO_LONG
    assert "21 positions" in refused.message
    assert "limit is 20" in refused.message
    driver.submit(2, prompt_length=10, max_tokens=10)
    driver.settle()
    assert len(outputs(driver, 2)) == 10
    driver.join("short", pages=1000, max_length=30)
    assert refusal(driver.submit(3, prompt_length=21, max_tokens=10)).cause is RefusalCause.TOO_LONG
    assert not of_type(driver.submit(4, prompt_length=20, max_tokens=10), RefuseSequence)


def test_without_targets_sequences_queue_and_are_checked_when_one_joins() -> None:
    driver = Driver()
    assert driver.submit(1, prompt_length=100) == []
    assert driver.submit(2, prompt_length=3) == []
    commands = driver.join("target", max_length=50)
    (failed,) = of_type(commands, FailSequence)
    assert failed.sequence_id == 1
    assert "120 positions" in failed.error
    assert [row.sequence_id for row in driver.only_step("target").rows] == [2]


def test_a_sequence_that_only_a_lost_target_could_hold_fails_instead_of_blocking_the_queue() -> None:
    driver = Driver()
    driver.join("large", max_length=500)
    driver.join("small", max_length=50)
    driver.submit(1, prompt_length=100)
    commands = driver.lose("large")
    assert [failed.sequence_id for failed in of_type(commands, FailSequence)] == [1]


def test_the_queue_is_bounded_in_sequences() -> None:
    driver = Driver(window=2, max_queued_sequences=3)
    driver.join("target")
    for sequence_id in range(5):
        assert not of_type(driver.submit(sequence_id), RefuseSequence)
    refused = refusal(driver.submit(5))
    assert refused.cause is RefusalCause.QUEUE_FULL
    assert "3 sequences wait, the limit is 3" in refused.message
    driver.cancel(4)
    assert driver.submit(6) == []


def test_the_queue_is_bounded_in_tokens() -> None:
    driver = Driver(window=1, max_queued_tokens=50)
    driver.join("target")
    driver.submit(0)
    assert driver.submit(1, prompt_length=60) == []  # alone in the queue: it could never wait otherwise
    assert refusal(driver.submit(2, prompt_length=1)).cause is RefusalCause.QUEUE_FULL
    driver.cancel(1)
    assert driver.submit(3, prompt_length=30) == []
    assert driver.submit(4, prompt_length=20) == []
    assert "limit of 50" in refusal(driver.submit(5, prompt_length=1)).message


def test_a_resubmitted_sequence_goes_on_where_its_output_stopped() -> None:
    driver = pair(window=1, max_queued_sequences=1)
    driver.submit(0)
    driver.submit(1)
    assert refusal(driver.submit(2)).cause is RefusalCause.QUEUE_FULL
    fresh = Driver()
    fresh.join("target")
    fresh.submit(7, max_tokens=12)
    fresh.settle()
    whole = outputs(fresh, 7)
    assert driver.submit(7, max_tokens=12, committed_output=tuple(whole[:5])) == []  # was admitted once: let in again
    assert driver.submit(8, admitted_before=True) == []
    assert refusal(driver.submit(9)).cause is RefusalCause.QUEUE_FULL
    driver.settle()
    assert outputs(driver, 7) == whole[5:]
    assert FinishSequence(7, FinishReason.LENGTH) in driver.log


@pytest.mark.parametrize(
    ("committed", "stop", "reason"),
    [((4, 5, 6), frozenset(), FinishReason.LENGTH), ((4, 5), frozenset({5}), FinishReason.STOP)],
)
def test_a_resubmitted_sequence_that_was_complete_ends_at_once(
    committed: tuple[int, ...], stop: frozenset[int], reason: FinishReason
) -> None:
    driver = pair()
    commands = driver.submit(1, max_tokens=3, committed_output=committed, stop_token_ids=stop)
    assert commands == [FinishSequence(1, reason)]
    assert driver.core.snapshot().pool == 0


def test_first_come_first_served() -> None:
    driver = Driver(window=2)
    driver.join("target", pages=20, page_size=4)
    driver.submit(0, prompt_length=10, max_tokens=5)
    driver.submit(1, prompt_length=60, max_tokens=5)
    driver.submit(2, prompt_length=2, max_tokens=5)
    assert driver.core.snapshot().window == 1  # the long one does not fit yet, and nobody overtakes it
    driver.settle()
    opened = [row.sequence_id for step in of_type(driver.log, SendStep) for row in step.rows if row.opening]
    assert opened == [0, 1, 2]


# --- rounds ---


def test_the_last_prefill_chunk_yields_the_first_token() -> None:
    driver = Driver(prefill_chunk=4)
    driver.join("target")
    driver.submit(1, prompt_length=10, max_tokens=1)
    seen = []
    while driver.core.snapshot().pool:
        (row,) = driver.only_step("target").rows
        seen.append((row.kv_len, len(row.tokens), row.choose, row.opening is not None))
        driver.answer("target")
    assert seen == [(0, 4, False, True), (4, 4, False, False), (8, 2, True, False)]
    assert outputs(driver, 1) == expected(driver, 1)


def test_draft_and_target_catch_up_side_by_side() -> None:
    driver = pair(prefill_chunk=4)
    driver.submit(1, prompt_length=8)
    assert [len(driver.only_step(w).rows[0].tokens) for w in ("draft", "target")] == [4, 4]
    driver.answer("draft")
    driver.answer("draft")
    assert not driver.steps["draft"]  # it has the whole prompt and waits for the target
    driver.answer("target")
    driver.answer("target")
    (row,) = driver.only_step("draft").rows
    assert (row.kv_len, len(row.tokens), row.draft_length) == (8, 1, 4)


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


def test_an_empty_proposal_is_a_legal_round() -> None:
    driver = pair()
    driver.workers["draft"].short_sighted = True
    for sequence_id in range(4):
        driver.submit(sequence_id, max_tokens=15)
    driver.settle()
    for sequence_id in range(4):
        assert outputs(driver, sequence_id) == expected(driver, sequence_id)
    shares = {emitted.drafted for emitted in of_type(driver.log, EmitTokens)}
    assert {0, 4} <= shares


def test_two_missing_tokens_are_no_catching_up() -> None:
    """Else a small chunk would keep most of a large pool from being drafted for after full acceptance."""
    driver = pair(prefill_chunk=4)
    for sequence_id in range(6):
        driver.submit(sequence_id, prompt_length=3, max_tokens=30)
    driver.settle()
    rows = [row for step in of_type(driver.log, SendStep) if step.worker_id == "draft" for row in step.rows]
    assert sum(len(row.tokens) == 2 for row in rows) > 6
    steps = [step for step in of_type(driver.log, SendStep) if step.worker_id == "draft"]
    assert max(sum(len(row.tokens) == 2 for row in step.rows) for step in steps) >= 3
    plain = [e for e in of_type(driver.log, EmitTokens) if not e.drafted]
    assert len(plain) <= 2 * 6  # the prefill of each, and perhaps one round at the end


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


def test_a_stop_token_at_the_very_limit_is_a_stop() -> None:
    fresh = Driver()
    fresh.join("target")
    fresh.submit(1, max_tokens=1)
    fresh.settle()
    (token,) = outputs(fresh, 1)
    fresh.submit(1, max_tokens=1, stop_token_ids=frozenset({token}))
    fresh.settle()
    assert FinishSequence(1, FinishReason.STOP) in fresh.log


# --- steps and groups ---


def test_prefill_rides_in_the_step_of_a_verify_group_and_shares_its_chunk() -> None:
    driver = Driver(prefill_chunk=8, draft_length=0, steps_in_flight=1)
    driver.join("target")
    driver.submit(1, prompt_length=3)
    driver.submit(2, prompt_length=5)
    driver.submit(3, prompt_length=20)
    driver.answer("target")
    step = driver.only_step("target")
    assert step.group is not None
    assert step.group.rows == 1
    assert [(row.sequence_id, len(row.tokens), row.choose) for row in step.rows] == [
        (1, 1, True),
        (2, 5, True),
        (3, 3, False),
    ]


def test_a_second_step_waits_for_what_may_still_join_it() -> None:
    driver = pair(batch_size=2, steps_in_flight=2)
    for sequence_id in range(3):
        driver.submit(sequence_id, prompt_length=1)
    while driver.core.snapshot().prefilling:
        driver.answer("target")
    assert driver.core.snapshot().drafting == 3
    driver.answer("draft")
    assert [step.group.rows for step in driver.steps["target"]] == [1]
    driver.answer("draft")
    assert driver.core.snapshot().drafted == 1
    assert len(driver.steps["target"]) == 1  # the target is busy, and a third may still join the second
    driver.answer("draft")
    assert [step.group.rows for step in driver.steps["target"]] == [1, 2]


def test_a_drafts_second_step_waits_for_what_is_being_verified() -> None:
    driver = Driver()
    driver.join("one")
    driver.join("two")
    driver.join("draft", Role.DRAFT)
    driver.submit(0, prompt_length=1)
    driver.answer("one")
    driver.answer("draft")
    assert driver.core.snapshot().verifying == 1
    for sequence_id in (1, 2, 3):
        driver.submit(sequence_id, prompt_length=1, max_tokens=9)
    for drafting in (1, 2):
        driver.answer("two")
        assert driver.core.snapshot().drafting == drafting
        assert len(driver.steps["draft"]) == 1
    driver.answer("one")
    assert [len(step.rows) for step in driver.steps["draft"]] == [1, 2]


def test_no_more_steps_than_allowed_are_in_flight() -> None:
    driver = Driver(batch_size=1, draft_length=0, steps_in_flight=2)
    driver.join("target")
    for sequence_id in range(6):
        driver.submit(sequence_id)
    for _ in range(20):
        assert len(driver.steps["target"]) <= 2
        driver.answer("target")
    assert len(driver.steps["target"]) == 2


def test_packed_rows_are_bounded_and_prefill_is_not_shut_out() -> None:
    driver = Driver(batch_size=8, draft_length=0, prefill_chunk=64)
    driver.join("target", packed=8)
    for sequence_id in range(20):
        driver.submit(sequence_id, prompt_length=4, max_tokens=100)
    driver.submit(99, prompt_length=100, max_tokens=3)
    driver.settle(most=5000)
    steps = of_type(driver.log, SendStep)
    assert all(sum(len(row.tokens) + len(row.draft_tokens) for row in step.rows) <= 8 for step in steps)
    assert of_type(driver.log, FinishSequence)[0].sequence_id == 99


def test_a_row_with_drafts_fits_a_small_worker() -> None:
    driver = Driver(draft_length=7)
    driver.join("target", packed=8)
    driver.join("draft", Role.DRAFT, packed=8)
    driver.submit(1, max_tokens=40)
    driver.settle()
    assert outputs(driver, 1) == expected(driver, 1)
    assert max(emitted.drafted for emitted in of_type(driver.log, EmitTokens)) == 3


def eqspec_waiting() -> Driver:
    """A target idle with a drafted sequence, while another is being drafted."""
    driver = Driver(policy=Policy.EQSPEC, wait_bound_steps=1.5, initial_step_seconds=0.1)
    driver.join("target")
    driver.join("draft", Role.DRAFT)
    driver.submit(1, prompt_length=2)
    driver.submit(2, prompt_length=2)
    while driver.core.snapshot().drafted == 0:
        if driver.steps["target"]:
            driver.answer("target", seconds=0.1)
        elif driver.steps["draft"]:
            step = driver.steps["draft"][0]
            if len(step.rows) == 2 and all(row.draft_length for row in step.rows):
                driver.answer("draft", instead=lambda row: unknown(row) if row.sequence_id == 2 else None)
            else:
                driver.answer("draft")
    return driver


def test_a_waiting_sequence_goes_when_its_bound_is_reached() -> None:
    driver = eqspec_waiting()
    assert not driver.steps["target"]
    deadline = driver.core.next_deadline()
    assert deadline == pytest.approx(driver.now + 1.5 * 0.1)
    assert driver.core.wait_bound("target") == pytest.approx(0.15)
    driver.now = deadline - 1e-6
    assert driver.tick() == []
    driver.now = deadline
    (step,) = driver.tick()
    assert [row.sequence_id for row in step.rows] == [1]
    assert step.group.forced_by_bound
    assert step.group.seconds_waited == pytest.approx(0.15)
    assert driver.core.next_deadline() is None


def test_a_complete_cohort_does_not_wait() -> None:
    driver = eqspec_waiting()
    driver.answer("draft")
    step = driver.only_step("target")
    assert sorted(row.sequence_id for row in step.rows) == [1, 2]
    assert not step.group.forced_by_bound


def test_the_bound_counts_from_a_sequences_turn() -> None:
    """Eight are drafted at once, two go at a time: the others can only wait for their turn."""
    driver = Driver(batch_size=2, draft_length=0, initial_step_seconds=0.1, window=20, steps_in_flight=1)
    driver.join("target")
    for sequence_id in range(8):
        driver.submit(sequence_id, prompt_length=1)
    driver.answer("target", seconds=0.1)
    driver.now = 7.0
    driver.answer("target", seconds=0.1)
    waiting = driver.core._fleet.targets["target"].drafted.first(8)
    assert [sequence.due - 7.0 for sequence in waiting] == pytest.approx([0.2, 0.2, 0.3, 0.3, 0.4, 0.4])


def test_eqspec_keeps_a_batch_of_sequences_per_target() -> None:
    driver = Driver(policy=Policy.EQSPEC, batch_size=3, window=48)
    driver.join("a")
    driver.join("b")
    for sequence_id in range(20):
        driver.submit(sequence_id)
    assert driver.core.snapshot().window == 6


# --- homes and pages ---


def test_the_window_is_bounded_and_sequences_spread_over_targets() -> None:
    driver = Driver(window=6)
    driver.join("a")
    driver.join("b")
    for sequence_id in range(20):
        driver.submit(sequence_id)
    snapshot = driver.core.snapshot()
    assert (snapshot.window, snapshot.waiting, snapshot.pool) == (6, 14, 20)
    assert [worker.sequences for worker in snapshot.workers] == [3, 3]


def test_the_youngest_makes_room_and_comes_back_with_its_tokens() -> None:
    driver = Driver(draft_length=0)
    driver.join("target", pages=12, page_size=4)
    driver.submit(1, prompt_length=8, max_tokens=30)
    driver.submit(2, prompt_length=8, max_tokens=30)
    driver.settle()
    assert driver.core.snapshot().preemptions > 0
    for sequence_id in (1, 2):
        assert outputs(driver, sequence_id) == expected(driver, sequence_id)
    finished = [command.sequence_id for command in of_type(driver.log, FinishSequence)]
    assert finished == [1, 2]
    first_release = next(step for step in of_type(driver.log, SendStep) if step.released)
    assert first_release.released == (2,)
    assert not driver.workers["target"].held


def test_a_draft_short_of_pages_costs_drafts_not_progress() -> None:
    driver = Driver()
    driver.join("target", pages=1000)
    driver.join("draft", Role.DRAFT, pages=8, page_size=4)
    for sequence_id in range(4):
        driver.submit(sequence_id, prompt_length=8, max_tokens=20)
    driver.settle()
    for sequence_id in range(4):
        assert outputs(driver, sequence_id) == expected(driver, sequence_id)
    assert driver.core.snapshot().preemptions == 0
    drafted = {emitted.drafted > 0 for emitted in of_type(driver.log, EmitTokens)}
    assert drafted == {True, False}
    assert not driver.workers["draft"].held


def test_the_youngest_gives_up_its_draft_for_an_older_one() -> None:
    driver = Driver()
    driver.join("target", pages=1000)
    driver.join("draft", Role.DRAFT, pages=8, page_size=4)
    for sequence_id in (1, 2):
        driver.submit(sequence_id, prompt_length=8, max_tokens=20)
    driver.settle()
    rounds = {i: [e for e in of_type(driver.log, EmitTokens) if e.sequence_id == i] for i in (1, 2)}
    assert all(e.drafted for e in rounds[1][1:-1])
    assert any(e.drafted for e in rounds[2])
    assert not all(e.drafted for e in rounds[2][1:-1])


def test_a_draft_that_catches_up_slowly_holds_nobody_up() -> None:
    driver = Driver(prefill_chunk=8)
    driver.join("target")
    driver.submit(1, prompt_length=60, max_tokens=60)
    for _ in range(9):
        driver.answer("target")
    driver.join("draft", Role.DRAFT)
    before = len(outputs(driver, 1))
    for _ in range(5):
        driver.answer("target")
    assert len(outputs(driver, 1)) == before + 5
    assert len(driver.steps["draft"]) == 1


def test_a_sequence_longer_than_the_drafts_model_goes_on_without_it() -> None:
    driver = Driver()
    driver.join("target")
    driver.join("draft", Role.DRAFT, max_length=20)
    driver.submit(1, prompt_length=10, max_tokens=40)
    driver.settle()
    assert outputs(driver, 1) == expected(driver, 1)
    rows = [row for step in of_type(driver.log, SendStep) if step.worker_id == "draft" for row in step.rows]
    assert max(row.kv_len + len(row.tokens) + row.draft_length for row in rows) == 20
    assert not driver.workers["draft"].held


def test_a_draft_that_joins_late_is_used() -> None:
    driver = Driver(prefill_chunk=8)
    driver.join("target")
    driver.submit(1, prompt_length=60, max_tokens=60)
    for _ in range(12):
        driver.answer("target")
    driver.join("draft", Role.DRAFT)
    driver.settle("target", "draft")
    assert outputs(driver, 1) == expected(driver, 1)
    emitted = of_type(driver.log, EmitTokens)
    assert emitted[0].drafted == 0
    assert max(round_.drafted for round_ in emitted) == 4
    # While the draft caught up in chunks, the sequence went on without it.
    first_chunk = next(i for i, c in enumerate(driver.log) if isinstance(c, SendStep) and c.worker_id == "draft")
    first_drafted = next(i for i, c in enumerate(driver.log) if isinstance(c, EmitTokens) and c.drafted)
    assert any(isinstance(c, EmitTokens) for c in driver.log[first_chunk:first_drafted])


def test_a_lost_target_costs_recomputation_and_nothing_else() -> None:
    driver = pair(prefill_chunk=8)
    for sequence_id in range(3):
        driver.submit(sequence_id, prompt_length=6, max_tokens=20)
    for _ in range(6):
        driver.answer("target")
        driver.answer("draft")
    before = {sequence_id: len(outputs(driver, sequence_id)) for sequence_id in range(3)}
    assert min(before.values()) >= 1
    lost = driver.steps["target"][0]
    driver.lose("target")
    assert driver.core.snapshot().waiting == 3
    late = driver.workers["target"].run(lost)
    assert driver.handle(StepCompleted("target", lost.step_id, late, 0.1)) == []
    driver.join("other")
    first = driver.steps["other"][0].rows[0]
    assert (first.sequence_id, first.kv_len, first.opening is not None) == (0, 0, True)
    del driver.steps["target"]
    driver.settle()
    for sequence_id in range(3):
        assert outputs(driver, sequence_id) == expected(driver, sequence_id)


def test_a_target_that_restarts_under_its_name_starts_empty() -> None:
    driver = pair()
    driver.submit(1, max_tokens=20)
    driver.answer("target")
    driver.answer("draft")
    driver.answer("draft")
    assert driver.core.snapshot().verifying == 1
    driver.join("target")
    rows = driver.only_step("target").rows
    assert [(row.kv_len, row.opening is not None) for row in rows] == [(0, True)]
    driver.settle()
    assert outputs(driver, 1) == expected(driver, 1)


def test_a_lost_draft_hands_its_sequences_to_another() -> None:
    driver = Driver()
    driver.join("target")
    driver.join("one", Role.DRAFT)
    driver.submit(1, max_tokens=30)
    driver.answer("target")
    driver.answer("one")
    assert driver.core.snapshot().drafting == 1
    driver.join("two", Role.DRAFT)
    commands = driver.lose("one")
    (step,) = of_type(commands, SendStep)
    assert step.worker_id == "two"
    assert step.rows[0].kv_len == 0
    assert step.rows[0].draft_length == 4
    del driver.steps["one"]
    driver.settle()
    assert outputs(driver, 1) == expected(driver, 1)


def test_the_last_draft_lost_means_plain_decoding() -> None:
    driver = pair()
    driver.submit(1, max_tokens=10)
    driver.answer("target")
    driver.answer("draft")
    assert driver.core.snapshot().drafting == 1
    commands = driver.lose("draft")
    (step,) = of_type(commands, SendStep)
    assert step.worker_id == "target"
    del driver.steps["draft"]
    driver.settle()
    assert outputs(driver, 1) == expected(driver, 1)


# --- ends ---


@pytest.mark.parametrize("answers", range(8))
def test_cancelling_frees_every_worker_at_once(answers: int) -> None:
    """At any moment of its life; idle workers get a step just to release."""
    driver = pair()
    driver.submit(1, prompt_length=6, max_tokens=50)
    for _ in range(answers):
        worker_id = max(
            driver.steps, key=lambda name: -driver.steps[name][0].step_id if driver.steps[name] else -(10**9)
        )
        driver.answer(worker_id)
    count = len(outputs(driver, 1))
    assert of_type(driver.cancel(1), FinishSequence) == [FinishSequence(1, FinishReason.CANCELLED)]
    assert driver.core.snapshot().pool == 0
    driver.settle(most=4)
    assert not driver.workers["target"].held
    assert not driver.workers["draft"].held
    assert len(outputs(driver, 1)) == count
    assert driver.cancel(1) == []
    pages = {worker.worker_id: worker.free_pages for worker in driver.core.snapshot().workers}
    assert pages == {"target": 1000, "draft": 1000}


def test_a_cancelled_sequence_that_waits_leaves_the_queue() -> None:
    driver = Driver(window=1)
    driver.join("target")
    driver.submit(1)
    driver.submit(2)
    assert driver.cancel(2) == [FinishSequence(2, FinishReason.CANCELLED)]
    assert driver.core.snapshot().waiting == 0


def test_stale_and_unknown_answers_do_nothing() -> None:
    driver = pair()
    driver.submit(1, max_tokens=20)
    step = driver.steps["target"][0]
    driver.answer("target")
    results = driver.workers["target"].run(step)
    assert driver.handle(StepCompleted("target", step.step_id, results, 0.1)) == []
    assert driver.handle(StepCompleted("target", 999, (), 0.1)) == []
    assert driver.handle(StepCompleted("nobody", 1, (), 0.1)) == []
    driver.lose("nobody")
    driver.settle()
    assert outputs(driver, 1) == expected(driver, 1)


def test_releases_ride_on_the_next_step() -> None:
    driver = Driver(draft_length=0)
    driver.join("target")
    driver.submit(1, max_tokens=2)
    driver.submit(2, max_tokens=30)
    driver.settle()
    (release,) = [step for step in of_type(driver.log, SendStep) if 1 in step.released]
    assert release.rows, "another sequence was running: no step of its own is needed"


def test_time_that_goes_backwards_is_taken_as_standing_still() -> None:
    driver = pair()
    driver.now = 100.0
    driver.submit(1)
    driver.now = 50.0
    driver.settle()
    assert outputs(driver, 1) == expected(driver, 1)


def test_same_events_same_commands() -> None:
    def run() -> list[object]:
        driver = pair(policy=Policy.AUTO, batch_size=3, window=6)
        driver.workers["draft"].guess = 0.6
        for sequence_id in range(12):
            driver.submit(sequence_id, prompt_length=1 + sequence_id * 5, max_tokens=15)
        driver.settle()
        return list(driver.log)

    assert run() == run()


def test_broken_books_are_noticed() -> None:
    driver = pair()
    driver.submit(1)
    driver.core._fleet.targets["target"].prefilling.clear()
    with pytest.raises(RuntimeError):
        driver.core.check_integrity()
