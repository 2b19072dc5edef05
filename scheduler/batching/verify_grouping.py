"""Which of a target's DRAFTED sequences to verify next: the grouping policies.

`verify_steps.py` asks the policy, and fits the group into the pages and tokens of a step. All policies keep the wait
bound: once the oldest DRAFTED sequence is due (see TargetWorker.due), the oldest sequences go, whatever their lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from scheduler.config import Policy
from scheduler.state.indexes import CountByLength, DraftedIndex
from scheduler.state.workers import Sequence


@dataclass(slots=True)
class GroupingView:
    """What a policy may look at.

    `coming` counts the target's READY and DRAFTING sequences, `verifying` those in steps not answered yet. `may_wait`
    is false if the step is sent in any case, for a prefill. `drafting`: whether any of the target's sequences draft.
    """

    drafted: DraftedIndex[Sequence]
    coming: CountByLength
    verifying: int
    batch_size: int
    now: float
    may_wait: bool
    drafting: bool = False

    def overdue(self, sequence: Sequence) -> bool:
        return self.now >= sequence.due


@dataclass(slots=True)
class VerifyGroup:
    """Sequences to verify, oldest first. `forced` when the wait bound left no choice."""

    sequences: list[Sequence]
    forced: bool = False


class GroupingPolicy(Protocol):
    """Picks a verify group. None to wait, or when nothing is drafted. Never waits once the oldest sequence is due."""

    lockstep: bool
    """Whether all of a target's sequences are verified together: no more than a batch of them run at a time."""

    def pick(self, view: GroupingView) -> VerifyGroup | None: ...


class OldestFirst:
    """The oldest sequences, whatever their lengths: best where batches need no padding."""

    lockstep = False

    def pick(self, view: GroupingView) -> VerifyGroup | None:
        return VerifyGroup(view.drafted.first(view.batch_size)) if view.drafted else None


class WholeCohort:
    """EQSPEC: one cohort of sequences per target, verified together once all of them are drafted."""

    lockstep = True

    def pick(self, view: GroupingView) -> VerifyGroup | None:
        if not view.drafted:
            return None
        oldest = view.drafted.first(view.batch_size)
        if view.overdue(oldest[0]):
            return VerifyGroup(oldest, forced=True)
        return None if view.coming.total or view.verifying else VerifyGroup(oldest)


class LargestEqualGroup:
    """EXSPEC: the largest group of equal length, once no sequence of that length is being drafted for; the oldest
    sequences where no two are equal."""

    lockstep = False

    def pick(self, view: GroupingView) -> VerifyGroup | None:
        if not view.drafted:
            return None
        oldest = view.drafted.first(view.batch_size)
        if view.overdue(oldest[0]):
            return VerifyGroup(oldest, forced=True)
        group = view.drafted.largest_group()
        if len(group) < min(2, view.batch_size):
            return VerifyGroup(oldest)
        if len(group) < view.batch_size and view.may_wait and view.coming.at(group[0].length):
            return None
        return VerifyGroup(group)


class OneStepForAll:
    """AUTO: all sequences of a target in one step while they fit; otherwise the oldest sequences.

    While they fit, the drafted sequences wait for those in the running step, else the target would take two steps in
    each cycle from then on. They also wait for proposals if the target drafts, but not for a probe.
    """

    lockstep = False

    def pick(self, view: GroupingView) -> VerifyGroup | None:
        if not view.drafted:
            return None
        oldest = view.drafted.first(view.batch_size)
        if view.overdue(oldest[0]):
            return VerifyGroup(oldest, forced=True)
        fit_one_step = len(view.drafted) + view.coming.total + view.verifying <= view.batch_size
        others_come = view.verifying or (view.coming.total and view.drafting)
        return None if fit_one_step and view.may_wait and others_come else VerifyGroup(oldest)


def make_policy(policy: Policy) -> GroupingPolicy:
    match policy:
        case Policy.EQSPEC:
            return WholeCohort()
        case Policy.EXSPEC:
            return LargestEqualGroup()
        case Policy.RAGGED:
            return OldestFirst()
        case Policy.AUTO:
            return OneStepForAll()
