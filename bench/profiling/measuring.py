"""Brings a pair of workers through its loads, and learns from every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median

from bench.profiling.loads import Load, answers_load, cost_loads
from bench.profiling.measured_cell import MeasuredCell
from bench.profiling.profile import Profile, WorkerProfile
from bench.profiling.step_law import law_of
from bench.profiling.step_log import StepLog, TimedStep
from bench.profiling.text_prompts import TextPrompts
from scheduler.config import SchedulerConfig
from scheduler.messages import Role

Say = Callable[[str, float], None]
"""Hears what is measured now, and which share of all has been."""


async def measure_pair(
    cell: MeasuredCell, config: SchedulerConfig, prompts: TextPrompts, long_prompt: int, say: Say
) -> Profile:
    """The profile of the cell's two workers; prompts have up to `long_prompt` tokens. Raises `RunError` if a worker is
    lost."""
    answers = answers_load(config, prompts, long_prompt)
    loads = [*cost_loads(config, prompts, long_prompt), answers]
    say("warming up", 0.0)
    await _log(cell, config, loads[0])
    logs: list[tuple[Load, StepLog]] = []
    for number, load in enumerate(loads):
        say(load.title, number / len(loads))
        logs.append((load, await _log(cell, config, load)))
    say("done", 1.0)
    return _profile(cell, logs)


async def _log(cell: MeasuredCell, config: SchedulerConfig, load: Load) -> StepLog:
    log, requests = StepLog(), load.requests()
    await cell.run(load.config(config), requests, [0.0] * len(requests), log)
    return log


def _profile(cell: MeasuredCell, logs: Sequence[tuple[Load, StepLog]]) -> Profile:
    """The last load is that of the answers."""
    _, answers = logs[-1]
    plain = [step for load, log in logs if not load.draft_length for step in log.steps[Role.TARGET] if step.decoding]
    wire, wire_row = _by_rows((step.rows, step.wire) for step in plain)
    pause, pause_row = _by_rows((step.rows, step.pause) for step in plain)
    return Profile(
        target=_worker(cell, Role.TARGET, logs),
        draft=_worker(cell, Role.DRAFT, logs),
        acceptance=answers.accepted / max(1, answers.tried),
        tried=answers.tried,
        wire_seconds=wire / 2,
        step_seconds=pause,
        row_seconds=wire_row + pause_row,
    )


def _worker(cell: MeasuredCell, role: Role, logs: Sequence[tuple[Load, StepLog]]) -> WorkerProfile:
    steps: list[TimedStep] = [step for _, log in logs for step in log.steps[role]]
    described = cell.descriptions[role]
    threads = f" x {described.threads}" if described.device == "cpu" else ""
    return WorkerProfile(described.device + threads, law_of(steps), described.total_pages * described.page_size)


def _by_rows(found: Iterable[tuple[int, float | None]]) -> tuple[float, float]:
    """Seconds by themselves and for each row, of the medians by the number of rows: what stalled does not count."""
    times: dict[int, list[float]] = {}
    for rows, seconds in found:
        if seconds is not None:
            times.setdefault(rows, []).append(max(seconds, 1e-6))
    middle = {rows: median(some) for rows, some in times.items()}
    (few, least), (many, most) = min(middle.items()), max(middle.items())
    row = max(0.0, (most - least) / (many - few)) if many > few else 0.0
    return max(0.0, least - few * row), row
