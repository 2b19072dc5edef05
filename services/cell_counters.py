"""What a scheduler service counts for metrics beside its statistics. Never reset: counters only go up."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

from protos import worker_pb2
from scheduler.messages import Role, RowResult, RowStatus, SendStep, SequenceRequest
from services.service_observer import SequenceEnd, ServiceObserver

QUEUE_BOUNDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80, 160)
"""Seconds."""

_LOST_KV = (RowStatus.UNKNOWN_SEQUENCE, RowStatus.KV_MISMATCH)


class Distribution:
    """Observations counted by buckets: up to each bound, and last those above all bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @classmethod
    def of(cls, counts: Mapping[int, int], bounds: tuple[float, ...]) -> Distribution:
        """From the number of observations of each value."""
        distribution = cls(bounds)
        for value, times in counts.items():
            distribution.observe(value, times)
        return distribution


class CellCounters(ServiceObserver):
    """How sequences came, went and were saved."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.recoveries: Counter[str] = Counter()
        self.lease_expiries = 0
        self.queue_seconds = Distribution(QUEUE_BOUNDS)
        self._entered: dict[int, float] = {}

    def refused(self, cause: str) -> None:
        """A request that did not become a sequence."""
        self.refusals[cause] += 1

    def sequence_entered(self, request: SequenceRequest, traceparent: str, now: float) -> None:
        self._entered[request.sequence_id] = now

    def step_sent(self, role: Role, step: SendStep, now: float) -> None:
        """The first step that works on a sequence opens it at its worker."""
        for row in step.rows:
            if row.opening is not None:
                entered = self._entered.pop(row.sequence_id, None)
                if entered is not None:
                    self.queue_seconds.observe(now - entered)

    def step_replied(
        self, role: Role, step: SendStep, results: tuple[RowResult, ...], timings: worker_pb2.StepTimings, now: float
    ) -> None:
        if role is Role.TARGET:
            self.recoveries["kv_lost"] += sum(result.status in _LOST_KV for result in results)

    def worker_lost(self, role: Role, worker_id: str, sequences: int) -> None:
        self.recoveries[f"{role.value}_lost"] += sequences

    def sequence_ended(self, sequence_id: int, end: SequenceEnd, now: float) -> None:
        self._entered.pop(sequence_id, None)
        if end.cause is None:
            self.outcomes[end.outcome] += 1
        else:
            self.refusals[end.cause.value] += 1
