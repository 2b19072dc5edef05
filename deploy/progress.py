"""What a command is doing, on standard error: live on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from services.scheduler.telemetry.statistics import StatisticsSnapshot

_SECONDS_BETWEEN_LINES = 10.0


class Reporter(Protocol):
    """Where progress goes."""

    def stage(self, who: str, message: str, fraction: float | None) -> None:
        """Something under way before the run: a download, a worker that loads. `fraction` None: not known."""

    def run(self, title: str, done: int, total: int, statistics: StatisticsSnapshot | None) -> None:
        """The run called `title` has brought `done` of `total` sequences to their end."""

    def show(self, content: RenderableType) -> None:
        """Prints a result on standard output, past whatever moves on the same terminal."""


def describe(statistics: StatisticsSnapshot) -> str:
    """A run in half a line: speed, acceptance, groups."""
    parts = [f"{statistics.tokens_per_second:.0f} tokens/s"]
    if statistics.drafted:
        parts.append(f"accepted {statistics.acceptance_rate:.0%}")
        parts.append(f"{statistics.committed_per_round:.2f} a round")
    if statistics.groups:
        parts.append(f"group {statistics.mean_group_size:.1f}")
        parts.append(f"equal {statistics.equal_length_share:.0%}")
    return ", ".join(parts)


class LiveReporter:
    """Bars that move."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def stage(self, who: str, message: str, fraction: float | None) -> None:
        self._update(who, f"{who}: {message}", 1.0 if fraction is None else fraction, 1.0, fraction is None, "")

    def run(self, title: str, done: int, total: int, statistics: StatisticsSnapshot | None) -> None:
        for name in [name for name in self._tasks if not name.startswith("run ")]:
            self._progress.remove_task(self._tasks.pop(name))
        shown = describe(statistics) if statistics is not None else ""
        self._update(f"run {title}", f"{title} {done}/{total}", done, total, False, shown)

    def show(self, content: RenderableType) -> None:
        if sys.stdout.isatty():
            self._progress.console.print(content)
        else:
            _print_result(content)

    def _update(self, name: str, text: str, done: float, total: float, unknown: bool, shown: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(text, total=None if unknown else total, shown=shown)
        self._progress.update(
            self._tasks[name], description=text, completed=done, total=None if unknown else total, shown=shown
        )


class LineReporter:
    """One line for each new stage, and for a run one every few seconds and at its end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last_stage: dict[str, str] = {}
        self._next_line = 0.0

    def stage(self, who: str, message: str, fraction: float | None) -> None:
        if self._last_stage.get(who) != message:
            self._last_stage[who] = message
            self._print(f"{who}: {message}")

    def run(self, title: str, done: int, total: int, statistics: StatisticsSnapshot | None) -> None:
        now = time.monotonic()
        if now < self._next_line and done < total:
            return
        self._next_line = now + _SECONDS_BETWEEN_LINES
        shown = f", {describe(statistics)}" if statistics is not None else ""
        self._print(f"{title}: {done}/{total} sequences{shown}")

    def show(self, content: RenderableType) -> None:
        _print_result(content)

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def _print_result(content: RenderableType) -> None:
    Console(file=sys.stdout, soft_wrap=not sys.stdout.isatty()).print(content)


def error_console() -> Console:
    return Console(file=sys.stderr)


@contextmanager
def reporting(console: Console) -> Iterator[Reporter]:
    """Reports to `console` for as long as the block lasts."""
    if not console.is_terminal:
        yield LineReporter(console)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[shown]}", markup=False),
        TimeElapsedColumn(),
    )
    # Results on standard output are no part of the display; they may go to a file.
    with Progress(*columns, console=console, redirect_stdout=False) as progress:
        yield LiveReporter(progress)
