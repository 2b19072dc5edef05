"""What is learnt of one draft worker that prepares proposals while its target verifies: how often, and how long."""

from __future__ import annotations

from scheduler.speculation.acceptance import PRIOR_CHANCE
from scheduler.speculation.cost_model import FORGET

_SPARE = 0.1
"""Of the time that a verification is expected to take, kept back: steps vary, and what comes after the verdict is of no
use."""


class DraftAhead:
    """`length`: tokens of each outcome for which there is time, one more where time was left, one less where they came
    late, 1 to `longest`. `found`: the share of verdicts that it had prepared for, of those that it was to."""

    __slots__ = ("_ended_at", "_longest", "_pass_seconds", "found", "length")

    def __init__(self, longest: int) -> None:
        self.length = self._longest = max(1, longest)
        self.found = PRIOR_CHANCE
        self._ended_at: float | None = None  # of the last preparation, if its verdict has not come yet
        self._pass_seconds = 0.0

    def ended(self, length: int, seconds: float, late: bool, now: float) -> None:
        """Proposals of up to so many tokens took so many seconds; perhaps all verdicts came before."""
        if late:
            self._ended_at, self.length = None, max(1, length - 1)
        else:
            self._ended_at, self._pass_seconds = now, seconds / (1 + length)

    def verified(self, step_seconds: float, asked: bool, found: bool, now: float) -> None:
        """The verdict on what this draft had proposed, whether it was asked to prepare, and for this outcome had."""
        if self._ended_at is not None:
            left = now - self._ended_at - _SPARE * step_seconds
            self.length += left > self._pass_seconds and self.length < self._longest
            self._ended_at = None
        if asked:
            self.found += (1 - FORGET) * (found - self.found)
        else:
            # What was not found once may be found again: it is tried anew in the end.
            self.found += (1 - FORGET) ** 2 * (PRIOR_CHANCE - self.found)


def outcomes_that_fit(most: int, pass_seconds: float, row_seconds: float) -> int:
    """The most outcomes whose rows cost no more than the passes themselves, which take the time in any case.

    `row_seconds` are those of one outcome of all sequences.
    """
    return most if row_seconds * most <= pass_seconds else int(pass_seconds / row_seconds)
