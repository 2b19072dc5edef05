"""What a command is doing, in lines on standard error, and what it found, on standard output."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from spool.services.scheduler.telemetry.statistics import StatisticsSnapshot

_SECONDS_BETWEEN_LINES = 5.0


def say(text: str) -> None:
    """Prints a line on standard error."""
    print(text, file=sys.stderr, flush=True)


def report(lines: Iterable[str], summary: Mapping[str, Any] | None) -> None:
    """Prints what a command found on standard output: in lines or, if there is one, the summary, as one line of JSON.
    The lines are then on standard error."""
    if summary is None:
        print("\n".join(lines), flush=True)
    else:
        say("\n".join(lines))
        print(json.dumps(summary), flush=True)


class Reporter:
    """Prints a line for each new stage, and another every few seconds where one tells how far it is."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[str, float]] = {}

    def stage(self, who: str, message: str, fraction: float | None) -> None:
        """Something that happens before the run, such as a download. `fraction` is the part that is done, if known."""
        last, due = self._last.get(who, ("", 0.0))
        now, part = time.monotonic(), f" ({fraction:.0%})" if fraction and fraction < 1 else ""
        if message != last or (fraction is not None and now >= due):
            self._last[who] = message, now + _SECONDS_BETWEEN_LINES
            say(f"{who}: {message}{part}")

    def run(self, title: str, done: int, total: int, statistics: StatisticsSnapshot | None) -> None:
        """The run called `title` has finished `done` of `total` sequences."""
        _, due = self._last.get(title, ("", 0.0))
        now, shown = time.monotonic(), f", {describe(statistics)}" if statistics is not None else ""
        if now >= due or done == total:
            self._last[title] = "", now + _SECONDS_BETWEEN_LINES
            say(f"{title}: {done}/{total} sequences{shown}")


def describe(statistics: StatisticsSnapshot) -> str:
    """Speed, acceptance and batches of a run."""
    parts = [f"{statistics.tokens_per_second:.0f} tokens/s"]
    if statistics.drafted:
        parts.append(f"accepted {statistics.acceptance_rate:.0%}")
        parts.append(f"{statistics.committed_per_round:.2f} a round")
    if statistics.groups:
        parts.append(f"group {statistics.mean_group_size:.1f}")
        parts.append(f"{statistics.equal_length_share:.0%} of rows in equal-length groups")
    return ", ".join(parts)
