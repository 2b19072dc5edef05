"""A schedule that breaks a rule becomes the shortest one that still breaks it, by delta debugging."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from scheduler.messages import Role
from tests.sim.cell.plan import FAULTS, Plan, make_plan
from tests.sim.cell.schedule import ScheduleError, run_plan
from tests.sim.cell.transcript import transcript

T = TypeVar("T")

_COURSES = 3
"""Whatever is left out changes the course of what follows: a shorter schedule is tried with some other courses too."""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The shortest schedule found, how it fails, and what happens in it."""

    plan: Plan
    failure: str
    transcript: str

    @property
    def size(self) -> int:
        return size_of(self.plan)

    def report(self) -> str:
        return "\n".join(
            [
                f"seed {self.plan.seed}: {self.failure}",
                f"  {self.plan.config}",
                *(f"  {worker}" for worker in self.plan.workers),
                *(f"  request {one.number} at {one.arrival:.5f}: {one.request}" for one in self.plan.requests),
                *(f"  {fault}" for fault in self.plan.faults),
                self.transcript,
            ]
        )


def size_of(plan: Plan) -> int:
    return len(plan.requests) + len(plan.faults)


def kind_of(failure: str) -> str:
    """What two failures have in common that differ in numbers and lists only."""
    return re.sub(r"\d+(\.\d+)?", "#", re.sub(r"[\[(][^\[\]()]*[\])]", "...", failure))


def shrink(
    seed: int, sequences: int = 200, kinds: tuple[str, ...] = FAULTS, draft_ahead: int | None = None
) -> Shrunk | None:
    """None for a seed that breaks no rule."""
    rng = random.Random(seed)
    plan = make_plan(rng, seed, sequences, kinds, draft_ahead)
    search = _Search(seed, rng.getstate())
    if not search.finds(plan):
        return None
    plan = search.shorter(plan, replace(plan, wire=None))
    # A second time: what could not go for the sake of a fault may go without that fault.
    for _ in range(2):
        plan = replace(plan, requests=search.fewest(plan, "requests"))
        plan = replace(plan, faults=search.fewest(plan, "faults"))
    plan = replace(plan, workers=search.fewest(plan, "workers"))
    return search.result(plan)


class _Search:
    """Schedules that fail as the first one did that was looked at."""

    def __init__(self, seed: int, state: object) -> None:
        self._seed = seed
        self._state = state
        self._kind: str | None = None

    def finds(self, plan: Plan) -> bool:
        return self._failure(plan) is not None

    def shorter(self, plan: Plan, without: Plan) -> Plan:
        return without if self.finds(without) else plan

    def fewest(self, plan: Plan, field: str) -> tuple[object, ...]:
        return tuple(fewest(getattr(plan, field), lambda some: self.finds(replace(plan, **{field: tuple(some)}))))

    def result(self, plan: Plan) -> Shrunk:
        error = self._failure(plan, detailed=True)
        if error is None:
            raise RuntimeError(f"seed {self._seed}: a schedule that failed does not fail again")
        return Shrunk(plan, error.failure, transcript(error.events))

    def _failure(self, plan: Plan, detailed: bool = False) -> ScheduleError | None:
        # Nothing happens without requests, and without a target they cannot end.
        possible = plan.requests and any(worker.role is Role.TARGET for worker in plan.workers)
        for course in range(_COURSES) if possible else ():
            try:
                run_plan(plan, self._random(course), detailed)
            except ScheduleError as error:
                self._kind = self._kind or kind_of(error.failure)
                if kind_of(error.failure) == self._kind:
                    return error
            if self._kind is None:
                break  # the schedule of the seed itself has one course
        return None

    def _random(self, course: int) -> random.Random:
        rng = random.Random(f"course {course} of {self._seed}")
        if not course:
            rng.setstate(self._state)  # type: ignore[arg-type]
        return rng


def fewest(parts: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> Sequence[T]:
    """Some of the parts, which fail together, and of which none can be left out alone."""
    size = max(len(parts), 1)
    while size:
        before, start = len(parts), 0
        while start < len(parts):
            fewer = [*parts[:start], *parts[start + size :]]
            if fails(fewer):
                parts = fewer
            else:
                start += size
        if size > 1 or len(parts) == before:
            size //= 2
    return parts
