"""What a command is doing, on standard error: lines, and on a terminal a moving line below them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from services.scheduler.telemetry.statistics import StatisticsSnapshot

_SECONDS_BETWEEN_LINES = 10.0


class Reporter:
    """Prints a line for each new stage, and for a run one every few seconds and at its end."""

    def __init__(self, console: Console, moving: Spinner) -> None:
        self._console = console
        self._moving = moving
        self._last_stage: dict[str, str] = {}
        self._next_line = 0.0

    def stage(self, who: str, message: str, fraction: float | None) -> None:
        """Something that happens before the run, such as a download. `fraction` is the part that is done, if known."""
        text = f"{who}: {message}"
        self._moving.update(text=Text(text if fraction is None else f"{text} ({fraction:.0%})"))
        if self._last_stage.get(who) != message:
            self._last_stage[who] = message
            self._print(text)

    def run(self, title: str, done: int, total: int, statistics: StatisticsSnapshot | None) -> None:
        """The run called `title` has finished `done` of `total` sequences."""
        shown = f", {describe(statistics)}" if statistics is not None else ""
        text = f"{title}: {done}/{total} sequences{shown}"
        self._moving.update(text=Text(text))
        now = time.monotonic()
        if now >= self._next_line or done == total:
            self._next_line = now + _SECONDS_BETWEEN_LINES
            self._print(text)

    def show(self, content: RenderableType) -> None:
        """Prints a result on standard output."""
        if sys.stdout.isatty() and self._console.is_terminal:
            self._console.print(content)
        else:
            Console(file=sys.stdout, soft_wrap=not sys.stdout.isatty()).print(content)

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def describe(statistics: StatisticsSnapshot) -> str:
    """Speed, acceptance and batches of a run."""
    parts = [f"{statistics.tokens_per_second:.0f} tokens/s"]
    if statistics.drafted:
        parts.append(f"accepted {statistics.acceptance_rate:.0%}")
        parts.append(f"{statistics.committed_per_round:.2f} a round")
    if statistics.groups:
        parts.append(f"group {statistics.mean_group_size:.1f}")
        parts.append(f"equal {statistics.equal_length_share:.0%}")
    return ", ".join(parts)


def two_columns(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """A table of names and values."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, value)
    return table


def error_console() -> Console:
    return Console(file=sys.stderr)


@contextmanager
def reporting(console: Console) -> Iterator[Reporter]:
    """Reports to `console`. The moving line goes at the end of the block, after which the reporter still prints."""
    moving = Spinner("dots")
    if not console.is_terminal:
        yield Reporter(console, moving)
        return
    # Results on standard output may go to a file.
    with Live(moving, console=console, transient=True, redirect_stdout=False):
        yield Reporter(console, moving)
