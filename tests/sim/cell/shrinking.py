"""A schedule that breaks a rule becomes the shortest one that still breaks it, by delta debugging."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from scheduler.messages import Role
from tests.sim.cell.plan import FAULTS, Plan, make_plan
from tests.sim.cell.schedule import ScheduleError, run_plan

T = TypeVar("T")

_COURSES = 3
"""Whatever is left out changes the course of what follows: a shorter schedule is tried with some other courses too."""


def shrink(
    seed: int, sequences: int = 200, kinds: tuple[str, ...] = FAULTS, draft_ahead: int | None = None
) -> str | None:
    """The shortest schedule found, and all that happens in it; None for a seed that breaks no rule."""
    rng = random.Random(seed)
    plan = make_plan(rng, seed, sequences, kinds, draft_ahead)
    state = rng.getstate()
    try:
        run_plan(plan, rng)
    except ScheduleError as error:
        kind = _kind_of(error.failure)
    else:
        return None

    def failure_of(shorter: Plan, detailed: bool = False) -> ScheduleError | None:
        """Where it fails as the first one did."""
        # Nothing happens without requests, and without a target they cannot end.
        possible = shorter.requests and any(worker.role is Role.TARGET for worker in shorter.workers)
        for course in range(_COURSES) if possible else ():
            again = random.Random(f"course {course} of {seed}")
            if not course:
                again.setstate(state)
            try:
                run_plan(shorter, again, detailed)
            except ScheduleError as error:
                if _kind_of(error.failure) == kind:
                    return error
        return None

    def without(name: str) -> Plan:
        def with_only(parts: Sequence[Any]) -> Plan:
            changes: dict[str, Any] = {name: tuple(parts)}
            return replace(plan, **changes)

        return with_only(fewest(getattr(plan, name), lambda parts: failure_of(with_only(parts)) is not None))

    # Faults twice: what could not go for the sake of a request may go without that request.
    for name in ("requests", "faults", "requests", "faults", "workers"):
        plan = without(name)
    found = failure_of(plan, detailed=True)
    if found is None:
        raise RuntimeError(f"seed {seed}: a schedule that failed does not fail again")
    parts = [*plan.workers, *plan.requests]
    return "\n".join([*(f"  {part}" for part in parts), found.report(len(found.events))])


def _kind_of(failure: str) -> str:
    """What two failures have in common that differ in numbers and lists only."""
    return re.sub(r"\d+(\.\d+)?", "#", re.sub(r"[\[(][^\[\]()]*[\])]", "...", failure))


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
