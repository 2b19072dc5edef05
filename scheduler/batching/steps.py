"""Sends all steps that can be sent now: who is asked first, and until nothing more is to be sent."""

from __future__ import annotations

from scheduler.batching.draft_steps import DraftPlanner
from scheduler.batching.verify_grouping import GroupingPolicy
from scheduler.batching.verify_steps import TargetPlanner
from scheduler.messages import SendStep
from scheduler.state.workers import TargetWorker
from scheduler.transitions.lifecycle import Lifecycle
from scheduler.transitions.parts import CoreParts


class StepPlanner:
    """Asks the planners of draft and target steps, in passes, until no worker takes another step.

    Only workers for which the answer may be another one than when they were asked last: those that have changed since,
    drafts for which it depends on targets, and targets that have waited long enough.

    In each pass sequences are admitted first, then every draft worker is asked, then every target: a policy waits for
    proposals of draft steps that run, so a draft step that could start must have started by then.
    """

    def __init__(self, parts: CoreParts, lifecycle: Lifecycle, policy: GroupingPolicy) -> None:
        self._fleet = parts.fleet
        self._counters = parts.counters
        self._emit = parts.emit
        self._lifecycle = lifecycle
        self._drafts = DraftPlanner(parts.config, lifecycle, parts.controller)
        self._targets = TargetPlanner(parts.config, lifecycle, parts.controller, policy)
        self._last_step_id = 0

    def send_all(self, now: float) -> None:
        """Sends every step that can be sent, and releases to workers that get no other step."""
        progress = True
        while progress:
            preemptions = self._counters.preemptions
            progress = self._lifecycle.admit()
            for draft in self._fleet.drafts.values():
                if draft.changed or draft.watches_targets:
                    progress |= self._send(self._drafts.plan(draft, self._last_step_id + 1, now))
            for target in self._fleet.targets.values():
                due = target.waits_until
                if target.changed or (due is not None and due <= now):
                    progress |= self._send(self._targets.plan(target, self._last_step_id + 1, now))
            # A preemption may have freed pages without a step: a waiting sequence may fit now.
            progress |= self._counters.preemptions > preemptions
        for worker in self._fleet.workers():
            if worker.releases and not worker.outstanding:
                self._send(worker.release(self._last_step_id + 1, now))

    def next_deadline(self) -> float | None:
        """When the first target that waits for a larger step must stop waiting; None when none waits."""
        targets = self._fleet.targets.values()
        waits = [due for target in targets if (due := target.waits_until) is not None and not target.busy]
        return min(waits, default=None)

    def wait_bound(self, target: TargetWorker) -> float:
        """Seconds that a DRAFTED sequence of this target may wait voluntarily."""
        return self._targets.bound(target)

    def _send(self, step: SendStep | None) -> bool:
        if step is None:
            return False
        self._last_step_id = step.step_id
        self._emit(step)
        return True
