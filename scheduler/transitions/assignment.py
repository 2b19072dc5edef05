"""Which draft worker serves which target.

Each step of a target carries a grant, which lets the target ask one draft worker for proposals. A target can go on
without proposals at any time, so nothing here waits for an answer: a draft that is slow, gone or cut off costs speed
until the target gets another one.
"""

from __future__ import annotations

from spool.scheduler.messages import DraftGrant, DraftingReport
from spool.scheduler.state.fleet import Fleet
from spool.scheduler.state.workers import DraftWorker, TargetWorker

_LATE_STEPS = 3
"""A target complains when fewer than half of its proposals came in time, in this many steps in a row."""
_SECONDS_BETWEEN = 5.0
"""A target gets another draft for being served badly, or for the balance, at most so often: a new one must read the
prompts first."""
_SECONDS_UNTIL_BALANCED = 60.0
"""After so long a draft that targets have left gets some again, as it may have recovered."""
_WORST_BALANCE = 2
"""Targets change their drafts when the busiest draft has more than this many times the load of the idlest."""


class Assignment:
    """Gives each target without a draft of its own a grant for a draft worker, if there is any that does not drain.

    Drafts are to serve about equally many running sequences.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._last_number = 0
        self._balanced_at = 0.0

    def renew(self, now: float) -> None:
        """Workers have come, gone or begun to drain: gives targets other drafts where they need them, and where that
        makes the loads more equal."""
        drafts = self._able()
        for target in self._fleet.targets.values():
            if not target.spec.own_draft_id and (target.draft is None or target.draft not in drafts):
                self._grant(target, _idlest(drafts), now)
        self._balance(now, granted_before=now)

    def _balance(self, now: float, granted_before: float) -> None:
        """Makes the loads of drafts more equal, by targets that got their drafts no later than `granted_before`."""
        self._balanced_at = now
        drafts = self._able()
        while len(drafts) > 1:
            drafts.sort(key=lambda draft: draft.load)
            idlest, busiest = drafts[0], drafts[-1]
            gap = busiest.load - idlest.load
            movable = [
                target
                for target in busiest.targets.values()
                if _weight(target) < gap and target.granted_at <= granted_before
            ]
            if busiest.load <= _WORST_BALANCE * idlest.load or not movable:
                break
            self._grant(min(movable, key=lambda target: abs(gap - 2 * _weight(target))), idlest, now)

    def take_report(self, target: TargetWorker, grant: DraftGrant | None, report: DraftingReport, now: float) -> None:
        """Takes in how the draft of this grant served the target in one step."""
        if grant is None or grant is not target.grant:
            return
        if report.asked > 0:
            target.late_steps = 0 if report.in_time else target.late_steps + 1
        complains = not report.connected or target.late_steps >= _LATE_STEPS
        if complains and now >= target.granted_at + _SECONDS_BETWEEN:
            other = _idlest([draft for draft in self._able() if draft is not target.draft])
            if other is not None:
                self._grant(target, other, now)
        if now >= self._balanced_at + _SECONDS_UNTIL_BALANCED:
            self._balance(now, granted_before=now - _SECONDS_BETWEEN)

    def _able(self) -> list[DraftWorker]:
        return [draft for draft in self._fleet.drafts.values() if not draft.draining]

    def _grant(self, target: TargetWorker, draft: DraftWorker | None, now: float) -> None:
        if target.draft is not None:
            del target.draft.targets[target.worker_id]
        target.draft, target.grant = draft, None
        if draft is not None:
            self._last_number += 1
            draft.targets[target.worker_id] = target
            target.grant = DraftGrant(draft.worker_id, self._last_number)
        target.granted_at, target.late_steps = now, 0
        target.figures.change_proposer(None if draft is None else draft.acceptance)


def _idlest(drafts: list[DraftWorker]) -> DraftWorker | None:
    return min(drafts, key=lambda draft: draft.load, default=None)


def _weight(target: TargetWorker) -> int:
    """The target's part of its draft's load."""
    return 1 + len(target.sequences)
