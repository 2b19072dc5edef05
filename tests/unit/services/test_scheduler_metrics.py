"""What the scheduler exports, from its counters and from a reading."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import Metric as Family

from scheduler.config import SchedulerConfig
from scheduler.core import SchedulerCore
from scheduler.messages import (
    RefusalCause,
    Role,
    Row,
    RowResult,
    RowStatus,
    SendStep,
    SequenceRequest,
    SequenceSubmitted,
    WorkerJoined,
    WorkerSpec,
)
from scheduler.statistics import DraftingSnapshot, WorkerSnapshot
from services.observability.observer import REFUSED, SequenceEnd, StepTimings
from services.scheduler.telemetry.metrics import Reading, SchedulerMetrics
from services.scheduler.telemetry.statistics import POSITIONS, ServiceStatistics, StatisticsSnapshot


def reading(statistics: StatisticsSnapshot | None = None, workers: tuple[WorkerSnapshot, ...] = ()) -> Reading:
    """Of a scheduler with one target and nine sequences."""
    core = SchedulerCore(SchedulerConfig(max_running=6))
    core.handle([WorkerJoined(WorkerSpec("t", Role.TARGET, 16, 100, 100, 64))], 0.0)
    for sequence_id in range(9):
        core.handle([SequenceSubmitted(SequenceRequest(sequence_id, (1, 2, 3), 5))], 0.0)
    drafting = DraftingSnapshot("t", "d", 3, 1.5, 100.0, (0.8, 0.7, 0.7))
    return Reading(
        core=replace(core.snapshot(), drafting_now=(drafting,), outcomes_sought=9, outcomes_found=6),
        statistics=statistics or ServiceStatistics(0.0).snapshot(0.0),
        workers=workers,
        queue_limit=7,
        sessions=2,
        uptime_seconds=12.5,
        wanted={Role.TARGET: 3},
    )


def worker(worker_id: str, role: Role, free: int, total: int) -> WorkerSnapshot:
    return WorkerSnapshot(worker_id, role, 0, free, total, 0, 0.0, 0.0)


def families(metrics: SchedulerMetrics, now: Reading | None = None) -> dict[str, Family]:
    return {family.name: family for family in metrics.families(now or reading())}


def told(metrics: SchedulerMetrics, name: str, now: Reading | None = None) -> dict[str, float]:
    """By the value of the one label, `name` being a sample's; "" without a label. Zeros are left out."""
    samples = [sample for family in metrics.families(now or reading()) for sample in family.samples]
    found = [sample for sample in samples if sample.name == f"spool_{name}"]
    assert found, name
    return {next(iter(sample.labels.values()), ""): sample.value for sample in found if sample.value}


def step(*rows: Row) -> SendStep:
    return SendStep("w", 1, rows)


def row(sequence_id: int, opens: bool) -> Row:
    return Row(sequence_id, 0, 0, (1,), opening=SequenceRequest(sequence_id, (1,), 1) if opens else None)


