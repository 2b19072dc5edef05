"""What the stages of a run share: how long each may take, how far it is, and where its random numbers come from."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich import progress as rich_progress
from rich.console import Console

Progress = Callable[[float, str], None]
"""Called with the part that is done, in [0, 1], and what is worth telling."""

Stage = Callable[[str], Progress]
"""Called when a stage begins; gives what hears of its progress."""

_SECONDS_BETWEEN_LINES = 30.0


@dataclass(frozen=True, slots=True)
class Budget:
    """Either `minutes` or `count` (shards, steps). Raises `ValueError` naming field, value and limit."""

    minutes: float | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.count is None):
            raise ValueError(f"minutes is {self.minutes} and count is {self.count}, exactly one must be given")
        for name, value in (("minutes", self.minutes), ("count", self.count)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}, must be above 0")

    def spent(self, seconds: float, count: int) -> float:
        """The part that is spent after so many seconds of work and so many things made, in [0, 1]."""
        part = count / self.count if self.count is not None else seconds / (60 * (self.minutes or 1))
        return min(part, 1.0)


def derived_seed(*parts: int | str) -> int:
    """A number below 2**63 that depends on all parts and on nothing else."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@contextmanager
def showing(console: Console) -> Iterator[Stage]:
    """Shows stages on `console` for as long as the block lasts."""
    if not console.is_terminal:
        yield lambda name: _lines(console, name)
        return
    columns = (
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(bar_width=32),
        rich_progress.TaskProgressColumn(),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TimeRemainingColumn(),
        rich_progress.TextColumn("{task.fields[note]}", markup=False),
    )
    with rich_progress.Progress(*columns, console=console) as bars:
        yield lambda name: _bar(bars, name)


def _bar(bars: rich_progress.Progress, name: str) -> Progress:
    task = bars.add_task(name, total=1.0, note="")
    return lambda share, note: bars.update(task, completed=share, note=note)


def _lines(console: Console, name: str) -> Progress:
    next_line, ended = 0.0, False

    def show(share: float, note: str) -> None:
        nonlocal next_line, ended
        if time.monotonic() >= next_line or (share >= 1 and not ended):
            next_line, ended = time.monotonic() + _SECONDS_BETWEEN_LINES, share >= 1
            console.print(f"{name} {share:.0%}: {note}", highlight=False, markup=False, soft_wrap=True)

    return show
