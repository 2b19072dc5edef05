"""The scheduler's part: measures the load of each group, decides, and explains the last decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spool.deploy.autoscaling.control import GroupControl, GroupDecision
from spool.deploy.config.placement import TargetAutoscaling, WorkerAutoscaling
from spool.deploy.config.spool_config import SpoolConfig
from spool.scheduler.config import SchedulerConfig
from spool.scheduler.messages import Role
from spool.scheduler.statistics import Snapshot, WorkerSnapshot
from spool.services.scheduler.status import ReplicaFigures


def autoscaling_rules(config: SpoolConfig) -> dict[str, Any]:
    """The `autoscaling` sections of the worker groups by role, as plain data; None for a group of fixed size."""
    sections = {role: config.group(role).autoscaling for role in config.roles}
    return {
        role.value: section.model_dump(mode="json") if section is not None else None
        for role, section in sections.items()
    }


class Autoscaler:
    """Decides each time that it observes the scheduler. It has no clock of its own."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._target: TargetAutoscaling | None = None
        self._draft: WorkerAutoscaling | None = None
        self._controls = {role: GroupControl() for role in Role}
        self.decision: ReplicaFigures | None = None
        """The last one, for the scheduler's status and metrics."""

    def set_rules(self, rules: Mapping[str, Any]) -> None:
        """Takes what `autoscaling_rules` returns."""
        target, draft = rules.get(Role.TARGET.value), rules.get(Role.DRAFT.value)
        self._target = TargetAutoscaling.model_validate(target) if target is not None else None
        self._draft = WorkerAutoscaling.model_validate(draft) if draft is not None else None

    def observe(self, core: Snapshot, draft_busy: Sequence[float], now: float) -> dict[str, float]:
        """Lower and upper bounds on the replicas of each scaled group, for `policy.FollowScheduler`. `draft_busy`: of
        each draft worker in use, the part of the last seconds in which it computed."""
        targets = [worker for worker in core.workers if worker.role is Role.TARGET]
        parts: list[str] = []
        reported: dict[str, float] = {}
        wanted: dict[Role, int] = {}

        highest_draft = max(1, len(targets))
        if self._target is not None:
            capacity = self._capacity(targets, self._target, core.max_running / highest_draft)
            load = core.live / capacity
            decision = self._controls[Role.TARGET].decide(load, len(targets), self._target, now)
            highest_draft = wanted[Role.TARGET] = decision.wanted
            reported |= _bounds(Role.TARGET, decision)
            waiting = f" ({core.waiting} waiting)" if core.waiting else ""
            found = f"{_count(core.live, 'sequence')}{waiting}, {capacity:.0f} fill a target, load {load:.2f}"
            parts.append(f"{_count(decision.wanted, 'target')}: {found}{_pending(decision, self._target)}")

        if self._draft is not None:
            load, drafts = sum(draft_busy), len(draft_busy)
            busy = load / drafts if drafts else 0.0
            # A target has one draft, which may propose for several, so more drafts than targets gain nothing.
            decision = self._controls[Role.DRAFT].decide(load, drafts, self._draft, now, highest_draft)
            wanted[Role.DRAFT] = decision.wanted
            reported |= _bounds(Role.DRAFT, decision)
            found = f"busy {busy:.0%} of the time, load {load:.2f}"
            parts.append(f"{_count(decision.wanted, 'draft')}: {found}{_pending(decision, self._draft)}")

        if wanted:
            self.decision = ReplicaFigures("; ".join(parts), wanted)
        return reported

    def _capacity(self, targets: list[WorkerSnapshot], rules: TargetAutoscaling, running: float) -> float:
        """Sequences that fill one target: the configured number, or `running` without one, or fewer where the KV of
        those there needs more."""
        limit = float(rules.sequences_per_replica or self._config.max_running or max(1.0, running))
        used = sum(worker.total_pages - worker.free_pages for worker in targets)
        sequences = sum(worker.sequences for worker in targets)
        if not used or not sequences:
            return limit
        pages = sum(worker.total_pages for worker in targets) / len(targets)
        return max(1.0, min(limit, pages * sequences / used))


def at_least_name(role: Role) -> str:
    """Name of the reported lower bound."""
    return f"{role.value}_at_least"


def at_most_name(role: Role) -> str:
    """Name of the reported upper bound."""
    return f"{role.value}_at_most"


def _bounds(role: Role, decision: GroupDecision) -> dict[str, float]:
    return {at_least_name(role): float(decision.at_least), at_most_name(role): float(decision.at_most)}


def _pending(decision: GroupDecision, rules: WorkerAutoscaling) -> str:
    """What the load of this moment would change if it lasted."""
    if decision.now.low > decision.wanted:
        return f" ({decision.now.low} if that lasts {rules.upscale_delay_seconds:g} s)"
    if decision.now.high < decision.wanted:
        return f" ({decision.now.high} if that lasts {rules.downscale_delay_seconds:g} s)"
    return ""


def _count(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"
