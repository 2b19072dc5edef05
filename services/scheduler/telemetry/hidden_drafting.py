"""How much of the drafts' computing happens while a target computes, counted as replies come."""

from __future__ import annotations

from scheduler.messages import Role
from services.scheduler.telemetry.overlap import Interval, overlap_seconds, without


class HiddenDrafting:
    """Adds up `seconds`. Times are seconds on one monotonic clock, passed in.

    A step's interval is where it computed; it lies between its sending and its reply. What an interval may still
    overlap with is remembered: steps that were sent before it ended and are not answered.
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
                self.seconds += overlap_seconds([(begin, end)], self._verifying)
                self._drafting.append((begin, end))
            else:
                parts = without((begin, end), self._verifying)
                self.seconds += overlap_seconds(self._drafting, parts)
                self._verifying.extend(parts)
        self._forget()

    def worker_lost(self, worker_id: str) -> None:
        """Its steps will not be answered."""
        for key in [key for key in self._sent if key[0] == worker_id]:
            del self._sent[key]
        self._forget()

    def _forget(self) -> None:
        horizon = min(self._sent.values(), default=float("inf"))
        self._drafting = [interval for interval in self._drafting if interval[1] > horizon]
        self._verifying = [interval for interval in self._verifying if interval[1] > horizon]
