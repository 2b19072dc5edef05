"""Whether a step waits for a draft worker that has kept steps waiting before."""

from __future__ import annotations

_MOST_SKIPPED = 64


class Patience:
    """After a step in which the draft was late, the next one does not wait; after one more the next two do not, then
    four, and so on, until the draft is in time again. So one that hangs costs almost nothing."""

    def __init__(self) -> None:
        self._skipping = 0
        self._next = 1

    @property
    def left(self) -> bool:
        """Whether the present step may wait."""
        return not self._skipping

    def note(self, in_time: bool) -> None:
        """How the step ended."""
        if in_time:
            self._skipping, self._next = 0, 1
        elif self._skipping:
            self._skipping -= 1
        else:
            self._skipping, self._next = self._next, min(2 * self._next, _MOST_SKIPPED)
