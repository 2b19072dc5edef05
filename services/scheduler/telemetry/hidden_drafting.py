"""How much of the drafts' computing happens while a target computes, counted as replies come."""

from __future__ import annotations

from bisect import bisect_right, insort
from operator import itemgetter

from scheduler.messages import Role
from services.scheduler.telemetry.overlap import Interval, overlap_seconds, without

_END = itemgetter(1)


class HiddenDrafting:
    """Adds up `seconds`. Times are seconds on one monotonic clock, passed in.

    A step's interval is where it computed; it lies between its sending and its reply. What an interval may still
    overlap with is remembered: steps that were sent before it ended and are not answered. Both lists are in the order
    of the intervals' ends, so that a reply looks only at those which end after its own begin: a worker that hangs makes
    them long, and nothing slow.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._sent: dict[tuple[str, int], float] = {}
        self._drafting: list[Interval] = []
        self._verifying: list[Interval] = []

    def step_sent(self, worker_id: str, step_id: int, now: float) -> None:
        self._sent[worker_id, step_id] = now

    def step_replied(self, role: Role, worker_id: str, step_id: int, computing: Interval) -> None:
        sent = self._sent.pop((worker_id, step_id), None)
        if sent is None:
            return
        begin, end = max(computing[0], sent), computing[1]
        if end > begin:
            # Time of targets is kept disjoint, so that each moment of a draft is hidden once.
            if role is Role.DRAFT:
                self.seconds += overlap_seconds([(begin, end)], _after(self._verifying, begin))
                insort(self._drafting, (begin, end), key=_END)
            else:
                parts = without((begin, end), _after(self._verifying, begin))
                self.seconds += overlap_seconds(_after(self._drafting, begin), parts)
                for part in parts:
                    insort(self._verifying, part, key=_END)
        self._forget()

    def worker_lost(self, worker_id: str) -> None:
        """Its steps will not be answered."""
        for key in [key for key in self._sent if key[0] == worker_id]:
            del self._sent[key]
        self._forget()

    def _forget(self) -> None:
        horizon = min(self._sent.values(), default=float("inf"))
        for intervals in (self._drafting, self._verifying):
            del intervals[: bisect_right(intervals, horizon, key=_END)]


def _after(intervals: list[Interval], time: float) -> list[Interval]:
    """Those that end later. `intervals` are in the order of their ends."""
    return intervals[bisect_right(intervals, time, key=_END) :]
