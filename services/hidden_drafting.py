"""How much of the drafts' computing happens while a target computes, counted as replies come."""

from __future__ import annotations

from scheduler.messages import Role

Interval = tuple[float, float]


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
            parts = [(begin, end)] if role is Role.DRAFT else _without((begin, end), self._verifying)
            for part in parts:
                others = self._verifying if role is Role.DRAFT else self._drafting
                self.seconds += sum(max(min(part[1], other[1]) - max(part[0], other[0]), 0.0) for other in others)
            (self._drafting if role is Role.DRAFT else self._verifying).extend(parts)
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


def _without(interval: Interval, taken: list[Interval]) -> list[Interval]:
    """The parts of an interval that lie in none of the others."""
    parts = []
    begin, end = interval
    for other_begin, other_end in sorted(taken):
        if other_end <= begin or other_begin >= end:
            continue
        if other_begin > begin:
            parts.append((begin, other_begin))
        begin = max(begin, other_end)
    if begin < end:
        parts.append((begin, end))
    return parts
