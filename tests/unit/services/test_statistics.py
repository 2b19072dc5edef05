from __future__ import annotations

import pytest

from scheduler.messages import EmitTokens, GroupFormed, Role, Row, RowResult, RowStatus, SendStep, SequenceRequest
from services.observability.observer import SequenceEnd, StepTimings
from services.scheduler.telemetry.statistics import ServiceStatistics


def timings(
    total: float, idle: float = 0.0, forward: float = 0.0, sample: float = 0.0, realign: float = 0.0
) -> StepTimings:
    return StepTimings(total=total, idle=idle, forward=forward, sample=sample, realign=realign)


def request(sequence_id: int) -> SequenceRequest:
    return SequenceRequest(sequence_id, (1,), 9)


def step(step_id: int) -> SendStep:
    """Without rows: what is counted of them is counted apart."""
    return SendStep("t", step_id, ())


def test_shares_of_a_targets_time_add_up() -> None:
    statistics = ServiceStatistics(now=0.0)
    statistics.sequence_entered(request(1), "", now=0.0)
    statistics.step_sent(Role.TARGET, step(1), now=1.0)
    # What lies before the first step is not the target's time.
    statistics.step_replied(
        Role.TARGET, step(1), (), timings(2.0, idle=50.0, forward=1.0, sample=0.5, realign=0.3), now=3.0
    )
    statistics.core_ran(0.5)
    statistics.step_sent(Role.TARGET, step(2), now=5.0)
    # The target has a step: what the core computes now costs nothing.
    statistics.core_ran(7.0)
    statistics.step_replied(Role.TARGET, step(2), (), timings(2.0, idle=2.0, forward=2.0), now=7.0)
    snapshot = statistics.snapshot(now=7.0)
    assert snapshot.target_busy_share == pytest.approx(3.5 / 6)
    assert snapshot.realignment_share == pytest.approx(0.3 / 6)
    assert snapshot.scheduling_share == pytest.approx((0.2 + 0.5) / 6)
    assert snapshot.waiting_share == pytest.approx(1.5 / 6)
    assert snapshot.lost_share == pytest.approx(2.5 / 6)
    assert snapshot.core_seconds == 7.5


def test_time_without_sequences_is_nobodys_loss() -> None:
    statistics = ServiceStatistics(now=0.0)
    for started, step_id, idle in ((0.0, 1, 0.0), (11.0, 2, 11.0)):
        statistics.sequence_entered(request(step_id), "", now=started)
        statistics.step_sent(Role.TARGET, step(step_id), now=started + 1)
        statistics.step_replied(Role.TARGET, step(step_id), (), timings(1.0, idle=idle, forward=1.0), now=started + 2)
        statistics.tokens_emitted(EmitTokens(step_id, (1, 2, 3), 0, 0))
        statistics.sequence_ended(step_id, SequenceEnd("stop"), now=started + 2)
    snapshot = statistics.snapshot(now=100.0)
    assert snapshot.seconds == 4.0
    assert snapshot.tokens_per_second == 1.5
    # Of 11 idle seconds 9 passed between the sequences.
    assert snapshot.target_busy_share == pytest.approx(2 / 4)
    assert snapshot.waiting_share == pytest.approx(2 / 4)


def test_lost_worker_starts_its_time_anew() -> None:
    statistics = ServiceStatistics(now=0.0)
    statistics.sequence_entered(request(1), "", now=0.0)
    for step_id in (1, 2):
        statistics.step_sent(Role.TARGET, step(step_id), now=0.0)
        statistics.step_replied(Role.TARGET, step(step_id), (), timings(1.0, idle=30.0, forward=1.0), now=1.0)
        statistics.step_sent(Role.TARGET, step(10 + step_id), now=1.0)
        statistics.worker_lost(Role.TARGET, "t", 1)
    snapshot = statistics.snapshot(now=1.0)
    assert (snapshot.target_busy_share, snapshot.workers_lost, snapshot.target_steps) == (1.0, 2, 2)


