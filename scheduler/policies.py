"""Which of a target's DRAFTED sequences to verify next: the grouping policies.

All of them hold the bound: once the oldest DRAFTED sequence is due (see TargetBook.due), the oldest rows go, whatever
their lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from scheduler.config import Policy
from scheduler.drafted import CountByLength, DraftedIndex, group_key
from scheduler.sequence import Sequence
from scheduler.step_times import VerifyTimes, expected_commit


@dataclass(frozen=True, slots=True)
class GroupingView:
    """What a policy may look at.

    `coming` counts the target's READY and DRAFTING sequences, `verifying` those in steps not answered yet.
    `may_wait` is false where waiting cannot pay: the step goes anyway, for a prefill. `arrivals` gives the seconds
    until the next draft step for this target is expected to end and the number of sequences it brings.
    """

    drafted: DraftedIndex
    coming: CountByLength
    verifying: int
    batch_size: int
    now: float
    may_wait: bool
    times: VerifyTimes
    acceptance: float
    arrivals: Callable[[], tuple[float, int]]

    def overdue(self, sequence: Sequence) -> bool:
        return self.now >= sequence.due


@dataclass(frozen=True, slots=True)
class Choice:
    """Rows to verify, oldest first. `forced` when the bound left no choice."""

    rows: list[Sequence]
    forced: bool = False


def equal_lengths(rows: Iterable[Sequence]) -> bool:
    return len({group_key(sequence) for sequence in rows}) <= 1


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
    """AUTO: whatever is expected to commit the most tokens per second: an equal group, the oldest rows, or waiting."""

    lockstep = False

    def choose(self, view: GroupingView) -> Choice | None:
        if not view.drafted:
            return None
        oldest_rows = view.drafted.first(view.batch_size)
        if view.overdue(oldest_rows[0]):
            return Choice(oldest_rows, forced=True)
        best, best_rate = oldest_rows, _rate(oldest_rows, equal_lengths(oldest_rows), view)
        group = view.drafted.largest_group()
        if len(group) >= 2 and (group_rate := _rate(group, True, view)) > best_rate:
            best, best_rate = group, group_rate
        if len(best) < view.batch_size and view.may_wait and view.coming.total:
            seconds, count = view.arrivals()
            in_time = view.now + seconds <= oldest_rows[0].due
            if count and in_time and _rate(oldest_rows, False, view, seconds, count) > best_rate:
                return None
        return Choice(best)


def _rate(
    rows: list[Sequence], equal: bool, view: GroupingView, seconds_before: float = 0.0, more_rows: int = 0
) -> float:
    """Expected committed tokens per second of `rows`, joined after a wait by `more_rows` that look like them."""
    packed = 0
    tokens = 0.0
    for sequence in rows:
        packed += 1 + len(sequence.draft_tokens)
        tokens += expected_commit(view.acceptance, len(sequence.draft_tokens))
    growth = min(len(rows) + more_rows, view.batch_size) / len(rows)
    seconds = seconds_before + view.times.predict(round(packed * growth), equal)
    return tokens * growth / max(seconds, 1e-9)


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
