"""A record of every step on every worker, and a picture of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scheduler.messages import Role, RowResult, SendStep
from services.observability.observer import ServiceObserver, StepTimings

_MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One answered step. Times are seconds; `sent` and `replied` on the scheduler's clock, the others durations.

    `rows` counts sequences, `draft_length` is the most tokens that a row of the step proposes or verifies, and
    `equal_length` says that at least two rows are verified, all of one length. A worker's
    clock never leaves it: the step is taken to end when its reply came, so everything is late by the way of the reply.
    """

    role: Role
    worker_id: str
    step_id: int
    rows: int
    draft_length: int
    equal_length: bool
    packed_rows: int
    sent: float
    replied: float
    queued: float
    prepare: float
    forward: float
    sample: float
    total: float

    @property
    def started(self) -> float:
        return self.replied - self.total

    @property
    def computing(self) -> tuple[float, float]:
        """From when to when the worker ran forward passes and sampling."""
        begin = min(self.started + self.prepare, self.replied)
        return begin, min(begin + self.forward + self.sample, self.replied)


class StepTrace(ServiceObserver):
    """Collects the steps of one scheduler service, until they are taken or cleared."""

    def __init__(self) -> None:
        self.steps: list[TracedStep] = []
        self._sent: dict[tuple[str, int], float] = {}

    def clear(self) -> None:
        """Forgets the steps that were answered; those under way are recorded when they are."""
        self.steps.clear()

    def take(self) -> list[TracedStep]:
        """Those answered since the last call."""
        steps, self.steps = self.steps, []
        return steps

    def step_sent(self, role: Role, step: SendStep, now: float) -> None:
        self._sent[step.worker_id, step.step_id] = now

    def worker_lost(self, role: Role, worker_id: str, sequences: int) -> None:
        for key in [key for key in self._sent if key[0] == worker_id]:
            del self._sent[key]

    def step_replied(
        self, role: Role, step: SendStep, results: tuple[RowResult, ...], timings: StepTimings, now: float
    ) -> None:
        """A reply to a step that was not seen being sent is left out."""
        sent = self._sent.pop((step.worker_id, step.step_id), None)
        if sent is None:
            return
        self.steps.append(
            TracedStep(
                role=role,
                worker_id=step.worker_id,
                step_id=step.step_id,
                rows=len(step.rows),
                draft_length=max((row.draft_length or len(row.draft_tokens) for row in step.rows), default=0),
                equal_length=step.group is not None and step.group.equal_length and step.group.rows > 1,
                packed_rows=timings.packed_rows,
                sent=sent,
                replied=now,
                queued=timings.queued,
                prepare=timings.prepare,
                forward=timings.forward,
                sample=timings.sample,
                total=timings.total,
            )
        )


def chrome_trace(steps: Sequence[TracedStep]) -> dict[str, Any]:
    """For chrome://tracing or ui.perfetto.dev ("Trace Event Format"): two lanes a worker, its queue and its steps."""
    workers = sorted({(step.role is Role.DRAFT, step.worker_id) for step in steps})
    lanes = {worker_id: 2 * number + 1 for number, (_, worker_id) in enumerate(workers)}
    origin = min((step.sent for step in steps), default=0.0)
    events: list[dict[str, Any]] = []
    for worker_id, lane in lanes.items():
        for offset, name in enumerate((f"{worker_id} queue", worker_id)):
            shared = {"ph": "M", "pid": 1, "tid": lane + offset}
            events.append({"name": "thread_name", "args": {"name": name}} | shared)
            events.append({"name": "thread_sort_index", "args": {"sort_index": lane + offset}} | shared)
    for step in steps:
        verb = "propose" if step.role is Role.DRAFT else "verify"
        name = f"{verb} {step.rows} rows, gamma {step.draft_length}"
        lane = lanes[step.worker_id]
        details = {"step": step.step_id, "rows": step.rows, "packed_rows": step.packed_rows}
        begin, end = step.computing
        for label, where, start, seconds in (
            (name, lane, step.started - step.queued, step.queued),
            (name, lane + 1, step.started, step.total),
            ("prepare", lane + 1, step.started, begin - step.started),
            ("forward", lane + 1, begin, min(step.forward, end - begin)),
            ("sample", lane + 1, begin + min(step.forward, end - begin), end - begin - min(step.forward, end - begin)),
        ):
            if seconds > 0:
                times = {"ts": (start - origin) * _MICROSECONDS, "dur": seconds * _MICROSECONDS}
                events.append({"name": label, "ph": "X", "pid": 1, "tid": where, "args": details} | times)
    return {"traceEvents": events, "displayTimeUnit": "ms"}
