"""Which of a target's DRAFTED sequences to verify next: the grouping policies.

`verify_steps.py` asks the policy, and fits the group into the pages and tokens of a step. All policies keep the wait
bound: once the oldest DRAFTED sequence is due (see TargetWorker.due), the oldest sequences go, whatever their lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from scheduler.config import Policy
from scheduler.costs.draft_plan import DraftPlan
from scheduler.costs.step_times import TargetTimes
from scheduler.speculation.controller import TargetFigures
from scheduler.state.indexes import CountByLength, DraftedIndex, group_key
from scheduler.state.workers import Sequence


@dataclass(slots=True)
class Arrivals:
    """What the next draft step for a target is expected to bring.

    In `seconds`, so many `sequences` with so many `batched_tokens` to verify, expected to commit so many `tokens`.
    """

    seconds: float
    sequences: int
    batched_tokens: int
    tokens: float


@dataclass(slots=True)
class GroupingView:
    """What a policy may look at.

    `coming` counts the target's READY and DRAFTING sequences, `verifying` those in steps not answered yet.
    `may_wait` is false where waiting cannot pay: the step goes anyway, for a prefill. `plan` is AUTO's, None before the
    first. `arrivals` tells what the running draft step will bring.
    """

    drafted: DraftedIndex[Sequence]
    coming: CountByLength
    verifying: int
    batch_size: int
    now: float
    may_wait: bool
    times: TargetTimes
    plan: DraftPlan | None
    arrivals: Callable[[], Arrivals | None]
    figures: TargetFigures | None = None

    def overdue(self, sequence: Sequence) -> bool:
        return self.now >= sequence.due


@dataclass(slots=True)
class VerifyGroup:
    """Sequences to verify, oldest first. `forced` when the wait bound left no choice."""

    sequences: list[Sequence]
    forced: bool = False


def equal_lengths(sequences: Iterable[Sequence]) -> bool:
    remaining = iter(sequences)
    first = next(remaining, None)
    return first is None or all(group_key(sequence) == group_key(first) for sequence in remaining)


class GroupingPolicy(Protocol):
    """Picks a verify group. None to wait, or when nothing is drafted. Never waits once the oldest sequence is due."""

    lockstep: bool
    """Whether all of a target's sequences are verified together: no more than a batch of them run at a time."""

    def pick(self, view: GroupingView) -> VerifyGroup | None: ...


class Ragged:
    """The oldest sequences, whatever their lengths: best where batches need no padding."""

    lockstep = False

    def pick(self, view: GroupingView) -> VerifyGroup | None:
        return VerifyGroup(view.drafted.first(view.batch_size)) if view.drafted else None


class LockstepRagged:
    """EQSPEC: one cohort per target, verified together once all of its sequences are drafted."""

    lockstep = True

    def pick(self, view: GroupingView) -> VerifyGroup | None:
        if not view.drafted:
            return None
        oldest = view.drafted.first(view.batch_size)
        if view.overdue(oldest[0]):
            return VerifyGroup(oldest, forced=True)
        return None if view.coming.total or view.verifying else VerifyGroup(oldest)


class EqualLength:
    """EXSPEC: the largest equal-length group, waiting for members still being drafted; else a ragged batch."""

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


class BestRate:
    """AUTO: whatever is expected to commit the most tokens per second: an equal group, the oldest, or waiting.

    Where all sequences of a target fit one step, the plan says how they are verified: merged in one step, or in two
    halves. A merged plan waits for the sequences of a running step: those queued behind it would need a step of their
    own from then on. Any other wait must pay at once: the wait and the step after it must give more tokens per second
    than a step now. In a merged plan it must also be shorter than the base cost of a step.
    """

    lockstep = False

    def pick(self, view: GroupingView) -> VerifyGroup | None:
        drafted = view.drafted
        if not drafted:
            return None
        chosen = drafted.first(view.batch_size)
        if view.overdue(chosen[0]):
            return VerifyGroup(chosen, forced=True)
        if view.figures is not None:
            return _together(view, view.figures, chosen)
        here, plan = len(drafted), view.plan
        everyone = here + view.coming.total + view.verifying
        one_step = everyone <= view.batch_size
        merged = one_step and (plan is None or plan.merged)
        if merged and view.may_wait and view.verifying:
            return None
        if plan is not None and one_step and plan.split and not view.verifying:
            chosen = chosen[: (everyone + 1) // 2]
        batched, tokens = _worth(chosen)
        seconds = view.times.predict(batched, not view.times.ragged_extra or equal_lengths(chosen))
        if view.times.ragged_extra:
            group = drafted.largest_group()
            if len(group) >= 2:
                group_batched, group_tokens = _worth(group)
                group_seconds = view.times.predict(group_batched, True)
                if group_tokens * seconds > tokens * group_seconds:
                    chosen, batched, tokens, seconds = group, group_batched, group_tokens, group_seconds
        if len(chosen) < view.batch_size and view.may_wait and view.coming.total:
            more = view.arrivals()
            if more is not None and view.now + more.seconds <= chosen[0].due:
                part = min(1.0, (view.batch_size - len(chosen)) / more.sequences)
                together = view.times.predict(batched + part * more.batched_tokens, False)
                pays = (tokens + part * more.tokens) * seconds > tokens * (more.seconds + together)
                if plan is not None and one_step:
                    pays = pays and merged and more.seconds < view.times.base
                if pays:
                    return None
        return VerifyGroup(chosen)


def _together(view: GroupingView, figures: TargetFigures, chosen: list[Sequence]) -> VerifyGroup | None:
    everyone = len(view.drafted) + view.coming.total + view.verifying
    waits = view.may_wait and (view.verifying or (view.coming.total and figures.drafting))
    return None if everyone <= view.batch_size and waits else VerifyGroup(chosen)


def _worth(sequences: list[Sequence]) -> tuple[int, float]:
    """The batched tokens of these sequences, and the tokens that they are expected to commit."""
    batched = len(sequences)
    tokens = 0.0
    for sequence in sequences:
        batched += len(sequence.draft_tokens)
        tokens += sequence.expected_tokens
    return batched, tokens


def make_policy(policy: Policy) -> GroupingPolicy:
    match policy:
        case Policy.EQSPEC:
            return LockstepRagged()
        case Policy.EXSPEC:
            return EqualLength()
        case Policy.RAGGED:
            return Ragged()
        case Policy.AUTO:
            return BestRate()