def test_figures_of_a_reading() -> None:
    statistics = StatisticsSnapshot(
        groups=7,
        group_sizes={1: 2, 4: 5},
        equal_length_groups=3,
        drafted=12,
        accepted=4,
        accepted_lengths={0: 1, 2: 2},
        outcomes={"stop": 3, "failed": 1, "refused": 8},
        busy_seconds={"draft": 1.5, "target": 2},
        prefix_hits={"draft": 0, "target": 200},
        row_errors={"failed": 1},
    )
    workers = (worker("t", Role.TARGET, 40, 100), worker("u", Role.TARGET, 50, 50), worker("d", Role.DRAFT, 30, 50))
    now, metrics = reading(statistics, workers), SchedulerMetrics()

    def figures(name: str) -> dict[str, float]:
        return told(metrics, name, now)

    assert figures("num_requests_running") == {"": 6}
    assert figures("num_requests_waiting") == {"": 3}
    assert figures("live_sequences") == {"": 9}
    assert sum(figures("running_sequences").values()) == 6
    assert (figures("max_running_sequences"), figures("queue_limit")) == ({"": 6}, {"": 7})
    assert figures("workers") == {"target": 2, "draft": 1}
    assert figures("workers_wanted") == {"target": 3}
    assert figures("kv_pages") == {"target": 150, "draft": 50}
    assert figures("kv_pages_used") == {"target": 60, "draft": 20}
    assert figures("kv_cache_usage_perc") == {"": 80 / 200}
    assert figures("sequences_total") == {"stop": 3, "failed": 1}
    assert figures("row_errors_total") == {"failed": 1}
    assert figures("prefix_cache_hits_total") == {"target": 200}
    assert figures("worker_busy_seconds_total") == {"draft": 1.5, "target": 2}
    assert figures("verify_groups_total") == {"single": 2, "equal_length": 3, "ragged": 2}
    assert figures("verify_group_rows_sum") == {"": 22}
    assert figures("spec_decode_num_drafts_total") == figures("spec_decode_accepted_length_count") == {"": 3}
    assert figures("spec_decode_num_accepted_tokens_total") == {"": 4}
    assert figures("spec_decode_num_accepted_tokens_per_pos_total") == {"0": 2, "1": 2}
    assert figures("draft_ahead_outcomes_total") == {"": 9}
    assert figures("draft_ahead_outcomes_prepared_total") == {"": 6}
    assert figures("draft_length_chosen") == {"t": 3}
    assert figures("gateway_sessions") == {"": 2}
    assert figures("scheduler_uptime_seconds") == {"": 12.5}


@given(st.lists(st.integers(0, 25)))
def test_accepted_tokens_by_position(accepted: list[int]) -> None:
    found = StatisticsSnapshot(accepted_lengths=dict(Counter(accepted))).accepted_per_position
    assert sum(found) == sum(accepted)
    for position in range(POSITIONS - 1):
        assert found[position] == sum(length > position for length in accepted)


def test_queue_time_ends_with_the_first_step_of_a_sequence() -> None:
    metrics = SchedulerMetrics()
    for sequence_id, now in ((1, 0.0), (2, 1.0), (3, 1.0), (4, 1.0)):
        metrics.sequence_entered(SequenceRequest(sequence_id, (1,), 1), "", now)
    metrics.step_sent(Role.TARGET, step(row(1, True)), 0.25)
    metrics.step_sent(Role.TARGET, step(row(1, False), row(2, True)), 3.0)
    # Preempted, and opened again.
    metrics.step_sent(Role.TARGET, step(row(1, True)), 9.0)
    metrics.sequence_ended(3, SequenceEnd("cancelled"), 5.0)
    metrics.sequence_ended(4, SequenceEnd(REFUSED, "full", RefusalCause.QUEUE_FULL), 5.0)
    metrics.step_sent(Role.TARGET, step(row(3, True), row(4, True)), 9.0)
    assert told(metrics, "request_queue_time_seconds_count") == {"": 2}
    assert told(metrics, "request_queue_time_seconds_sum") == {"": 2.25}
    assert told(metrics, "refusals_total") == {"queue_full": 1}


def test_refusals_of_what_never_entered() -> None:
    metrics = SchedulerMetrics()
    metrics.refused(RefusalCause.INVALID)
    metrics.refused_without_target()
    assert told(metrics, "refusals_total") == {"invalid": 1, "no_target": 1}


def test_recoveries() -> None:
    metrics = SchedulerMetrics()
    rows, timings = step(*(row(1, False) for _ in RowStatus)), StepTimings()
    results = tuple(RowResult(1, status, 0, 0) for status in RowStatus)
    metrics.step_replied(Role.DRAFT, rows, results, timings, 1.0)
    assert told(metrics, "recoveries_total") == {}
    metrics.step_replied(Role.TARGET, rows, results, timings, 1.0)
    metrics.worker_lost(Role.TARGET, "w", 5)
    metrics.worker_lost(Role.DRAFT, "w", 3)
    metrics.worker_lost(Role.TARGET, "w", 0)
    assert told(metrics, "recoveries_total") == {"kv_lost": 2, "target_lost": 5, "draft_lost": 3}
