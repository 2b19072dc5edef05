"""What a command is doing, in lines on standard error."""

from __future__ import annotations

import sys
import time

from rich.console import Console, RenderableType

from services.scheduler.telemetry.statistics import StatisticsSnapshot

_SECONDS_BETWEEN_LINES = 10.0


class Reporter:
    """Prints a line for each new stage, and another every few seconds where one tells how far it is."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: dict[str, tuple[str, float]] = {}

    def stage(self, who: str, message: str, fraction: float | None) -> None:
        """Something that happens before the run, such as a download. `fraction` is the part that is done, if known."""
        last, due = self._last.get(who, ("", 0.0))
        now = time.monotonic()
        if message != last or (fraction is not None and now >= due):
            self._last[who] = message, now + _SECONDS_BETWEEN_LINES
            self._print(f"{who}: {message}" + (f" ({fraction:.0%})" if fraction and fraction < 1 else ""))

    def run(self, title: str, done: int, total: int, statistics: StatisticsSnapshot | None) -> None:
        """The run called `title` has finished `done` of `total` sequences."""
        _, due = self._last.get(title, ("", 0.0))
        now = time.monotonic()
        if now >= due or done == total:
            self._last[title] = "", now + _SECONDS_BETWEEN_LINES
            shown = f", {describe(statistics)}" if statistics is not None else ""
            self._print(f"{title}: {done}/{total} sequences{shown}")

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


def error_console() -> Console:
    return Console(file=sys.stderr)
