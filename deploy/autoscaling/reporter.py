"""The scheduler's own part: reads what it measures, decides, and keeps the last decision to show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from deploy.autoscaling.decision import Past, Rules, decide
from deploy.autoscaling.explanation import Explained, explain
from deploy.autoscaling.policy import AT_LEAST, AT_MOST
from deploy.autoscaling.recent import Reading, add_reading, figures_of
from scheduler.config import SchedulerConfig
from scheduler.messages import Role
from scheduler.statistics import Snapshot, WorkerSnapshot
from services.scheduler.status import ReplicaFigures
from services.scheduler.telemetry.statistics import StatisticsSnapshot


class Autoscaler:
    """Decides each time that it is told how the scheduler is. Has no clock and asks nobody."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._rules: Rules | None = None
        self._readings: tuple[Reading, ...] = ()
        self._past = Past()
        self.explained: Explained | None = None
        """The last decision; None before the first."""

    def set_rules(self, rules: Rules) -> None:
        self._rules = rules

    def observe(self, core: Snapshot, totals: StatisticsSnapshot, now: float) -> dict[str, float]:
        """What Serve's policy is told: bounds on the replicas of each group. Empty before there are rules."""
        self._readings = add_reading(self._readings, reading(core, totals, self._config, now))
        if self._rules is None:
            return {}
        figures = figures_of(self._readings, self._config.batch_size, self._config.draft_length)
        decision, self._past = decide(figures, self._rules, self._past, now)
        self.explained = explain(decision, figures, self._rules)
        reported = {}
        for role, group in ((Role.TARGET, decision.target), (Role.DRAFT, decision.draft)):
            if group is not None:
                reported[AT_LEAST[role]] = float(group.at_least)
                reported[AT_MOST[role]] = float(group.at_most)
        return reported

    def replica_figures(self) -> ReplicaFigures | None:
        """The last decision as the scheduler's status has it."""
        if self.explained is None:
            return None
        return ReplicaFigures(self.explained.sentence, self.explained.wanted)

    def status(self) -> Mapping[str, Any] | None:
        """The last decision as plain data."""
        if self.explained is None:
            return None
        return {"explanation": self.explained.sentence, "figures": self.explained.figures}


def reading(core: Snapshot, totals: StatisticsSnapshot, config: SchedulerConfig, now: float) -> Reading:
    """The scheduler at this moment."""
    targets = [worker for worker in core.workers if worker.role is Role.TARGET]
    drafts = [worker for worker in core.workers if worker.role is Role.DRAFT]
    measured_targets = [worker for worker in targets if _measured(worker, config)]
    measured_drafts = [worker for worker in drafts if _measured(worker, config)]
    ended = totals.finished + totals.failed
    return Reading(
        time=now,
        arrived=ended + core.live,
        ended=ended,
        tokens=totals.tokens,
        deliveries=totals.deliveries,
        drafted=totals.drafted,
        accepted=totals.accepted,
        decoding=core.running - core.prefilling,
        running=core.running,
        waiting=core.waiting,
        targets=len(targets),
        drafts=len(drafts),
        target_busy=_busy(targets),
        draft_busy=_busy(drafts),
        acceptance=core.acceptance,
        target_base=_typical(worker.base_seconds for worker in measured_targets),
        target_row=_typical(worker.row_seconds for worker in measured_targets),
        draft_pass=_typical(worker.base_seconds for worker in measured_drafts),
        draft_row=_typical(worker.row_seconds for worker in measured_drafts),
        room=_room(targets),
    )


def _measured(worker: WorkerSnapshot, config: SchedulerConfig) -> bool:
    """A worker without steps has the configured time for one, and no rows in its law."""
    return worker.row_seconds > 0 or worker.base_seconds != config.initial_step_seconds


def _busy(workers: list[WorkerSnapshot]) -> float:
    return sum(worker.steps_in_flight > 0 for worker in workers) / len(workers) if workers else 0.0


def _typical(seconds: Iterable[float]) -> float:
    found = list(seconds)
    return statistics.median_low(found) if found else math.nan


def _room(targets: list[WorkerSnapshot]) -> float:
    """Sequences like those that are there whose KV fits one target."""
    used = sum(worker.total_pages - worker.free_pages for worker in targets)
    sequences = sum(worker.sequences for worker in targets)
    if not used or not sequences:
        return math.nan
    return _typical(float(worker.total_pages) for worker in targets) / (used / sequences)
