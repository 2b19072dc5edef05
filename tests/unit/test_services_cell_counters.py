from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from protos import worker_pb2
from scheduler.messages import RefusalCause, Role, Row, RowResult, RowStatus, SendStep, SequenceRequest
from services.cell_counters import CellCounters, Distribution
from services.counter_figures import POSITIONS, accepted_per_position
from services.service_observer import REFUSED, SequenceEnd


@given(st.lists(st.integers(0, 40)))
def test_distribution(values: list[int]) -> None:
    bounds = (0, 1, 5, 20)
    distribution = Distribution.of(Counter(values), bounds)
    limits = [-1, *bounds, 1000]
    expected = [sum(low < value <= high for value in values) for low, high in pairwise(limits)]
    assert distribution.counts == expected
    assert distribution.sum == sum(values)


@given(st.lists(st.integers(0, 25)))
def test_accepted_tokens_by_position(accepted: list[int]) -> None:
    found = accepted_per_position(Counter(accepted))
    assert sum(found) == sum(accepted)
    for position in range(POSITIONS - 1):
        assert found[position] == sum(length > position for length in accepted)


def step(*rows: Row) -> SendStep:
    return SendStep("w", 1, rows)


def row(sequence_id: int, opens: bool) -> Row:
    return Row(sequence_id, 0, 0, (1,), opening=SequenceRequest(sequence_id, (1,), 1) if opens else None)


def test_queue_time_ends_with_the_first_step_of_a_sequence() -> None:
    counters = CellCounters()
    for sequence_id, now in ((1, 0.0), (2, 1.0), (3, 1.0), (4, 1.0)):
        counters.sequence_entered(SequenceRequest(sequence_id, (1,), 1), "", now)
    counters.step_sent(Role.TARGET, step(row(1, True)), 0.25)
    counters.step_sent(Role.TARGET, step(row(1, False), row(2, True)), 3.0)
    # Preempted, and opened again.
    counters.step_sent(Role.TARGET, step(row(1, True)), 9.0)
    counters.sequence_ended(3, SequenceEnd("cancelled"), 5.0)
    counters.sequence_ended(4, SequenceEnd(REFUSED, "full", RefusalCause.QUEUE_FULL), 5.0)
    counters.step_sent(Role.TARGET, step(row(3, True), row(4, True)), 9.0)
    assert sum(counters.queue_seconds.counts) == 2
    assert counters.queue_seconds.sum == 2.25
    assert counters.outcomes == {"cancelled": 1}
    assert counters.refusals == {"queue_full": 1}


def test_recoveries() -> None:
    counters = CellCounters()
    rows, timings = step(*(row(1, False) for _ in RowStatus)), worker_pb2.StepTimings()
    results = tuple(RowResult(1, status, 0, 0) for status in RowStatus)
    counters.step_replied(Role.DRAFT, rows, results, timings, 1.0)
    assert counters.recoveries["kv_lost"] == 0
    counters.step_replied(Role.TARGET, rows, results, timings, 1.0)
    counters.worker_lost(Role.TARGET, "w", 5)
    counters.worker_lost(Role.DRAFT, "w", 3)
    counters.worker_lost(Role.TARGET, "w", 0)
    assert counters.recoveries == {"kv_lost": 2, "target_lost": 5, "draft_lost": 3}
