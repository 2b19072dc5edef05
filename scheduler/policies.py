"""Which of a target's DRAFTED sequences to verify next: the grouping policies.

All of them hold the bound: once the oldest DRAFTED sequence is due (see TargetBook.due), the oldest rows go, whatever
their lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from scheduler.config import Policy
from scheduler.draft_plan import DraftPlan
from scheduler.drafted import CountByLength, DraftedIndex, group_key
from scheduler.sequence import Sequence
from scheduler.step_times import TargetTimes


@dataclass(slots=True)
class Arrivals:
    """What the next draft step for a target is expected to bring: when, sequences, their packed rows and tokens."""

    seconds: float
    rows: int
    packed: int
    tokens: float


@dataclass(slots=True)
class GroupingView:
    """What a policy may look at.

    `coming` counts the target's READY and DRAFTING sequences, `verifying` those in steps not answered yet.
    `may_wait` is false where waiting cannot pay: the step goes anyway, for a prefill. `plan` is AUTO's, once it has
    one. `arrivals` tells what the draft step that runs will bring.
    """

    drafted: DraftedIndex
    coming: CountByLength
    verifying: int
    batch_size: int
    now: float
    may_wait: bool
    times: TargetTimes
    plan: DraftPlan | None
    arrivals: Callable[[], Arrivals | None]

    def overdue(self, sequence: Sequence) -> bool:
        return self.now >= sequence.due


@dataclass(slots=True)
class Choice:
    """Rows to verify, oldest first. `forced` when the bound left no choice."""

    rows: list[Sequence]
    forced: bool = False


def equal_lengths(rows: Iterable[Sequence]) -> bool:
    several = iter(rows)
    first = next(several, None)
    return first is None or all(group_key(sequence) == group_key(first) for sequence in several)


class GroupingPolicy(Protocol):
    """Chooses a verify group, or None to wait or when there is nothing. Never waits once the oldest is due."""

    lockstep: bool
    """Whether a target's sequences go round together, a batch at most of them in the window."""

    def choose(self, view: GroupingView) -> Choice | None: ...


class Ragged:
    """The oldest rows, whatever their lengths: best where rows are packed."""

    lockstep = False

    def choose(self, view: GroupingView) -> Choice | None:
        return Choice(view.drafted.first(view.batch_size)) if view.drafted else None


class LockstepRagged:
    """EQSPEC: one cohort per target, verified together when all of it that can be drafted is."""

    lockstep = True

    def choose(self, view: GroupingView) -> Choice | None:
        if not view.drafted:
            return None
        oldest_rows = view.drafted.first(view.batch_size)
        if view.overdue(oldest_rows[0]):
            return Choice(oldest_rows, forced=True)
        return None if view.coming.total or view.verifying else Choice(oldest_rows)


class EqualLength:
    """EXSPEC: the largest equal-length group, waiting for members still being drafted; else a ragged batch."""

    lockstep = False

    def choose(self, view: GroupingView) -> Choice | None:
        if not view.drafted:
            return None
        oldest_rows = view.drafted.first(view.batch_size)
        if view.overdue(oldest_rows[0]):
            return Choice(oldest_rows, forced=True)
        group = view.drafted.largest_group()
        if len(group) < min(2, view.batch_size):
            return Choice(oldest_rows)
        if len(group) < view.batch_size and view.may_wait and view.coming.at(group[0].length):
            return None
        return Choice(group)


class BestRate:
    """AUTO: whatever is expected to commit the most tokens per second: an equal group, the oldest rows, or waiting.

    Where all sequences of a target fit one step, its plan says how they go round: merged in one step, or in two halves.
    Merged, those in a running step are waited for, since what is queued behind it would need a step of its own from
    then on. Any other wait must pay at once: more tokens per second over the wait and the step after it than by going
    now; and in a merged plan it must take less than what a step costs before its first row.
    """

    lockstep = False

    def choose(self, view: GroupingView) -> Choice | None:
        drafted = view.drafted
        if not drafted:
            return None
        rows = drafted.first(view.batch_size)
        if view.overdue(rows[0]):
            return Choice(rows, forced=True)
        here, plan = len(drafted), view.plan
        everyone = here + view.coming.total + view.verifying
        one_step = everyone <= view.batch_size
        merged = one_step and (plan is None or plan.merged)
        if merged and view.may_wait and view.verifying:
            return None
        if plan is not None and one_step and plan.split and not view.verifying:
            rows = rows[: (everyone + 1) // 2]
        packed, tokens = _worth(rows)
        seconds = view.times.predict(packed, not view.times.ragged_extra or equal_lengths(rows))
        if view.times.ragged_extra:
            group = drafted.largest_group()
            if len(group) >= 2:
                group_packed, group_tokens = _worth(group)
                group_seconds = view.times.predict(group_packed, True)
                if group_tokens * seconds > tokens * group_seconds:
                    rows, packed, tokens, seconds = group, group_packed, group_tokens, group_seconds
        if len(rows) < view.batch_size and view.may_wait and view.coming.total:
            more = view.arrivals()
            if more is not None and view.now + more.seconds <= rows[0].due:
                part = min(1.0, (view.batch_size - len(rows)) / more.rows)
                together = view.times.predict(packed + part * more.packed, False)
                pays = (tokens + part * more.tokens) * seconds > tokens * (more.seconds + together)
                if plan is not None and one_step:
                    pays = pays and merged and more.seconds < view.times.base
                if pays:
                    return None
        return Choice(rows)


def _worth(rows: list[Sequence]) -> tuple[int, float]:
    """Packed rows, and the tokens that they are expected to commit."""
    packed = len(rows)
    tokens = 0.0
    for sequence in rows:
        packed += len(sequence.draft_tokens)
        tokens += sequence.expected_tokens
    return packed, tokens


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
