"""When a refused client should come again."""

from __future__ import annotations

from collections import deque

_REMEMBERED_ENDS = 64
_SHORTEST_SECONDS = 1.0
_LONGEST_SECONDS = 30.0

# A queue that is a tenth shorter has room for those who come again at about the same time.
_PART_OF_QUEUE = 0.1


class RetryAdvice:
    """Estimates from how fast sequences ended lately. Times are seconds on one monotonic clock, passed in."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=_REMEMBERED_ENDS)

    def sequence_ended(self, now: float) -> None:
        self._ends.append(now)

    def seconds(self, waiting: int, now: float) -> float:
        """Until a good part of the `waiting` sequences has been worked off."""
        if not self._ends or now <= self._ends[0]:
            return _SHORTEST_SECONDS
        ends_per_second = len(self._ends) / (now - self._ends[0])
        return min(max(_PART_OF_QUEUE * waiting / ends_per_second, _SHORTEST_SECONDS), _LONGEST_SECONDS)
