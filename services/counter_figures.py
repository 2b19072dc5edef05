"""The counters of a scheduler service as they travel in its status."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from protos import scheduler_pb2
from scheduler.messages import FinishReason, RefusalCause, Role, RowStatus
from services.cell_counters import Distribution
from services.scheduler_service import SchedulerService
from services.statistics import StatisticsSnapshot
from services.wire import role_to_wire

POSITIONS = 16
"""Positions of a proposal that are told apart; the last of them stands for all beyond."""

_GROUP_BOUNDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
_LENGTH_BOUNDS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)

# Labels that are there from the start, so that a first increase is seen as one.
_OUTCOMES = (*(reason.value for reason in FinishReason), "failed")
_REFUSALS = (*(cause.value for cause in RefusalCause), "no_target")
_RECOVERIES = ("target_lost", "draft_lost", "kv_lost")
_ROW_ERRORS = tuple(status.value for status in RowStatus if status is not RowStatus.OK)


def counter_figures(service: SchedulerService) -> scheduler_pb2.CounterFigures:
    core, totals, counters = service.core.snapshot(), service.statistics(), service.counters
    return scheduler_pb2.CounterFigures(
        sequences=_labelled(counters.outcomes, _OUTCOMES),
        refusals=_labelled(counters.refusals, _REFUSALS),
        recoveries=_labelled(counters.recoveries, _RECOVERIES),
        row_errors=_labelled(totals.row_errors, _ROW_ERRORS),
        groups=_labelled(_groups_by_shape(totals), ("single", "equal_length", "ragged")),
        realigned_rows=totals.realigned_rows,
        wait_bound_hits=totals.forced_groups,
        lease_expiries=counters.lease_expiries,
        drafts=sum(totals.accepted_lengths.values()),
        draft_tokens=totals.drafted,
        accepted_tokens=totals.accepted,
        accepted_per_position=accepted_per_position(totals.accepted_lengths),
        group_rows=_histogram(Distribution.of(totals.group_sizes, _GROUP_BOUNDS)),
        accepted_length=_histogram(Distribution.of(totals.accepted_lengths, _LENGTH_BOUNDS)),
        draft_length=_histogram(Distribution.of(core.draft_lengths, _LENGTH_BOUNDS)),
        queue_seconds=_histogram(counters.queue_seconds),
        roles=[_role(totals, role) for role in Role],
        draft_hidden_seconds=totals.hidden_draft_seconds,
        realignment_seconds=totals.realignment_seconds,
        core_seconds=totals.core_seconds,
    )


def accepted_per_position(accepted_lengths: Mapping[int, int]) -> list[int]:
    """A round that accepted a tokens did so at the positions 0 to a - 1."""
    accepted = [0] * POSITIONS
    for length, rounds in accepted_lengths.items():
        for position in range(length):
            accepted[min(position, POSITIONS - 1)] += rounds
    return accepted


def _groups_by_shape(totals: StatisticsSnapshot) -> dict[str, int]:
    single, equal = totals.group_sizes.get(1, 0), totals.equal_length_groups
    return {"single": single, "equal_length": equal, "ragged": totals.groups - single - equal}


def _role(totals: StatisticsSnapshot, role: Role) -> scheduler_pb2.RoleFigures:
    return scheduler_pb2.RoleFigures(
        role=role_to_wire(role),
        steps=totals.target_steps if role is Role.TARGET else totals.draft_steps,
        busy_seconds=totals.busy_seconds[role.value],
        seconds=totals.worker_seconds[role.value],
        workers_lost=totals.workers_lost_by_role[role.value],
    )


def _labelled(counts: Mapping[str, int], labels: Iterable[str]) -> list[scheduler_pb2.LabelledCount]:
    return [scheduler_pb2.LabelledCount(label=label, count=counts.get(label, 0)) for label in labels]


def _histogram(distribution: Distribution) -> scheduler_pb2.HistogramFigures:
    return scheduler_pb2.HistogramFigures(bounds=distribution.bounds, counts=distribution.counts, sum=distribution.sum)