def test_rounds_leave_out_what_the_prefill_gave() -> None:
    statistics = ServiceStatistics(now=0.0)
    statistics.sequence_entered(request(1), "", now=0.0)
    for tokens, drafted, accepted in (((1,), 0, 0), ((1, 2, 3), 4, 2), ((1,), 4, 0), ((1,), 0, 0)):
        statistics.tokens_emitted(EmitTokens(1, tokens, drafted, accepted))
    snapshot = statistics.snapshot(now=1.0)
    assert (snapshot.tokens, snapshot.rounds, snapshot.drafted, snapshot.accepted) == (6, 3, 8, 2)
    assert snapshot.committed_per_round == pytest.approx(5 / 3)
    assert snapshot.acceptance_rate == 0.25
    assert snapshot.accepted_lengths == {0: 1, 2: 1}


def test_groups() -> None:
    statistics = ServiceStatistics(now=0.0)
    for step_id, (rows, equal) in enumerate([(1, True), (4, True), (3, False), (4, False), (0, True)]):
        group = GroupFormed(rows, equal, rows == 3, 0.0)
        statistics.step_sent(Role.TARGET, SendStep("t", step_id, (), group=group), now=0.0)
    snapshot = statistics.snapshot(now=1.0)
    assert snapshot.group_sizes == {1: 1, 3: 1, 4: 2}
    assert snapshot.mean_group_size == 3.0
    assert snapshot.equal_length_share == pytest.approx(1 / 3)
    assert snapshot.forced_groups == 1


def test_reset_keeps_what_is_under_way() -> None:
    statistics = ServiceStatistics(now=0.0)
    statistics.sequence_entered(request(1), "", now=0.0)
    statistics.tokens_emitted(EmitTokens(1, (1,), 0, 0))
    statistics.step_sent(Role.TARGET, step(1), now=0.0)
    statistics.reset(now=10.0)
    statistics.step_replied(Role.TARGET, step(1), (), timings(1.0, idle=5.0, forward=1.0), now=11.0)
    statistics.tokens_emitted(EmitTokens(1, (1, 2), 1, 1))
    snapshot = statistics.snapshot(now=12.0)
    assert (snapshot.tokens, snapshot.rounds, snapshot.seconds, snapshot.unfinished) == (2, 1, 2.0, 1)
    assert snapshot.target_busy_share == 1.0


def test_rows_that_failed_are_counted_by_status() -> None:
    statistics = ServiceStatistics(now=0.0)
    results = tuple(RowResult(1, status, 0, 0) for status in (RowStatus.OK, RowStatus.KV_MISMATCH))
    statistics.step_replied(Role.TARGET, SendStep("w", 1, (Row(1, 0, 1, (5,)),) * 2), results, timings(1.0), now=1.0)
    assert statistics.snapshot(now=0.0).row_errors == {"kv_mismatch": 1}


def test_shared_positions_are_counted_by_role() -> None:
    statistics = ServiceStatistics(now=0.0)
    opening = Row(1, 0, 1, (5, 6), committed=(5, 6, 7, 8, 9))
    later = Row(1, 4, 1, (9,))

    def answered(role: Role, rows: tuple[Row, ...], *results: RowResult) -> None:
        statistics.step_replied(role, SendStep("w", 1, rows), results, timings(1.0), now=1.0)

    answered(Role.TARGET, (opening,), RowResult(1, RowStatus.OK, 3, 0, reused=3))
    answered(Role.TARGET, (later, opening), *[RowResult(1, RowStatus.OK, 5, 0, reused=1)] * 2)
    answered(Role.DRAFT, (opening,), RowResult(1, RowStatus.OK, 2, 0))
    snapshot = statistics.snapshot(now=0.0)
    assert snapshot.prefix_queries == {"draft": 5, "target": 10}
    assert snapshot.prefix_hits == {"draft": 0, "target": 5}
    statistics.reset(now=0.0)
    assert statistics.snapshot(now=0.0).prefix_hits == {"draft": 0, "target": 0}
