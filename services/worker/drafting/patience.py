"""Whether a target asks its draft worker for proposals."""

from __future__ import annotations

_LATE_STEPS = 3
_LONGEST_PAUSE = 100


class Patience:
    """After three steps in a row for which all proposals came late, there are none for a step; then the draft may show
    whether it is in time again. Each further time that it is not, the pause doubles, up to a hundred steps.

    In a pause the draft only keeps up its KV: a draft that needs more than half of the time that a step may wait would
    else be busy with the round before whenever a step does wait, and late for ever.
    """

    def __init__(self) -> None:
        self._late = self._steps = 0
        self._pause = 1

    @property
    def left(self) -> bool:
        return self._late < _LATE_STEPS or self._steps >= self._pause

    def step(self) -> None:
        """Another step of the target, whether it had to do with the draft or not."""
        self._steps += 1

    def waited(self, in_time: bool) -> None:
        """How a step ended that counted on proposals."""
        self._late = 0 if in_time else self._late + 1
        self._pause = 1 if self._late < _LATE_STEPS else min(2 * self._pause, _LONGEST_PAUSE)
        self._steps = 0
